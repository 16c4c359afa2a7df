"""The ticket that no worker is expected to make: tried where a worker has nothing else to do, refused in time."""

from __future__ import annotations

import random

import pytest
from taktline_gateway.arrivals import Arrivals
from taktline_gateway.deadline_queue import Priority
from taktline_gateway.long_shot import chance
from taktline_gateway.rhythms import RHYTHMS
from taktline_gateway.scheduler import Refusal

from tests.gateway.simulated_clock import Simulation, running, scheduler, ticket

ALONE = {1: 100.0}
TAIL = 1.1


def one_at_a_time(**fields):
    """A worker that takes 100 ms for one, 110 at the 99th percentile, with a batch on it since 0."""
    made = scheduler(table=ALONE, max_batch=1, tail=TAIL, **fields)
    made.submit(ticket("first", 9.0), 0.0)
    (first,) = made.poll(0.0).batches
    return made, first


def test_who_misses_by_less_than_the_spread_is_kept_and_tried_on_a_worker_that_was_quick():
    made, first = one_at_a_time()
    second = ticket("second", 0.197)  # two take 200 ms by their medians
    assert made.submit(second, 0.0) == (None, None)
    assert (made.depth, made.waiting()) == (1, [second])
    assert made.poll(0.0).batches == ()
    made.finished(first, 0.096)
    (tried,) = made.poll(0.096).batches
    assert tried.tickets == (second,)
    assert made.depth == 0
    assert running(made, "w0") is tried


def test_who_has_no_chance_any_more_is_told_before_the_worker_is_free():
    made, first = one_at_a_time()
    second = ticket("second", 0.197)
    made.submit(second, 0.0)
    wake_at = made.poll(0.0).wake_at
    assert wake_at == pytest.approx(0.197 - 0.100 / TAIL, abs=2e-4)
    (told,) = made.poll(wake_at).refused
    assert (told.ticket, told.reason) == (second, Refusal.UNREACHABLE)
    assert made.depth == 0
    made.finished(first, 0.110)
    assert made.poll(0.110).batches == ()


@pytest.mark.parametrize(
    ("deadline", "fields"),
    [
        (0.160, {}),  # far from it
        (0.197, {"priority": Priority.SAFETY}),
        (0.197, {"priority": Priority.BACKGROUND}),
        (0.197, {"extra": True}),  # nobody knows how long it takes
        (0.197, {"attempts": 1}),
    ],
)
def test_others_are_refused_at_once(deadline, fields):
    made, _ = one_at_a_time()
    refused, _ = made.submit(ticket("second", deadline, **fields), 0.0)
    assert refused.reason is Refusal.UNREACHABLE


def test_there_is_one_at_a_time_and_its_robots_newer_one_takes_its_place():
    made, _ = one_at_a_time()
    second, third, newer = ticket("second", 0.197), ticket("third", 0.198), ticket("second", 0.199, at=0.001, seq=2)
    assert made.submit(second, 0.0) == (None, None)
    assert made.submit(third, 0.0)[0].reason is Refusal.UNREACHABLE
    assert made.submit(newer, 0.001) == (None, second)
    assert made.waiting() == [newer]
    served = ticket("second", 9.0, at=0.002, seq=3)
    assert made.submit(served, 0.002) == (None, newer)
    assert made.waiting() == [served]


def test_behind_a_queue_none_is_held():
    """By the quarter of the work ahead that counts it misses by 20 ms; all of it takes seconds."""
    made, _ = one_at_a_time()
    number = 0
    while made.fleet.predicted_completion(0.25 * made.depth, 0.0) <= 2.0:
        made.submit(ticket(number, 2.0 + 1e-6 * number), 0.0)
        number += 1
    refused, _ = made.submit(ticket("next", 2.0 + 1e-6 * number), 0.0)
    assert refused.reason is Refusal.UNREACHABLE
    assert made.depth == number


def test_where_nothing_runs_only_who_has_one_chance_in_a_hundred_is_held():
    for deadline, held in ((0.092, True), (0.090, False)):
        made = scheduler(table=ALONE, max_batch=1, tail=TAIL)
        refused, _ = made.submit(ticket("a", deadline), 0.0)
        assert (refused is None) is held, deadline


def test_a_trial_of_its_robot_takes_its_place():
    made, first = one_at_a_time()
    second, newer = ticket("second", 0.197), ticket("second", 1.25, at=1.2, seq=2)
    made.submit(second, 0.0)
    made.finished(first, 0.050)
    assert made.submit(newer, 1.2) == (None, second)  # it has sat idle for a second, and nobody asked when it ended
    assert made.waiting() == [newer]


def test_one_that_is_held_is_not_replaced_by_one_that_was_passed_over():
    made, _ = one_at_a_time()
    queued, held = ticket("other", 0.202), ticket("second", 0.197)
    assert made.submit(held, 0.0) == (None, None)
    assert made.submit(queued, 0.0) == (None, None)
    (told,) = made.poll(0.1025).refused
    assert told.ticket is queued
    assert made.waiting() == [held]


def test_it_leaves_with_its_robot():
    made, first = one_at_a_time()
    second = ticket("second", 0.197)
    made.submit(second, 0.0)
    assert made.cancel(second)
    assert not made.cancel(second)
    assert made.depth == 0
    made.finished(first, 0.080)
    assert made.poll(0.080).batches == ()


def test_whoever_can_be_served_goes_first():
    made, first = one_at_a_time()
    made.submit(ticket("second", 0.197), 0.0)
    made.submit(sure := ticket("third", 9.0), 0.0)
    made.finished(first, 0.096)
    assert made.poll(0.096).batches[0].tickets == (sure,)


def test_a_queued_one_that_was_passed_over_by_its_last_start_is_tried_too():
    made, first = one_at_a_time()
    queued = ticket("queued", 0.202)
    made.submit(queued, 0.0)
    assert made.waiting() == [queued]
    assert made.poll(0.1025).refused == ()  # its last start by the median was 0.102; the batch before it is late
    made.finished(first, 0.104)
    assert made.poll(0.104).batches[0].tickets == (queued,)


def test_no_worker_is_kept_from_those_who_come():
    """A try that lasts until 196 ms has to be worth it where a robot in a rhythm comes at 105."""
    for period, tried in ((0.055, False), (0.300, True)):
        made, first = one_at_a_time()
        made.submit(ticket("second", 0.1935), 0.0)
        for at in (0.050 - period, 0.050):
            made.arrivals.note(("", "steady"), at, 0.0, 1.0)
        made.finished(first, 0.096)
        assert bool(made.poll(0.096).batches) is tried, period


def test_two_robots_in_step_for_whom_the_time_of_two_batches_hardly_lasts():
    """Batches vary by 3%: one in many is quick enough for both robots."""
    rng = random.Random(3)
    simulation = Simulation(scheduler(table={1: 628.0}, max_batch=1, tail=1.072))
    made, on_time, asked = simulation.scheduler, 0, 0
    for turn in range(300):
        now = 1.53 * turn
        made.submit(ticket("a", now + 1.224, at=now, seq=turn), now)
        made.submit(ticket("b", now + 1.224, at=now, seq=turn), now)
        asked += 2
        while True:
            batches = made.poll(now).batches
            if not batches:
                break
            (batch,) = batches
            end = now + 0.628 * rng.lognormvariate(0.0, 0.03)
            on_time += batch.tickets[0].deadline >= end
            now = end
            made.finished(batch, now - batch.sent_at)
    assert 0.505 * asked < on_time < 0.6 * asked
    assert made.depth <= 1


def test_chances_are_those_of_a_log_normal_distribution():
    assert chance(0.1, 0.11, 0.1) == pytest.approx(0.5)
    assert chance(0.1, 0.11, 0.11) == pytest.approx(0.99, abs=1e-4)
    assert chance(0.1, 0.11, 0.1 / 1.1) == pytest.approx(0.01, abs=1e-4)
    assert [chance(0.1, 0.1, seconds) for seconds in (0.0999, 0.1)] == [0.0, 1.0]
    assert chance(0.1, 0.11, 0.0) == 0.0


def test_what_is_expected_follows_the_rhythm_of_robots_and_of_strangers_the_rate():
    arrivals = Arrivals()
    for turn in range(3):
        arrivals.note(("", "a"), 1.0 * turn, 0.0, 1.0)
        arrivals.note(("", "b"), 1.0 * turn + 0.4, 0.0, 1.0)
    assert arrivals.expected_within(0.3, 2.45) == 0.0
    assert arrivals.expected_within(0.6, 2.45) == 1.0
    assert arrivals.expected_within(1.0, 2.45) == 2.0
    assert arrivals.expected_within(0.1, 3.1) == 0.5  # a is overdue
    assert arrivals.expected_within(0.1, 99.0) == 0.0
    strangers = Arrivals()
    for number in range(3 * RHYTHMS):
        strangers.note(("", str(number)), 0.01 * number, 0.0, 1.0)
    end = 0.03 * RHYTHMS
    assert strangers.expected_within(0.1, end) == pytest.approx(0.1 * strangers.rate_hz(end))
