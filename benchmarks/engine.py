"""π0.5 on one GPU: the engine's whole request against the plain PyTorch statement and the floor, by shape and batch.

    python benchmarks/engine.py [--quick] [--out DIR]

Random full-size weights; pixels and token ids are on the device, as in the published measurements. Times are CUDA
events around one replay, 10 warm-ups, 50 runs. The peer is benchmarks/plain_pi05.py, eager, and for some shapes with
its blocks through torch.compile and the whole request in one CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from floors import H200, phase_floors_ms
from plain_pi05 import PlainPi05, official_dtypes
from random_pi05 import PI05, conventions, random_tensors
from taktline_worker.models.pi.graphs import Bucket, GraphRunner
from taktline_worker.models.pi.runner import PiBatch
from taktline_worker.models.pi.weights import BF16_VISION, pack_weights

HORIZON, STEPS = 50, 10
SHAPES = [
    *(Bucket(rows, 3, 1) for rows in (1, 2, 4, 8, 16, 32)),
    *(Bucket(rows, 3, 200) for rows in (1, 32)),
    *(Bucket(rows, 2, 60) for rows in (1, 32)),
]
COMPILED = [Bucket(1, 3, 1), Bucket(32, 3, 1)]
START = time.monotonic()


@dataclass
class Row:
    """One line of the results, in the form that all benchmarks share, with the engine's own details last."""

    policy: str
    shape: dict[str, int]
    batch: int
    median_ms: float
    p99_ms: float
    n: int
    floor_ms: float
    versions: dict[str, str]
    date: str
    peer: str = ""
    peer_median_ms: float | None = None
    ratio: float | None = None
    bench: str = "engine"
    dtype: str = "bf16"
    gpus: int = 1
    command: str = "python benchmarks/engine.py"
    details: dict[str, Any] = field(default_factory=dict)


def say(text: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)


def event_times(call: Callable[[], object], warm_up: int, runs: int) -> list[float]:
    """Sorted milliseconds of `runs` calls, each between two events."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(runs):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)


def quantile(times: list[float], q: float) -> float:
    """The q-quantile of sorted times; with few runs the largest."""
    return times[min(len(times) - 1, int(len(times) * q))]


def capture(call: Callable[[], object], warm_up: int) -> torch.cuda.CUDAGraph:
    """One CUDA graph of `call`, captured after `warm_up` eager calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        for _ in range(warm_up):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def make_batch(bucket: Bucket, seed: int = 1) -> PiBatch:
    """Random pixels, tokens and noise that fill the bucket exactly."""
    generator = torch.Generator().manual_seed(seed)
    rows, views, prompt, tokens = bucket.rows, bucket.views, bucket.prompt, PI05.tokens_per_image
    image = torch.arange(rows * views * tokens).view(rows, -1)
    text = rows * views * tokens + torch.arange(rows * prompt).view(rows, -1)
    return PiBatch(
        pixels=torch.rand(rows * views, 3, 224, 224, generator=generator) * 2 - 1,
        tokens=torch.randint(3, 257_000, (rows, prompt), generator=generator),
        source=torch.cat((image, text), dim=1),
        lengths=torch.full((rows,), views * tokens + prompt, dtype=torch.int32),
        noise=torch.randn(rows, HORIZON, 32, generator=generator),
        state=None,
    )


def peer_inputs(batch: PiBatch, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """The same batch as the plain statement takes it, on the device."""
    pixels = batch.pixels.view(bucket.rows, bucket.views, 3, 224, 224)
    valid = torch.ones(bucket.rows, bucket.prompt, dtype=torch.bool)
    return tuple(x.cuda() for x in (pixels, batch.tokens, valid, batch.noise))


def errors(actions: torch.Tensor, oracle: torch.Tensor) -> dict[str, float]:
    """Distance of actions from the oracle, and the smallest cosine of a row."""
    distance = (actions - oracle).abs().flatten()
    cosine = torch.nn.functional.cosine_similarity(actions.flatten(1), oracle.flatten(1)).min()
    return {
        "mean_abs": float(distance.mean()),
        "p99_abs": float(distance.quantile(0.99)),
        "max_abs": float(distance.max()),
        "cosine": float(cosine),
    }


def parity(runner: GraphRunner, tensors: dict[str, torch.Tensor], bf16: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Error against the fp32 statement, of the engine and of the official bf16 mode, on one shape."""
    bucket = Bucket(1, 3, 1)
    batch = make_batch(bucket, seed=5)
    actions = runner.run(batch).cuda()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with torch.inference_mode():
        oracle = PlainPi05(tensors, PI05, STEPS)(*peer_inputs(batch, bucket))
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        official = PlainPi05(bf16, PI05, STEPS)(*peer_inputs(batch, bucket))
    return {"engine": errors(actions, oracle), "official_bf16": errors(official, oracle)}


def phases(runner: GraphRunner, bucket: Bucket) -> dict[str, float]:
    """Median of each phase in a graph of its own."""
    with torch.inference_mode():
        runner.encode_images(bucket)
    images = runner._images

    def prefix() -> None:
        runner._images = images
        runner.encode_prefix(bucket)

    parts: dict[str, Callable[[], None]] = {
        "vision": lambda: runner.encode_images(bucket),
        "prefix": prefix,
        "expert": lambda: runner.solve(bucket),
    }
    result = {}
    for name, call in parts.items():
        graph = capture(call, 1)
        result[name] = quantile(event_times(graph.replay, 3, 10), 0.5)
        del graph
    return result


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    parser.add_argument("--quick", action="store_true", help="batch 1 and 8 only, no compiled peer")
    parser.add_argument("--limit-s", type=float, default=1e9, help="skip compiled peers that would start later")
    options = parser.parse_args()
    shapes = [b for b in SHAPES if not options.quick or b.rows in (1, 8)]
    device = torch.device("cuda")
    versions = {"torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name()}
    tensors = random_tensors(PI05, device)
    weights = pack_weights(dict(tensors), PI05, conventions(3, HORIZON, STEPS), BF16_VISION, device)
    runner = GraphRunner(weights, PI05, HORIZON, shapes)
    del weights
    runner.capture()
    say("graphs captured")
    bf16 = official_dtypes(tensors, torch.bfloat16)
    accuracy = parity(runner, tensors, bf16)
    del tensors
    say(f"error against fp32: {json.dumps(accuracy)}")

    rows: list[Row] = []
    options.out.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        text = json.dumps([asdict(row) for row in rows], indent=1)
        (options.out / "engine_pi05.json").write_text(text + "\n", encoding="utf-8")

    for bucket in shapes:
        batch = make_batch(bucket)
        runner.load(batch, bucket)
        captured = runner.captured[bucket]
        times = event_times(captured.graph.replay, 10, 50)
        floors = phase_floors_ms(PI05, H200, bucket.rows, bucket.views, bucket.prompt, HORIZON, STEPS)
        row = Row(
            policy="pi05",
            shape={"views": bucket.views, "prompt_tokens": bucket.prompt, "horizon": HORIZON, "steps": STEPS},
            batch=bucket.rows,
            median_ms=quantile(times, 0.5),
            p99_ms=quantile(times, 0.99),
            n=len(times),
            floor_ms=sum(floors.values()),
            versions=versions,
            date=time.strftime("%Y-%m-%d"),
            details={
                "phases_ms": phases(runner, bucket),
                "phase_floors_ms": floors,
                "capture_s": captured.capture_s,
                "pool_bytes": captured.pool_bytes,
                "samples_per_s": 1e3 * bucket.rows / quantile(times, 0.5),
                "accuracy": accuracy if bucket == Bucket(1, 3, 1) else {},
            },
        )
        rows.append(row)
        parts = ", ".join(f"{name} {value:.2f}" for name, value in row.details["phases_ms"].items())
        say(f"{bucket}: {row.median_ms:.2f} ms, p99 {row.p99_ms:.2f}, floor {row.floor_ms:.2f}; {parts}")
        save()

    eager = PlainPi05(bf16, PI05, STEPS)
    for row, bucket in zip(list(rows), shapes, strict=True):
        inputs = peer_inputs(make_batch(bucket), bucket)
        runs = 10 if bucket.rows < 8 else 5
        with torch.inference_mode():
            times = event_times(lambda inputs=inputs: eager(*inputs), 2, runs)  # type: ignore[misc]
        row.peer, row.peer_median_ms = "plain PyTorch, eager", quantile(times, 0.5)
        row.ratio = row.peer_median_ms / row.median_ms
        say(f"{bucket}: eager peer {row.peer_median_ms:.1f} ms, ratio {row.ratio:.1f}")
        save()
    for bucket in COMPILED:
        if options.quick or time.monotonic() - START > options.limit_s:
            say(f"{bucket}: compiled peer skipped")
            continue
        compiled = PlainPi05(bf16, PI05, STEPS, compile_layers=True)
        inputs = peer_inputs(make_batch(bucket), bucket)
        graph = capture(lambda compiled=compiled, inputs=inputs: compiled(*inputs), 2)  # type: ignore[misc]
        times = event_times(graph.replay, 3, 20 if bucket.rows == 1 else 8)
        own = next(row for row, shape in zip(rows, shapes, strict=False) if shape == bucket)
        fields = {**asdict(own), "peer": "plain PyTorch, torch.compile + CUDA graph"}
        rows.append(
            Row(**{**fields, "peer_median_ms": quantile(times, 0.5), "ratio": quantile(times, 0.5) / own.median_ms})
        )
        say(f"{bucket}: compiled peer {rows[-1].peer_median_ms:.1f} ms, ratio {rows[-1].ratio:.2f}")
        save()
        del graph, compiled

    heads = (("views", 5), ("prompt", 6), ("batch", 5), ("ms", 8), ("p99/p50", 7), ("floor", 7), ("x floor", 7))
    print(" ".join(f"{name:>{width}}" for name, width in (*heads, ("peer ms", 8), ("ratio", 6))), " peer")
    for row in rows:
        print(
            f"{row.shape['views']:>5} {row.shape['prompt_tokens']:>6} {row.batch:>5} {row.median_ms:>8.2f} "
            f"{row.p99_ms / row.median_ms:>7.3f} {row.floor_ms:>7.2f} {row.median_ms / row.floor_ms:>7.2f} "
            f"{row.peer_median_ms or 0:>8.1f} {row.ratio or 0:>6.2f}  {row.peer}"
        )


if __name__ == "__main__":
    main()
