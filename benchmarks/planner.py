"""The V-JEPA 2-AC planner on one GPU or several: plans, energies' agreement with fp32, parts, and the plain peer.

    python benchmarks/planner.py [--parts] [--peer [--compiled]] [--fleet] [--exact 100] [--runs 3] [--out DIR]
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
from planner_fleet import ROBOTS, fleet_times
from planner_parts import parts
from planner_peer import Peer
from planner_search import MICRO_BATCH, SETTINGS, make_world, plan_seconds, row, scene_of
from power import Counters, EnergyMeter
from random_vjepa2 import random_checkpoint
from taktline_worker.models.vjepa2_ac.runner import VJepa2World
from taktline_worker.models.vjepa2_ac.weights import BF16, FP32, pack_weights
from taktline_worker.planning.mesh import OneRank, ProcessGroupMesh
from taktline_worker.planning.search import Problem
from torch import distributed as dist

SCORED_ROUNDS = (0, 1, 2, 4, 9)
"""Of a search, those whose actions are scored in fp32 too."""


def fleet_rows(world: VJepa2World, dtype: str, rounds: int) -> list[Row]:
    """Plans of a few rounds for several robots at once; one robot's are among the plans themselves."""
    settings = replace(SETTINGS, rounds=rounds)
    rows = []
    problem = lambda index: Problem(scene_of(world, 10 + index), settings, seed=index)  # noqa: E731
    for one in fleet_times(world, problem, 1, ROBOTS[1:]):
        assert one.equal, f"a plan of {one.robots} robots side by side differs from the one its robot gets alone"
        found = {"robots": one.robots, "plans_per_s": one.plans_per_s, "bit_equal": one.equal}
        rows.append(row(dtype, list(one.seconds), settings, 1, **found))
        say(f"{dtype}: {one.robots} robots, {one.plans_per_s:.2f} plans of {rounds} rounds a second")
    return rows


def beside(rows: list[Row], peers: dict[str, float]) -> None:
    """Puts the peers, by the seconds of one round in each precision, into the rows of one robot's plans."""
    fastest = min(peers, key=lambda name: peers[name])
    for index, one in enumerate(rows):
        if one.batch == 1:
            rounds = one.shape["rounds"]
            ratios = {name: 1000 * seconds * rounds / one.median_ms for name, seconds in peers.items()}
            rows[index] = replace(
                one,
                peer=f"plain PyTorch, whole prefix, {fastest} (one round x {rounds})",
                peer_median_ms=peers[fastest] * rounds * 1000,
                ratio=ratios[fastest],
                details=one.details | {"peer_round_s": peers, "ratios": ratios},
            )
            shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
            say(f"{one.dtype}, {rounds} rounds: times as fast as {shown}")


def on_one(options: argparse.Namespace, device: torch.device, save: Callable[[list[Row]], None]) -> list[Row]:
    """Everything that one GPU answers; `save` gets what there is so far."""
    checkpoint = random_checkpoint(device)
    rounded, full = pack_weights(checkpoint, BF16, device), pack_weights(checkpoint, FP32, device)
    world = make_world(rounded, checkpoint)
    scene = scene_of(world)
    say("worlds are captured")
    recorded = recorded_rounds(world, scene, SCORED_ROUNDS)
    sets = {name: actions[: options.exact] for name, actions in recorded.items()}
    exact = energies_of(
        VJepa2World(full, checkpoint.architecture, MICRO_BATCH, SETTINGS.horizon, fused=False), scene, sets
    )
    del full
    gc.collect()
    torch.cuda.empty_cache()
    say("energies in fp32")
    rows: list[Row] = []
    counters, mesh = Counters(), OneRank()
    reference: float | None = None
    for dtype in ("bf16", "fp8"):
        if dtype == "fp8":
            del world
            gc.collect()
            world = make_world(rounded, checkpoint, quantised=True)
        torch.cuda.reset_peak_memory_stats()
        plan_seconds(world, [Problem(scene, replace(SETTINGS, rounds=1))], mesh, 1, warm_ups=0)
        for rounds in (SETTINGS.rounds, 3):
            settings = replace(SETTINGS, rounds=rounds)
            with EnergyMeter(counters) as meter:
                seconds, _ = plan_seconds(world, [Problem(scene, settings)], mesh, options.runs, warm_ups=0)
            median = statistics.median(seconds)
            details: dict[str, Any] = {
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
                "watts": meter.watts,
                "joules": None if meter.joules is None else meter.joules / options.runs,
                "plans_per_s": 1.0 / median,
            }
            if rounds == SETTINGS.rounds:
                reference = reference or median
                found = agreement(energies_of(world, scene, sets), exact)
                details |= {"agreement": found, "times_bf16": median / reference}
                say(f"{dtype}: r { ({name: round(one['pearson'], 6) for name, one in found.items()}) }")
            rows.append(row(dtype, seconds, settings, 1, **details))
            shown = f"floor {rows[-1].floor_ms / 1000:.3f}, {details['joules']} J, {details['watts']} W"
            say(f"{dtype}: {median:.3f} s a plan of {rounds} rounds ({[round(one, 3) for one in seconds]}), {shown}")
            save(rows)
        if options.parts and dtype == "bf16":
            rows[0] = replace(rows[0], details=rows[0].details | {"parts": parts(world)})
            save(rows)
        if options.fleet:
            rows += fleet_rows(world, dtype, options.fleet_rounds)
            save(rows)
    del world
    gc.collect()
    torch.cuda.empty_cache()
    if options.peer:
        peer = Peer(checkpoint, scene, recorded["round 1"])
        official = peer.agreement(sets, exact)
        rows[0] = replace(rows[0], details=rows[0].details | {"agreement_of_the_peer_in_bf16": official})
        say(f"plain bf16 autocast: r { ({name: round(one['pearson'], 6) for name, one in official.items()}) }")
        found_s = peer.rounds()
        beside(rows, found_s)
        save(rows)
        if options.compiled:
            beside(rows, found_s | peer.compiled_round())
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
    parser.add_argument("--parts", action="store_true", help="time and joules of each kernel under load")
    parser.add_argument("--peer", action="store_true", help="time a round of the plain statement too")
    parser.add_argument("--compiled", action="store_true", help="the peer's blocks through torch.compile as well")
    parser.add_argument("--fleet", action="store_true", help="plans a second for 2, 4 and 8 robots at once, too")
    parser.add_argument("--fleet-rounds", type=int, default=3, metavar="N", help="rounds of a plan of the fleet")
    parser.add_argument(
        "--exact", type=int, default=SETTINGS.candidates, metavar="N", help="candidates of a round scored in fp32 too"
    )
    parser.add_argument("--runs", type=int, default=3, help="timed plans of each kind")
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
