"""How many deadlines any schedule could meet, found offline: bounds from both sides, and the optimum on small cases.

The batch schedule of one worker is a path through time: each step idles for a slot or runs a batch of some bucket, and
a batch may serve up to its bucket's number of requests that have come by its start and are not due before its end. The
only thing that ties the steps together is that a request is served once. That rule is relaxed: serving request j again
is allowed at a price p_j, which is also paid back once to the total. For any prices 0 <= p <= 1

    bound(p) = sum_j p_j + max over paths of sum over batches of (the largest 1 - p_j among the eligible, at most B)

is at least what any schedule can serve (weak duality; Geoffrion 1974). The best path for given prices is found by
dynamic programming, better prices by subgradient steps (Polyak 1969). The batches of each path, filled with the most
urgent of the eligible, are a schedule too: the best one met on the way is what a scheduler could have reached that knew
all arrivals beforehand. So the offline optimum lies between the two.

Time is cut into slots. Requests come at the start of their slot and are due at the end of theirs, and batches are
rounded down to whole slots, so every real schedule is among the paths: the upper figure is a bound. The lower figure is
optimistic by the same rounding, about 1%. Durations are the medians.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.gateway.times import BUCKETS, Engine
from benchmarks.gateway.traces import Job

SLOT_S = 0.001
ROUNDS = 80

Path = list[tuple[int, int]]
"""(slot, index of the bucket) of each batch, in order of time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """Share of the requests that the best offline schedule meets: at least `reached`, at most `upper`."""

    reached: float
    upper: float


class _Problem:
    """One trace on one worker, in slots."""

    def __init__(self, jobs: Sequence[Job], engine: Engine, slot_s: float) -> None:
        self.count = len(jobs)
        self.arrival = np.array([int(job.arrival / slot_s + 1e-9) for job in jobs])
        self.due = np.array([int(np.ceil(job.deadline / slot_s - 1e-9)) for job in jobs])
        self.horizon = int(self.due.max()) + 1
        self.lengths = [max(1, int(engine.median_s(bucket) / slot_s + 1e-9)) for bucket in BUCKETS]
        self.order = np.argsort(self.arrival, kind="stable")
        waiting: list[list[int]] = [[] for _ in range(self.horizon)]
        for job in self.order:
            for slot in range(int(self.arrival[job]), min(self.horizon, int(self.due[job]) - self.lengths[0] + 1)):
                waiting[slot].append(int(job))
        self.starts = np.array([slot for slot in range(self.horizon) if waiting[slot]], dtype=np.int64)
        self.row = {int(slot): row for row, slot in enumerate(self.starts)}
        # Of each bucket the eligible requests at each slot, padded with one that is worth nothing.
        self.eligible = []
        for length in self.lengths:
            rows = [[job for job in waiting[slot] if self.due[job] >= slot + length] for slot in self.starts]
            table = np.full((len(rows), max([1, *map(len, rows)])), self.count, dtype=np.int64)
            for index, row in enumerate(rows):
                table[index, : len(row)] = row
            self.eligible.append(table)

    def best_path(self, prices: NDArray[np.float64]) -> tuple[float, NDArray[np.float64], Path]:
        """(value of the best path, how often it serves each request, the path)."""
        worth = np.append(1.0 - prices, 0.0)
        gains = np.zeros((len(BUCKETS), self.horizon))
        for index, (bucket, table) in enumerate(zip(BUCKETS, self.eligible, strict=True)):
            values = worth[table]
            if bucket < values.shape[1]:
                values = -np.partition(-values, bucket - 1, axis=1)[:, :bucket]
            gains[index, self.starts] = values.sum(axis=1)
        value, choice = [0.0] * (self.horizon + 1), [-1] * (self.horizon + 1)
        columns, steps = gains.T.tolist(), list(enumerate(self.lengths))
        for slot in range(self.horizon - 1, -1, -1):
            best, chosen = value[slot + 1], -1
            column = columns[slot]
            for index, length in steps:
                gain = column[index]
                if gain > 0.0 and slot + length <= self.horizon and gain + value[slot + length] > best:
                    best, chosen = gain + value[slot + length], index
            value[slot], choice[slot] = best, chosen
        used, path, slot = np.zeros(self.count), [], 0
        while slot < self.horizon:
            index = choice[slot]
            if index < 0:
                slot += 1
                continue
            members = self.eligible[index][self.row[slot]]
            ranked = members[np.argsort(-worth[members], kind="stable")][: BUCKETS[index]]
            used[ranked[(ranked < self.count) & (worth[ranked] > 0.0)]] += 1.0
            path.append((slot, index))
            slot += self.lengths[index]
        return value[0], used, path

    def served_by(self, path: Path) -> int:
        """Requests that the batches of `path` serve when each takes the most urgent of the eligible."""
        waiting: list[int] = []
        coming, served = 0, 0
        for slot, index in path:
            while coming < self.count and self.arrival[self.order[coming]] <= slot:
                heapq.heappush(waiting, int(self.due[self.order[coming]]))
                coming += 1
            while waiting and waiting[0] < slot + self.lengths[index]:
                heapq.heappop(waiting)
            for _ in range(min(BUCKETS[index], len(waiting))):
                heapq.heappop(waiting)
                served += 1
        return served


def offline_bounds(jobs: Sequence[Job], engine: Engine, *, slot_s: float = SLOT_S, rounds: int = ROUNDS) -> Bounds:
    """Bounds of the share of `jobs` that the best schedule of one worker serves in time."""
    if not jobs:
        return Bounds(1.0, 1.0)
    problem = _Problem(jobs, engine, slot_s)
    prices = np.zeros(problem.count)
    best_prices, best, reached = prices, float(problem.count), 0
    step, stale = 1.0, 0
    for _ in range(rounds):
        value, used, path = problem.best_path(prices)
        total = float(prices.sum()) + value
        reached = max(reached, problem.served_by(path))
        if total < best - 1e-6:
            best, best_prices, stale = total, prices, 0
        else:
            stale += 1
        if best - reached < 1.0 - 1e-6:
            break  # whole requests are counted: these two are the optimum
        if stale >= 6:
            step, stale, prices = 0.6 * step, 0, best_prices
            continue
        slope = used - 1.0
        slope[(prices <= 0.0) & (slope < 0.0)] = 0.0
        norm = float((slope**2).sum())
        if norm == 0.0:
            break
        prices = np.clip(prices + step * max(total - reached, 0.5) / norm * slope, 0.0, 1.0)
    return Bounds(min(1.0, reached / problem.count), min(1.0, best / problem.count))


def optimum(jobs: Sequence[Job], engine: Engine) -> int:
    """Most of `jobs` that one worker can serve in time, exactly, with median durations; for a dozen of them at most.

    Exhaustive over what the worker does next: idle until the next arrival, or a batch of any size. Of those that a
    batch of one size could serve in time it takes the most urgent: leaving one of them for later in exchange for a less
    urgent one is never better, as the less urgent one can take its place then.
    """
    ordered = sorted(jobs, key=lambda job: job.deadline)

    @functools.cache
    def best(now: float, left: frozenset[int]) -> int:
        alive = frozenset(
            index
            for index in left
            if ordered[index].deadline >= max(now, ordered[index].arrival) + engine.median_s(1) - 1e-9
        )
        here = sorted(index for index in alive if ordered[index].arrival <= now + 1e-9)
        later = [ordered[index].arrival for index in alive if ordered[index].arrival > now + 1e-9]
        found = best(min(later), alive) if later else 0
        for size in range(1, min(len(here), BUCKETS[-1]) + 1):
            end = round(now + engine.median_s(size), 9)
            fitting = [index for index in here if ordered[index].deadline >= end - 1e-9]
            if len(fitting) >= size:
                found = max(found, size + best(end, alive - frozenset(fitting[:size])))
        return found

    return best(0.0, frozenset(range(len(ordered))))
