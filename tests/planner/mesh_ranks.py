"""Forks eight ranks over gloo and lets meshes of 1, 2, 3, 4 and 8 of them plan; writes each plan's bytes.

Run as a script, so that the ranks fork from one process that has imported everything: python mesh_ranks.py OUT
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from taktline_worker.models.vjepa2_ac.adapter import VJepa2Adapter
from taktline_worker.models.vjepa2_ac.config import SidecarArchitecture
from taktline_worker.models.vjepa2_ac.processor import PlannerProcessor, to_pixels
from taktline_worker.models.vjepa2_ac.runner import VJepa2World
from taktline_worker.models.vjepa2_ac.weights import BF16, FP32, open_checkpoint, pack_weights
from taktline_worker.planning.mesh import Mesh, OneRank, ProcessGroupMesh
from taktline_worker.planning.ranks import FixedRanks
from taktline_worker.planning.relay import dismiss, follow, lead
from taktline_worker.planning.search import Plan, Problem
from taktline_worker.planning.settings import SearchLimits, SearchSettings
from taktline_worker.planning.world import Scene
from torch import distributed as dist

RANKS = 8
SIZES = (1, 2, 3, 4, 8)
PRECISIONS = ("fp32", "bf16", "bf16 fused", "fp8")
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "vjepa2_ac_tiny"
SETTINGS = SearchSettings(candidates=64, elites=8, rounds=3)


def make_world(precision: str) -> VJepa2World:
    """The golden model, plain and fused: that is as a worker on a GPU runs it, through the kernels' references."""
    fp8 = precision == "fp8"
    fused = fp8 or precision == "bf16 fused"
    checkpoint = open_checkpoint(GOLDEN / "checkpoint.pt", SidecarArchitecture(64, 4, 4))
    weights = pack_weights(checkpoint, FP32 if precision == "fp32" else BF16, torch.device("cpu"))
    return VJepa2World(weights, checkpoint.architecture, micro_batch=8, max_horizon=2, fused=fused, quantised=fp8)


def make_problems(world: VJepa2World) -> list[Problem]:
    """Three robots; the second one's search is no multiple of the micro-batch, and has a warm start and a budget.

    The third one's is MPPI's.
    """
    generator = torch.Generator().manual_seed(5)
    frames = torch.randint(0, 256, (4, 64, 64, 3), generator=generator, dtype=torch.uint8)
    latents = world.encode(torch.stack([to_pixels(frame.numpy(), 64) for frame in frames]))
    poses = torch.tensor([[0.4, 0.1, 0.3, 3.0, 0.1, -0.2, 0.5], [0.5, -0.1, 0.2, 0.0, 0.0, 0.0, 0.0]])
    previous = 0.03 * torch.ones(2, 7)
    return [
        Problem(Scene(latents[0], latents[1], poses[0]), SETTINGS, seed=11),
        Problem(
            Scene(latents[2], latents[3], poses[1]),
            replace(SETTINGS, candidates=36, rounds=9),
            seed=12,
            previous=previous,
            deadline=3.5,
        ),
        Problem(
            Scene(latents[1], latents[2], poses[0]),
            replace(SETTINGS, optimiser="mppi", candidates=44),
            seed=13,
        ),
    ]


class RoundClock:
    """Rank 0's clock: one second between two readings, so the budget ends after a known round. Others never read it."""

    def __init__(self) -> None:
        self.now = -1.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def summary(plan: Plan) -> dict[str, object]:
    tensors = {name: getattr(plan, name).numpy().tobytes().hex() for name in ("actions", "poses", "energies")}
    return tensors | {"rounds": plan.rounds, "stopped": plan.stopped}


def rank_main(rank: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=RANKS)
    found: dict[str, list[dict[str, object]]] = {}
    pair: dist.ProcessGroup | None = None
    for size in SIZES:
        group = dist.new_group(list(range(size)))  # every rank takes part in making every group
        if rank >= size:
            continue
        pair = group if size == 2 else pair
        mesh: Mesh = OneRank() if size == 1 else ProcessGroupMesh(group)
        for precision in PRECISIONS:
            world = make_world(precision)
            if rank == 0:
                plans = lead(world, make_problems(world), mesh, RoundClock())
                dismiss(mesh)
                found[f"{precision} {size}"] = [summary(plan) for plan in plans]
            else:
                follow(world, mesh)
    dist.barrier()
    if rank < 2:
        lose_a_rank(rank, ProcessGroupMesh(pair), out, found)
    os._exit(0)  # groups with a lost member cannot be taken down in order


def lose_a_rank(rank: int, mesh: Mesh, out: Path, found: dict[str, list[dict[str, object]]]) -> None:
    """Ranks 0 and 1 plan; rank 1 dies with its order in hand."""
    world = make_world("fp32")
    if rank == 1:
        mesh.send(torch.zeros(1, dtype=torch.int64))
        os._exit(0)
    settings = replace(SETTINGS, horizon=2)
    processor = PlannerProcessor(64, settings, SearchLimits(), {})
    adapter = VJepa2Adapter(world, processor, "fp32", 0.25, FixedRanks(mesh))
    row = adapter.largest_row()
    for name in ("lost", "after"):
        (outcome,) = adapter.run([row], 1)
        assert outcome.plan is not None
        found[name] = [summary(outcome.plan)]
    (alone,) = VJepa2Adapter(world, processor, "fp32", 0.25).run([row], 1)
    assert alone.plan is not None
    found["alone"] = [summary(alone.plan)]
    assert adapter.ranks.mesh().size == 1
    (out / "plans.json").write_text(json.dumps(found))


def main() -> int:
    out = Path(sys.argv[1])
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(rank, out)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
