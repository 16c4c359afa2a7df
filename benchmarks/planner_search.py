"""The planner's search as its benchmarks time it: settings, scene, captured world, clock, and a line of the results."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import triton
from engine import Row
from taktline_worker.models.vjepa2_ac import modules
from taktline_worker.models.vjepa2_ac.runner import VJepa2World
from taktline_worker.models.vjepa2_ac.weights import CheckpointFile, VJepa2Weights
from taktline_worker.planning.mesh import Mesh
from taktline_worker.planning.search import Plan, Problem, search
from taktline_worker.planning.settings import SearchSettings
from taktline_worker.planning.world import Scene

SETTINGS = SearchSettings(candidates=800, rounds=10, elites=80, horizon=2)
MICRO_BATCH = 100
FLOPS_A_CANDIDATE = 334.2e9
"""Both steps with cached keys and values, matrix products and attention; 2 FLOP a multiply-add."""
ROOF_FLOPS = {"bf16": 790e12, "fp8": 1580e12}


def scene_of(world: VJepa2World, seed: int = 3) -> Scene:
    """A scene of random latents, normed as encoded ones are: the encoder is a thousandth of a plan."""
    generator = torch.Generator().manual_seed(seed)
    a = world.architecture
    latent, goal = torch.randn(2, a.tokens, a.encoder_width, generator=generator).to(world.device)
    pose = torch.tensor([0.4, 0.1, 0.3, 3.1, 0.05, -0.4, 0.2], device=world.device)
    return Scene(modules.latent_norm(latent), modules.latent_norm(goal), pose)


def plan_seconds(
    world: VJepa2World, problems: list[Problem], mesh: Mesh, runs: int, warm_ups: int = 1
) -> tuple[list[float], list[Plan]]:
    """Sorted seconds of `runs` searches after the warm-ups, and the last one's plans."""
    times = []
    for index in range(warm_ups + runs):
        torch.cuda.synchronize()
        began = time.perf_counter()
        plans = search(world, problems, mesh)
        torch.cuda.synchronize()
        if index >= warm_ups:
            times.append(time.perf_counter() - began)
    return sorted(times), plans


def row(dtype: str, seconds: list[float], settings: SearchSettings, gpus: int, **details: Any) -> Row:
    """One line of the results."""
    robots = int(details.pop("robots", 1))
    floor = robots * settings.candidates * settings.rounds * FLOPS_A_CANDIDATE / ROOF_FLOPS[dtype] / gpus
    return Row(
        bench="planner",
        policy="vjepa2-ac",
        shape={name: getattr(settings, name) for name in ("candidates", "rounds", "elites", "horizon")},
        batch=robots,
        dtype=dtype,
        gpus=gpus,
        median_ms=1000 * statistics.median(seconds),
        p99_ms=1000 * seconds[-1],
        n=len(seconds),
        floor_ms=1000 * floor,
        versions={"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)},
        date=time.strftime("%Y-%m-%d"),
        command="benchmarks/planner.py",
        details={"micro_batch": MICRO_BATCH, "max_step_m": settings.max_step_m} | details,
    )


def make_world(weights: VJepa2Weights, checkpoint: CheckpointFile, quantised: bool = False) -> VJepa2World:
    """A captured world of the benchmark's unit."""
    world = VJepa2World(weights, checkpoint.architecture, MICRO_BATCH, SETTINGS.horizon, quantised=quantised)
    world.capture()
    return world
