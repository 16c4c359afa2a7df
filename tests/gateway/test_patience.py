"""Where budgets differ, who can wait is left for the next batch, and never for more tickets than that is worth."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_gateway.arrivals import DIFFER_FROM, DIFFER_FULL, PATIENCE, Arrivals
from taktline_gateway.batching import GRAIN, weigh_batch
from taktline_gateway.deadline_queue import Priority

from tests.gateway.simulated_clock import scheduler, service_times, ticket

SLOW = {1: 22.6, 2: 32.2, 4: 51.4, 8: 89.7, 16: 166.5}


def asked(budgets_s):
    """Arrivals that have seen these budgets, over and over."""
    arrivals = Arrivals()
    for turn in range(1_000):
        arrivals.note_budget(budgets_s[turn % len(budgets_s)], 0.001 * turn)
    return arrivals


@given(st.lists(st.floats(0.02, 2.0), min_size=1, max_size=6))
def test_it_is_worth_something_only_where_budgets_differ(budgets_s):
    arrivals = asked(budgets_s)
    usual_s, spread_s = arrivals.usual_budget_s, arrivals.budget_spread_s
    patience_hz = arrivals.patience_hz()
    assert 0.0 <= patience_hz <= PATIENCE / usual_s * (1 + 1e-9)
    assert (patience_hz > 0.0) == (spread_s > DIFFER_FROM * usual_s)
    if spread_s >= DIFFER_FULL * usual_s:
        assert patience_hz == pytest.approx(PATIENCE / usual_s)


def test_robots_in_a_rhythm_are_not_left_waiting():
    """It is known when they come; waiting would only push them out of the phases that hints have given them."""
    arrivals = asked((0.05, 0.45))
    worth = arrivals.patience_hz()
    for turn in range(2):
        for robot in range(4):
            arrivals.note(("", str(robot)), 2.0 + turn + 0.1 * robot, 0.01, 1.0)
    assert arrivals.patience_hz() == 0.0
    for robot in range(4, 8):
        arrivals.note(("", str(robot)), 3.5, 0.01, 1.0)
    assert arrivals.patience_hz() == pytest.approx(worth / 2)


def test_nothing_is_known_before_anyone_came():
    assert Arrivals().patience_hz() == 0.0


def chosen(deadlines, patience_hz, *, beyond=0, rate_hz=80.0, price_hz=0.0):
    times = service_times(SLOW, 16)
    return weigh_batch(
        sorted(deadlines), 0.0, times, 16, rate_hz, beyond, price_hz, patience_hz=patience_hz, bold=False
    )


def test_who_can_wait_is_left_for_the_company_of_those_who_come():
    assert chosen([0.8] * 8, 0.0)[:2] == (0, 8)
    assert chosen([0.8] * 8, 1.0)[:2] == (0, 4)


def test_a_tight_head_is_not_served_alone_before_many():
    deadlines = [0.025, *[0.4] * 28]
    assert chosen(deadlines, 0.0) == (0, 1, 29)
    assert chosen(deadlines, 1.5) == (1, 16, 28)


queues = st.lists(st.floats(0.023, 1.0), min_size=1, max_size=60)


@settings(deadline=None, max_examples=200)
@given(queues, st.floats(0.0, 5.0), st.integers(0, 10), st.sampled_from([0.0, 40.0]))
def test_it_never_costs_more_on_time_than_it_is_worth(deadlines, patience_hz, beyond, price_hz):
    times = service_times(SLOW, 16)
    impatient = chosen(deadlines, 0.0, beyond=beyond)
    patient = chosen(deadlines, patience_hz, beyond=beyond)
    most = patience_hz * times.median_s(16) * min(16, len(deadlines))
    assert patient[2] >= impatient[2] - most - GRAIN
    start, size, _ = chosen(deadlines, patience_hz, beyond=beyond, price_hz=price_hz)
    assert size == 1 or times.tail_s(size) <= sorted(deadlines)[start], "no member of a batch is late by it"


@given(st.lists(st.floats(0.023, 1.0), min_size=33, max_size=60), st.integers(0, 50))
def test_where_two_full_batches_wait_nobody_needs_company(deadlines, beyond):
    assert chosen(deadlines, 5.0, beyond=beyond) == chosen(deadlines, 0.0, beyond=beyond)


@pytest.mark.parametrize("priority", list(Priority))
def test_only_production_waits_for_it(priority):
    """With safety's deadlines nobody is traded, and those of low classes are not what was seen of budgets."""

    def size(patient):
        made = scheduler(table=SLOW, max_batch=16)
        for turn in range(200):  # what came before: tight budgets and loose ones, 100 a second
            made.arrivals.note((f"t{turn}", "before"), 0.01 * turn, 0.0, 1.0)
            made.arrivals.note_budget(0.2 if turn % 2 else 1.8, 0.01 * turn)
        assert made.arrivals.patience_hz() == pytest.approx(PATIENCE, rel=0.1)
        if not patient:
            made.arrivals.budget_spread_s = 0.0
        for robot in range(8):
            made.queue.add(ticket(robot, 2.8, at=2.0, priority=priority))
        (batch,) = made.poll(2.0).batches
        return len(batch.tickets)

    assert (size(patient=True), size(patient=False)) == ((4, 8) if priority is Priority.PRODUCTION else (8, 8))
