"""Request traces: Poisson, bursts, and fleets in and out of step, with deadlines of all kinds."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

from benchmarks.gateway.times import Engine


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One request: seconds since the trace began."""

    robot: int
    seq: int
    arrival: float
    deadline: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """A named trace; `load` is its request rate over the engine's best throughput."""

    name: str
    load: float
    jobs: tuple[Job, ...]


Budget = Callable[[random.Random], float]
DURATION_S = 30.0
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.5, 3.0)
FLEET_SHARE = 0.8
"""What a robot of a fleet has left when it asks, of its period."""
TRAINING_SEED = 1
HELD_OUT_SEEDS = (7001, 7002, 7003, 7004, 7005)
"""Whatever was tuned was tuned on other seeds, all below 1000; these only judge."""


def even(low_ms: float, high_ms: float) -> Budget:
    """Budgets spread evenly between two values."""
    return lambda rng: rng.uniform(low_ms, high_ms) / 1e3


def poisson(
    name: str,
    load: float,
    capacity_hz: float,
    budget: Budget,
    seed: int = TRAINING_SEED,
    duration_s: float = DURATION_S,
) -> Trace:
    """Independent robots, each asking once."""
    rng = random.Random(seed)
    at, jobs = 0.0, []
    while True:
        at += rng.expovariate(load * capacity_hz)
        if at > duration_s:
            return Trace(name, load, tuple(jobs))
        jobs.append(Job(len(jobs), 0, at, at + budget(rng)))


def bursty(
    name: str,
    load: float,
    capacity_hz: float,
    budget: Budget,
    seed: int = TRAINING_SEED,
    duration_s: float = DURATION_S,
    stretch: float = 1.0,
) -> Trace:
    """Poisson whose rate switches between a quarter and 2.1 times its mean, for 0.1 to 0.45 s each, stretched."""
    rng = random.Random(seed)
    at, jobs, busy, until = 0.0, [], False, 0.0
    while True:
        if at >= until:
            busy = not busy
            until = at + stretch * (rng.uniform(0.1, 0.3) if busy else rng.uniform(0.15, 0.45))
        at += rng.expovariate(load * capacity_hz * (2.125 if busy else 0.25))
        if at > duration_s:
            return Trace(name, load, tuple(jobs))
        jobs.append(Job(len(jobs), 0, at, at + budget(rng)))


def fleet(
    name: str,
    load: float,
    capacity_hz: float,
    robots: int,
    share: float,
    *,
    jitter_ms: float | None,
    seed: int = TRAINING_SEED,
    duration_s: float = DURATION_S,
    most_s: float = math.inf,
) -> Trace:
    """Robots that replan with one period; `share` of it, `most_s` at most, is each one's budget.

    No jitter given: phases are random.
    """
    rng = random.Random(seed)
    period = robots / (load * capacity_hz)
    budget = min(most_s, share * period)
    jobs = []
    for robot in range(robots):
        phase = rng.uniform(0, period)
        turn = 0
        while True:
            offset = phase if jitter_ms is None else abs(rng.gauss(0.0, jitter_ms / 1e3))
            at = turn * period + offset
            if at > duration_s:
                break
            jobs.append(Job(robot, turn, at, at + budget))
            turn += 1
    jobs.sort(key=lambda job: job.arrival)
    return Trace(name, load, tuple(jobs))


def all_traces(engine: Engine, seed: int) -> list[Trace]:
    """The benchmark's traces for an engine; another seed is another day."""
    pace, rate = engine.pace, engine.capacity_hz
    long = {"seed": seed, "duration_s": pace.duration_s}
    made = [poisson(f"poisson, {pace.label}", load, rate, pace.even, **long) for load in LOADS]
    for load in (0.3, 0.5, 0.7, 0.9, 3.0):
        made.append(poisson("poisson, mixed", load, rate, pace.mixed, **long))
        made.append(bursty(f"bursty, {pace.label}", load, rate, pace.even, **long, stretch=pace.stretch))
    for robots in pace.robots:
        for load in (0.5, 0.8, 1.5):
            for name, jitter_ms in (("in", 2.0), ("out of", None)):
                most_s = pace.chunk_ms / 1e3
                title = f"{robots} robots {name} step"
                made.append(fleet(title, load, rate, robots, FLEET_SHARE, jitter_ms=jitter_ms, most_s=most_s, **long))
    return made
