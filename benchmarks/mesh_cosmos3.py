"""Cosmos3 on a mesh of GPUs: guidance branches, split matrices and split tokens, each beside one GPU of the same run.

    torchrun --nproc-per-node N benchmarks/mesh_cosmos3.py [--only cosmos3-nano,cosmos3-edge] [--quick] [--out DIR]

Random weights of the published size, the official request, batch 1; the denoising loop in a graph with its exchanges,
timed on rank 0 by CUDA events. N = 2 measures 2x1, 1x2 by matrices and 1x2 by tokens; N = 4 and 8 what they add up to.
With --tiny it runs on this machine's cores: that shows that it works, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from taktline_worker.models.cosmos3.config import Cosmos3Architecture
from taktline_worker.models.cosmos3.graphs import GraphRunner
from taktline_worker.models.cosmos3.mesh import Mesh, OneRank, Place, ProcessGroupMesh, Split, debug_checksum
from taktline_worker.models.cosmos3.request import LATENT_CHANNELS, RequestSettings, draw_noise
from taktline_worker.models.cosmos3.runner import Inputs
from taktline_worker.models.cosmos3.synthetic import POLICIES, PROMPT_TOKENS, random_tensors
from taktline_worker.models.cosmos3.weights import Cosmos3Weights, pack_weights
from torch import distributed as dist

EMPTY_TOKENS = 10
START = time.monotonic()
Form = tuple[int, int, Split]


def forms(ranks: int) -> list[Form]:
    """Branches, ranks of a branch, and what these share, for all ranks together."""
    found: list[Form] = [(2, ranks // 2, "tensor")]
    if ranks > 2:
        found.append((2, ranks // 2, "sequence"))
    return [*found, (1, ranks, "sequence"), (1, ranks, "tensor")]


def random_inputs(a: Cosmos3Architecture, s: RequestSettings) -> Inputs:
    """One request, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    video, actions = draw_noise(s, a.action_width, 7)
    prompt = torch.randint(a.vocabulary, (PROMPT_TOKENS,), generator=generator).tolist()
    return Inputs(
        conditional=(tuple(prompt),),
        unconditional=(tuple(range(EMPTY_TOKENS)),),
        clean=torch.randn(1, LATENT_CHANNELS, *s.latent_grid[1:], generator=generator),
        state=torch.rand(1, s.raw_dims, generator=generator) if s.state_row else None,
        video=video[None, :, 1:],
        actions=actions[None, int(s.state_row) :, : s.raw_dims],
        imagine=False,
    )


def milliseconds(call: Callable[[], object], device: torch.device, runs: int) -> list[float]:
    """Sorted times of `runs` calls after two warm-ups."""
    times = []
    for index in range(runs + 2):
        if device.type != "cuda":
            begin = time.perf_counter()
            call()
            took = 1e3 * (time.perf_counter() - begin)
        else:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            call()
            last.record()
            last.synchronize()
            took = first.elapsed_time(last)
        if index > 1:
            times.append(took)
    return sorted(times)


def share(name: str, place: Place, device: torch.device, held: dict[tuple[str, int], Cosmos3Weights]) -> Cosmos3Weights:
    """This rank's share of the weights; the whole ones serve all forms but those that split the matrices."""
    key = name, place.shards
    if key not in held:
        a, settings = POLICIES[name]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        held[key] = pack_weights(random_tensors(a, device), a, settings, dtype, device, place)
    return held[key]


def run(name: str, mesh: Mesh, weights: Cosmos3Weights, device: torch.device, runs: int) -> dict[str, Any]:
    """The denoising loop on one mesh: times, actions, and a checksum of this rank's state."""
    a, settings = POLICIES[name]
    room = -(-PROMPT_TOKENS // 64) * 64
    runner = GraphRunner(weights, a, settings, None, mesh, rows=(1,), texts=(room,))
    if device.type == "cuda":
        runner.capture()
    inputs = random_inputs(a, settings)
    state = runner.solve(inputs)
    buffers = runner.buffers(runner.bucket_for(1, PROMPT_TOKENS, False))
    with torch.inference_mode():
        times = milliseconds(partial(runner.compute, buffers), device, runs)
    found = {
        "median_ms": times[len(times) // 2],
        "p99_ms": times[-1],
        "n": len(times),
        "actions": runner.unpack(state)[1].float().cpu(),
        "checksum": debug_checksum(state[:, runner.video_values :]),
    }
    del runner, buffers
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    parser.add_argument("--only", default="cosmos3-nano,cosmos3-edge", help="policies of random:NAME")
    parser.add_argument("--quick", action="store_true", help="5 runs instead of 30")
    parser.add_argument("--tiny", action="store_true", help="tiny models on this machine's cores")
    options = parser.parse_args()
    if options.tiny and options.out == parser.get_default("out"):
        parser.error("--tiny needs an --out of its own: its times are no results")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.tiny:
        shrink()
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    runs = 5 if options.quick or options.tiny else 30
    rows: list[dict[str, Any]] = []
    target = options.out / f"mesh_cosmos3_{size}.json"
    for name in options.only.split(","):
        held: dict[tuple[str, int], Cosmos3Weights] = {}
        alone = run(name, OneRank(), share(name, Place(), device, held), device, runs)
        for branches, ranks, split in forms(size):
            mesh = ProcessGroupMesh(branches, ranks, split)
            got = run(name, mesh, share(name, mesh.place, device, held), device, runs)
            sums: list[Any] = [None] * size
            dist.all_gather_object(sums, got["checksum"])
            if rank == 0:
                rows.append(row_of(name, (branches, ranks, split), size, got, alone, len(set(sums)) == 1, device))
                options.out.mkdir(parents=True, exist_ok=True)
                target.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if rank == 0:
        say(f"wrote {target}")
    dist.destroy_process_group()


def row_of(
    name: str,
    form: Form,
    size: int,
    got: dict[str, Any],
    alone: dict[str, Any],
    same: bool,
    device: torch.device,
) -> dict[str, Any]:
    """A result in the form that all benchmarks share; its peer is one GPU."""
    branches, ranks, split = form
    settings = POLICIES[name][1]
    apart = float((got["actions"] - alone["actions"]).norm() / alone["actions"].norm())
    ratio = alone["median_ms"] / got["median_ms"]
    say(f"{name} cfg {branches} tp {ranks} {split}: {got['median_ms']:.1f} ms, {ratio:.2f}x, apart {apart:.1e}")
    return {
        "bench": "mesh",
        "policy": name,
        "shape": {"preset": settings.name, "prompt_tokens": PROMPT_TOKENS, "steps": settings.steps},
        "batch": 1,
        "dtype": "bf16" if device.type == "cuda" else "fp32",
        "gpus": size,
        "median_ms": got["median_ms"],
        "p99_ms": got["p99_ms"],
        "n": got["n"],
        "peer": "this engine on one GPU, the denoising loop alone",
        "peer_median_ms": alone["median_ms"],
        "ratio": ratio,
        "floor_ms": None,
        "versions": {"torch": torch.__version__},
        "date": time.strftime("%Y-%m-%d"),
        "command": f"torchrun --nproc-per-node {size} benchmarks/mesh_cosmos3.py",
        "details": {"cfg": branches, "tp": ranks, "split": split, "apart": apart, "ranks_hold_the_same_bits": same},
    }


def shrink() -> None:
    """Replaces the published sizes by tiny ones."""
    for name, (a, settings) in POLICIES.items():
        small = replace(a, layers=2, width=64, heads=8, kv_heads=8, head_dim=16, mlp=96, vocabulary=300)
        POLICIES[name] = (
            replace(small, sections=(4, 2, 2)),
            replace(settings, frames=9, padded=(96, 128), content=(92, 96)),
        )


def say(text: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    main()
