"""A day of factory shifts, request by request: robots that ask and must be answered in time, workers that come and go.

No GPU and no network: batch times are a table, the queue is earliest deadline first and batches as the gateway does,
and what a worker cannot make in time is refused. The autoscaler is the only thing that differs between runs.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from taktline_protocol.messages import BucketTime

DAY_S = 86_400
TIMES = (
    BucketTime(batch=1, median_ms=110, p99_ms=120),
    BucketTime(batch=2, median_ms=140, p99_ms=150),
    BucketTime(batch=4, median_ms=210, p99_ms=225),
    BucketTime(batch=8, median_ms=360, p99_ms=380),
)
"""A 3 B policy on a Jetson-class accelerator."""
COLD_START_S = 75.0
BUDGETS_MS = ((0.7, 1000.0), (0.3, 500.0))
"""Share of the requests, time they leave."""
RATE_HZ = 1.5
"""Observations of one robot a second."""


class Request(NamedTuple):
    """One observation."""

    deadline: float
    arrived: float
    budget_ms: float


class View(NamedTuple):
    """What an autoscaler may look at: the last period's arrivals by budget, misses, busy share, queue, workers."""

    now: float
    arrivals: dict[float, int]
    seen: int
    missed: int
    busy: float
    queued: int
    ready: int
    desired: int


Scaler = Callable[[View], int]


def robots_at(second: float) -> float:
    """Robots that work: three shifts with a ramp of a minute, two breaks, a line that stands still at noon."""
    hour = second / 3600
    plan = ((0, 3), (6, 24), (14, 18), (22, 3), (24, 3))
    count = 3.0
    for (start, robots), (end, _) in itertools.pairwise(plan):
        if start <= hour < end:
            before = 3.0 if start in (0, 6) else 24.0 if start == 14 else 18.0
            ramp = min(1.0, (second - 3600 * start) / 60.0) if start else 1.0
            count = before + (robots - before) * ramp
    for begin, length in ((10.0, 0.5), (18.0, 0.5)):
        if begin <= hour < begin + length:
            count = min(count, 5.0)
    if 12.0 <= hour < 12.25:
        count = min(count, 12.0)
    return count


def arrivals(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Arrival instants (s) of a whole day, and their budgets (ms): Poisson, thinned to the robots at work."""
    rng = np.random.default_rng(seed)
    top = 24 * RATE_HZ
    count = rng.poisson(top * DAY_S)
    instants = np.sort(rng.uniform(0, DAY_S, count))
    minute = np.array([robots_at(s) for s in range(0, DAY_S + 10, 10)])
    keep = rng.uniform(0, 24, count) < np.interp(instants, np.arange(0, DAY_S + 10, 10), minute)
    instants = instants[keep]
    shares = np.array([share for share, _ in BUDGETS_MS])
    budgets = rng.choice([budget for _, budget in BUDGETS_MS], size=len(instants), p=shares)
    return instants, budgets


class Outcome(NamedTuple):
    """One simulated day.

    Attributes:
        minutes: time of each sample, h; likewise workers that are paid, and misses in that minute.
    """

    requests: int
    missed: int
    worker_hours: float
    changes: int
    minutes: list[float]
    workers: list[int]
    misses: list[int]


def simulate(
    scaler: Scaler, seed: int, *, period_s: float, start: int, noise: float = 0.05, until_s: float = DAY_S
) -> Outcome:
    """Run a day; `scaler` is asked every `period_s` for the number of workers."""
    rng = np.random.default_rng(seed + 1)
    instants, budgets = arrivals(seed)
    limit = int(np.searchsorted(instants, until_s))
    median = {time.batch: time.median_ms / 1e3 for time in TIMES}
    queue: list[Request] = []
    free = [0.0] * start  # instant from which each ready worker is free
    starting: list[float] = []
    leaving = 0
    desired, changes = start, 0
    missed = seen = 0
    window_arrivals: dict[float, int] = {}
    window_seen = window_missed = 0
    busy_s = 0.0
    next_look, index = period_s, 0
    paid_s, last = 0.0, 0.0
    samples: tuple[list[float], list[int], list[int]] = ([], [], [])
    minute_missed, next_minute = 0, 60.0
    jitter = iter(rng.normal(1.0, noise, 4_000_000))

    def run_until(now: float) -> None:
        nonlocal missed, window_missed, busy_s, minute_missed, leaving
        while free:
            at = min(free)
            if at > now:
                return
            slot = free.index(at)
            if leaving:
                free.pop(slot)
                leaving -= 1
                continue
            if not queue:
                return
            begin = max(at, queue[0].arrived)
            if begin > now:
                return
            # As the gateway: the largest batch that makes none of its members late.
            members: list[Request] = []
            while queue and len(members) < 8:
                size = _bucket(len(members) + 1)
                tightest = min([queue[0].deadline, *(member.deadline for member in members)])
                if begin + median[size] * 1.05 > tightest:
                    if not members:
                        heapq.heappop(queue)
                        missed += 1
                        window_missed += 1
                        minute_missed += 1
                        continue
                    break
                members.append(heapq.heappop(queue))
            if not members:
                continue
            spent = median[_bucket(len(members))] * max(0.8, next(jitter))
            late = sum(1 for member in members if begin + spent > member.deadline)
            missed += late
            window_missed += late
            minute_missed += late
            busy_s += spent
            free[slot] = begin + spent

    while index < limit or next_look < until_s:
        instant = instants[index] if index < limit else math.inf
        now = min(instant, next_look, next_minute, min(starting, default=math.inf))
        if now >= until_s:
            break
        run_until(now)
        paid_s += (len(free) + len(starting)) * (now - last)
        last = now
        while starting and min(starting) <= now:
            starting.remove(min(starting))
            free.append(now)
        if now == next_minute:
            samples[0].append(now / 3600)
            samples[1].append(len(free) + len(starting))
            samples[2].append(minute_missed)
            minute_missed, next_minute = 0, next_minute + 60.0
        if now == next_look:
            ready = max(1, len(free))
            view = View(
                now, window_arrivals, window_seen, window_missed, min(1.0, busy_s / (ready * period_s)),
                len(queue), len(free), desired,
            )  # fmt: skip
            wanted = scaler(view)
            changes += wanted != desired
            have = len(free) - leaving + len(starting)
            starting.extend([now + COLD_START_S] * max(0, wanted - have))
            for _ in range(have - wanted):
                if starting:
                    starting.remove(max(starting))
                else:
                    leaving += 1
            desired = wanted
            window_arrivals, window_seen, window_missed, busy_s = {}, 0, 0, 0.0
            next_look += period_s
        if now == instant:
            budget = float(budgets[index])
            heapq.heappush(queue, Request(instant + budget / 1e3, instant, budget))
            window_arrivals[budget] = window_arrivals.get(budget, 0) + 1
            window_seen += 1
            seen += 1
            index += 1
    return Outcome(seen, missed, paid_s / 3600, changes, *samples)


def _bucket(size: int) -> int:
    return 1 if size <= 1 else 2 if size == 2 else 4 if size <= 4 else 8
