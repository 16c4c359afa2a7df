"""Cosmos3 on a mesh of GPUs: guidance branches, split matrices and split tokens, each beside one GPU of the same run.

    torchrun --nproc-per-node N benchmarks/mesh_cosmos3.py [--only cosmos3-nano,cosmos3-edge] [--runs 30] [--others 30]
        [--out DIR]

Random weights of the published size, the official request, batch 1, a known instruction. A request is what the worker
does for it, by the clock of rank 0: frames to the GPU, encoding, the order to the other ranks, denoising, actions back.
Of it the denoising loop, a graph with its exchanges, is also timed by CUDA events. One GPU is the mean of all GPUs,
each with a whole policy of its own at the same time as the others, with which it shares the host's cores and memory,
before and after the first form: they are not equally fast, and slower once they are hot. N = 2 measures 2x1, 1x2 by
matrices and 1x2 by tokens; N = 4 and 8 what they add up to.
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
from taktline_worker.models.cosmos3 import synthetic, vae
from taktline_worker.models.cosmos3.graphs import GraphRunner
from taktline_worker.models.cosmos3.group import PolicyGroup, follow
from taktline_worker.models.cosmos3.mesh import Mesh, OneRank, Place, ProcessGroupMesh, Split, debug_checksum
from taktline_worker.models.cosmos3.orders import dismiss
from taktline_worker.models.cosmos3.ranks import Joined
from taktline_worker.models.cosmos3.request import PolicyRequest, draw_noise
from taktline_worker.models.cosmos3.synthetic import POLICIES, PROMPT_TOKENS, random_tensors, random_vae
from taktline_worker.models.cosmos3.vae_weights import VaeWeights
from taktline_worker.models.cosmos3.weights import Cosmos3Weights, pack_weights
from taktline_worker.planning import mesh as orders
from torch import distributed as dist

EMPTY_TOKENS = 10
ALONE = 16
"""Most requests of one GPU alone, half of them before the first form and half behind it."""
START = time.monotonic()
Form = tuple[int, int, Split]


def forms(ranks: int) -> list[Form]:
    """Branches, ranks of a branch, and what these share, for all ranks together."""
    found: list[Form] = [(2, ranks // 2, "tensor")]
    if ranks > 2:
        found.append((2, ranks // 2, "sequence"))
    return [*found, (1, ranks, "sequence"), (1, ranks, "tensor")]


def random_request(name: str) -> PolicyRequest:
    """One request, the same on every rank."""
    a, s = POLICIES[name]
    generator = torch.Generator().manual_seed(3)
    video, actions = draw_noise(s, a.action_width, 7)
    prompt = torch.randint(a.vocabulary, (PROMPT_TOKENS,), generator=generator).tolist()
    frames = torch.rand(3, s.encoded_frames, *s.padded, generator=generator) * 2 - 1
    state = torch.rand(s.raw_dims, generator=generator) if s.state_row else None
    return PolicyRequest(tuple(prompt), tuple(range(EMPTY_TOKENS)), frames, state, video, actions)


class Started:
    """The ranks that torchrun has started, as the worker's group sees those that it starts itself."""

    def __init__(self, mesh: Mesh) -> None:
        control = dist.new_group(backend="gloo") if dist.get_backend() == "nccl" else None
        self.joined = Joined(orders.ProcessGroupMesh(control=control), mesh)

    def take(self) -> Joined:
        """All of them are there."""
        return self.joined

    def sound(self) -> bool:
        """See `take`."""
        return True

    def lost(self) -> None:
        """Nobody starts them again here."""

    def close(self) -> None:
        """Lets the others return."""
        dismiss(self.joined.control)


def milliseconds(call: Callable[[], object], device: torch.device | None, runs: int) -> list[float]:
    """Sorted times of `runs` calls after two warm-ups: by events on a GPU, else, and without a device, by the clock."""
    times = []
    for index in range(runs + 2):
        if device is None or device.type != "cuda":
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


def run(
    name: str, mesh: Mesh, weights: Cosmos3Weights, coder: VaeWeights, device: torch.device, runs: int
) -> dict[str, Any]:
    """Requests and the denoising loop on one mesh: times, actions, and a checksum of this rank's state."""
    a, settings = POLICIES[name]
    room, spread = -(-PROMPT_TOKENS // 64) * 64, not isinstance(mesh, OneRank)

    def member(mesh: Mesh) -> GraphRunner:
        leads = mesh.place.rank == 0
        encode = partial(vae.encode, coder) if leads else None
        runner = GraphRunner(weights, a, settings, encode, mesh, rows=(1,), texts=(room,))
        if device.type == "cuda":
            runner.capture()
        return runner

    started: Any = Started(mesh) if spread else None
    request = random_request(name)
    whole: list[float] = []
    if mesh.place.rank == 0:
        group = PolicyGroup(member, None, started)
        runner = group.runner
        found = group.run([request])[0].outcome.actions
        whole = milliseconds(lambda: group.run([request]), None, runs)
        group.close()
    else:
        runner, found = member(mesh), torch.zeros(0)
        follow(runner, None, started.joined.control)
    buffers = runner.buffers(runner.bucket_for(1, PROMPT_TOKENS, False))  # with the request in it
    if spread:
        dist.barrier()
    with torch.inference_mode():
        loop = milliseconds(partial(runner.compute, buffers), device, max(3, runs // 4))
    state = buffers.result[:1]
    return {
        "whole": whole,
        "loop": loop,
        "actions": found,
        "checksum": debug_checksum(state[:, runner.video_values :]),
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    parser.add_argument("--only", default="cosmos3-nano,cosmos3-edge", help="policies of random:NAME")
    parser.add_argument("--runs", type=int, default=30, help="requests of the first form")
    parser.add_argument("--others", type=int, default=0, help="requests of the other forms; 0 = as many")
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
    runs = min(5, options.runs) if options.tiny else options.runs
    rows: list[dict[str, Any]] = []
    target = options.out / f"mesh_cosmos3_{size}.json"
    for name in options.only.split(","):
        held: dict[tuple[str, int], Cosmos3Weights] = {}
        coder = random_vae(synthetic.VAE, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
        whole = share(name, Place(), device, held)
        alone_runs = max(2, min(runs, ALONE) // 2)
        alone = run(name, OneRank(), whole, coder, device, alone_runs)
        for number, (branches, ranks, split) in enumerate(forms(size)):
            mesh = ProcessGroupMesh(branches, ranks, split)
            count = runs if number == 0 else options.others or runs
            got = run(name, mesh, share(name, mesh.place, device, held), coder, device, count)
            if number == 0:
                again = run(name, OneRank(), whole, coder, device, alone_runs)
                alone |= {part: sorted(alone[part] + again[part]) for part in ("whole", "loop")}
                took = everyone((median(alone["whole"]), median(alone["loop"])), size)
                peers = dict(zip(("whole", "loop"), map(list, zip(*took, strict=True)), strict=True))
            if device.type == "cuda":
                torch.cuda.empty_cache()
            apart = float((got["actions"] - alone["actions"]).norm() / alone["actions"].norm()) if rank == 0 else 0.0
            same = len(set(everyone(got["checksum"], size))) == 1
            if rank == 0:
                rows.append(row_of(name, (branches, ranks, split), size, got, peers, apart, same, device))
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
    peers: dict[str, list[float]],
    apart: float,
    same: bool,
    device: torch.device,
) -> dict[str, Any]:
    """A result in the form that all benchmarks share; its peer is one GPU."""
    branches, ranks, split = form
    settings = POLICIES[name][1]
    took, loop = median(got["whole"]), median(got["loop"])
    own, own_loop = (sum(peers[part]) / size for part in ("whole", "loop"))
    say(
        f"{name} cfg {branches} tp {ranks} {split}: request {took:.1f} ms of {own:.1f}, {own / took:.3f}x;"
        f" loop {loop:.1f} of {own_loop:.1f}, {own_loop / loop:.3f}x; apart {apart:.1e}"
    )
    return {
        "bench": "mesh",
        "policy": name,
        "shape": {"preset": settings.name, "prompt_tokens": PROMPT_TOKENS, "steps": settings.steps},
        "batch": 1,
        "dtype": "bf16" if device.type == "cuda" else "fp32",
        "gpus": size,
        "median_ms": took,
        "p99_ms": got["whole"][-1],
        "n": len(got["whole"]),
        "peer": "this engine on one GPU, the same request; the mean of the GPUs, each at the same time as the others",
        "peer_median_ms": own,
        "ratio": own / took,
        "floor_ms": None,
        "versions": {"torch": torch.__version__},
        "date": time.strftime("%Y-%m-%d"),
        "command": f"torchrun --nproc-per-node {size} benchmarks/mesh_cosmos3.py",
        "details": {
            "cfg": branches,
            "tp": ranks,
            "split": split,
            "apart": apart,
            "ranks_hold_the_same_bits": same,
            "loop_median_ms": loop,
            "loop_peer_median_ms": own_loop,
            "loop_ratio": own_loop / loop,
            "alone_ms": peers["whole"],
            "alone_loop_ms": peers["loop"],
        },
    }


def shrink() -> None:
    """Replaces the published sizes by tiny ones."""
    narrow = [replace(stage, inputs=stage.inputs // 20, outputs=stage.outputs // 20) for stage in synthetic.VAE.encoder]
    synthetic.VAE = replace(synthetic.VAE, encoder=tuple(narrow))
    for name, (a, settings) in POLICIES.items():
        small = replace(a, layers=2, width=64, heads=8, kv_heads=8, head_dim=16, mlp=96, vocabulary=300)
        POLICIES[name] = (
            replace(small, sections=(4, 2, 2)),
            replace(settings, frames=9, padded=(96, 128), content=(92, 96)),
        )


def everyone(own: Any, size: int) -> list[Any]:
    """Each rank's value."""
    found: list[Any] = [None] * size
    dist.all_gather_object(found, own)
    return found


def median(times: list[float]) -> float:
    """The middle one of sorted times."""
    return times[len(times) // 2]


def say(text: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    main()
