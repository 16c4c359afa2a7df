"""Cosmos3 on one GPU: the engine's whole request in graphs against its floor and plain peers, by shape.

    python benchmarks/engine_cosmos3.py [--only nano,paper,edge] [--quick | --sweep] [--add exact,compiled] [--out DIR]

Random weights of the published sizes; frames lie on the device, texts were encoded before, as with a known instruction.
Times are CUDA events around one request, as many as fit 1.5 s, three at least and 50 at most. Peers:
benchmarks/plain_cosmos3.py in bf16, eager and with every layer through torch.compile; they encode the texts in each
request, and the frames with the same VAE as the engine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from engine import Row, add_peer, capture, event_times, quantile, say
from floors import H200
from plain_cosmos3 import PlainCosmos3
from taktline_worker.models.cosmos3 import fp8, vae
from taktline_worker.models.cosmos3.graphs import GraphRunner
from taktline_worker.models.cosmos3.profile import EMPTY_TOKENS, Cosmos3Profile
from taktline_worker.models.cosmos3.request import PolicyRequest, draw_noise
from taktline_worker.models.cosmos3.runner import Cosmos3Runner
from taktline_worker.models.cosmos3.synthetic import POLICIES, PROMPT_TOKENS, VAE, random_tensors, random_vae
from taktline_worker.models.cosmos3.weights import pack_weights
from taktline_worker.models.cosmos3.work import text_work

SUBJECTS = {
    "nano": ("cosmos3-nano", (1, 2, 4, 8, 16)),
    "paper": ("cosmos3-nano-paper", (1, 16)),
    "edge": ("cosmos3-edge", (1, 8)),
}
"""Policy and shape of `synthetic.POLICIES`, and batch sizes."""
SWEEP = (1, 2, 4, 8, 16)
LIMIT_MS = 1_500.0


def measured(call: Callable[[], object]) -> list[float]:
    """Sorted milliseconds of as many runs as fit the limit."""
    [once] = event_times(call, 1, 1)
    return sorted([once, *event_times(call, 0, int(max(3, min(50, LIMIT_MS / once))) - 1)])


def random_rows(name: str, batch: int) -> list[PolicyRequest]:
    """Robots with frames, instructions and noise of their own."""
    a, s = POLICIES[name]
    generator = torch.Generator().manual_seed(3)
    rows = []
    for seed in range(batch):
        video, actions = draw_noise(s, a.action_width, seed)
        tokens = torch.randint(a.vocabulary, (PROMPT_TOKENS,), generator=generator).tolist()
        frames = torch.rand(3, s.encoded_frames, *s.padded, generator=generator) * 2 - 1
        state = torch.rand(s.raw_dims, generator=generator) if s.state_row else None
        rows.append(PolicyRequest(tuple(tokens), tuple(range(EMPTY_TOKENS)), frames, state, video, actions))
    return rows


def peer_call(plain: PlainCosmos3, encode: Callable[[torch.Tensor], torch.Tensor], rows: list[PolicyRequest]) -> Any:
    """What the peer does for these rows, from frames on the device to actions."""
    s, device = plain.settings, plain.device
    _, height, width = s.latent_grid
    first = int(s.state_row)
    frames = torch.stack([row.frames for row in rows]).to(device)
    states = [row.state for row in rows if row.state is not None]
    state = torch.stack(states).to(device, plain.dtype) if states else None
    video = torch.stack([row.video_noise[:, 1:] for row in rows]).to(device)
    actions = torch.stack([row.action_noise[first:, : s.raw_dims] for row in rows]).to(device)
    prompts = tuple(
        torch.tensor([getattr(row, name) for row in rows], device=device) for name in ("conditional", "unconditional")
    )

    @torch.inference_mode()
    def call() -> torch.Tensor:
        clean = encode(frames)[:, :, :1, :height, :width]
        return plain(clean, state, video, actions, prompts)

    return call


def distance(actions: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """Relative L2 distance, and the largest of one number."""
    apart = (actions.double() - exact.double()).cpu()
    return {"relative": float(apart.norm() / exact.double().norm()), "max_abs": float(apart.abs().max())}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    parser.add_argument("--only", default=",".join(SUBJECTS), help="of nano, paper, edge")
    parser.add_argument("--quick", action="store_true", help="batch 1 only, no fp32 and no compiled peer")
    parser.add_argument("--add", default="", help="what --quick leaves out: exact (fp32), compiled, or both")
    parser.add_argument("--sweep", action="store_true", help="bf16 at batches 1 to 16 in seconds, nothing beside it")
    options = parser.parse_args()
    device = torch.device("cuda")
    versions = {"torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name()}
    options.out.mkdir(parents=True, exist_ok=True)
    for subject in options.only.split(",") if options.sweep else ():
        target = options.out / f"engine_cosmos3_{subject}_batches.json"
        swept = sweep(SUBJECTS[subject][0], device, versions)
        target.write_text(json.dumps([asdict(row) for row in swept], indent=1) + "\n", encoding="utf-8")
        say(f"wrote {target}")
        torch.cuda.empty_cache()
    for subject in () if options.sweep else options.only.split(","):
        target = options.out / f"engine_cosmos3_{subject}.json"

        def save(rows: list[Row], target: Path = target) -> None:
            target.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")

        extras = set(options.add.split(",")) if options.quick else {"exact", "compiled"}
        save(measure(subject, device, versions, save, quick=options.quick, extras=extras))
        say(f"wrote {target}")
        torch.cuda.empty_cache()


def sweep(name: str, device: torch.device, versions: dict[str, str]) -> list[Row]:
    """T_sync(B): batch 1 in its graph; larger ones the same launches without one, which hide behind seconds of work.

    A batch runs once or twice at least, as many times as fit the limit.
    """
    a, settings = POLICIES[name]
    encode = partial(vae.encode, random_vae(VAE, torch.bfloat16, device))
    weights = pack_weights(random_tensors(a, device), a, settings, torch.bfloat16, device)
    rows: list[Row] = []
    for batch in SWEEP:
        runner = GraphRunner(weights, a, settings, encode, rows=(batch,), texts=(-(-PROMPT_TOKENS // 64) * 64,))
        if batch == 1:
            runner.capture()
        profile = Cosmos3Profile(name, runner, VAE, "bf16", PROMPT_TOKENS)
        call = profile.whole(batch)
        times = event_times(call, 0 if rows and rows[-1].median_ms > LIMIT_MS else 1, 1)
        times = sorted(times + event_times(call, 0, int(min(10, LIMIT_MS / times[0]))))
        floor = sum(1e3 * max(p.flops / H200.flops, p.bytes / H200.bytes_per_s) for p in profile.phases(batch))
        rows.append(row_of(profile, name, batch, times, floor, versions))
        rows[-1].details |= {"captured": bool(runner.captured)}
        median = rows[-1].median_ms
        say(f"{name} batch {batch}: {median:.1f} ms, n {len(times)}, {median / floor:.2f} of its floor")
        del runner, profile, call
        torch.cuda.empty_cache()
    return rows


def measure(
    subject: str,
    device: torch.device,
    versions: dict[str, str],
    save: Callable[[list[Row]], None],
    *,
    quick: bool,
    extras: set[str],
) -> list[Row]:
    """All batch sizes of one policy and shape, and the peers of some; `save` gets what there is so far."""
    name, batches = SUBJECTS[subject]
    a, settings = POLICIES[name]
    batches = batches[:1] if quick else batches
    coder = random_vae(VAE, torch.bfloat16, device)
    encode = partial(vae.encode, coder)
    found: dict[str, torch.Tensor] = {}
    if "exact" in extras:
        exact = Cosmos3Runner(
            pack_weights(random_tensors(a, device), a, settings, torch.float32, device), a, settings, encode
        )
        found["exact"] = exact.run(random_rows(name, 1))[0].actions
        del exact
        torch.cuda.empty_cache()
        say(f"{name}: fp32 done")
    weights = pack_weights(random_tensors(a, device), a, settings, torch.bfloat16, device)
    room = -(-PROMPT_TOKENS // 64) * 64
    runner = GraphRunner(weights, a, settings, encode, rows=batches, texts=(room,))
    runner.capture()
    say(f"{name}: {len(runner.captured)} graphs captured")
    found["ours"] = runner.run(random_rows(name, 1))[0].actions
    profile = Cosmos3Profile(name, runner, VAE, "bf16", PROMPT_TOKENS)
    rows: list[Row] = []
    for batch in batches:
        rows.append(measured_row(profile, runner, name, batch, versions))
        save(rows)
    rows += in_fp8(runner, rows, found, name, versions)
    save(rows)
    if settings.name == "paper":
        every = torch.rand(1, 3, settings.frames, *settings.padded, device=device) * 2 - 1
        took = quantile(measured(capture(partial(encode, every), 1).replay), 0.5)
        say(f"{name}: all {settings.frames} frames encoded, of which the first is read: {took:.1f} ms")
        rows[0].details["encode_every_frame_ms"] = took
    save(rows)
    texts = {
        "text_ms": quantile(event_times(partial(encode_text, runner), 2, 10), 0.5),
        "text_floor_ms": text_work(a, PROMPT_TOKENS, 2.0).floor_ms(H200.flops, H200.bytes_per_s),
    }
    plain = PlainCosmos3(random_tensors(a, device), a, settings, torch.bfloat16)
    found["plain"] = peer_call(plain, encode, random_rows(name, 1))()[0].float().cpu()
    accuracy = {key: distance(found[key], found["exact"]) for key in ("ours", "plain", "fp8") if "exact" in found}
    accuracy["ours_from_plain"] = distance(found["ours"], found["plain"])
    accuracy["fp8_from_ours"] = distance(found["fp8"], found["ours"])
    say(f"{name}: distance of actions {json.dumps(accuracy)}")
    for row in rows:
        row.details |= texts | {"accuracy": accuracy}
    for batch in batches[:: max(1, len(batches) - 1)]:
        own = next(row for row in rows if row.batch == batch and row.dtype == "bf16")
        add_peer(own, "plain PyTorch, eager", measured(peer_call(plain, encode, random_rows(name, batch))))
        save(rows)
    if "compiled" in extras:
        torch._dynamo.config.recompile_limit = 64
        compiled = PlainCosmos3(plain.w.items(), a, settings, torch.bfloat16, compiled=True)
        second = Row(**asdict(rows[0]))
        add_peer(second, "plain PyTorch, torch.compile", measured(peer_call(compiled, encode, random_rows(name, 1))))
        rows.append(second)
    return rows


def in_fp8(
    bf16: GraphRunner, measured_before: list[Row], found: dict[str, torch.Tensor], name: str, versions: dict[str, str]
) -> list[Row]:
    """The smallest and the largest batch with FP8 products, beside this engine's bf16 of the same run."""
    peers = {row.batch: row for row in measured_before[:: max(1, len(measured_before) - 1)]}
    sizes = tuple(peers)
    runner = GraphRunner(
        fp8.quantise(bf16.weights),
        bf16.architecture,
        bf16.settings,
        bf16.encoder,
        rows=sizes,
        texts=(bf16.buckets[0].text,),
    )
    runner.capture()
    found["fp8"] = runner.run(random_rows(name, 1))[0].actions
    profile = Cosmos3Profile(name, runner, VAE, "fp8", PROMPT_TOKENS)
    rows = [measured_row(profile, runner, name, batch, versions) for batch in sizes]
    for row in rows:
        row.dtype = "fp8"
        row.peer, row.peer_median_ms = "this engine's bf16", peers[row.batch].median_ms
        row.ratio = row.peer_median_ms / row.median_ms
        say(f"{name} batch {row.batch} in fp8: {row.median_ms / row.peer_median_ms:.3f} of bf16's time")
        row.details["floor_is_of"] = "bf16"
    return rows


@torch.inference_mode()
def encode_text(runner: Cosmos3Runner) -> None:
    """One instruction that was not seen before."""
    runner.encode_text([token % runner.architecture.vocabulary for token in range(PROMPT_TOKENS)])


def measured_row(profile: Cosmos3Profile, runner: GraphRunner, name: str, batch: int, versions: dict[str, str]) -> Row:
    """One batch size: the whole request, its phases and its floor."""
    times = measured(profile.whole(batch))
    phases = profile.phases(batch)
    graphs = {
        "encode": runner.encoders[batch].graph,
        "denoise": runner.captured[runner.bucket_for(batch, PROMPT_TOKENS, False)].graph,
    }
    parts = {name: quantile(measured(graph.replay), 0.5) for name, graph in graphs.items()}
    floors = {phase.name: 1e3 * max(phase.flops / H200.flops, phase.bytes / H200.bytes_per_s) for phase in phases}
    row = row_of(profile, name, batch, times, sum(floors.values()), versions)
    row.details |= {"phases_ms": parts, "phase_floors_ms": floors, "tflop": sum(p.flops for p in phases) / 1e12}
    shown = ", ".join(f"{key} {value:.1f}" for key, value in parts.items())
    say(f"{name} batch {batch}: {row.median_ms:.1f} ms, {row.median_ms / row.floor_ms:.2f} of its floor; {shown}")
    return row


def row_of(
    profile: Cosmos3Profile, name: str, batch: int, times: list[float], floor_ms: float, versions: dict[str, str]
) -> Row:
    """What was measured, in the form that all benchmarks share."""
    return Row(
        policy=name.removesuffix("-paper"),
        shape=profile.shape | {"preset": "paper" if name.endswith("-paper") else "official"},
        batch=batch,
        median_ms=quantile(times, 0.5),
        p99_ms=quantile(times, 0.99),
        n=len(times),
        floor_ms=floor_ms,
        versions=versions,
        date=time.strftime("%Y-%m-%d"),
        command="python benchmarks/engine_cosmos3.py",
    )


if __name__ == "__main__":
    main()
