"""The scheduler under a simulated clock: its promises one by one, and against brute force on small cases."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import UserList
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_gateway import deadline_queue, due_list
from taktline_gateway.batching import GRAIN, choose_batch, weigh_batch
from taktline_gateway.deadline_queue import DeadlineQueue, Priority, Ticket
from taktline_gateway.due_list import DueList, T
from taktline_gateway.scheduler import Refusal, Scheduler
from taktline_gateway.service_times import MIN_SAMPLES

from tests.gateway.simulated_clock import Simulation, running, scheduler, service_times, ticket

# ----- one that is alone


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("priority", Priority)
def test_the_only_ticket_is_decided_as_any_other(priority, behind):
    """Where nobody may be waited for the decision is a shorter one, and the same."""
    for budget_ms, passed_ms in itertools.product(range(6, 22), range(12)):
        plans = []
        for max_wait_s in (0.0, 1e-12):  # with a wait, even one that is over, everything is weighed
            made = scheduler(max_wait_s=max_wait_s)
            if behind:
                for number in range(MIN_SAMPLES):  # so the next batch is sent ahead, and mostly too early
                    made.fleet.get("w0").times.note_outside(1, 0.005 if number < 2 else 0.001)
                made.submit(ticket("first", 1.0), 0.0)
                made.poll(0.0)
            now = passed_ms / 1e3
            made.submit(ticket("arm", now + budget_ms / 1e3, at=now, priority=priority), now)
            plan = made.poll(now)
            sent = [([one.robot for one in batch.tickets], batch.predicted, batch.level) for batch in plan.batches]
            plans.append((sent, [refused.ticket.robot for refused in plan.refused], plan.wake_at, made.depth))
        assert plans[0] == plans[1], (budget_ms, passed_ms)


# ----- the queue


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20), st.sampled_from(Priority), st.booleans()), max_size=60)
)
def test_queue_agrees_with_a_sorted_list(steps):
    queue = DeadlineQueue()
    model = {}
    for number, (robot, deadline, priority, remove) in enumerate(steps):
        name = str(robot)
        if remove:
            expected = model.pop(name, None)
            probe = expected if expected is not None else ticket(name, deadline)
            assert queue.remove(probe) is (expected is not None)
            continue
        ahead = sum((other.priority, other.deadline) <= (priority, deadline) for other in model.values())
        assert queue.ahead_of(deadline, 2 * priority) == ahead
        one = ticket(name, deadline, seq=number, priority=priority)
        assert queue.add(one) is model.get(name)
        model[name] = one
        ordered = sorted(model.values(), key=lambda item: (item.priority, item.deadline, item.seq))
        assert list(queue) == ordered
        assert queue.first(3) == ordered[:3]
        assert queue.earliest() is min(model.values(), key=lambda item: (item.deadline, item.seq))
        assert len(queue) == len(model)


class Looks(UserList):
    """Stands for the arrays of a queue, and counts their elements that are looked at, by whatever looks."""

    count = 0

    def __init__(self, kind, elements=()):
        super().__init__(elements)
        self.kind = kind

    def __getitem__(self, index):
        Looks.count += len(range(*index.indices(len(self.data)))) if isinstance(index, slice) else 1
        return Looks(self.kind, self.data[index]) if isinstance(index, slice) else self.data[index]

    def __iter__(self):
        for element in self.data:
            Looks.count += 1
            yield element

    def index(self, element, *bounds):
        Looks.count += len(self.data)
        return self.data.index(element, *bounds)


@dataclasses.dataclass(slots=True, eq=False)
class Seen(Ticket):
    """A ticket that counts what it is compared with."""

    __hash__ = Ticket.__hash__

    def __eq__(self, other):
        Looks.count += 1
        return self is other


class ScannedForPlaces(DueList[T]):
    """One that looks at everybody to know how many are ahead."""

    def up_to(self, due):
        return sum(one <= due for block in self._dues for one in block)


class ScannedForOne(DueList[T]):
    """One that looks for who leaves from the beginning."""

    def remove(self, due, order):
        for block, orders in enumerate(self._orders):
            if order in list(orders):
                index = orders.index(order)
                self._delete(block, index, index + 1)
                return


class ScannedForTickets(DueList[T]):
    """One that finds a ticket by comparing it with others."""

    def remove(self, due, order):
        one = next(one for one in self if one.order == order)
        block = next(block for block, tickets in enumerate(self._tickets) if one in tickets)
        index = self._tickets[block].index(one)
        self._delete(block, index, index + 1)


def most_looks(queued, kind=DueList):
    """The most elements that one operation of a queue of so many looks at, splits and joins of blocks apart."""
    rng, looks = random.Random(7), []
    with (
        mock.patch.object(due_list, "array", Looks),
        mock.patch.object(deadline_queue, "DueList", kind),
    ):
        queue = DeadlineQueue()
        waiting = []

        def come(number):
            waiting.append(Seen(f"r{number}", number, rng.random(), 0.0))
            return waiting[-1]

        for number in range(queued):
            queue.add(come(number))

        def counted(work, *about):
            Looks.count = 0
            work(*about)
            looks.append(Looks.count)

        for number in range(queued, queued + 50):
            new, leaves = come(number), waiting.pop(rng.randrange(queued))
            counted(queue.ahead_of, new.due, 2 * new.priority)
            counted(queue.add, new)
            counted(queue.remove, leaves)
            counted(queue.queued, leaves.source)
            counted(queue.earliest)
            counted(queue.last)
    return max(looks)


def test_queue_operations_grow_slowly_with_its_length():
    """What is looked at counts, not seconds: 10,000 queued tickets must not cost like 10,000."""
    few, many = most_looks(100), most_looks(10_000)
    assert few <= 3 * math.log2(100)
    assert many <= 3 * math.log2(10_000)


@pytest.mark.parametrize("kind", [ScannedForPlaces, ScannedForOne, ScannedForTickets])
def test_a_queue_that_looks_at_everybody_would_be_noticed(kind):
    assert most_looks(10_000, kind) > 1_000


# ----- measured times


def test_times_follow_the_measurements():
    times = service_times()
    assert [times.median_s(size) for size in (1, 3, 8)] == [0.010, 0.016, 0.024]
    for _ in range(MIN_SAMPLES):
        times.record(3, 0.030)
    assert times.median_s(4) == times.median_s(3) == 0.030
    assert times.median_s(8) == 0.030, "a larger batch is never predicted to be faster"
    assert times.median_s(2) == 0.012


def test_one_freak_batch_does_not_move_the_tail():
    times = service_times()
    for _ in range(50):
        times.record(1, 0.010)
    times.record(1, 5.0)
    assert times.tail_s(1) == 0.010


@given(st.floats(0, 0.05), st.integers(1, 8))
def test_largest_within_is_the_largest(seconds, limit):
    times = service_times(tail=1.3)
    expected = max((size for size in range(1, limit + 1) if times.tail_s(size) <= seconds), default=0)
    assert times.largest_within(seconds, limit) == expected


# ----- promises


def test_idle_worker_starts_at_once():
    simulation = Simulation(scheduler())
    plan = simulation.submit(ticket("a", 1.0))
    assert [len(batch.tickets) for batch in plan.batches] == [1]


def test_what_waits_goes_in_one_batch_when_the_worker_is_free():
    simulation = Simulation(scheduler())
    simulation.run([ticket(n, 1.0 + n, at=0.0) for n in range(5)])
    assert [len(batch.tickets) for batch in simulation.batches] == [1, 4]


def test_a_batch_grows_only_while_its_most_urgent_member_stays_on_time():
    simulation = Simulation(scheduler())
    tight = ticket("tight", 0.024, at=0.001)
    simulation.run([ticket("first", 1.0), tight, *(ticket(n, 1.0, at=0.001) for n in range(5))])
    # Free at 10 ms: a batch of two would end at 22 ms, one of four at 26 ms.
    assert simulation.done[tight] <= tight.deadline
    assert len(next(batch for batch in simulation.batches if tight in batch.tickets).tickets) == 2
    assert not simulation.refused


def test_padding_is_not_bought_where_it_only_delays():
    """Five in a bucket of eight take 40 ms; four take 16 and the fifth 10 more."""
    times = service_times({1: 10.0, 2: 12.0, 4: 16.0, 8: 40.0})
    assert choose_batch([1.0] * 5, 0.0, times, 8) == (0, 4)
    assert choose_batch([1.0] * 8, 0.0, times, 8, rate_hz=100.0)[1] == 4


def test_a_large_batch_is_formed_where_the_load_needs_it():
    times = service_times({1: 10.0, 2: 12.0, 4: 20.0, 8: 34.0})
    assert choose_batch([1.0] * 8, 0.0, times, 8, rate_hz=10.0) == (0, 4)
    assert choose_batch([1.0] * 8, 0.0, times, 8, rate_hz=1_000.0) == (0, 8)


def test_a_hopelessly_tight_head_does_not_cost_the_batch_behind_it():
    """Head first: 1 on time, then the clock is past the rest. Behind it: 8 on time."""
    times = service_times({1: 20.0, 8: 30.0})
    assert choose_batch([0.021, *[0.032] * 8], 0.0, times, 8) == (1, 8)


def test_unreachable_is_refused_at_once_with_a_prediction():
    made = scheduler()
    made.submit(ticket("a", 1.0), 0.0)
    made.poll(0.0)
    refused, _ = made.submit(ticket("b", 0.015), 0.005)
    assert refused.reason is Refusal.UNREACHABLE
    assert refused.completion == pytest.approx(0.020)
    assert refused.retry_s == pytest.approx(0.005)


def test_no_batch_waits_for_refusals_which_follow_at_once():
    made = scheduler()
    for robot in range(6):
        made.submit(ticket(f"lost-{robot}", 0.020), 0.0)
    made.submit(ticket("arm", 1.0), 0.0)
    plan = made.poll(0.015)  # a busy process: nobody asked before
    assert [one.robot for batch in plan.batches for one in batch.tickets] == ["arm"]
    assert not plan.refused
    assert plan.wake_at <= 0.015
    refused = []
    while plan.wake_at is not None and plan.wake_at <= 0.015:
        plan = made.poll(0.015)
        refused += [one.ticket.robot for one in plan.refused]
    assert sorted(refused) == [f"lost-{robot}" for robot in range(6)]


def test_who_is_behind_more_than_can_be_served_may_be_admitted_as_not_all_of_them_will_be():
    """One at a time, 10 ms each: of eight ahead that are due before it at most three can be served."""
    made = scheduler(max_batch=1, table={1: 10.0})
    for robot in range(8):
        assert made.submit(ticket(robot, 0.030), 0.0) == (None, None)
    last = ticket("last", 0.034)
    assert made.submit(last, 0.0) == (None, None)
    hopeless = ticket("hopeless", 0.009)
    assert made.submit(hopeless, 0.0)[0].reason is Refusal.UNREACHABLE


def test_a_queued_ticket_is_refused_by_the_timer_when_its_last_start_passes():
    made = scheduler()
    made.submit(ticket("a", 10.0), 0.0)
    made.poll(0.0)
    waiting = ticket("b", 0.030)
    assert made.submit(waiting, 0.0) == (None, None)
    plan = made.poll(0.0)
    assert plan.wake_at == pytest.approx(0.020, abs=2e-4)
    # The worker hangs: nothing finishes, the timers fire; the first one says that the worker is silent.
    silent = made.poll(plan.wake_at)
    assert [batch.tickets[0].robot for batch in silent.silent] == ["a"]
    late = made.poll(silent.wake_at)
    assert [refused.ticket for refused in late.refused] == [waiting]
    assert len(made.queue) == 0


def test_newest_wins():
    simulation = Simulation(scheduler())
    simulation.submit(ticket("busy", 1.0))
    old, new = ticket("a", 1.0, seq=1), ticket("a", 1.1, seq=2)
    simulation.submit(old)
    simulation.submit(new)
    simulation.advance(1.0)
    assert simulation.superseded == [old]
    assert new in simulation.done
    assert old not in simulation.done


def test_cancelled_never_reaches_a_worker():
    simulation = Simulation(scheduler())
    simulation.submit(ticket("busy", 1.0))
    gone = ticket("a", 1.0)
    simulation.submit(gone)
    assert simulation.scheduler.cancel(gone)
    assert not simulation.scheduler.cancel(gone)
    simulation.advance(1.0)
    assert gone not in simulation.done


def test_idle_workers_share_what_waits():
    made = scheduler(workers=2)
    for n in range(4):
        made.submit(ticket(n, 1.0), 0.0)
    assert [len(batch.tickets) for batch in made.poll(0.0).batches] == [2, 2]


def test_a_slow_worker_leaves_the_urgent_ticket_to_the_fast_one():
    made = Scheduler(max_batch=8, max_wait_s=0.0)
    made.add_worker("fast", service_times())
    made.add_worker("slow", service_times({1: 100.0}))
    made.submit(ticket("first", 1.0), 0.0)
    assert made.poll(0.0).batches[0].worker == "fast"
    urgent = ticket("urgent", 0.030)
    assert made.submit(urgent, 0.001) == (None, None)
    assert made.poll(0.001).batches == ()
    made.finished(running(made, "fast"), 0.010)
    assert made.poll(0.010).batches[0].worker == "fast"


def test_a_failed_worker_rests_then_proves_itself_on_one():
    made = scheduler()
    made.submit(ticket("a", 1.0), 0.0)
    made.poll(0.0)
    made.failed(running(made, "w0"), 0.5)
    for n in range(5):
        made.submit(ticket(n, 2.0), 0.1)
    resting = made.poll(0.1)
    assert resting.batches == ()
    assert resting.wake_at == pytest.approx(0.5)
    assert [len(batch.tickets) for batch in made.poll(0.5).batches] == [1]
    made.finished(running(made, "w0"), 0.010)
    assert [len(batch.tickets) for batch in made.poll(0.51).batches] == [4]


def test_a_failed_ticket_goes_to_another_worker_if_it_can_still_make_it():
    made = scheduler(workers=2)
    one = ticket("a", 0.100)
    made.submit(one, 0.0)
    batch = made.poll(0.0).batches[0]
    made.failed(batch, 1.0)
    assert made.resubmit(one, 0.050)
    again = made.poll(0.050).batches[0]
    assert again.worker != batch.worker
    assert again.tickets == (one,)
    made.failed(again, 1.0)
    assert not made.resubmit(one, 0.095)


def test_without_a_worker_it_is_refused():
    refused, _ = scheduler(workers=0).submit(ticket("a", 1.0), 0.0)
    assert refused.reason is Refusal.NO_WORKER


def test_in_a_full_queue_the_last_of_a_lower_class_gives_way():
    made = scheduler(max_queued=3)
    made.submit(ticket("busy", 9.0), 0.0)
    made.poll(0.0)
    for n in range(3):
        made.submit(ticket(f"learner {n}", 5.0 + n, priority=Priority.ROLLOUT), 0.0)
    assert made.submit(ticket("learner 3", 4.0, priority=Priority.ROLLOUT), 0.0)[0].reason is Refusal.QUEUE_FULL
    assert made.submit(ticket("arm", 9.0), 0.0) == (None, None)
    assert made.submit(ticket("guard", 9.0, priority=Priority.SAFETY), 0.0) == (None, None)
    refused = made.poll(0.0).refused
    assert [(one.ticket.robot, one.reason) for one in refused] == [
        ("learner 2", Refusal.QUEUE_FULL),
        ("learner 1", Refusal.QUEUE_FULL),
    ]
    assert [one.robot for one in made.waiting()] == ["guard", "arm", "learner 0"]
    assert made.submit(ticket("second arm", 1.0), 0.0)[0] is None
    assert made.submit(ticket("third arm", 1.0), 0.0)[0].reason is Refusal.QUEUE_FULL, "nobody is behind it"
    assert not made.poll(0.0).batches


def test_a_full_queue_refuses():
    made = scheduler(max_queued=2)
    made.submit(ticket("busy", 9.0), 0.0)
    made.poll(0.0)
    outcomes = [made.submit(ticket(n, 9.0), 0.0)[0] for n in range(3)]
    assert [outcome.reason if outcome else None for outcome in outcomes] == [None, None, Refusal.QUEUE_FULL]
    assert made.submit(ticket(1, 9.5), 0.0)[1] is not None, "a newer observation needs no new place"


def test_priority_goes_first():
    simulation = Simulation(scheduler(max_batch=1))
    simulation.submit(ticket("busy", 9.0))
    simulation.submit(ticket("background", 1.0, priority=Priority.BACKGROUND))
    simulation.submit(ticket("safety", 5.0, priority=Priority.SAFETY))
    simulation.advance(9.0)
    assert [batch.tickets[0].robot for batch in simulation.batches] == ["busy", "safety", "background"]


# ----- waiting for company


def burst(rounds, robots, period=0.1, gap=0.001):
    return [
        ticket(robot, turn * period + robot * gap + 0.09, at=turn * period + robot * gap, seq=turn)
        for turn in range(rounds)
        for robot in range(robots)
    ]


def test_a_synchronised_fleet_is_waited_for():
    simulation = Simulation(scheduler(max_wait_s=0.010))
    simulation.run(burst(rounds=30, robots=4))
    assert [len(batch.tickets) for batch in simulation.batches[-5:]] == [4] * 5


def test_the_wait_ends_when_everybody_is_here():
    simulation = Simulation(scheduler(max_wait_s=0.010))
    simulation.run(burst(rounds=30, robots=4))
    last = simulation.batches[-1]
    began = last.predicted - simulation.scheduler.times("w0").median_s(4)
    assert began - max(one.arrived_at for one in last.tickets) < 1e-9


def test_a_lone_robot_never_waits():
    simulation = Simulation(scheduler(max_wait_s=0.010))
    simulation.run(burst(rounds=30, robots=1))
    assert all(simulation.done[one] == pytest.approx(one.arrived_at + 0.010) for one in simulation.done)
    assert len(simulation.done) == 30


def test_waiting_never_costs_a_deadline():
    simulation = Simulation(scheduler(max_wait_s=0.050))
    arrivals = [
        ticket(robot, turn * 0.1 + robot * 0.004 + 0.020, at=turn * 0.1 + robot * 0.004, seq=turn)
        for turn in range(20)
        for robot in range(3)
    ]
    simulation.run(arrivals)
    late = [one for one, end in simulation.done.items() if end > one.deadline + 1e-9]
    assert not late


# ----- against brute force


def best_possible(deadlines, times, limit):
    """Most tickets that any sequence of batches, in any order and with any drops, can serve on time from t=0."""
    best = 0
    for size in range(len(deadlines), 0, -1):
        for kept in itertools.combinations(sorted(deadlines), size):
            if _feasible(list(kept), 0.0, times, limit):
                return size
        best = max(best, 0)
    return best


def _feasible(deadlines, now, times, limit):
    # On-time tickets can always be arranged in deadline order, in consecutive batches.
    if not deadlines:
        return True
    return any(
        now + times.median_s(size) <= deadlines[0]
        and _feasible(deadlines[size:], now + times.median_s(size), times, limit)
        for size in range(1, min(limit, len(deadlines)) + 1)
    )


deadline_lists = st.lists(st.integers(8, 60), min_size=1, max_size=7)


@settings(deadline=None, max_examples=150)
@given(deadline_lists)
def test_all_at_once_is_within_one_of_the_optimum_and_nobody_is_served_late(deadlines):
    times = service_times()
    simulation = Simulation(scheduler())
    tickets = [ticket(n, ms / 1e3 + 1e-6) for n, ms in enumerate(deadlines)]
    for one in tickets:
        refused, _ = simulation.scheduler.submit(one, 0.0)
        if refused is not None:
            simulation.refused[one] = refused.reason
    simulation.poll()
    simulation.advance(1e9)
    assert len(simulation.done) + len(simulation.refused) == len(tickets)
    assert all(end <= one.deadline for one, end in simulation.done.items())
    optimum = best_possible([ms / 1e3 + 1e-6 for ms in deadlines], times, 8)
    assert len(simulation.done) >= optimum - 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(10, 120)), min_size=1, max_size=40), st.integers(1, 3))
def test_every_ticket_ends_exactly_once_and_never_late(arrivals, workers):
    simulation = Simulation(scheduler(workers=workers))
    tickets = [ticket(n, (at + left) / 1e3, at=at / 1e3) for n, (at, left) in enumerate(arrivals)]
    simulation.run(tickets)
    assert set(simulation.done) | set(simulation.refused) == set(tickets)
    assert not set(simulation.done) & set(simulation.refused)
    assert all(end <= one.deadline + 1e-9 for one, end in simulation.done.items())


@given(st.lists(st.floats(0.005, 0.2), min_size=1, max_size=30), st.integers(1, 8))
def test_a_chosen_batch_makes_none_of_its_members_late(deadlines, limit):
    times = service_times(tail=1.2)
    ordered = sorted(deadlines)
    start, size = choose_batch(ordered, 0.0, times, limit, bold=False)
    members = ordered[start : start + size]
    assert 1 <= size <= limit
    assert size == 1 or times.tail_s(size) <= members[0]


@given(st.lists(st.floats(0.005, 0.2), min_size=1, max_size=30), st.integers(1, 8))
def test_a_chance_is_taken_only_where_more_are_expected_on_time_by_it(deadlines, limit):
    """A bold choice that is another one than the careful one is expected to serve more, or as many sooner."""
    times = service_times(tail=1.2)
    ordered = sorted(deadlines)
    bold = weigh_batch(ordered, 0.0, times, limit, 0.0, 0, 0.0)
    careful = weigh_batch(ordered, 0.0, times, limit, 0.0, 0, 0.0, bold=False)
    assert bold[2] >= careful[2] - GRAIN
    start, size, _ = bold
    if size > 1 and times.tail_s(size) > ordered[start]:
        assert times.median_s(size) <= ordered[start], "a batch that the first member makes less often than not"


def test_times_that_never_vary_are_weighed_to_the_last_bit():
    """Without any spread a rounding may put an end behind the deadline that it just meets."""
    start, size, _ = weigh_batch([0.010, 0.026, 0.026, 0.026], 0.0, service_times(), 8, 0.0, 0, 0.0)
    assert start + size <= 4


def test_a_plan_that_ends_in_time_by_every_median_only_counts_less_than_one_with_room():
    """24 tickets in 168 ms: 16 and then 4 take 157 ms, 8 and 8 and 4 take 163.5 and wait less."""
    times = service_times({1: 20.5, 2: 26.5, 4: 38.5, 8: 62.5, 16: 118.5, 32: 230.5}, 32, tail=1.072)
    assert choose_batch([0.168] * 24, 0.0, times, 32) == (0, 16)
    certain = service_times({1: 20.5, 2: 26.5, 4: 38.5, 8: 62.5, 16: 118.5, 32: 230.5}, 32)
    assert choose_batch([0.168] * 24, 0.0, certain, 32) == (0, 8), "where nothing varies, what waits less is better"


def test_with_safetys_deadlines_no_chances_are_taken():
    """Eight that fit a batch by the median only: production takes the even chance, safety a smaller and surer batch."""
    sizes = {}
    for priority in (Priority.SAFETY, Priority.PRODUCTION):
        made = scheduler(tail=1.2)
        for robot in range(8):
            made.submit(ticket(robot, 0.0281, priority=priority), 0.0)
        sizes[priority] = len(made.poll(0.0).batches[0].tickets)
    assert sizes[Priority.PRODUCTION] == 8
    assert times_fit(sizes[Priority.SAFETY], 0.0281)


def times_fit(size, slack_s):
    return service_times(tail=1.2).tail_s(size) <= slack_s


def test_overload_keeps_the_goodput():
    """Three times the capacity: refusing early must keep at least 90% of the throughput that fits the deadlines."""
    rng = random.Random(7)

    def goodput(load):
        rate = load * 8 / 0.024
        at, arrivals = 0.0, []
        while at < 20.0:
            at += rng.expovariate(rate)
            arrivals.append(ticket(len(arrivals), at + 0.100, at=at))
        simulation = Simulation(scheduler())
        simulation.run(arrivals)
        return sum(end <= one.deadline for one, end in simulation.done.items()) / 20.0

    peak = max(goodput(load) for load in (0.7, 0.9, 1.0))
    assert goodput(3.0) >= 0.9 * peak
