"""Several workers under a simulated clock: routing by predicted completion, silence, hedging, rest and return."""

from __future__ import annotations

import pytest
from taktline_gateway.scheduler import Refusal, Scheduler
from taktline_gateway.service_times import MIN_SAMPLES
from taktline_gateway.worker_state import SILENT_FACTOR, SILENT_FLOOR_S

from tests.gateway.simulated_clock import Simulation, running, scheduler, service_times, ticket

SILENT_S = SILENT_FACTOR * 0.010 + SILENT_FLOOR_S
"""When a batch of one on a worker of 10 ms counts as silent."""


def pair(fast=None, slow=None):
    made = Scheduler(max_batch=8, max_wait_s=0.0)
    made.add_worker("fast", service_times(fast) if fast else service_times())
    made.add_worker("slow", service_times(slow or {1: 100.0, 8: 200.0}))
    return made


def test_an_observation_goes_where_it_is_done_first_even_if_that_worker_is_busy():
    """Fast: free in 5 ms and then 10 ms. Slow: idle, but 100 ms."""
    made = pair()
    made.submit(ticket("a", 9.0), 0.0)
    assert made.poll(0.0).batches[0].worker == "fast"
    made.submit(ticket("b", 9.0), 0.005)
    assert made.poll(0.005).batches == ()
    made.finished(running(made, "fast"), 0.010)
    assert made.poll(0.010).batches[0].worker == "fast"


def test_the_slow_worker_helps_when_the_fast_one_cannot_take_them_all():
    made = pair()
    made.submit(ticket("a", 9.0), 0.0)
    made.poll(0.0)
    for n in range(9):
        made.submit(ticket(n, 9.0), 0.005)
    assert [batch.worker for batch in made.poll(0.005).batches] == ["slow"]


def test_every_observation_is_routed_on_its_own():
    """One robot's observations go to different workers, each to the one that is free."""
    simulation = Simulation(scheduler(workers=2))
    simulation.submit(ticket("other", 9.0))
    simulation.submit(ticket("arm", 9.0, seq=1))
    simulation.advance(0.050)
    simulation.submit(ticket("arm", 9.0, seq=2))
    simulation.advance(0.1)
    simulation.submit(ticket("arm", 9.0, seq=3))
    simulation.advance(1.0)
    arm = [batch.worker for batch in simulation.batches if batch.tickets[0].robot == "arm"]
    assert len(set(arm)) == 2


def test_what_the_network_costs_is_added_to_what_was_never_measured_from_here():
    times = service_times()
    for _ in range(MIN_SAMPLES):
        times.note_network(0.003)
        times.record(1, 0.013)
    assert times.median_s(1) == pytest.approx(0.013)
    assert times.median_s(8) == pytest.approx(0.024 + 0.003)
    assert times.tail_s(8) == pytest.approx(0.024 + 0.003)


def test_a_worker_is_silent_only_past_its_tail_and_only_once():
    made = scheduler(workers=2)
    made.submit(ticket("a", 9.0), 0.0)
    batch = made.poll(0.0).batches[0]
    assert made.poll(SILENT_S - 1e-4).silent == ()
    assert made.poll(SILENT_S).silent == (batch,)
    assert made.poll(SILENT_S + 1.0).silent == ()


def test_a_hedge_needs_another_worker_and_slack():
    made = scheduler(workers=2)
    enough, short = ticket("enough", SILENT_S + 0.0101), ticket("short", SILENT_S + 0.0099)
    for one in (enough, short):
        made.submit(one, 0.0)
    silent = next(batch.worker for batch in made.poll(0.0).batches if enough in batch.tickets)
    made.finished(running(made, next(name for name in made.workers() if name != silent)), 0.010)
    made.poll(SILENT_S)
    assert not made.resubmit(short, SILENT_S, avoid=silent)
    assert made.resubmit(enough, SILENT_S, avoid=silent)
    again = made.poll(SILENT_S).batches
    assert [(batch.worker == silent, batch.tickets) for batch in again] == [(False, (enough,))]
    lone = scheduler()
    one = ticket("one", 9.0)
    lone.submit(one, 0.0)
    lone.poll(0.0)
    assert not lone.resubmit(one, SILENT_S, avoid="w0")


def test_a_hedge_never_displaces_a_newer_observation():
    made = scheduler(workers=2)
    old = ticket("arm", 9.0, seq=1)
    made.submit(old, 0.0)
    silent = made.poll(0.0).batches[0].worker
    made.submit(ticket("x", 9.0), 0.0)
    made.poll(0.0)
    newer = ticket("arm", 9.5, seq=2)
    made.submit(newer, 0.001)
    assert not made.resubmit(old, SILENT_S, avoid=silent)
    assert made.queue.queued(newer.source) is newer


def test_the_longer_a_worker_is_silent_the_later_it_is_expected():
    """Nobody knows when it comes back; as late again as it is overdue is the guess."""
    made = scheduler()
    made.submit(ticket("a", 9.0), 0.0)
    made.poll(0.0)
    assert made.fleet.predicted_completion(0, 0.010) == pytest.approx(0.020)
    assert made.fleet.predicted_completion(0, 0.110) == pytest.approx(0.110 + 0.100 + 0.010)
    refused, _ = made.submit(ticket("b", 0.200), 0.110)
    assert refused.reason is Refusal.UNREACHABLE
    assert refused.retry_s == pytest.approx(0.020)


def test_a_worker_that_leaves_takes_nothing_with_it():
    """What is queued stays queued for the others; what is in flight is finished by the caller."""
    simulation = Simulation(scheduler(workers=2))
    tickets = [ticket(n, 9.0) for n in range(12)]
    for one in tickets:
        simulation.submit(one)
    leaving = simulation.batches[0].worker
    simulation.scheduler.remove_worker(leaving)
    for end, batch in list(simulation.running):
        if batch.worker == leaving:  # its answer comes all the same
            simulation.running.remove((end, batch))
            simulation.done.update(dict.fromkeys(batch.tickets, end))
            simulation.scheduler.finished(batch, 0.010)
    simulation.advance(9.0)
    assert set(simulation.done) == set(tickets)
    assert leaving not in {batch.worker for batch in simulation.batches[2:]}
