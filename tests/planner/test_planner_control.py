"""Control with a trained world model as simulator: what it has learned, how bf16 ranks by it, and where loops end."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from taktline_worker.models.vjepa2_ac import poses
from taktline_worker.models.vjepa2_ac.weights import BF16
from taktline_worker.planning.search import Problem, search
from taktline_worker.planning.world import Scene
from torch import Tensor

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
UNIT = 100


@pytest.fixture(scope="module")
def control() -> Iterator[Any]:
    """`benchmarks/planner_control.py`; the folder's scripts import each other by their bare names."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("planner_control")
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def arm_world(control: Any) -> Any:
    return control.toy_arm.world_of(control.toy_arm.trained(), micro_batch=UNIT)


def test_the_model_has_learned_what_actions_do(control: Any, arm_world: Any) -> None:
    """Frames that it was not trained on: other poses, and actions at the bound of a step."""
    generator = torch.Generator().manual_seed(99)
    predicted, stayed = [], []
    for _ in range(16):
        pose = torch.tensor(control.START)
        pose[:3] += 0.2 * torch.rand(3, generator=generator) - 0.1
        actions = torch.zeros(2, 7)
        actions[:, :3] = control.toy_arm.MAX_STEP_M * (torch.rand(2, 3, generator=generator) * 2 - 1).sign()
        landing = poses.integrate(poses.integrate(pose, actions[0]), actions[1])
        before, after = control.latent_of(arm_world, pose), control.latent_of(arm_world, landing)
        found = arm_world.predict(Scene(before, before, pose), actions)
        torch.testing.assert_close(found.pose, landing)
        predicted.append(float((found.latent - after).abs().mean()))
        stayed.append(float((before - after).abs().mean()))
    assert sum(predicted) < 0.5 * sum(stayed)


@pytest.mark.parametrize("fused", [False, True])
def test_bf16_ranks_as_fp32_does_by_trained_weights(control: Any, arm_world: Any, fused: bool) -> None:
    settings = replace(control.SETTINGS, candidates=UNIT, elites=10, rounds=10)
    start = torch.tensor(control.START)
    target = start + torch.tensor((*control.GOAL, 0.0, 0.0, 0.0, 0.0))
    scene = Scene(control.latent_of(arm_world, start), control.latent_of(arm_world, target), start)
    rounds: list[tuple[Tensor, Tensor]] = []
    search(arm_world, [Problem(scene, settings)], observer=lambda index, number, *values: rounds.append(values))
    rounded = control.toy_arm.world_of(control.toy_arm.trained(), precision=BF16, micro_batch=UNIT, fused=fused)
    prepared, found = rounded.prepare(scene), []
    for actions, exact in rounds:
        energies = torch.zeros(UNIT)
        rounded.score(prepared, actions, energies)
        assert float((energies - exact).abs().max()) > 1e-7  # a bf16 that equals fp32 was none
        found.append((float(torch.corrcoef(torch.stack((energies, exact)).double())[0, 1]), float(exact.std())))
    # Of 512 numbers an energy is a mean, at the published size of 360,448: rounding is averaged out much less here.
    assert all(r >= 0.999 for r, _ in found[:3])
    spreads = [spread for _, spread in found]
    assert spreads[0] > 10 * spreads[-1]  # a search ends among plans that are nearly one: r falls with any rounding


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seen", ["prediction", "frames"])
def test_an_arm_comes_near_its_goal(control: Any, arm_world: Any, overlap: bool, seen: str) -> None:
    settings = replace(control.SETTINGS, candidates=UNIT, elites=10, rounds=3)
    found = control.episode(arm_world, settings, 0, overlap, True, seen, 1.5)
    assert found.distance_m[-1] < 0.05
    assert list(found.step_s) == control.step_seconds(1.5, overlap)


def test_steps_last_as_long_as_plan_and_move(control: Any) -> None:
    assert control.step_seconds(1.5, overlap=False) == [2.5] * 12
    assert control.step_seconds(1.5, overlap=True) == [3.0] + [1.5] * 11
    assert control.step_seconds(0.5, overlap=True) == [1.5] + [1.0] * 11


def test_the_rows_are_counted_from_the_plans_measured_last(control: Any) -> None:
    """After a new planner.json: `python benchmarks/planner_control.py --times-only`."""
    times = control.plan_seconds()
    rows = json.loads((BENCHMARKS / "results" / "h200" / "planner_control.json").read_text())
    assert {(row["seen"], row["shape"]["rounds"], row["warm"], row["overlap"]) for row in rows} == {
        (seen, rounds, warm, overlap)
        for seen in ("prediction", "frames")
        for rounds in (3, 10)
        for warm in (False, True)
        for overlap in (False, True)
    }
    for row in rows:
        assert control.timed(row, times) == row
