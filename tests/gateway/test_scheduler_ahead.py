"""A batch is sent while the one before it still runs: what only the first part of it needs costs the engine nothing."""

from __future__ import annotations

import itertools

import pytest
from taktline_gateway.fairness import Shares
from taktline_gateway.scheduler import Refusal
from taktline_gateway.service_times import MIN_SAMPLES
from taktline_gateway.worker_state import SILENT_FACTOR, SILENT_FLOOR_S

from tests.gateway.simulated_clock import running, scheduler, ticket

ENGINE_S = {1: 0.010, 2: 0.014, 4: 0.022, 8: 0.040}
BEFORE_S, AFTER_S = 0.004, 0.001
"""Sending and decoding a batch; carrying its answer back."""
OUTSIDE_S = BEFORE_S + AFTER_S
TABLE_MS = {size: 1e3 * (seconds + OUTSIDE_S) for size, seconds in ENGINE_S.items()}


class Worker:
    """Receives at any time; its engine runs one batch after the other, a little longer or shorter than measured."""

    def __init__(self, jitter=0.0):
        self.free_at = 0.0
        self.busy_s = 0.0
        self._jitter = itertools.cycle((1.0 - jitter, 1.0 + jitter))

    def end_of(self, batch, now):
        begin = max(now + BEFORE_S, self.free_at)
        seconds = ENGINE_S[next(size for size in ENGINE_S if size >= len(batch.tickets))] * next(self._jitter)
        self.free_at = begin + seconds
        self.busy_s += seconds
        return self.free_at + AFTER_S


def closed_loop(robots, seconds, *, told, budget_s=5.0, jitter=0.0, rest_s=0.001):
    """Robots that ask again as soon as they have their answer: scheduler, worker, answers, most batches at a time."""
    made, worker = scheduler(table=TABLE_MS), Worker(jitter)
    asks = [(0.001 * robot, robot) for robot in range(robots)]
    flying, answered, most, wake = [], [], 0, None
    seq = itertools.count(1)
    now = 0.0
    while now < seconds:
        now = min([at for at, _ in asks] + [end for end, _ in flying] + ([] if wake is None else [wake]))
        for end, batch in [pair for pair in flying if pair[0] <= now]:
            flying.remove((end, batch))
            made.finished(batch, now - batch.sent_at, outside_s=OUTSIDE_S if told else 0.0)
            for one in batch.tickets:
                answered.append((now, one, batch))
                asks.append((now + rest_s, one.robot))
        for ask in [ask for ask in asks if ask[0] <= now]:
            asks.remove(ask)
            robot = ask[1]
            refused, _ = made.submit(ticket(robot, now + budget_s, at=now, seq=next(seq)), now)
            assert refused is None
        plan = made.poll(now)
        assert not plan.refused
        assert not plan.silent
        flying += [(worker.end_of(batch, now), batch) for batch in plan.batches]
        most = max(most, len(flying))
        wake = None if plan.wake_at is None else max(now + 1e-9, plan.wake_at)
    return made, worker, answered, most


@pytest.mark.parametrize(("robots", "jitter"), [(2, 0.0), (8, 0.0), (16, 0.0), (32, 0.0), (16, 0.01)])
def test_a_saturated_engine_hardly_rests(robots, jitter):
    _, before, slower, _ = closed_loop(robots, 6.0, told=False, jitter=jitter)
    _, worker, answered, most = closed_loop(robots, 6.0, told=True, jitter=jitter)
    assert worker.busy_s / worker.free_at > 0.95 > before.busy_s / before.free_at
    assert most == 2
    assert len(answered) > 1.03 * len(slower)


def test_a_lone_robot_is_served_as_before():
    _, _, slower, _ = closed_loop(1, 5.0, told=False)
    _, _, answered, most = closed_loop(1, 5.0, told=True)
    assert most == 1
    assert len(answered) == len(slower)


def test_what_is_learned_of_a_batch_is_what_it_takes_alone():
    made, *_ = closed_loop(32, 6.0, told=True)
    times = made.times("w0")
    assert times.overlap_s == pytest.approx(OUTSIDE_S)
    assert times.median_s(8) == pytest.approx(ENGINE_S[8] + OUTSIDE_S, rel=0.02)
    assert times.best_rate == pytest.approx(8 / ENGINE_S[8], rel=0.02)


def test_predictions_hold_for_batches_sent_ahead():
    _, _, answered, _ = closed_loop(16, 6.0, told=True)
    late = [now - batch.predicted for now, _, batch in answered if now > 2.0]
    assert max(map(abs, late)) < 0.001


def learned():
    """A worker whose overlap is known, with a batch of one on it since instant 1."""
    made = scheduler(table=TABLE_MS)
    for _ in range(MIN_SAMPLES):
        made.times("w0").note_outside(1, OUTSIDE_S)
    made.submit(ticket("first", 9.0, at=1.0), 1.0)
    (batch,) = made.poll(1.0).batches
    return made, batch


def test_it_is_sent_no_sooner_than_it_must_be_and_asks_to_be_woken_then():
    made, first = learned()
    end = 1.0 + ENGINE_S[1] + OUTSIDE_S
    made.submit(ticket("second", 9.0, at=1.001), 1.001)
    plan = made.poll(1.001)
    assert plan.batches == ()
    assert plan.wake_at == pytest.approx(end - OUTSIDE_S)
    (second,) = made.poll(end - OUTSIDE_S).batches
    assert second.predicted == pytest.approx(end + ENGINE_S[1])
    made.submit(ticket("third", 9.0, at=end - 0.001), end - 0.001)
    assert made.poll(end - 0.001).batches == ()  # two are enough
    made.finished(first, end - 1.0, outside_s=OUTSIDE_S)
    assert running(made, "w0") is second


def test_admission_counts_on_the_engine_going_from_one_to_the_next():
    made, _ = learned()
    end = 1.0 + ENGINE_S[1] + OUTSIDE_S
    assert made.fleet.predicted_completion(0, 1.001) == pytest.approx(end + ENGINE_S[1])


def test_a_batch_that_waited_for_a_late_one_is_not_taken_for_slow():
    made, first = learned()
    end = 1.0 + ENGINE_S[1] + OUTSIDE_S
    made.submit(ticket("second", 9.0, at=1.001), 1.001)
    (second,) = made.poll(end - OUTSIDE_S).batches
    late = end + 0.030
    made.finished(first, late - 1.0, outside_s=OUTSIDE_S)
    (flight,) = made.fleet.get("w0").flights
    assert flight.end == pytest.approx(late + ENGINE_S[1])
    assert flight.silent_at == pytest.approx(
        late - OUTSIDE_S + SILENT_FACTOR * (ENGINE_S[1] + OUTSIDE_S) + SILENT_FLOOR_S
    )
    before = made.fleet.get("w0").busyness.share(late)
    made.finished(second, late + ENGINE_S[1] - second.sent_at, outside_s=OUTSIDE_S)
    assert made.fleet.get("w0").busyness.share(late + ENGINE_S[1]) >= before


def test_nothing_follows_a_batch_that_is_late():
    made, first = learned()
    late = first.predicted + OUTSIDE_S + 0.0001
    made.submit(ticket("second", 9.0, at=late), late)
    assert made.poll(late).batches == ()


def followed(deadline=9.0):
    """As `learned`, with a second batch behind the first."""
    made, first = learned()
    sent_at = first.predicted - OUTSIDE_S
    made.submit(ticket("second", deadline, at=sent_at), sent_at)
    (second,) = made.poll(sent_at).batches
    return made, first, second


def test_what_waits_behind_a_silent_batch_is_taken_back():
    made, first, second = followed()
    silent_at = 1.0 + SILENT_FACTOR * (ENGINE_S[1] + OUTSIDE_S) + SILENT_FLOOR_S
    before = made.poll(silent_at - 1e-6)
    assert (before.silent, before.recalled) == ((), ())
    plan = made.poll(silent_at + 1e-6)
    assert (plan.silent, plan.recalled) == ((first,), (second,))
    (back,) = second.tickets
    assert made.requeue(back, silent_at) is None
    assert made.waiting() == [back]
    assert made.poll(silent_at + 0.1).batches == ()  # nothing follows a silent one
    made.finished(first, 0.3, outside_s=OUTSIDE_S)
    assert made.poll(1.3).batches[0].tickets == (back,)


def test_what_waits_behind_a_late_batch_is_told_when_its_deadline_has_passed():
    deadline = 1.026  # before the first one counts as silent
    made, first, second = followed(deadline)
    for now in (first.predicted, deadline - 1e-6):
        plan = made.poll(now)
        assert plan.expired == ()
    assert plan.wake_at == pytest.approx(deadline)
    (told,) = made.poll(deadline + 1e-6).expired
    assert (told.ticket, told.reason) == (second.tickets[0], Refusal.UNREACHABLE)
    assert told.completion > deadline
    assert made.poll(deadline + 2e-6).expired == ()  # once
    made.finished(first, 0.027, outside_s=OUTSIDE_S)
    assert running(made, "w0") is second  # its engine may have begun it: it stays


def test_nobody_is_told_while_the_batch_before_is_on_time():
    made, first, second = followed()
    second.tickets[0].deadline = 1.0
    assert made.poll(first.predicted - 1e-6).expired == ()
    assert len(made.poll(first.predicted + 1e-6).expired) == 1


def test_a_route_that_allows_smaller_batches_now_leaves_those_in_flight_as_they_are():
    made = scheduler(table=TABLE_MS)
    times = made.times("w0")
    for _ in range(MIN_SAMPLES):
        times.note_outside(8, OUTSIDE_S)
    for robot in range(64):
        made.submit(ticket(robot, 9.0, at=1.0), 1.0)
    (first,) = made.poll(1.0).batches
    sent_at = first.predicted - OUTSIDE_S
    (second,) = made.poll(sent_at).batches
    assert (len(first.tickets), len(second.tickets)) == (8, 8)
    made.max_batch = 4
    times.limit(4)
    assert made.poll(sent_at + 0.001).batches == ()
    made.finished(first, first.predicted - 1.0, outside_s=OUTSIDE_S)
    assert running(made, "w0") is second
    made.finished(second, second.predicted - second.sent_at, outside_s=OUTSIDE_S)
    assert running(made, "w0") is None


def test_a_small_batch_behind_a_large_one_is_learned_as_what_it_takes_alone():
    """Large batches hide more than small ones; the worker says how long each has waited."""
    made = scheduler(table={1: 15.0, 8: 60.0})
    times = made.times("w0")
    outside = {1: 0.005, 8: 0.020}
    for _ in range(64):
        times.note_outside(8, outside[8])
        times.record(8, 0.060)
    now = 1.0
    for round_ in range(20):
        for robot in range(8):
            made.submit(ticket(robot, now + 9.0, at=now, seq=2 * round_), now)
        (large,) = made.poll(now).batches
        sent_at = large.predicted - times.overlap_s
        made.submit(ticket("lone", now + 9.0, at=sent_at, seq=2 * round_), sent_at)
        (small,) = made.poll(sent_at).batches
        assert small.predicted == pytest.approx(large.predicted + 0.010, abs=0.006)
        made.finished(large, 0.060, outside_s=outside[8], waited_s=0.0)
        end = now + 0.060 + 0.010
        waited_s = end - sent_at - 0.015
        made.finished(small, end - sent_at, outside_s=outside[1], waited_s=waited_s)
        now = end + 0.010
    assert times.median_s(1) == pytest.approx(0.015)
    assert times.hidden_s(1) == pytest.approx(outside[1])
    assert times.hidden_s(8) == pytest.approx(outside[8])


def test_the_engines_throughput_is_never_without_bounds():
    made = scheduler(table={1: 15.0, 8: 60.0})
    times = made.times("w0")
    for _ in range(MIN_SAMPLES):
        times.note_outside(8, 0.030)
    assert times.best_rate <= 2 * 8 / 0.060


def test_a_worker_that_failed_proves_itself_on_one_batch_at_a_time():
    made, first = learned()
    made.failed(first, 1.5)
    for robot in ("a", "b", "c"):
        made.submit(ticket(robot, 9.0, at=1.5), 1.5)
    (trial,) = made.poll(1.5).batches
    assert len(trial.tickets) == 1
    assert made.poll(trial.predicted - 0.001).batches == ()


def test_a_batch_behind_one_that_fails_may_still_be_answered():
    made, first, second = followed()
    made.failed(first, 1.2)
    assert running(made, "w0") is second
    made.finished(second, 0.020, outside_s=OUTSIDE_S)
    assert running(made, "w0") is None
    assert not made.fleet.get("w0").probation


def two_batches(*, robots):
    """A worker that runs one robot at a time, with a batch in its engine and another one sent ahead behind it."""
    made = scheduler(table=TABLE_MS, max_batch=1)
    for _ in range(MIN_SAMPLES):
        made.times("w0").note_outside(1, OUTSIDE_S)
    made.submit(ticket("first", 9.0, at=1.0), 1.0)
    (first,) = made.poll(1.0).batches
    sent_at = first.predicted - OUTSIDE_S
    for later, robot in enumerate(robots):
        made.submit(ticket(robot, 9.0 + 0.1 * later, at=sent_at), sent_at)
    (second,) = made.poll(sent_at).batches
    return made, first, second


def test_debts_are_forgiven_when_a_worker_idles_and_not_between_two_of_its_batches(monkeypatch):
    pardons = []
    monkeypatch.setattr(Shares, "forgive", lambda self: pardons.append(self))
    made, first, second = two_batches(robots=["second"])
    made.finished(first, first.predicted - 1.0, outside_s=OUTSIDE_S)
    assert not pardons
    made.finished(second, second.predicted - second.sent_at, outside_s=OUTSIDE_S)
    assert pardons


def test_whoever_is_taken_back_from_a_silent_worker_has_asked_once_and_was_served_nothing():
    def owed(*, fall_silent):
        made, first, second = two_batches(robots=["second", "waits"])
        (back,) = second.tickets
        if fall_silent:
            plan = made.poll(made.fleet.get("w0").silent_at + 1e-6)
            assert plan.recalled == (second,)
            assert made.requeue(back, 1.1) is None
            assert made.depth == 2
            made.finished(first, 0.2, outside_s=OUTSIDE_S)
            (again,) = made.poll(1.2).batches
            assert again.tickets == (back,)
        (waits,) = made.waiting()
        made.cancel(waits)  # settles the books, and forgives nobody
        account = back.account
        return account.served - account.level.now, account.asks.note(1.0)

    assert owed(fall_silent=True) == pytest.approx(owed(fall_silent=False))
