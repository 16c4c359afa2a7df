"""Searches of their own size and searches that a budget ends: what they take, whom they let in, what they teach."""

from __future__ import annotations

import math

import msgspec
import pytest
from taktline_gateway.scheduler import Refusal
from taktline_gateway.service_times import MIN_SAMPLES
from taktline_gateway.work import WHOLE, Work, durations, work_of
from taktline_protocol import worker_pb2
from taktline_protocol.rpc import policy_info, to_search_work
from taktline_protocol.search_work import SearchWork

from tests.gateway.simulated_clock import Simulation, running, scheduler, service_times, ticket

OWN = SearchWork(
    candidates=800,
    rounds=10,
    horizon=2,
    anytime=False,
    unit=200,
    round_share=0.09,
    max_candidates=4096,
    max_rounds=100,
    max_horizon=4,
)
LINEAR = {1: 20_000.0, 2: 40_000.0}
CUT = Work(0.02, 1.0, until_deadline=True)


@pytest.mark.parametrize(
    ("asked", "least", "most"),
    [
        ({"rounds": 3}, 0.37, 0.37),
        ({"rounds": 20}, 1.9, 1.9),
        ({"candidates": 400}, 0.55, 0.55),
        ({"candidates": 401}, 0.775, 0.775),  # a third unit, of all ranks together
        ({"horizon": 1}, 0.55, 0.55),
        ({"anytime": True}, 0.19, 1.0),
        ({"budget_ms": 300.0}, 0.19, 1.0),
        ({"budget_ms": 300.0, "rounds": 3, "candidates": 400}, 0.145, 0.235),
        ({"anytime": True, "rounds": 1}, 0.19, 0.19),
    ],
)
def test_a_search_is_the_part_of_any_and_its_rounds(asked, least, most):
    found = work_of(worker_pb2.Search(**asked), OWN)
    assert (found.least, found.most) == (pytest.approx(least), pytest.approx(most))
    assert found.limit_s == (0.3 if "budget_ms" in asked else math.inf)
    assert found.until_deadline is asked.get("anytime", False)


def test_the_deployments_own_search_is_what_t_sync_says():
    assert work_of(worker_pb2.Search(), OWN) is WHOLE
    assert work_of(worker_pb2.Search(rounds=10, elites=3, anytime=False), OWN) is WHOLE
    anytime = msgspec.structs.replace(OWN, anytime=True)
    assert work_of(worker_pb2.Search(), anytime).until_deadline
    assert work_of(worker_pb2.Search(anytime=False), anytime) is WHOLE


@pytest.mark.parametrize(
    "asked", [{"rounds": 101}, {"candidates": 2**31}, {"horizon": 5}, {"budget_ms": -1.0}, {"budget_ms": math.nan}]
)
def test_what_a_worker_will_refuse_is_let_through_to_be_told_why(asked):
    assert work_of(worker_pb2.Search(**asked), OWN).least < 0.19


def test_what_a_worker_says_of_its_search_travels():
    assert policy_info(worker_pb2.InfoResponse(search=to_search_work(OWN))).search == OWN
    assert policy_info(worker_pb2.InfoResponse()).search is None
    for changes in ({"unit": 0}, {"rounds": 0}, {"round_share": 0.0}, {"round_share": 0.2}, {"round_share": math.nan}):
        broken = to_search_work(msgspec.structs.replace(OWN, **changes))
        assert policy_info(worker_pb2.InfoResponse(search=broken)).search is None


@pytest.mark.parametrize("work", [CUT, Work(0.02, 1.0, limit_s=0.5), Work(0.025, 0.025)])
def test_a_ticket_is_admitted_by_what_it_takes_at_least(work):
    made = scheduler(table=LINEAR)
    made.submit(ticket("first", 100.0), 0.0)
    made.poll(0.0)
    made.finished(running(made, "w0"), 20.0)  # a worker that has idled is tried against its table
    assert made.submit(ticket("a", 20.6, at=20.0, work=work), 20.0) == (None, None)
    (batch,) = made.poll(20.0).batches
    assert batch.predicted == pytest.approx(20.0 + (0.6 if work is CUT else 0.5))
    for refused, least in ((Work(0.04, 1.0, until_deadline=True), 0.8), (WHOLE, 20.0)):
        fresh = scheduler(table=LINEAR)
        answer, _ = fresh.submit(ticket("b", 0.6, work=refused), 0.0)
        assert answer is not None
        assert answer.reason is Refusal.UNREACHABLE
        assert answer.completion == pytest.approx(least)


def test_a_limit_beyond_the_deadline_lets_nobody_in():
    """Only a deadline that ends a search makes its first round enough: a limit is used up."""
    work = Work(0.02, 1.0, limit_s=5.0)
    answer, _ = scheduler(table=LINEAR).submit(ticket("a", 4.9, work=work), 0.0)
    assert answer is not None
    assert answer.completion == pytest.approx(5.0)
    assert scheduler(table=LINEAR).submit(ticket("b", 5.1, work=work), 0.0) == (None, None)
    both = Work(0.02, 1.0, limit_s=5.0, until_deadline=True)
    assert scheduler(table=LINEAR).submit(ticket("c", 0.5, work=both), 0.0) == (None, None)
    whole = Work(0.02, 1.0, limit_s=50.0)
    assert scheduler(table=LINEAR).submit(ticket("d", 20.1, work=whole), 0.0) == (None, None)


def test_one_of_more_than_the_policys_own_work_is_refused_where_only_that_would_fit():
    made = scheduler(table=LINEAR)
    answer, _ = made.submit(ticket("a", 30.0, work=Work(2.0, 2.0)), 0.0)
    assert answer is not None
    assert answer.completion == pytest.approx(40.0)
    assert made.submit(ticket("b", 40.5, work=Work(2.0, 2.0)), 0.0) == (None, None)
    (batch,) = made.poll(0.0).batches
    assert batch.predicted == pytest.approx(40.0)


def test_one_that_goes_to_another_policy_is_due_as_its_work_is_there():
    one = ticket("a", 25.0, work=CUT)
    scheduler(table=LINEAR).submit(one, 0.0)
    assert one.due == one.last_due > 44.0
    one.work = WHOLE
    scheduler(table=LINEAR).submit(one, 0.0)
    assert one.due == one.last_due == 25.0


def test_those_ahead_count_as_what_they_take():
    """Nine searches of 0.4 s and one of 1 s of budget behind them; by T_sync they were three minutes."""
    short = Work(0.02, 0.02)
    simulation = Simulation(scheduler(table={1: 20_000.0}, max_batch=1))
    arrivals = [ticket(index, 5.0, work=short) for index in range(10)]
    simulation.run(arrivals)
    assert not simulation.refused
    assert max(simulation.done.values()) == pytest.approx(4.0)


def test_the_queue_keeps_the_average_of_what_waits():
    made = scheduler(table=LINEAR, workers=1)
    queue = made.queue
    assert queue.usual_share == 1.0
    tickets = [ticket("a", 100.0, work=Work(0.5, 0.5)), ticket("b", 110.0), ticket("c", 120.0, work=CUT)]
    for one in tickets:
        made.submit(one, 0.0)
    assert queue.usual_share == pytest.approx((0.5 + 1.0 + 0.02) / 3)
    queue.remove(tickets[2])
    assert queue.usual_share == pytest.approx(0.75)
    queue.take(tickets[0].rank, 0, tickets[:2])
    assert queue.usual_share == 1.0


def test_one_that_may_be_ended_late_gives_up_its_place_when_its_first_round_would_be_late():
    simulation = Simulation(scheduler(table=LINEAR, max_batch=1))
    busy, waits = ticket("a", 20.5), ticket("b", 10.0, at=0.1, work=CUT)
    simulation.run([busy, waits])
    assert simulation.done[busy] == pytest.approx(20.0)
    assert simulation.refused[waits] is Refusal.UNREACHABLE


def test_a_batch_takes_its_members_shares_and_ends_with_the_last_that_may_be_ended():
    times = service_times(LINEAR, tail=1.1)
    own, half = ticket("a", 100.0), ticket("b", 100.0, work=Work(0.5, 0.5))
    assert durations([own], times, 0.0).median_s == 20.0
    mixed = durations([own, half], times, 0.0)
    assert (mixed.median_s, mixed.tail_s) == (pytest.approx(30.0), pytest.approx(33.0))
    first, last = ticket("c", 3.0, work=CUT), ticket("d", 5.0, work=CUT)
    assert durations([first, last], times, 1.0).median_s == pytest.approx(4.0)
    assert durations([first, last], times, 1.0).cut_s == pytest.approx(4.0)
    assert durations([first, own], times, 1.0).median_s == pytest.approx(40.0)
    flat = service_times({1: 10_000.0, 2: 10_000.0})  # two at a time cost nothing more: the larger one decides
    assert durations([half, ticket("e", 9.0, work=Work(0.1, 0.1))], flat, 0.0).median_s == pytest.approx(5.0)


def test_an_anytime_search_that_uses_all_its_time_is_not_taken_for_silent():
    made = scheduler(table=LINEAR)
    made.submit(ticket("a", 5.0, work=CUT), 0.0)
    made.poll(0.0)
    worker = made.fleet.get("w0")
    assert worker.silent_at > 5.4  # a round behind its deadline at least
    assert running(made, "w0").hangs_at > 5.4


@pytest.mark.parametrize(("work", "took_s", "learned"), [(Work(0.1, 0.1), 3.0, 30.0), (CUT, 3.0, 20.0)])
def test_t_sync_is_learned_from_parts_of_it_and_not_from_what_was_ended(work, took_s, learned):
    made = scheduler(table={1: 20_000.0})
    for number in range(MIN_SAMPLES):
        now = 100.0 * number
        made.submit(ticket("a", now + took_s, at=now, work=work), now)
        (batch,) = made.poll(now).batches
        made.finished(batch, took_s)
    assert made.times("w0").median_s(1) == pytest.approx(learned)


def test_a_table_that_refuses_even_one_round_is_corrected_by_a_trial():
    made = scheduler(table=LINEAR)
    one = ticket("a", 10.3, at=10.0, work=CUT)  # by the table a round takes 0.4 s
    assert made.submit(one, 10.0) == (None, None)
    (batch,) = made.poll(10.0).batches
    made.finished(batch, 0.3)
    assert made.times("w0").median_s(1) == pytest.approx(15.0)
    assert made.submit(ticket("b", 20.65, at=20.31, work=CUT), 20.31) == (None, None)


def test_a_worker_that_has_just_answered_a_long_batch_is_not_tried_against_its_table():
    made = scheduler(table=LINEAR)
    made.submit(ticket("a", 30.0), 0.0)
    made.poll(0.0)
    made.finished(running(made, "w0"), 20.0)
    answer, _ = made.submit(ticket("b", 25.0, at=20.5), 20.5)
    assert answer is not None
    assert made.submit(ticket("c", 26.0, at=21.1), 21.1) == (None, None)
