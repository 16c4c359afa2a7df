"""The fleet measurement at a small size: every number of robots, and plans with the bits of those made alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from taktline_worker.planning.search import Problem
from taktline_worker.planning.settings import SearchSettings

from benchmarks.planner_fleet import FleetTime, fleet_times

SETTINGS = SearchSettings(candidates=24, elites=6, rounds=2)


def test_robots_side_by_side_are_timed_and_compared(kit: Any) -> None:
    world = kit.world("full", micro_batch=8)
    scene = kit.scene(world)

    def problem(index: int) -> Problem:
        moved = replace(scene, pose=scene.pose + 0.01 * index)
        return Problem(moved, replace(SETTINGS, candidates=24 - index), seed=index)

    readings = iter(range(100))
    found = fleet_times(world, problem, 2, clock=lambda: float(next(readings)))
    assert [one.robots for one in found] == [1, 2, 4, 8]
    assert all(one.equal for one in found)
    assert all(one.seconds == (1.0, 1.0) for one in found)
    assert [one.plans_per_s for one in found] == [1.0, 2.0, 4.0, 8.0]


def test_a_plan_that_depends_on_its_company_is_noticed(kit: Any) -> None:
    world = kit.world("full", micro_batch=8)
    scene = kit.scene(world)
    asked = iter(range(100))

    def problem(index: int) -> Problem:
        return Problem(scene, SETTINGS, seed=next(asked) if index == 1 else 0)  # robot 1's noise is never the same

    found = fleet_times(world, problem, 1, robots=(1, 2))
    assert [one.equal for one in found] == [True, False]


def test_the_median_counts() -> None:
    assert FleetTime(4, (1.0, 2.0, 9.0), True).plans_per_s == pytest.approx(2.0)
