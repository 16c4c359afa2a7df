"""The search as a component: optimisers, warm start, convergence, budgets, and robots side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import SearchOptions
from taktline_worker.planning.cem import elites
from taktline_worker.planning.optimiser import ActionSpace
from taktline_worker.planning.round_times import REFUSALS, RoundTimes
from taktline_worker.planning.search import Plan, Problem, search
from taktline_worker.planning.settings import SearchChanges, SearchLimits, SearchSettings, check, resolve
from torch import Tensor

from tests.planner import point_world

SETTINGS = SearchSettings(candidates=64, elites=8, rounds=6, horizon=2)


def plan_of(problem: Problem, world: Any = None, **options: Any) -> Plan:
    return search(world or point_world.PointWorld(), [problem], **options)[0]


def same(a: Plan, b: Plan) -> bool:
    equal = all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("actions", "poses", "energies"))
    return equal and (a.rounds, a.stopped) == (b.rounds, b.stopped)


@pytest.mark.parametrize("optimiser", ["cem", "mppi"])
def test_a_plan_reaches_a_goal_that_is_in_reach(optimiser: Any) -> None:
    settings = replace(SETTINGS, optimiser=optimiser, candidates=256, elites=16, rounds=12, temperature=0.1)
    plan = plan_of(Problem(point_world.reach(0.06, -0.04, 0.02), settings, seed=1))
    moved = plan.actions[:, :3].sum(dim=0)
    # MPPI keeps sampling at its first width, so its mean stays noisy.
    tolerance = 0.004 if optimiser == "cem" else 0.02
    torch.testing.assert_close(moved, torch.tensor([0.06, -0.04, 0.02]), atol=tolerance, rtol=0)
    assert plan.actions.shape == (2, 7)
    assert not plan.actions[:, 3:6].any()
    assert plan.actions[:, :3].abs().max() <= settings.max_step_m
    if optimiser == "cem":
        assert plan.energies[-1, 1] < 0.5 * plan.energies[0, 1]
    torch.testing.assert_close(plan.poses[1, :3], torch.tensor([0.4, 0, 0.3]) + moved)


def test_mppi_comes_nearer_at_its_default_temperature() -> None:
    """The mean of rounds, weighed by how far below the round's best each energy is, in quarters of their spread."""
    settings = SearchSettings(optimiser="mppi", candidates=256, rounds=12)
    assert settings.temperature == SearchOptions().temperature == 0.25
    rounds: list[tuple[Tensor, Tensor]] = []
    goal = point_world.reach(0.06, -0.04, 0.02)
    world = point_world.PointWorld()
    (plan,) = search(world, [Problem(goal, settings, seed=1)], observer=lambda index, number, *one: rounds.append(one))
    mean = torch.zeros(2, 7, dtype=torch.float64)
    for actions, energies in rounds:
        wide = energies.double()
        weights = torch.exp(-(wide - wide.min()) / (0.25 * wide.std()))
        fitted = torch.einsum("c,chd->hd", weights / weights.sum(), actions.double())
        mean = 0.85 * fitted + 0.15 * mean
    torch.testing.assert_close(plan.actions[:, :3], mean[:, :3].float(), atol=1e-6, rtol=0)
    missed = (plan.actions[:, :3].sum(dim=0) - torch.tensor([0.06, -0.04, 0.02])).norm()
    assert missed < 0.5 * torch.tensor([0.06, -0.04, 0.02]).norm()


def test_equal_energies_go_to_the_lower_index() -> None:
    energies = torch.tensor([3.0, 1.0, 2.0, 1.0, 1.0, 0.5])
    assert elites(energies, 4).tolist() == [5, 1, 3, 4]
    assert elites(torch.tensor([float("nan"), 2.0, 1.0]), 2).tolist() == [2, 1]


def test_clips_pins_and_forced_gripper() -> None:
    settings = replace(SETTINGS, pins={1: 0.2, 3: 0.3}, close_gripper=1)
    space = ActionSpace(settings, torch.device("cpu"), torch.float32)
    actions = space.sample(space.first(), 10 * torch.randn(2, 64, 4, generator=torch.Generator().manual_seed(0)))
    assert actions[..., 0].abs().max() == pytest.approx(0.05)
    assert torch.all(actions[..., 1] == torch.tensor(0.2))  # pins are not bounded
    assert torch.all(actions[:, 0, 6] == torch.tensor(0.3))
    assert torch.all(actions[:, 1, 6] == 1.0)  # beats the pin and the clip


def test_gripper_dead_zone_applies_to_the_answer_alone() -> None:
    space = ActionSpace(SETTINGS, torch.device("cpu"), torch.float32)
    belief = space.first()
    belief.mean[:, 3] = torch.tensor([0.2499, -0.25])
    assert space.answer(belief)[:, 6].tolist() == [0.0, -0.25]
    assert belief.mean[0, 3] > 0


def test_warm_start_begins_at_the_tail_of_the_previous_plan() -> None:
    space = ActionSpace(replace(SETTINGS, horizon=3, pins={2: 0.01}), torch.device("cpu"), torch.float32)
    previous = torch.zeros(3, 7)
    previous[:, 0] = torch.tensor([0.01, 0.02, 0.9])
    previous[:, 6] = torch.tensor([0.1, -0.2, 0.3])
    belief = space.first(previous)
    torch.testing.assert_close(belief.mean[:, 0], torch.tensor([0.02, 0.05, 0.0]))  # clipped, then nothing known
    torch.testing.assert_close(belief.mean[:, 3], torch.tensor([-0.2, 0.3, 0.0]))
    assert torch.all(belief.mean[:, 2] == torch.tensor(0.01))
    assert torch.equal(belief.std, space.first().std)


def test_warm_start_improves_a_search_of_one_round() -> None:
    scene = point_world.reach(0.08, 0.06, -0.06)
    still = replace(SETTINGS, pins={3: 0.0})  # a metric that adds gripper and metres would drown the metres
    one = replace(still, rounds=1)
    best = plan_of(Problem(scene, replace(still, rounds=10, horizon=3), seed=2)).actions
    cold, warm = (plan_of(Problem(scene, one, seed=3, previous=previous)) for previous in (None, best))
    assert warm.energies[0, 1] < cold.energies[0, 1]


def test_convergence_stops_early_and_leaves_the_plan_of_that_many_rounds() -> None:
    scene = point_world.reach(0.03, 0.0, 0.0)
    settings = replace(SETTINGS, rounds=30, convergence=0.2)
    plan = plan_of(Problem(scene, settings, seed=4))
    assert plan.stopped == "converged"
    assert 1 < plan.rounds < 30
    assert torch.equal(plan.actions, plan_of(Problem(scene, replace(SETTINGS, rounds=plan.rounds), seed=4)).actions)


class Clock:
    """A clock that each reading moves on by `step` seconds."""

    def __init__(self, step: float) -> None:
        self.now = 0.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_a_budget_gives_the_best_plan_found_when_it_ends() -> None:
    """Rounds take 1 s here: readings at 1, 2 | 3, 4 | 5, 6, so the fourth would end after 7.5."""
    scene, world = point_world.reach(0.03, 0.02, 0.0), point_world.PointWorld()
    settings = replace(SETTINGS, rounds=20)
    plan = plan_of(Problem(scene, settings, seed=5, deadline=6.5), world, clock=Clock(1.0))
    assert (plan.stopped, plan.rounds) == ("budget", 3)
    assert world.waits == 3
    assert torch.equal(plan.actions, plan_of(Problem(scene, replace(SETTINGS, rounds=3), seed=5)).actions)


def test_a_search_without_a_clock_never_waits_for_the_device() -> None:
    world = point_world.PointWorld()

    def no_clock() -> float:
        raise AssertionError("the clock was read")

    plan_of(Problem(point_world.reach(0.03, 0.0, 0.0), SETTINGS), world, clock=no_clock)
    assert world.waits == 0


def fleet() -> list[Problem]:
    """Robots with searches of different sizes."""
    return [
        Problem(point_world.reach(0.05, 0.0, 0.0), SETTINGS, seed=1),
        Problem(point_world.reach(0.0, 0.05, 0.02, 0.4), replace(SETTINGS, candidates=40, rounds=3), seed=2),
        Problem(point_world.reach(0.0, 0.0, -0.05), replace(SETTINGS, horizon=3, optimiser="mppi"), seed=1),
        Problem(point_world.reach(0.01, 0.0, 0.0), replace(SETTINGS, rounds=30, convergence=0.3), seed=7),
    ]


def test_robots_side_by_side_get_the_plans_they_get_alone() -> None:
    problems, world = fleet(), point_world.PointWorld()
    together = search(world, problems)
    for problem, plan in zip(problems, together, strict=True):
        assert same(plan, plan_of(problem))
    assert {plan.stopped for plan in together} == {"rounds", "converged"}
    # The first round's units: four of robot 0, three of robot 1 (padded), four, four.
    goals = [[torch.equal(goal, problem.scene.goal) for problem in problems].index(True) for goal, _ in world.units]
    assert goals[:15] == [0] * 4 + [1] * 3 + [2] * 4 + [3] * 4


def test_neighbours_do_not_change_a_plan_of_the_network(kit: Any, scene: Any) -> None:
    world = kit.world(micro_batch=32)
    settings = SearchSettings(candidates=64, elites=8, rounds=2)
    other = Problem(replace(scene, goal=scene.latent), replace(settings, rounds=1, candidates=20), seed=9)
    problem = Problem(scene, settings, seed=30)
    alone = plan_of(problem, world)
    beside = search(world, [other, problem])
    assert same(alone, beside[1])
    assert same(plan_of(other, world), beside[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"candidates": 1},
        {"candidates": 5000},
        {"rounds": 0},
        {"rounds": 101},
        {"elites": 1},
        {"elites": 401},
        {"horizon": 0},
        {"horizon": 3},
    ],
)
def test_requests_outside_the_limits_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(TaktlineError) as caught:
        resolve(SearchSettings(), SearchChanges(**changes), SearchLimits(horizon=2))
    assert caught.value.code is ErrorCode.SEARCH_INVALID
    assert next(iter(changes)) in caught.value.message


@pytest.mark.parametrize(
    "changes",
    [
        {"max_step_m": 0.0},
        {"max_step_m": float("inf")},
        {"momentum_std": 1.5},
        {"pins": {4: 0.0}},
        {"pins": {0: float("nan")}},
        {"close_gripper": 3},
        {"temperature": 0.0},
        {"optimiser": "mppi", "convergence": 0.1},
    ],
)
def test_deployments_outside_the_limits_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TaktlineError) as caught:
        check(replace(SearchSettings(), **changes), SearchLimits())
    assert caught.value.code is ErrorCode.SEARCH_INVALID


def test_round_times_scale_with_units_and_horizon() -> None:
    times = RoundTimes(micro_batch=16, ranks=2)
    assert times.round_s(SETTINGS) is None
    times.learn([(SETTINGS, 5)], 2.0)  # 4 units on 2 ranks x 2 steps x 5 rounds = 20 unit steps
    assert times.round_s(SETTINGS) == pytest.approx(0.4)
    assert times.round_s(replace(SETTINGS, candidates=65)) == pytest.approx(0.6)
    assert times.round_s(replace(SETTINGS, horizon=3)) == pytest.approx(0.6)
    times.learn([(SETTINGS, 5), (SETTINGS, 0)], 4.0)
    assert 0.4 < (times.round_s(SETTINGS) or 0) < 0.8


def test_one_pause_teaches_little_and_a_mesh_that_stays_slow_is_learned() -> None:
    times = RoundTimes(micro_batch=16, ranks=2)
    times.learn([(SETTINGS, 5)], 0.13)  # 26 ms a round
    times.learn([(SETTINGS, 1)], 4.0)
    assert 0.026 < (times.round_s(SETTINGS) or 0) < 0.05
    for _ in range(30):
        times.learn([(SETTINGS, 1)], 4.0)
    assert times.round_s(SETTINGS) == pytest.approx(4.0, rel=0.01)


def test_refusals_end_where_rounds_were_fast_enough_before() -> None:
    times = RoundTimes(micro_batch=16)
    assert times.refuse([SETTINGS], 1.0)  # of nothing measured nothing is tried
    times.learn([(SETTINGS, 1)], 0.4)
    times.learn([(SETTINGS, 1)], 4.0)
    assert (times.round_s(SETTINGS) or 0) > 0.5
    assert not any(times.refuse([SETTINGS], 0.3) is False for _ in range(3 * REFUSALS))  # no round was ever so fast
    assert [times.refuse([SETTINGS], 0.5) for _ in range(REFUSALS)] == [True] * (REFUSALS - 1) + [False]
    assert times.on(1).refuse([SETTINGS], 0.5)  # another count of ranks does not begin anew
    times.learn([(SETTINGS, 1)], 0.4)
    assert times.round_s(SETTINGS) == pytest.approx(0.4)
    # Tried in vain: it is as slow as it was thought to be, and the next refusals are as many.
    times.learn([(SETTINGS, 1)], 1.6)
    for _ in range(REFUSALS):
        times.refuse([SETTINGS], 0.5)
    times.learn([(SETTINGS, 1)], 1.6)
    assert times.round_s(SETTINGS) == pytest.approx(1.6)
    assert all(times.refuse([SETTINGS], 0.5) for _ in range(REFUSALS - 1))
