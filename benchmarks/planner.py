"""The V-JEPA 2-AC planner on one GPU or several: plans, energies' agreement with fp32, parts, and the plain peer.

    python benchmarks/planner.py [--parts] [--peer] [--fleet] [--out DIR]
    torchrun --standalone --nproc-per-node 2 benchmarks/planner.py [--out DIR]

Random weights of the published size. A plan is timed from latents to the plan's tensors on the device, by the wall
clock between two synchronisations, after a warm-up plan of three rounds. Under torchrun the ranks share one search, and
rank 0 also plans alone: both plans must be equal to the last bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from engine import Row, say
from planner_agreement import agreement, energies_of, recorded_rounds
from planner_fleet import fleet_times
from planner_parts import parts
from planner_peer import Peer
from planner_search import MICRO_BATCH, SETTINGS, make_world, plan_seconds, row, scene_of
from power import PowerMeter
from random_vjepa2 import random_checkpoint
from taktline_worker.models.vjepa2_ac.runner import VJepa2World
from taktline_worker.models.vjepa2_ac.weights import BF16, FP32, pack_weights
from taktline_worker.planning.mesh import OneRank, ProcessGroupMesh
from taktline_worker.planning.search import Problem
from torch import distributed as dist

SCORED_ROUNDS = (0, 1, 2, 4, 9)
"""Of a search, those whose actions are scored in fp32 too."""


def fleet_rows(world: VJepa2World, dtype: str, rounds: int, runs: int) -> list[Row]:
    """Plans of a few rounds for several robots at once."""
    settings = replace(SETTINGS, rounds=rounds)
    rows = []
    for one in fleet_times(world, lambda index: Problem(scene_of(world, 10 + index), settings, seed=index), runs):
        assert one.equal, f"a plan of {one.robots} robots side by side differs from the one its robot gets alone"
        found = {"robots": one.robots, "plans_per_s": one.plans_per_s, "bit_equal": one.equal}
        rows.append(row(dtype, list(one.seconds), settings, 1, **found))
        say(f"{dtype}: {one.robots} robots, {one.plans_per_s:.2f} plans a second")
    return rows


def beside(rows: list[Row], peers: dict[str, float]) -> None:
    """Puts the fastest peer, by the seconds of one round in each precision, into the rows of whole plans."""
    fastest = min(peers, key=lambda name: peers[name])
    for index, one in enumerate(rows):
        if one.shape["rounds"] == SETTINGS.rounds and one.batch == 1:
            best = peers[fastest] * SETTINGS.rounds * 1000
            rows[index] = replace(
                one,
                peer=f"plain PyTorch, whole prefix, {fastest} (one round x 10)",
                peer_median_ms=best,
                ratio=best / one.median_ms,
                details=one.details | {"peer_round_s": peers},
            )
            say(f"{one.dtype}: {rows[index].ratio:.2f} times as fast as the fastest peer, {fastest}")


def on_one(options: argparse.Namespace, device: torch.device, save: Callable[[list[Row]], None]) -> list[Row]:
    """Everything that one GPU answers; `save` gets what there is so far."""
    checkpoint = random_checkpoint(device)
    rounded, full = pack_weights(checkpoint, BF16, device), pack_weights(checkpoint, FP32, device)
    world = make_world(rounded, checkpoint)
    scene = scene_of(world)
    say("worlds are captured")
    rows: list[Row] = []
    extra = parts(world) if options.parts else {}
    recorded = recorded_rounds(world, scene, SCORED_ROUNDS)
    sets = {name: actions[: options.exact] for name, actions in recorded.items()}
    exact = energies_of(
        VJepa2World(full, checkpoint.architecture, MICRO_BATCH, SETTINGS.horizon, fused=False), scene, sets
    )
    del full
    gc.collect()
    torch.cuda.empty_cache()
    say("energies in fp32")
    problem = Problem(scene, SETTINGS)
    mesh = OneRank()
    reference: float | None = None
    for dtype in ("bf16", "fp8"):
        if dtype == "fp8":
            del world
            gc.collect()
            world = make_world(rounded, checkpoint, quantised=True)
        torch.cuda.reset_peak_memory_stats()
        short = replace(SETTINGS, rounds=3)
        short_seconds, _ = plan_seconds(world, [Problem(scene, short)], mesh, options.runs)
        with PowerMeter() as meter:
            seconds, _ = plan_seconds(world, [problem], mesh, options.runs, warm_ups=0)
        median = statistics.median(seconds)
        reference = reference or median
        details: dict[str, Any] = {
            "agreement": agreement(energies_of(world, scene, sets), exact),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "watts": meter.watts,
            "joules": None if meter.watts is None else meter.watts * median,
            "times_bf16": median / reference,
            "parts_ms": extra if dtype == "bf16" else {},
        }
        rows.append(row(dtype, seconds, SETTINGS, 1, **details))
        say(f"{dtype}: {median:.3f} s a plan, floor {rows[-1].floor_ms / 1000:.3f}; {json.dumps(details['agreement'])}")
        rows.append(row(dtype, short_seconds, short, 1))
        say(f"{dtype}: {rows[-1].median_ms / 1000:.3f} s a plan of three rounds; {details['watts']} W")
        save(rows)
        if options.fleet:
            rows += fleet_rows(world, dtype, options.fleet_rounds, max(1, options.runs // 3))
            save(rows)
    del world
    gc.collect()
    torch.cuda.empty_cache()
    if options.peer:
        peer = Peer(checkpoint, scene, recorded["round 1"])
        found = peer.rounds()
        beside(rows, found)
        save(rows)
        if options.compiled:
            beside(rows, found | peer.compiled_round())
            save(rows)
    return rows


def on_several(rank: int, size: int, runs: int, save: Callable[[list[Row]], None]) -> list[Row]:
    """The same plan on all ranks of a torchrun and on rank 0 alone."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    mesh = ProcessGroupMesh(control=dist.new_group(backend="gloo"))
    checkpoint = random_checkpoint(device)
    weights = pack_weights(checkpoint, BF16, device)
    rows: list[Row] = []
    for dtype in ("bf16", "fp8"):
        world = make_world(weights, checkpoint, quantised=dtype == "fp8")
        scene = scene_of(world)
        for rounds, warm_ups in ((3, 1), (SETTINGS.rounds, 0)):
            settings = replace(SETTINGS, rounds=rounds)
            problem = Problem(scene, settings)
            dist.barrier()
            seconds, shared = plan_seconds(world, [problem], mesh, runs, warm_ups)
            if rank == 0:
                alone, single = plan_seconds(world, [problem], OneRank(), 1, warm_ups=0)
                equal = torch.equal(shared[0].actions, single[0].actions)
                equal = equal and torch.equal(shared[0].energies, single[0].energies)
                assert equal, "plans differ between one rank and several"
                speedup = alone[0] / statistics.median(seconds)
                rows.append(row(dtype, seconds, settings, size, one_gpu_s=alone[0], speedup=speedup, bit_equal=equal))
                save(rows)
                say(f"{dtype}, {rounds} rounds on {size}: {rows[-1].median_ms:.0f} ms, {speedup:.3f} times one GPU")
            dist.barrier()
        del world
        gc.collect()
    dist.destroy_process_group()
    return rows


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", action="store_true", help="time each operation alone")
    parser.add_argument("--peer", action="store_true", help="time a round of the plain statement too")
    parser.add_argument("--compiled", action="store_true", help="the peer's blocks through torch.compile as well")
    parser.add_argument("--fleet", action="store_true", help="plans a second for 1, 2, 4 and 8 robots at once")
    parser.add_argument("--fleet-rounds", type=int, default=3, metavar="N", help="rounds of a plan of the fleet")
    parser.add_argument(
        "--exact", type=int, default=SETTINGS.candidates, metavar="N", help="candidates of a round scored in fp32 too"
    )
    parser.add_argument("--runs", type=int, default=5, help="timed plans of each kind")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    options = parser.parse_args()
    if options.exact <= 0 or options.exact % MICRO_BATCH:
        parser.error(f"--exact must be a multiple of {MICRO_BATCH}")
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    target = options.out / ("planner.json" if size == 1 else f"planner_x{size}.json")
    options.out.mkdir(parents=True, exist_ok=True)

    def save(rows: list[Row]) -> None:
        target.write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n")

    rows = on_several(rank, size, options.runs, save) if size > 1 else on_one(options, torch.device("cuda"), save)
    if rank == 0:
        save(rows)
        say(f"wrote {target}")


if __name__ == "__main__":
    main()
