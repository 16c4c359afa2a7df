"""A search driven from outside its scorers: the plans of one process, whoever scored what and whoever was lost."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.planning.search import Plan, Problem, search
from taktline_worker.planning.settings import SearchSettings
from taktline_worker.planning.shards import RoundSpan, ScoredRound, ShardCall, ShardReply, ShardScorer, drive

from tests.planner import point_world

SETTINGS = SearchSettings(candidates=100, elites=8, rounds=6, horizon=2)


class Steps:
    """A clock that moves one second between two readings."""

    def __init__(self) -> None:
        self.now = -1.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Local:
    """Scorers in this process; calls are dealt out in turn, and what crosses is pickled as it would be on a wire.

    Args:
        dies: by number of the call (from 0), the scorer that is replaced by a new one before it.
    """

    def __init__(self, size: int, problems: Sequence[Problem], dies: dict[int, int] | None = None) -> None:
        self.size = size
        self._problems = pickle.dumps(list(problems))
        self._dies = dies or {}
        self._scorers = [self._new(index) for index in range(size)]
        self.calls = 0
        self.fetched = 0
        self.untils: list[float | None] = []

    def _new(self, index: int) -> ShardScorer:
        return ShardScorer(point_world.PointWorld(), str(index))

    def _fetch(self) -> list[Problem]:
        self.fetched += 1
        return pickle.loads(self._problems)

    def _next(self) -> ShardScorer:
        lost = self._dies.get(self.calls)
        if lost is not None:
            self._scorers[lost] = self._new(lost)
        self.calls += 1
        return self._scorers[self.calls % len(self._scorers)]

    def score(self, calls: Sequence[ShardCall], until: float | None) -> list[ShardReply]:
        self.untils.append(until)
        return [pickle.loads(pickle.dumps(self._next().score(call, self._fetch))) for call in calls]

    def finish(self, plan: str, rounds: Sequence[ScoredRound]) -> list[Plan]:
        return self._next().finish(plan, rounds, self._fetch)


def problems() -> list[Problem]:
    """Two robots: one warm-started with a mean of its own, one whose last unit is padded more."""
    return [
        Problem(point_world.reach(0.06, -0.04, 0.02), SETTINGS, seed=1, previous=0.02 * torch.ones(2, 7)),
        Problem(point_world.reach(-0.03, 0.01, 0.05, 0.5), replace(SETTINGS, candidates=37, rounds=4), seed=2),
    ]


def same(a: Plan, b: Plan) -> bool:
    equal = all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("actions", "poses", "energies"))
    return equal and (a.rounds, a.stopped) == (b.rounds, b.stopped)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16])
def test_plans_are_those_of_one_process(size: int) -> None:
    given = problems()
    expected = search(point_world.PointWorld(), given)
    scorers = Local(size, given)
    found = drive(scorers, "a", given)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert scorers.fetched <= size  # latents cross once a scorer and plan


@pytest.mark.parametrize("call", range(0, 18, 2))
def test_a_lost_scorer_changes_no_bit(call: int) -> None:
    given = problems()
    expected = search(point_world.PointWorld(), given)
    found = drive(Local(3, given, {call: 0, call + 1: 1, call + 2: 2}), "a", given)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_one_plan_after_the_other() -> None:
    given = problems()
    expected = search(point_world.PointWorld(), given)
    scorers = Local(2, given)
    for name in ("a", "b"):
        assert all(same(a, b) for a, b in zip(drive(scorers, name, given), expected, strict=True))


@pytest.mark.parametrize("optimiser", ["cem", "mppi"])
def test_early_ends_are_those_of_one_process(optimiser: Any) -> None:
    given = [
        Problem(
            point_world.reach(0.06, -0.04, 0.02),
            replace(SETTINGS, optimiser=optimiser, convergence=0.3, rounds=30),
            seed=1,
        ),
        Problem(point_world.reach(0.01, 0.01, 0.01), replace(SETTINGS, rounds=9), seed=2, deadline=8.5),
    ]
    expected = search(point_world.PointWorld(), given, clock=Steps())
    found = drive(Local(3, given), "a", given, Steps())
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert found[1].stopped == "budget"
    assert found[0].stopped == ("converged" if optimiser == "cem" else "rounds")


def test_every_round_says_where_its_time_went() -> None:
    given = problems()
    spans: list[RoundSpan] = []
    drive(Local(2, given), "a", given, observer=spans.append)
    assert len(spans) == SETTINGS.rounds
    assert all(0 <= span.scoring_s <= span.seconds and set(span.scorers) == {"0", "1"} for span in spans)


class Silent(Local):
    """Nobody answers from call `silent_from` on, until the deadline."""

    silent_from = 0

    def score(self, calls: Sequence[ShardCall], until: float | None) -> list[ShardReply]:
        if self.calls >= self.silent_from:
            raise TaktlineError(ErrorCode.DEADLINE_EXPIRED, "no world model answered", "send a larger budget")
        return super().score(calls, until)


def test_a_round_that_is_late_ends_who_has_a_budget_and_sends_the_others_again() -> None:
    given = [replace(problems()[0], deadline=1e9), problems()[1], replace(problems()[1], deadline=2e9)]
    scorers = Silent(2, given)
    scorers.silent_from = 4
    found = drive(scorers, "a", given)
    for index in (0, 2):
        (expected,) = search(
            point_world.PointWorld(), [replace(given[index], settings=replace(given[index].settings, rounds=2))]
        )
        one = found[index]
        assert isinstance(one, Plan)
        assert torch.equal(one.actions, expected.actions)
        assert one.stopped == "budget"
    assert isinstance(found[1], TaktlineError)
    # The first round is not held against a budget; later ones must be there by the first that still counts.
    assert scorers.untils == [None, 1e9]


def test_what_a_new_plan_costs_its_first_round_is_not_held_against_the_next() -> None:
    """Fetching takes 50 seconds and a round five: several fit, and by the first one's time no second would."""
    clock = Steps()

    class Slow(Local):
        def _new(self, index: int) -> ShardScorer:
            return ShardScorer(point_world.PointWorld(), str(index), clock)

        def _fetch(self) -> list[Problem]:
            clock.now += 50.0
            return super()._fetch()

    given = [replace(problems()[0], deadline=71.0)]
    (found,) = drive(Slow(1, given), "a", given, clock)
    assert isinstance(found, Plan)
    assert (found.rounds, found.stopped) == (4, "budget")


def test_the_next_round_is_as_long_as_its_slowest_scorer_whoever_fetched_longest() -> None:
    """One scorer fetches for 80 seconds and scores for 10, the other scores for 85: the second round takes as long."""
    clock = Steps()

    class Uneven(Local):
        def score(self, calls: Sequence[ShardCall], until: float | None) -> list[ShardReply]:
            first, second = super().score(calls, until)
            clock.now += 90.0
            return [replace(first, seconds=90.0, prepared_s=80.0), replace(second, seconds=85.0, prepared_s=0.0)]

    given = [replace(problems()[0], deadline=150.0)]
    (found,) = drive(Uneven(2, given), "a", given, clock)
    assert isinstance(found, Plan)
    assert (found.rounds, found.stopped) == (1, "budget")


def test_rounds_that_were_scored_answer_where_the_next_one_is_not_in_time() -> None:
    given = [replace(one, deadline=1e9) for one in problems()]
    scorers = Silent(2, given)
    scorers.silent_from = 6
    found = drive(scorers, "a", given)
    expected = search(
        point_world.PointWorld(), [replace(one, settings=replace(one.settings, rounds=3)) for one in given]
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.actions, other.actions)
        assert torch.equal(one.energies, other.energies)
        assert (one.rounds, one.stopped) == (3, "budget")
    with pytest.raises(TaktlineError, match="no world model answered"):
        drive(Silent(2, given), "b", given)
