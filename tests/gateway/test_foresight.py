"""What a small fleet in a steady rhythm gains by being planned for: against exhaustive search, and on the clock."""

from __future__ import annotations

import functools
import random
import statistics
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_gateway import foresight
from taktline_gateway.arrivals import Arrivals
from taktline_gateway.company import Company
from taktline_gateway.deadline_queue import Priority
from taktline_gateway.foresight import IN_SIGHT, LATE, foreseen, plan

from tests.gateway.simulated_clock import Simulation, scheduler, service_times, ticket

WAIT_S = 0.005
PI_MS = {1: 22.6, 2: 32.2, 4: 51.4, 8: 89.7}
LIKE_PI = {"table": PI_MS, "max_wait_s": WAIT_S, "tail": 1.07}
PERIOD_S, BUDGET_S = 0.1, 0.08
NEVER = float("inf")


def turns(robots, *, seed=1, seconds=6.0, off_s=0.0, period=PERIOD_S, budget=BUDGET_S, priority=Priority.PRODUCTION):
    """Robots with one period, each with a phase of its own."""
    rng = random.Random(seed)
    made = []
    for robot in range(robots):
        at = rng.uniform(0.01, period)
        for seq in range(int(seconds / period)):
            came = at + seq * period + (rng.gauss(0.0, off_s) if off_s else 0.0)
            made.append(ticket(robot, came + budget, at=came, seq=seq, priority=priority))
    return sorted(made, key=lambda one: one.arrived_at)


def share(arrivals, **options):
    simulation = Simulation(scheduler(**{**LIKE_PI, **options}))
    simulation.run(arrivals)
    return sum(end <= one.deadline for one, end in simulation.done.items()) / len(arrivals)


def gain(**options):
    """Mean difference of the share on time over twelve sets of phases."""
    found = []
    for seed in range(12):
        arrivals = turns(8, seed=seed, **options)
        with mock.patch.object(Company, "foreseen", return_value=None):
            without = share(turns(8, seed=seed, **options))
        found.append(share(arrivals) - without)
    return statistics.fmean(found), min(found)


def test_a_fleet_out_of_step_is_served_better_by_a_plan_that_knows_who_comes():
    mean, worst = gain()
    assert mean > 0.02
    assert worst > -0.02


def test_and_where_its_robots_come_a_millisecond_or_two_off_their_rhythm():
    mean, worst = gain(off_s=0.0015)
    assert mean > 0.01
    assert worst > -0.03


def test_a_plan_is_kept_to_while_one_who_cannot_be_made_any_more_is_still_queued():
    """Four come within a millisecond, which is all that a batch of four leaves them: who waits is given up for them."""
    phases_ms = (0.9, 4.4, 4.4, 5.0, 5.0, 6.5, 11.6, 15.5)
    arrivals = [
        ticket(robot, (16.0 * turn + phase + 12.8) / 1e3, at=(16.0 * turn + phase) / 1e3, seq=turn)
        for turn in range(200)
        for robot, phase in enumerate(phases_ms)
    ]
    assert share(arrivals, table={1: 5.88, 2: 9.25, 4: 11.95, 8: 17.6}, tail=1.0) > 0.47


@pytest.mark.parametrize(
    ("arrivals", "options"),
    [
        pytest.param([ticket(one, 0.011 * one + 0.08, at=0.011 * one) for one in range(400)], {}, id="strangers"),
        pytest.param(turns(11), {}, id="too many to have a turn in sight"),
        pytest.param(turns(8), {"workers": 2}, id="several workers"),
        pytest.param(turns(8), {"max_wait_s": 0.0}, id="nobody may wait"),
        pytest.param(turns(8, priority=Priority.SAFETY), {}, id="safety, for whom no chance is taken"),
        pytest.param(turns(8, priority=Priority.ROLLOUT), {}, id="rollouts"),
    ],
)
def test_nothing_is_planned_for(arrivals, options):
    with mock.patch.object(foresight, "plan", side_effect=AssertionError):
        share(arrivals, **options)


def test_a_fleet_far_off_its_rhythm_is_not_planned_for_once_that_is_known():
    begun = []

    def counted(due, here, times, limit, begins, latest):
        begun.append(begins)
        return plan(due, here, times, limit, begins, latest)

    with mock.patch.object(foresight, "plan", side_effect=counted):
        share(turns(8, off_s=0.012))
    assert all(begins < 1.0 for begins in begun)


def test_a_fleet_in_step_is_left_to_the_wait_for_company():
    rng = random.Random(3)
    arrivals = []
    for turn in range(100):
        for robot in range(8):
            at = 0.16 * turn + abs(rng.gauss(0.0, 0.002))
            arrivals.append(ticket(robot, at + 0.12, at=at, seq=turn))
    with mock.patch.object(foresight, "plan", side_effect=AssertionError):
        assert share(sorted(arrivals, key=lambda one: one.arrived_at)) > 0.99


def test_robots_that_stop_are_looked_for_a_few_times_and_no_more():
    """Their rhythms are exact, so that nothing is left of how far off they come but the least that is assumed."""
    for seed in range(5):
        simulation = Simulation(scheduler(**LIKE_PI))
        arrivals = turns(8, seed=seed, period=0.0533, budget=0.0427)
        polls = []
        poll = simulation.scheduler.poll
        simulation.scheduler.poll = lambda now, poll=poll, polls=polls: (polls.append(now), poll(now))[1]
        simulation.run(arrivals)
        assert len(polls) < 4 * len(arrivals)
        assert sum(now > arrivals[-1].arrived_at for now in polls) < 50


def test_work_for_one_decision_is_bounded():
    for robots in (2, 8, 10):
        seen = []

        def counted(due, *rest, seen=seen):
            seen.append(len(due))
            return plan(due, *rest)

        with mock.patch.object(foresight, "plan", side_effect=counted):
            share(turns(robots, period=0.0125 * robots, budget=0.01 * robots + 0.03))
        assert seen
        assert max(seen) <= IN_SIGHT


def rhythm(phases, beats=40):
    """Arrivals of robots with these phases, up to the beginning of a new turn; and when that begins."""
    arrivals = Arrivals()
    for turn in range(beats):
        for robot, phase in enumerate(phases):
            arrivals.note(("", str(robot)), turn * PERIOD_S + phase, WAIT_S, BUDGET_S)
    return arrivals, beats * PERIOD_S


def first(arrivals, dues, now, *, latest=NEVER, begins=None, table=PI_MS):
    begins = now if begins is None else begins
    return foreseen(dues, arrivals, service_times(table), 8, begins=begins, latest=latest, now=now)


def test_one_is_waited_for_where_a_batch_of_two_saves_the_second():
    """The second would come 2 ms after the first has gone alone, and be too late behind it."""
    table = {1: 50.0, 2: 60.0}
    arrivals, begin = rhythm([0.0, 0.010])
    now = begin + 0.0001
    arrivals.note(("", "0"), now, WAIT_S, BUDGET_S)
    step = foreseen([now + BUDGET_S], arrivals, service_times(table, 2), 2, begins=now, latest=NEVER, now=now)
    assert step.size == 2
    assert step.wait_until == pytest.approx(begin + 0.010 + LATE * arrivals.spread_s, abs=1e-4)
    late = begin + 0.02  # for one that has not come by then nobody waits
    after = foreseen([now + BUDGET_S], arrivals, service_times(table, 2), 2, begins=late, latest=NEVER, now=late)
    assert after is None or after.wait_until is None


def test_a_long_wait_has_to_save_somebody():
    """A batch of two is quicker than two of one, but both are in time either way."""
    here, due = [0.0, 0.006], [1.0, 1.006]
    times = service_times({1: 50.0, 2: 60.0}, 2)
    assert plan(due, here, times, 2, 0.0, NEVER) == (0, 2)
    assert plan(due, here, times, 2, 0.0, 0.005) == (0, 1)
    assert plan([0.081, 0.09], here, times, 2, 0.0, 0.005) == (0, 2)


def test_a_batch_that_is_sent_ahead_has_only_those_who_are_here():
    arrivals, begin = rhythm([0.012 * robot for robot in range(8)])
    now = begin + 0.0001
    arrivals.note(("", "0"), now, WAIT_S, BUDGET_S)
    step = first(arrivals, [now + BUDGET_S], now, begins=now + 0.014)
    assert step.size == 1 or step.wait_until > now


def test_who_cannot_be_served_is_in_no_plan():
    times = service_times(PI_MS)
    assert plan([0.01, 0.02], [0.0, 0.0], times, 8, 0.0, NEVER) is None
    assert plan([0.01, 0.03], [0.0, 0.0], times, 8, 0.0, NEVER) == (1, 1)
    assert plan([], [], times, 8, 0.0, NEVER) is None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(10, 60)), min_size=1, max_size=7),
    st.sampled_from([{1: 10.0, 2: 12.0, 4: 16.0}, {1: 10.0, 2: 19.0, 4: 36.0}, {1: 20.0, 2: 22.0, 4: 44.0}]),
    st.integers(0, 20),
)
def test_the_first_batch_is_within_one_ticket_of_the_best_plan(tickets, table, begins_ms):
    """Against exhaustive search over all slices in the order of the deadlines, whatever their size."""
    rows = sorted(((at + budget) / 1e3, at / 1e3) for at, budget in tickets)
    due, here, newest = [row[0] for row in rows], [], 0.0
    for _, at in rows:
        newest = max(newest, at)
        here.append(newest)
    times, begins = service_times(table, 4), begins_ms / 1e3

    @functools.cache
    def best(index, free):
        if index == len(due):
            return 0
        return max(
            [best(index + 1, free), *(after(index, size, free) for size in range(1, min(4, len(due) - index) + 1))]
        )

    def after(index, size, free):
        start = max(free, here[index + size - 1])
        if start + times.median[size] > due[index]:
            return -1
        return size + best(index + size, start + times.median[size])

    found = plan(due, here, times, 4, begins, NEVER)
    optimum = best(0, begins)
    if found is None:
        assert optimum == 0
        return
    served = after(*found, begins)
    assert served > 0  # it is in time, and only those go who have come
    assert served >= optimum - 1
