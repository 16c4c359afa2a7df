"""Request traces: Poisson, bursts, and fleets in and out of step, with deadlines of all kinds."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable


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
TRAINING_SEED = 1
HELD_OUT_SEEDS = (7001, 7002, 7003, 7004, 7005)
"""Whatever was tuned was tuned on other seeds, all below 1000; these only judge."""


def even(low_ms: float, high_ms: float) -> Budget:
    """Budgets spread evenly between two values."""
    return lambda rng: rng.uniform(low_ms, high_ms) / 1e3


def mixed(rng: random.Random) -> float:
    """A third 50 Hz controllers with little buffer, a third 20 Hz, a third slow ones with a whole chunk left."""
    return rng.choice((rng.uniform(60, 120), rng.uniform(150, 400), rng.uniform(500, 1000))) / 1e3


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
) -> Trace:
    """Poisson whose rate switches between a quarter and 2.5 times its mean, for 0.1 to 0.5 s each."""
    rng = random.Random(seed)
    at, jobs, busy, until = 0.0, [], False, 0.0
    while True:
        if at >= until:
            busy = not busy
            until = at + (rng.uniform(0.1, 0.3) if busy else rng.uniform(0.15, 0.45))
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
) -> Trace:
    """Robots that replan with one period; `share` of it is each one's budget. No jitter given: phases are random."""
    rng = random.Random(seed)
    period = robots / (load * capacity_hz)
    jobs = []
    for robot in range(robots):
        phase = rng.uniform(0, period)
        turn = 0
        while True:
            offset = phase if jitter_ms is None else abs(rng.gauss(0.0, jitter_ms / 1e3))
            at = turn * period + offset
            if at > duration_s:
                break
            jobs.append(Job(robot, turn, at, at + share * period))
            turn += 1
    jobs.sort(key=lambda job: job.arrival)
    return Trace(name, load, tuple(jobs))


def all_traces(capacity_hz: float, seed: int) -> list[Trace]:
    """The benchmark's traces for an engine of this capacity; another seed is another day."""
    loads = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.5, 3.0)
    made = [poisson("poisson, 150-500 ms", load, capacity_hz, even(150, 500), seed) for load in loads]
    for load in (0.3, 0.5, 0.7, 0.9, 3.0):
        made.append(poisson("poisson, mixed", load, capacity_hz, mixed, seed))
        made.append(bursty("bursty, 150-500 ms", load, capacity_hz, even(150, 500), seed))
    for robots in (8, 32, 128, 512):
        for load in (0.5, 0.8, 1.5):
            for name, jitter_ms in (("in", 2.0), ("out of", None)):
                title = f"{robots} robots {name} step"
                made.append(fleet(title, load, capacity_hz, robots, 0.8, jitter_ms=jitter_ms, seed=seed))
    return made
