"""π0 and π0.5 on one GPU: the engine's whole request against peers and the floor, by precision and shape.

    python benchmarks/engine.py [--part accuracy|figures|peers] [--quick] [--only pi05/bf16,...] [--out DIR]

Random full-size weights; pixels and token ids are on the device, as in the published measurements. Times are CUDA
events around one replay, 10 warm-ups, 50 runs; policies and precisions of one shape are measured in turns, so that the
GPU's heat and clocks are the same for all. Peers: of FP8 our own bf16, of π0 our own π0.5, both among the figures.
`--part peers` has benchmarks/plain_pi.py, eager and with its blocks through torch.compile and the whole request in a
CUDA graph, beside our own time in the same run, for every shape that has a goal; it writes a file a policy. Without
--part both run; each first holds our fp32 and bf16 to the plain statement and says how far each precision is from it,
which is all of `--part accuracy`.
What a run does not measure stays in the files as it was.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import triton
from engine_accuracy import HORIZON, STEPS, Subject, accuracy, make_batch, peer_inputs
from floors import H200, phase_floors_ms
from plain_pi import PlainPi, official_dtypes
from result_rows import Row as Row
from result_rows import save_rows
from taktline_protocol.deployment import QuantisationOptions
from taktline_worker.bucket_graphs import BucketGraphs
from taktline_worker.models.pi.graphs import Bucket, GraphRunner
from taktline_worker.models.pi.synthetic import PI0, PI05, conventions, random_tensors
from taktline_worker.models.pi.weights import BF16_VISION, pack_weights

SHAPES = [
    *(Bucket(rows, 3, 1) for rows in (1, 2, 4, 8, 16, 32)),
    *(Bucket(rows, 3, 200) for rows in (1, 32)),
    *(Bucket(rows, 2, 60) for rows in (1, 32)),
]
OTHERS = [Bucket(rows, 3, 1) for rows in (1, 8, 32)]
"""Shapes of FP8, and of π0."""
P99_OVER_P50 = 1.05
"""Most that the 99th percentile of one robot's requests may be of their median."""
TURNS = 5
"""Of what is measured in turns."""
ONE_ROW = [Bucket(1, 3, 1), Bucket(1, 2, 60)]
"""Shapes of an expert stored in bytes, and of π0."""
SUBJECTS: dict[Subject, str] = {
    ("pi05", "bf16"): "engine_pi05.json",
    ("pi05", "fp8"): "engine_pi05_fp8.json",
    ("pi05", "bf16+fp8-expert"): "engine_pi05_fp8_expert.json",
    ("pi05", "bf16+int8-expert"): "engine_pi05_int8_expert.json",
    ("pi0", "bf16"): "engine_pi0.json",
}
GOALS = [
    Bucket(1, 3, 1),
    Bucket(1, 2, 60),
    Bucket(1, 3, 200),
    Bucket(8, 3, 1),
    Bucket(32, 3, 1),
    Bucket(32, 2, 60),
    Bucket(32, 3, 200),
]
"""What has a goal, and is therefore measured first."""
PEERS = {"pi05": GOALS, "pi0": [Bucket(1, 3, 1)]}
"""Shapes that plain PyTorch is measured at, by policy."""
STORED = {
    "bf16+fp8-expert": QuantisationOptions(expert="fp8"),
    "bf16+int8-expert": QuantisationOptions(expert="int8"),
}
START = time.monotonic()
RowT = TypeVar("RowT")


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


def times_in_turns(calls: Mapping[Subject, Callable[[], object]], runs: int = 50) -> dict[Subject, list[float]]:
    """`event_times` of several calls, 10 warm-ups each, in five turns."""
    found: dict[Subject, list[float]] = {subject: [] for subject in calls}
    for turn in range(TURNS):
        for subject, call in calls.items():
            found[subject] += event_times(call, 2 if turn else 10, runs // TURNS)
    return {subject: sorted(times) for subject, times in found.items()}


def prepare_time(graphs: BucketGraphs[RowT, Any], rows: Sequence[RowT]) -> float:
    """Median wall milliseconds until the rows lie in their graph's buffers."""
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graphs.loaded(rows)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return quantile(sorted(times), 0.5)


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


def phases(runner: GraphRunner, bucket: Bucket) -> dict[str, float]:
    """Median of each phase in a graph of its own."""
    runs = 10 if bucket.rows < 16 else 5
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
        result[name] = quantile(event_times(graph.replay, 3, runs), 0.5)
        del graph
    return result


def build(
    tensors: dict[str, torch.Tensor], subject: Subject, shapes: list[Bucket], runners: dict[Subject, GraphRunner]
) -> None:
    """Add the captured runner of a policy and precision."""
    policy, precision = subject
    architecture = PI05 if policy == "pi05" else PI0
    weights = pack_weights(
        dict(tensors), architecture, conventions(3, HORIZON, STEPS), BF16_VISION, torch.device("cuda")
    )
    towers: Literal["bf16", "fp8"] = "fp8" if precision == "fp8" else "bf16"
    runner = runners[subject] = GraphRunner(
        weights, architecture, HORIZON, shapes, towers, quantisation=STORED.get(precision)
    )
    del weights
    runner.capture()
    say(f"{policy} {precision}: {len(shapes)} graphs captured")


def measure(
    runner: GraphRunner,
    subject: Subject,
    bucket: Bucket,
    versions: dict[str, str],
    times: list[float],
    *,
    whole: bool = False,
) -> Row:
    """One shape, whose batch is loaded: the whole request, its phases (unless `whole`) and its floor."""
    policy, precision = subject
    captured = runner.captured[bucket]
    floors = phase_floors_ms(
        PI05 if policy == "pi05" else PI0, H200, bucket.rows, bucket.views, bucket.prompt, HORIZON, STEPS
    )
    row = Row(
        policy=policy,
        dtype=precision,
        shape={"views": bucket.views, "prompt_tokens": bucket.prompt, "horizon": HORIZON, "steps": STEPS},
        batch=bucket.rows,
        median_ms=quantile(times, 0.5),
        p99_ms=quantile(times, 0.99),
        n=len(times),
        floor_ms=sum(floors.values()),
        versions=versions,
        date=time.strftime("%Y-%m-%d"),
        details={
            "phases_ms": {} if whole else phases(runner, bucket),
            "phase_floors_ms": floors,
            "capture_s": captured.capture_s,
            "pool_bytes": captured.pool_bytes,
            "samples_per_s": 1e3 * bucket.rows / quantile(times, 0.5),
            "p99_over_p50": quantile(times, 0.99) / quantile(times, 0.5),
            "floor_is_of": "bf16",
        },
    )
    parts = ", ".join(f"{name} {value:.2f}" for name, value in row.details["phases_ms"].items())
    say(f"{policy} {precision} {bucket}: {row.median_ms:.2f} ms, p99 {row.p99_ms:.2f}; {parts}")
    if bucket.rows == 1 and row.details["p99_over_p50"] > P99_OVER_P50:
        say(f"  its p99 is {row.details['p99_over_p50']:.3f} of its median, more than {P99_OVER_P50}")
    return row


def add_peer(row: Row, peer: str, times: list[float]) -> None:
    """Set the peer of a row."""
    row.peer, row.peer_median_ms = peer, quantile(times, 0.5)
    row.ratio = row.peer_median_ms / row.median_ms
    row.details["peer_n"] = len(times)
    say(f"{row.policy} batch {row.batch}: {peer} {row.peer_median_ms:.1f} ms, ratio {row.ratio:.2f}")


def measure_peers(
    runners: Mapping[Subject, GraphRunner],
    plain: Mapping[str, dict[str, torch.Tensor]],
    versions: dict[str, str],
    rows: list[Row],
    options: argparse.Namespace,
) -> None:
    """Plain PyTorch, eager and compiled, each beside our own time in the same run: a row a shape and peer.

    Args:
        runners: ours, of which the captured shapes are measured.
        plain: tensors of the official bf16 mode, by policy.
        versions: of what runs.
        rows: the rows are added here, and saved as they come.
        options: of the command line.
    """

    def keep(own: Row, peer: str, times: list[float]) -> None:
        row = Row(**asdict(own))
        add_peer(row, peer, times)
        rows.append(row)
        save_rows(options.out / f"engine_{row.policy}_peers.json", [one for one in rows if one.policy == row.policy])

    for policy, tensors in plain.items():
        runner, architecture = runners[policy, "bf16"], PI05 if policy == "pi05" else PI0
        eager = PlainPi(tensors, architecture, STEPS)
        for bucket in [b for b in PEERS[policy] if b in runner.captured]:
            if time.monotonic() - START > options.limit_s:
                say(f"{policy} {bucket}: peers skipped")
                continue
            batch, few = make_batch(bucket, policy=policy), bucket.rows < 8
            runner.load(batch, bucket)
            times = event_times(runner.captured[bucket].graph.replay, 10, 50 if few else 20)
            own = measure(runner, (policy, "bf16"), bucket, versions, times, whole=True)
            inputs = peer_inputs(batch, bucket)
            with torch.inference_mode():
                times = event_times(lambda eager=eager, inputs=inputs: eager(*inputs), 2, 5)  # type: ignore[misc]
            keep(own, "plain PyTorch, eager", times)
            if options.quick:
                continue
            torch.compiler.reset()  # a block's compiled forms are kept, and few
            compiled = PlainPi(tensors, architecture, STEPS, compile_layers=True)
            graph = capture(lambda compiled=compiled, inputs=inputs: compiled(*inputs), 2)  # type: ignore[misc]
            times = event_times(graph.replay, 3, 20 if few else 8)
            keep(own, "plain PyTorch, torch.compile + CUDA graph", times)
            del graph, compiled


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    parser.add_argument("--part", choices=("accuracy", "figures", "peers", "all"), default="all", help="default: all")
    parser.add_argument("--quick", action="store_true", help="batch 1 and 8 only, no compiled peer")
    parser.add_argument("--batches", default="1,2,4,8,16,32", help="rows of the shapes; default: %(default)s")
    parser.add_argument("--limit-s", type=float, default=1e9, help="skip what would start later; goals come first")
    known = [f"{policy}/{precision}" for policy, precision in SUBJECTS]
    parser.add_argument("--only", default=",".join(known), help="of %(default)s; files of the others stay as they are")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(known):
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    subjects = {one: name for one, name in SUBJECTS.items() if "/".join(one) in wanted or one == ("pi05", "bf16")}
    batches = {int(text) for text in options.batches.split(",")}
    shapes = [b for b in SHAPES if b.rows in batches and (not options.quick or b.rows in (1, 8))]
    if options.part == "peers":
        subjects = {one: name for one, name in subjects.items() if one[1] == "bf16"}
        shapes = [b for b in GOALS if b in shapes]
    if options.part == "accuracy":
        shapes = [Bucket(1, 3, 1)]
    device = torch.device("cuda")
    versions = {"torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name()}
    runners: dict[Subject, GraphRunner] = {}
    found: dict[str, Any] = {}
    plain: dict[str, dict[str, torch.Tensor]] = {}
    if ("pi0", "bf16") in subjects:
        tensors = random_tensors(PI0, device)
        of_pi0 = PEERS["pi0"] if options.part == "peers" else [*OTHERS, *ONE_ROW]
        build(tensors, ("pi0", "bf16"), [b for b in shapes if b in of_pi0], runners)
        plain["pi0"] = official_dtypes(tensors, torch.bfloat16)
        found["pi0"] = accuracy(runners, tensors, "pi0", plain["pi0"])
        del tensors
    tensors = random_tensors(PI05, device)
    for subject in (one for one in subjects if one[0] == "pi05"):
        own_shapes = {"bf16": shapes, "fp8": OTHERS}.get(subject[1], ONE_ROW)
        build(tensors, subject, [b for b in own_shapes if b in shapes], runners)
    plain["pi05"] = official_dtypes(tensors, torch.bfloat16)
    found["pi05"] = accuracy(runners, tensors, "pi05", plain["pi05"])
    del tensors
    torch.cuda.empty_cache()
    say(f"errors against fp32: {json.dumps(found)}")
    if options.part == "accuracy":
        return

    rows: dict[Subject, list[Row]] = {subject: [] for subject in subjects}
    options.out.mkdir(parents=True, exist_ok=True)
    wanted_rows = [(bucket, [one for one in subjects if bucket in runners[one].captured]) for bucket in shapes]
    wanted_rows.sort(key=lambda one: (GOALS.index(one[0]) if one[0] in GOALS else len(GOALS), one[0].rows))
    for bucket, group in wanted_rows if options.part != "peers" else ():
        if time.monotonic() - START > options.limit_s:
            say(f"{bucket}: skipped")
            continue
        for one in group:
            runners[one].load(make_batch(bucket, policy=one[0]), bucket)
        times = times_in_turns({one: runners[one].captured[bucket].graph.replay for one in group})
        for one in group:
            row = measure(runners[one], one, bucket, versions, times[one])
            row.details["accuracy"] = found[one[0]] if bucket == Bucket(1, 3, 1) else {}
            if one != ("pi05", "bf16"):
                name = "this engine's pi05" if one[0] == "pi0" else "this engine's bf16"
                add_peer(row, name, times["pi05", "bf16"])
            rows[one].append(row)
            save_rows(options.out / subjects[one], rows[one])
    peers: list[Row] = []
    if options.part != "figures":
        measure_peers(runners, dict(reversed(plain.items())), versions, peers, options)

    heads = (("policy", 6), ("dtype", 16), ("views", 5), ("prompt", 6), ("batch", 5), ("ms", 8), ("p99/p50", 7))
    heads += (("floor", 7), ("x floor", 7), ("peer ms", 8), ("ratio", 6))
    print(" ".join(f"{name:>{width}}" for name, width in heads), " peer")
    for row in (row for group in (*rows.values(), peers) for row in group):
        print(
            f"{row.policy:>6} {row.dtype:>16} {row.shape['views']:>5} {row.shape['prompt_tokens']:>6} {row.batch:>5} "
            f"{row.median_ms:>8.2f} {row.p99_ms / row.median_ms:>7.3f} {row.floor_ms:>7.2f} "
            f"{row.median_ms / row.floor_ms:>7.2f} {row.peer_median_ms or 0:>8.1f} {row.ratio or 0:>6.2f}  {row.peer}"
        )


if __name__ == "__main__":
    main()
