"""The bound for rules without foresight: against brute force in slots, against rules, and by its certificate."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from benchmarks.gateway.online_bound import Demand, Relaxation, mixed, online_bound
from benchmarks.gateway.peers import ClockworkLike, Ours
from benchmarks.gateway.simulator import simulate
from benchmarks.gateway.tables import rows_of
from benchmarks.gateway.times import ENGINES, Engine
from benchmarks.gateway.traces import poisson

STEADY = dataclasses.replace(ENGINES[0], sigma=0.0)
PAIRS = Engine("pairs", ((1, 20.0), (2, 34.0)), "whole slots", 0.0, buckets=(1, 2))
BUSY = Demand(tight_hz=25.0, others_hz=30.0, low_ms=40.0, high_ms=70.0)


def per_slot(demand, slot_ms):
    """Mean number of tight ones of a slot by how many whole slots they have left at its end."""
    budgets = np.linspace(demand.low_ms, demand.high_ms, 3001)
    budgets = (budgets[1:] + budgets[:-1]) / 2 / slot_ms
    left = np.floor(budgets[:, None] + (np.arange(200) + 0.5) / 200).astype(int) - 1
    kinds, counts = np.unique(left, return_counts=True)
    return {
        int(kind): demand.tight_hz * slot_ms / 1e3 * count / left.size
        for kind, count in zip(kinds, counts, strict=True)
    }


def by_slots(engine, demand, price, slot_ms):
    """Requests a second that the best rule earns in the easier problem where two tight ones wait at most.

    All durations are whole slots, so a worker that never idles is free at slots' ends, and who has so many whole slots
    left then loses nothing by the rest. Values are a matrix over two waiting ones, the more urgent one first: 0 for
    nobody, else the slots that are left less those of a batch of one, and 1.
    """
    lengths = [1, *(round(1e3 * engine.median_s(bucket) / slot_ms) for bucket in engine.buckets)]
    shortest, coming = lengths[1], per_slot(demand, slot_ms)
    kinds = max(coming) - shortest + 1
    first, second = np.triu_indices(kinds + 1)
    actions, means = [], []
    for which, length in enumerate(lengths):
        able = length - shortest + 1 if which else 1
        urgent, other = np.where(first >= able, first, 0), np.where(second >= able, second, 0)
        for members in range(which + 1):
            gone = (members == 2) | ((members == 1) & (urgent > 0)), (members == 2) | ((members == 1) & (urgent == 0))
            left = [np.where(one, 0, waiting) for one, waiting in zip(gone, (urgent, other), strict=True)]
            reward = (1 - price) * engine.buckets[which - 1] + price * members if which else 0.0
            possible = np.count_nonzero([urgent, other], axis=0) >= members
            actions.append((which, reward, possible, np.sort(np.maximum(np.array(left) - length, 0), axis=0)))
        means.append(np.zeros(kinds + 1))
        for left_slots, mean in coming.items():
            for passed in range(min(length, left_slots - shortest + 1)):
                means[which][left_slots - passed - shortest + 1] += mean

    def then(values, which):
        for kind in range(1, kinds + 1):
            mean = means[which][kind]
            none, one = math.exp(-mean), mean * math.exp(-mean)
            both = np.sort([np.arange(kinds + 1), np.full(kinds + 1, kind)], axis=0)
            after = values + price * mean
            after[0, :] = none * values[0, :] + (1 - none) * values[both[0], both[1]] + price * (mean - (1 - none))
            two = 1 - none - one
            after[0, 0] = none * values[0, 0] + one * values[0, kind] + two * values[kind, kind]
            after[0, 0] += price * (mean - one - 2 * two)
            values = after
        return values

    values = np.zeros((kinds + 1, kinds + 1))
    for _ in range(3000):
        expected = [then(values, which) for which in range(len(lengths))]
        best = np.full(len(first), -np.inf)
        for which, reward, possible, rest in actions:
            gain = (reward + expected[which][rest[0], rest[1]] - values[first, second]) / lengths[which]
            best = np.maximum(best, np.where(possible, gain, -np.inf))
        if np.ptp(best) < 1e-8:
            return 1e3 / slot_ms * best.max()
        values[first, second] += 0.98 * best
        values -= values[0, 0]
    raise AssertionError("no convergence")


@pytest.mark.parametrize("price", [0.3, 0.5, 0.8])
def test_it_is_what_brute_force_finds_in_slots(price):
    share, _ = Relaxation(PAIRS, BUSY, 2).share(price)
    earned = share * (BUSY.tight_hz + BUSY.others_hz) - price * BUSY.others_hz
    assert earned == pytest.approx(by_slots(PAIRS, BUSY, price, slot_ms=2.0), rel=1e-4)


def test_any_values_certify_a_bound_and_the_best_ones_the_lowest():
    problem, rng = Relaxation(STEADY, mixed(STEADY, 0.9), 2), np.random.default_rng(5)
    share, values = problem.share(0.5)
    demand = problem.demand
    for spread in (0.01, 0.1, 1.0):
        other = values + rng.normal(0.0, spread, len(values))
        assert (problem.rates(other, 0.5).max() + 0.5 * demand.others_hz) / (demand.tight_hz + demand.others_hz) > share


def test_without_a_price_it_is_the_capacity_and_with_the_whole_one_every_tight_one_is_served():
    demand = mixed(STEADY, 0.9)
    problem = Relaxation(STEADY, demand, 2)
    rate = demand.tight_hz + demand.others_hz
    assert problem.share(0.0)[0] * rate == pytest.approx(STEADY.capacity_hz, rel=1e-5)
    assert problem.share(1.0)[0] == pytest.approx(1.0, abs=1e-4)


def test_more_that_may_wait_make_it_lower():
    shares = [Relaxation(STEADY, mixed(STEADY, 0.9), most).share(0.5)[0] for most in (1, 2, 3)]
    assert shares[0] > shares[1] > shares[2]


def test_the_traces_ask_as_the_bound_assumes():
    demand, seconds = mixed(STEADY, 0.8), 200.0
    jobs = poisson("mixed", 0.8, STEADY.capacity_hz, STEADY.pace.mixed, seed=3, duration_s=seconds).jobs
    budgets = np.array([1e3 * (job.deadline - job.arrival) for job in jobs])
    tight = budgets[budgets <= demand.high_ms]
    others = len(budgets) - len(tight)
    for count, hz in ((len(tight), demand.tight_hz), (others, demand.others_hz)):
        assert abs(count - seconds * hz) < 4.0 * math.sqrt(seconds * hz)
    assert tight.min() >= demand.low_ms
    middle, width = (demand.low_ms + demand.high_ms) / 2, demand.high_ms - demand.low_ms
    assert abs(tight.mean() - middle) < 4.0 * width / math.sqrt(12 * len(tight))


@pytest.mark.parametrize("load", [0.8, 0.9])
def test_no_rule_passes_it_and_ours_is_within_three_points(load):
    bound, price = online_bound(STEADY, mixed(STEADY, load), most=3, search=2)
    assert 0.0 < price < 1.0
    days = [poisson("mixed", load, STEADY.capacity_hz, STEADY.pace.mixed, seed, 30.0) for seed in (2001, 2002, 2003)]
    ours, clockwork = (
        sum(simulate(day, make(STEADY), STEADY).on_time for day in days) / sum(len(day.jobs) for day in days)
        for make in (Ours, ClockworkLike)
    )
    assert clockwork < ours < bound < ours + 0.03


def test_the_rows_are_within_three_points_of_it_as_the_page_says():
    rows = rows_of("gateway-online-bound.json", "gateway-online-bound")
    assert [row["load"] for row in rows] == [0.7, 0.8, 0.9]
    for row in rows:
        assert row["on_time"] < row["bound"]
        assert row["bound"] - (row["on_time"] - row["on_time_half"]) < 0.03, row["load"]
