"""What a second of a worker is worth under loss, and how policies are compared over seeds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from taktline_gateway.arrivals import Arrivals
from taktline_gateway.batching import weigh_batch
from taktline_gateway.overload import (
    IDLE_FREE,
    LOSS_FROM,
    LOSS_FULL,
    LOSS_FULL_ALIKE,
    LOSS_FULL_ROOMY,
    UNLIKE,
    WORTH,
    WORTH_ALIKE,
    Busyness,
    price_hz,
)

from benchmarks.gateway.paired import difference
from tests.gateway.simulated_clock import Simulation, scheduler, service_times, ticket

shares = st.floats(0.0, 1.0)
TIGHT_S = 0.0
"""The tightest of budgets that no full batch fits."""


@given(shares, shares, st.floats(0.0, 1.0), shares, shares, st.integers(1, 8))
def test_a_second_is_worth_at_most_what_the_budgets_allow(lost, busy, budget_s, spread_s, tightest_s, limit):
    times = service_times()
    price = price_hz(lost, busy, budget_s, spread_s, tightest_s, times, limit)
    allowed = [size for size in (1, 2, 4, 8) if size == 1 or (size <= limit and 2 * times.median_s(size) <= budget_s)]
    assert 0.0 <= price <= WORTH_ALIKE * max(size / times.median_s(size) for size in allowed) + 1e-9


@given(shares, shares, st.floats(0.0, 1.0), shares, shares)
def test_without_loss_or_with_idle_time_it_is_worth_nothing(lost, busy, budget_s, spread_s, tightest_s):
    times = service_times()

    def price(lost: float, busy: float) -> float:
        return price_hz(lost, busy, budget_s, spread_s, tightest_s, times, 8)

    assert price(LOSS_FROM, busy) == 0.0
    assert price(lost, 1.0 - IDLE_FREE) == pytest.approx(0.0, abs=1e-9)
    assert price(lost, busy) <= price(1.0, 1.0)


@given(st.lists(shares, min_size=2, max_size=2), shares)
def test_the_more_alike_the_budgets_the_more_a_second_is_worth(spreads, lost):
    times = service_times()
    closer, wider = (price_hz(lost, 1.0, 0.048, 0.048 * spread, TIGHT_S, times, 8) for spread in sorted(spreads))
    assert closer >= wider - 1e-9
    assert price_hz(LOSS_FULL_ALIKE, 1.0, 0.048, 0.0, TIGHT_S, times, 8) == pytest.approx(WORTH_ALIKE * 8 / 0.024)
    assert price_hz(LOSS_FULL, 1.0, 0.048, UNLIKE * 0.048, TIGHT_S, times, 8) == pytest.approx(WORTH * 8 / 0.024)


def test_where_all_budgets_have_room_for_a_full_batch_time_is_worth_the_most_sooner():
    times = service_times()
    full_s = times.tail_s(8)
    roomy = price_hz(LOSS_FULL_ROOMY, 1.0, 1.0, 0.6, full_s, times, 8)
    assert roomy == pytest.approx(WORTH_ALIKE * 8 / times.median_s(8))
    assert price_hz(LOSS_FULL_ROOMY, 1.0, 1.0, 0.6, 0.99 * full_s, times, 8) < 0.25 * roomy
    assert price_hz(LOSS_FROM, 1.0, 1.0, 0.6, full_s, times, 8) == 0.0
    unknown = price_hz(LOSS_FULL_ROOMY, 1.0, 1.0, 0.6, math.inf, times, 8)
    assert unknown == price_hz(LOSS_FULL_ROOMY, 1.0, 1.0, 0.6, TIGHT_S, times, 8), "no budget is known"


def test_a_little_too_much_costs_little_where_all_budgets_have_room_for_a_full_batch():
    """Small batches for whoever is urgent take the time that the others need, until everybody is urgent."""
    table, capacity_hz = {1: 5.6, 2: 8.0, 4: 12.8, 8: 22.4}, 8 / 0.0224
    simulation = Simulation(scheduler(table=table))
    gap_s, budgets_s = 1.0 / (1.02 * capacity_hz), (0.028, 0.045, 0.12, 0.2)
    arrivals = [ticket(n, n * gap_s + budgets_s[n % 4], at=n * gap_s) for n in range(6000)]
    simulation.run(arrivals)
    on_time = sum(simulation.done.get(one, math.inf) <= one.deadline for one in arrivals) / len(arrivals)
    assert on_time > 0.91


def test_where_time_is_short_no_chance_is_taken_with_a_place_that_somebody_sure_could_have():
    times = service_times({4: 16.0}, 4, tail=1.2)
    unsure, sure = [0.0165, 0.017], [0.060, 0.061, 0.062, 0.063]

    def chosen(deadlines: list[float], price: float) -> tuple[int, int]:
        return weigh_batch(deadlines, 0.0, times, 4, 0.0, 0, price)[:2]

    assert chosen([*unsure, *sure], 0.0) == (0, 4), "with time to spare the heads are tried"
    assert chosen([*unsure, *sure], 60.0) == (2, 4)
    assert chosen([*unsure, *sure[1:]], 60.0) == (0, 4), "nobody sure is there for their places"


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.001, 1.0)), min_size=1, max_size=30))
def test_busyness_is_a_share_and_falls_while_nothing_runs(gaps_and_batches):
    busyness, now = Busyness(), 5.0
    for gap, seconds in gaps_and_batches:
        busyness.note(now + gap, seconds)
        now += gap + seconds
        assert 0.0 <= busyness.share(now) <= 1.0
    assert busyness.share(now + 1.0) < busyness.share(now)


def test_busyness_tends_to_the_share_of_busy_time():
    busyness = Busyness()
    for turn in range(500):
        busyness.note(0.1 * turn, 0.07)
    assert busyness.share(0.1 * 499 + 0.07) == pytest.approx(0.7, abs=0.03)


def test_a_worker_that_has_never_run_counts_as_busy_and_one_that_waits_does_not():
    busyness = Busyness()
    assert busyness.share(1e6) == 1.0
    busyness.note(10.0, 1.0)
    assert busyness.share(1e6) == pytest.approx(0.0)


def test_the_scheduler_knows_how_busy_its_worker_was():
    simulation = Simulation(scheduler())
    simulation.run([ticket(n, 0.1 * n + 0.05, at=0.1 * n) for n in range(100)])
    share = simulation.scheduler.fleet.get("w0").busyness.share(9.91)
    assert share == pytest.approx(0.1, abs=0.03), "10 ms of each 100"
    assert simulation.scheduler.arrivals.usual_budget_s == pytest.approx(0.05)
    assert simulation.scheduler.arrivals.budget_spread_s == pytest.approx(0.0, abs=1e-9)


def test_the_spread_of_budgets_is_how_far_they_are_from_the_usual_one():
    arrivals = Arrivals()
    for turn in range(2000):
        arrivals.note_budget(0.1 if turn % 2 else 0.3, 0.001 * turn)
    assert arrivals.usual_budget_s == pytest.approx(0.2, rel=0.02)
    assert arrivals.budget_spread_s == pytest.approx(0.1, rel=0.02)


def test_policies_are_ahead_tied_or_behind_by_their_paired_differences():
    assert difference([0.9, 0.8, 0.7], [0.9, 0.8, 0.7004]).standing == "ahead"
    assert difference([0.90, 0.80, 0.70], [0.92, 0.79, 0.72]).standing == "tied"
    assert difference([0.90, 0.80, 0.70], [0.91, 0.81, 0.711]).standing == "behind"
    with pytest.raises(ValueError, match="zip"):
        difference([0.9, 0.8], [0.9, 0.8, 0.7])
