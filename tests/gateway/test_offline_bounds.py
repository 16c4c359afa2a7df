"""The benchmark's yardstick: bounds that hold the optimum between them, checked against exhaustive search."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_gateway import arrivals

from benchmarks.gateway import bounds as bounds_module
from benchmarks.gateway.bounds import offline_bounds, optimum
from benchmarks.gateway.peers import Ours
from benchmarks.gateway.simulator import simulate, upper_bound
from benchmarks.gateway.times import ENGINES, Engine
from benchmarks.gateway.traces import Job, Trace, even, poisson

STEADY = dataclasses.replace(ENGINES[0], sigma=0.0)
ROUND = Engine("round", ((1, 20.0), (2, 30.0), (4, 50.0), (8, 90.0), (16, 170.0), (32, 330.0)), "whole slots", 0.0)

small_traces = st.lists(st.tuples(st.integers(0, 150), st.integers(15, 200)), min_size=1, max_size=8).map(
    lambda pairs: [Job(n, 0, at / 1e3, (at + left) / 1e3) for n, (at, left) in enumerate(sorted(pairs))]
)


def by_enumeration(jobs, engine):
    """The optimum without any argument about order: every subset of those here, at every arrival and every end."""

    def best(now, left):
        found = 0
        here = [job for job in left if job.arrival <= now + 1e-9]
        later = [job.arrival for job in left if job.arrival > now + 1e-9]
        if later:
            found = best(min(later), left)
        for size in range(1, len(here) + 1):
            end = now + engine.median_s(size)
            for members in itertools.combinations(here, size):
                if all(job.deadline >= end - 1e-9 for job in members):
                    found = max(found, size + best(end, [job for job in left if job not in members]))
        return found

    return best(0.0, list(jobs))


@settings(deadline=None, max_examples=40)
@given(small_traces.map(lambda jobs: jobs[:5]))
def test_the_optimum_is_the_optimum(jobs):
    assert optimum(jobs, ROUND) == by_enumeration(jobs, ROUND)


@settings(deadline=None, max_examples=40)
@given(small_traces)
def test_in_whole_slots_both_bounds_are_the_optimum(jobs):
    best = optimum(jobs, ROUND)
    bounds = offline_bounds(jobs, ROUND)
    assert round(bounds.reached * len(jobs)) == best == round(bounds.upper * len(jobs))
    assert best <= upper_bound(Trace("t", 0.0, tuple(jobs)), ROUND) * len(jobs) + 1e-3


@settings(deadline=None, max_examples=60)
@given(small_traces)
def test_ours_is_never_above_the_optimum_and_at_most_two_below(jobs):
    """It does not know who comes next; the optimum does."""
    ours = simulate(Trace("t", 0.0, tuple(jobs)), Ours(ROUND), ROUND).on_time
    best = optimum(jobs, ROUND)
    assert ours <= best
    assert ours >= best - 2


class Patient(Ours):
    """Ours after budgets that differ: it leaves those who can wait for the next batch."""

    def __init__(self, engine):
        super().__init__(engine)
        for turn in range(200):
            self.scheduler.arrivals.note_budget(0.03 if turn % 2 else 0.27, 0.0)
        assert self.scheduler.arrivals.patience_hz() > 2.0


@settings(deadline=None, max_examples=100, derandomize=True)
@given(small_traces)
def test_patience_is_never_above_the_optimum_and_at_most_three_below(jobs):
    """Always the same examples: a rule of thumb, two below in a few cases of a thousand, and nothing proves a limit."""
    served = simulate(Trace("t", 0.0, tuple(jobs)), Patient(ROUND), ROUND).on_time
    best = optimum(jobs, ROUND)
    assert best - 3 <= served <= best


def test_patience_serves_more_of_mixed_budgets():
    """Paired over days that nothing was tuned on: what it was made for, and by the scheduler itself."""
    gains = []
    for seed in range(2001, 2013):
        trace = poisson("mixed", 0.9, STEADY.capacity_hz, STEADY.pace.mixed, seed=seed, duration_s=10.0)
        patient = simulate(trace, Ours(STEADY), STEADY).share
        with mock.patch.object(arrivals, "PATIENCE", 0.0):
            gains.append(patient - simulate(trace, Ours(STEADY), STEADY).share)
    assert sum(gains) > 0.0
    assert statistics.fmean(gains) > statistics.stdev(gains) / len(gains) ** 0.5


def test_the_bounds_are_close_on_a_real_trace_and_above_ours():
    trace = poisson("poisson", 0.8, STEADY.capacity_hz, even(150, 500), seed=5, duration_s=2.0)
    bounds = offline_bounds(trace.jobs, STEADY)
    assert 0.0 <= bounds.upper - bounds.reached <= 0.01
    assert simulate(trace, Ours(STEADY), STEADY).share <= bounds.upper + 1e-9


@settings(deadline=None, max_examples=30)
@given(small_traces, st.sampled_from([0.0013, 0.004, 0.010]))
def test_coarse_slots_hold_the_optimum_between_them(jobs, slot_s):
    best, bounds = optimum(jobs, ROUND), offline_bounds(jobs, ROUND, slot_s=slot_s)
    assert round(bounds.reached * len(jobs)) <= best <= round(bounds.upper * len(jobs))


@settings(deadline=None, max_examples=30)
@given(small_traces)
def test_with_too_many_labels_the_bounds_stay_bounds(jobs):
    best, before = optimum(jobs, ROUND), bounds_module.MOST_LABELS
    bounds_module.MOST_LABELS = 1
    try:
        bounds = offline_bounds(jobs, ROUND)
    finally:
        bounds_module.MOST_LABELS = before
    assert round(bounds.reached * len(jobs)) <= best <= round(bounds.upper * len(jobs))
