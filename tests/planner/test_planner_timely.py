"""Plans on a mesh that falters: the answer by the deadline, from whole rounds alone, and the mesh given up or kept."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.planning import timely
from taktline_worker.planning.mesh import OneRank, RankLostError
from taktline_worker.planning.relay import follow
from taktline_worker.planning.search import Plan, Problem, search
from taktline_worker.planning.settings import SearchSettings
from taktline_worker.planning.timely import TimelySearch

from tests.planner import point_world

SETTINGS = SearchSettings(candidates=64, elites=8, rounds=6, horizon=2)
LIMIT_S = 60.0


class Leader:
    """Rank 0 of two in one process; `falter` is called with each round's number before its energies are gathered."""

    rank, size = 0, 2

    def __init__(self, falter: Callable[[int], None]) -> None:
        self.up: queue.Queue[torch.Tensor] = queue.Queue()
        self.down: queue.Queue[torch.Tensor] = queue.Queue()
        self.falter, self.rounds = falter, 0
        follower = threading.Thread(target=follow, args=(point_world.PointWorld(), Follower(self)), daemon=True)
        follower.start()

    def gather(self, mine: torch.Tensor, total: int) -> torch.Tensor:
        self.rounds += 1
        self.falter(self.rounds)
        energies = mine.new_empty(total, mine.shape[1])
        energies[0::2], energies[1::2] = mine, self.up.get(timeout=LIMIT_S)
        return self.send(energies)

    def agree(self, flags: torch.Tensor) -> torch.Tensor:
        return self.send(flags)

    def send(self, value: torch.Tensor) -> torch.Tensor:
        self.down.put(value.clone())
        return value


class Follower:
    rank, size = 1, 2

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def gather(self, mine: torch.Tensor, total: int) -> torch.Tensor:
        del total
        self._leader.up.put(mine.clone())
        return self._leader.down.get()

    def agree(self, flags: torch.Tensor) -> torch.Tensor:
        return self.send(flags)

    def send(self, value: torch.Tensor) -> torch.Tensor:
        return value.copy_(self._leader.down.get())


class OneLoss:
    """Ranks whose mesh stands until it is lost."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self.is_lost = threading.Event()

    def mesh(self) -> Any:
        return OneRank() if self.is_lost.is_set() else self._mesh

    def sound(self, mesh: Any = None) -> bool:
        del mesh
        return not self.is_lost.is_set()

    def lost(self) -> None:
        self.is_lost.set()

    def close(self) -> None:
        pass


class Clock:
    """Seconds that a test sets; a plan that waits for them would wait in earnest."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def problem(deadline: float | None = None, **changes: Any) -> Problem:
    scene = point_world.reach(0.06, -0.04, 0.02)
    return Problem(scene, replace(SETTINGS, **changes), seed=3, deadline=deadline)


def made_alone(rounds: int) -> Plan:
    return search(point_world.PointWorld(), [problem(rounds=rounds)])[0]


def same(found: Plan | TaktlineError, expected: Plan) -> bool:
    assert isinstance(found, Plan), found
    names = ("actions", "poses", "energies")
    return all(torch.equal(getattr(found, name), getattr(expected, name)) for name in names)


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """What a round waits for; set in the end whatever happens, so that no thread is left."""
    event = threading.Event()
    yield event
    event.set()


def holding(held: threading.Event, number: int) -> Callable[[int], None]:
    """Lets all rounds before `number` pass."""

    def falter(now: int) -> None:
        if now >= number:
            held.wait(LIMIT_S)

    return falter


def never_known(problem: Problem) -> float | None:
    return None


def test_a_mesh_that_is_well_gives_the_plan_of_one_process() -> None:
    ranks = OneLoss(Leader(lambda now: None))
    timed = TimelySearch(point_world.PointWorld(), ranks)
    for deadline in (None, time.monotonic() + LIMIT_S):
        (found,) = timed.plans([problem(deadline)], [deadline], never_known)
        assert same(found, made_alone(6))
        assert (found.rounds, found.stopped) == (6, "rounds")
        assert not timed.disturbed


def test_a_loss_that_nobody_has_noticed_yet_leaves_the_plan_of_the_whole_rounds(held: threading.Event) -> None:
    ranks = OneLoss(Leader(holding(held, 4)))
    timed = TimelySearch(point_world.PointWorld(), ranks)
    deadline = time.monotonic() + 5.0  # three rounds take milliseconds, on a busy machine too
    (found,) = timed.plans([problem(deadline)], [deadline], never_known)
    assert not held.is_set()  # the fourth round still waits for its rank
    assert same(found, made_alone(3))
    assert (found.rounds, found.stopped) == (3, "budget")
    assert timed.disturbed


def test_without_a_whole_round_the_deadline_brings_a_typed_error(held: threading.Event) -> None:
    ranks = OneLoss(Leader(holding(held, 1)))
    timed = TimelySearch(point_world.PointWorld(), ranks)
    deadline = time.monotonic() + 0.2
    (found,) = timed.plans([problem(deadline)], [deadline], never_known)
    assert isinstance(found, TaktlineError)
    assert found.code is ErrorCode.WORKER_UNAVAILABLE
    assert "no round" in str(found)
    # So does the instant after which the robot does not wait, for a search that has no budget of its own.
    (found,) = timed.plans([problem()], [time.monotonic() + 0.1], never_known)
    assert isinstance(found, TaktlineError)
    assert "the plan before this one" in str(found)


def test_a_round_that_is_only_late_keeps_its_mesh(held: threading.Event) -> None:
    leader = Leader(holding(held, 2))
    ranks = OneLoss(leader)
    timed = TimelySearch(point_world.PointWorld(), ranks)
    deadline = time.monotonic() + 4.0
    (found,) = timed.plans([problem(deadline)], [deadline], never_known)
    assert same(found, made_alone(1))
    held.set()
    (found,) = timed.plans([problem()], [None], never_known)
    assert same(found, made_alone(6))
    assert not ranks.is_lost.is_set()
    assert leader.rounds >= 6  # this plan's too were gathered there


def test_a_mesh_that_was_only_slow_is_known_to_be(held: threading.Event) -> None:
    clock = Clock()
    timed = TimelySearch(point_world.PointWorld(), OneLoss(Leader(holding(held, 3))), clock)
    deadline = 5.0  # of a clock that stands: the wait for it is five seconds of ours
    (found,) = timed.plans([problem(deadline)], [deadline], never_known)
    assert same(found, made_alone(2))
    assert timed.busy
    clock.now = 8.0
    held.set()
    taken = timed.wait([None])
    assert taken is not None
    assert (taken.seconds, taken.ranks) == (8.0, 2)
    # The round that was late ended after the deadline, and no further one was begun.
    assert taken.work == [(problem().settings, 3)]
    assert not timed.busy
    assert timed.wait([None]) is None


def test_a_batch_is_answered_at_the_first_deadline_that_a_round_outlives(held: threading.Event) -> None:
    ranks = OneLoss(Leader(holding(held, 3)))
    timed = TimelySearch(point_world.PointWorld(), ranks)
    soon, later = time.monotonic() + 5.0, time.monotonic() + 1000.0
    given = [problem(later), problem(soon), problem(), problem(later, rounds=1)]
    first, second, third, fourth = timed.plans(given, [later, soon, None, later], never_known)
    assert same(first, made_alone(2))
    assert same(second, made_alone(2))
    assert isinstance(third, TaktlineError)  # of which nobody asked for less than all rounds
    assert "beside this one" in str(third)
    assert same(fourth, made_alone(1))
    assert isinstance(fourth, Plan)
    assert fourth.stopped == "rounds"
    held.set()


def test_a_plan_that_has_ended_does_not_hurry_its_neighbours() -> None:
    clock = Clock()

    def falter(now: int) -> None:
        clock.now += 100.0

    timed = TimelySearch(point_world.PointWorld(), OneLoss(Leader(falter)), clock)
    # The first one's third round would end after its deadline; the second goes on beyond it.
    first, second = timed.plans([problem(250.0), problem(1e6)], [250.0, 1e6], never_known)
    assert same(first, made_alone(2))
    assert same(second, made_alone(6))
    assert not timed.disturbed


class Faulty(point_world.PointWorld):
    """Fails when it scores unit `at`."""

    at = 6

    def score(self, prepared: Any, actions: torch.Tensor, energies: torch.Tensor) -> None:
        if len(self.units) == self.at:
            self.at = -1
            raise ValueError("out of memory")
        super().score(prepared, actions, energies)


@pytest.mark.parametrize("deadline", [None, 1e9])
def test_a_world_model_that_fails_here_costs_its_plan_and_not_the_mesh(deadline: float | None) -> None:
    leader = Leader(lambda now: None)
    ranks = OneLoss(leader)
    timed = TimelySearch(Faulty(), ranks)
    with pytest.raises(ValueError, match="out of memory"):
        timed.plans([problem(deadline)], [deadline], never_known)
    assert not ranks.is_lost.is_set()
    begun = leader.rounds
    (found,) = timed.plans([problem()], [None], never_known)
    assert same(found, made_alone(6))
    assert leader.rounds == begun + 6  # the others were in step


def test_a_plan_that_fails_between_its_ranks_has_them_start_again() -> None:
    def falter(now: int) -> None:
        if now == 2:
            raise KeyError("energies")

    ranks = OneLoss(Leader(falter))
    timed = TimelySearch(point_world.PointWorld(), ranks)
    with pytest.raises(KeyError, match="energies"):
        timed.plans([problem()], [None], never_known)
    assert ranks.is_lost.is_set()


def test_a_rank_that_stays_silent_is_given_up(held: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timely, "PATIENCE_S", 0.1)
    ranks = OneLoss(Leader(holding(held, 2)))
    timed = TimelySearch(point_world.PointWorld(), ranks)
    deadline = time.monotonic() + 0.5
    timed.plans([problem(deadline)], [deadline], never_known)
    assert ranks.is_lost.wait(LIMIT_S)
    held.set()  # what ending the group does
    (found,) = timed.plans([problem()], [None], never_known)
    assert same(found, made_alone(6))


def breaking(number: int, then: Callable[[], None] = lambda: None) -> Callable[[int], None]:
    def falter(now: int) -> None:
        if now == number:
            then()
            raise RankLostError("Connection closed by peer")

    return falter


def test_a_loss_with_time_left_is_made_good_from_the_last_whole_round() -> None:
    world, clock = point_world.PointWorld(), Clock()
    ranks = OneLoss(Leader(breaking(4)))
    timed = TimelySearch(world, ranks, clock)
    (found,) = timed.plans([problem(1000.0)], [1000.0], never_known)
    assert same(found, made_alone(6))
    assert (found.rounds, found.stopped) == (6, "rounds")
    assert ranks.is_lost.is_set()
    # Two of four units in each of four rounds on the mesh, all of them in the three rounds that were left.
    assert len(world.units) == 4 * 2 + 3 * 4


def test_a_loss_without_a_deadline_has_the_whole_plan_made_again() -> None:
    ranks = OneLoss(Leader(breaking(4)))
    timed = TimelySearch(point_world.PointWorld(), ranks)
    (found,) = timed.plans([problem()], [None], never_known)
    assert same(found, made_alone(6))


def test_what_does_not_fit_after_a_loss_is_not_begun() -> None:
    clock = Clock()

    def pass_time() -> None:
        clock.now = 9.5

    # A second alone for a round is what the caller knows: it does not fit into the half that is left.
    for lost_in, end, words in ((1, 10.0, "too short"), (1, 12.0, "too short")):
        clock.now = 0.0
        world = point_world.PointWorld()
        timed = TimelySearch(world, OneLoss(Leader(breaking(lost_in, pass_time))), clock)
        deadline = end if end == 10.0 else None
        (found,) = timed.plans([problem(deadline)], [end], lambda problem: 1.0)
        assert isinstance(found, TaktlineError)
        assert words in str(found)
        assert len(world.units) == 2
    clock.now = 0.0
    timed = TimelySearch(point_world.PointWorld(), OneLoss(Leader(breaking(3, pass_time))), clock)
    (found,) = timed.plans([problem(9.0)], [20.0], lambda problem: 1.0)
    assert same(found, made_alone(2))
    assert found.stopped == "budget"


def test_values_of_an_aborted_collective_are_not_believed() -> None:
    world = point_world.PointWorld()
    ranks = OneLoss(Leader(lambda now: None))

    def falter(now: int) -> None:
        if now == 3:
            ranks.is_lost.set()

    mesh = Leader(falter)
    ranks._mesh = mesh
    gather = mesh.gather

    def aborted(mine: torch.Tensor, total: int) -> torch.Tensor:
        energies = gather(mine, total)
        return torch.full_like(energies, 7.0) if ranks.is_lost.is_set() else energies

    mesh.gather = aborted  # type: ignore[method-assign]
    (found,) = TimelySearch(world, ranks).plans(
        [problem(time.monotonic() + LIMIT_S)], [time.monotonic() + LIMIT_S], never_known
    )
    assert same(found, made_alone(6))
