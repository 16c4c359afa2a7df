"""A discrete-event simulation of one worker behind a scheduling policy, and the bound no policy can pass."""

from __future__ import annotations

import dataclasses
import heapq
import random
import time

from benchmarks.gateway.peers import Policy
from benchmarks.gateway.times import Engine
from benchmarks.gateway.traces import Job, Trace


@dataclasses.dataclass
class Result:
    """What became of a trace's requests; decisions in CPU time, so that a busy machine does not count."""

    total: int
    on_time: int
    late: int
    margins_ms: list[float]
    batches: list[int]
    decisions_us: list[float]

    @property
    def share(self) -> float:
        """On-time requests over all requests."""
        return self.on_time / max(1, self.total)


def simulate(trace: Trace, policy: Policy, engine: Engine, seed: int = 11) -> Result:
    """Plays `trace`; every policy meets the same arrivals and its batches take times from the same distribution."""
    rng = random.Random(seed)
    result = Result(len(trace.jobs), 0, 0, [], [], [])
    arrivals = iter(trace.jobs)
    coming: Job | None = next(arrivals, None)
    free_at = 0.0
    running: list[Job] = []
    started = 0.0
    ask_at: float | None = None
    while True:
        moments = [coming.arrival] if coming is not None else []
        if running:
            moments.append(free_at)
        if ask_at is not None:
            moments.append(ask_at)
        if not moments:
            return result
        now = min(moments)
        if running and now >= free_at:
            for job in running:
                margin = 1e3 * (job.deadline - now)
                result.margins_ms.append(margin)
                if margin >= 0:
                    result.on_time += 1
                else:
                    result.late += 1
            policy.finished(len(running), now - started)
            running = []
        while coming is not None and coming.arrival <= now:
            began = time.thread_time()
            policy.arrive(coming, now)
            result.decisions_us.append(1e6 * (time.thread_time() - began))
            coming = next(arrivals, None)
        if not running:
            began = time.thread_time()
            batch, ask_at = policy.next_batch(now)
            result.decisions_us.append(1e6 * (time.thread_time() - began))
            if batch:
                running, started = list(batch), now
                result.batches.append(len(batch))
                free_at = now + engine.draw_s(len(batch), rng)
        if running:
            ask_at = policy.refuse(now)
        if ask_at is not None and ask_at <= now:
            ask_at = now + 1e-6


def upper_bound(trace: Trace, engine: Engine) -> float:
    """Share of on-time requests that no schedule can exceed, found offline.

    The relaxation: work is divisible, preemptible and needs no company, each request costing as little as its best
    possible batch, the largest bucket that fits its own budget. With one common cost, serving the earliest deadline
    first maximises the work done in time (Glover's rule for convex bipartite matching); the common cost is the smallest
    one of the trace, so the bound is loose where budgets differ much.
    """
    costs = [
        min(
            engine.median_s(bucket) / bucket
            for bucket in engine.buckets
            if engine.median_s(bucket) <= job.deadline - job.arrival + 1e-9
        )
        for job in trace.jobs
        if engine.median_s(1) <= job.deadline - job.arrival + 1e-9
    ]
    if not costs:
        return 0.0
    cost = min(costs)
    open_jobs: list[tuple[float, int, float]] = []
    done = 0.0
    now = 0.0
    upcoming = [job for job in trace.jobs if engine.median_s(1) <= job.deadline - job.arrival + 1e-9]
    index = 0
    while index < len(upcoming) or open_jobs:
        if not open_jobs:
            now = max(now, upcoming[index].arrival)
        while index < len(upcoming) and upcoming[index].arrival <= now:
            heapq.heappush(open_jobs, (upcoming[index].deadline, index, cost))
            index += 1
        deadline, number, left = heapq.heappop(open_jobs)
        if deadline <= now:
            continue
        horizon = min(deadline, now + left, upcoming[index].arrival if index < len(upcoming) else float("inf"))
        done += horizon - now
        left -= horizon - now
        now = horizon
        if left > 1e-12:
            heapq.heappush(open_jobs, (deadline, number, left))
    return min(1.0, done / cost / max(1, len(trace.jobs)))
