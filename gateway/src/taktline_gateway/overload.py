"""What a second of a worker is worth while tickets are being lost: others could be served in it."""

from __future__ import annotations

import math

from taktline_gateway.service_times import ServiceTimes

LOSS_WEIGHT = 1 / 64
"""Weight of the newest ticket in the running share of lost ones."""
LOSS_FROM = 0.05
LOSS_FULL, LOSS_FULL_ALIKE, LOSS_FULL_ROOMY = 0.3, 0.25, 0.1
"""Shares of lost tickets from which a second of a worker is worth something, and at which it is worth the most.

Where even the tightest budget has room for a full batch, small ones are what makes everybody urgent: each takes time
that the others need, until the loosest have as little left as the tightest.
"""
WORTH, WORTH_ALIKE = 0.9, 1.0
"""What it is worth at most, in units of the throughput that the budgets allow.

Where all budgets are alike, or all have room for a full batch, whoever is lost is lost for want of time, and a second
serves others in full. Where they differ, tight ones are lost that no second would have saved, and loose ones wait for
the same second.
"""
UNLIKE = 0.2
"""Budgets that are off the usual one by this share of it, on average, are not alike at all."""
IDLE_FREE = 0.2
"""A worker that idles for this share of its time has time to give away: what is lost is not lost for want of it."""
BUSY_MEMORY_S = 2.0
"""Time constant of a worker's busy share."""


class Busyness:
    """How much of its recent time one worker was busy; one that is new is presumed busy."""

    __slots__ = ("_at", "_share")

    def __init__(self) -> None:
        self._share = 1.0
        self._at: float | None = None

    def note(self, start: float, seconds: float) -> None:
        """A batch has run for so long; batches come in the order in which they end."""
        self._share = 1.0 - (1.0 - self.share(start)) * math.exp(-seconds / BUSY_MEMORY_S)
        self._at = start + seconds

    def share(self, now: float) -> float:
        """Busy time over all time, forgetting with BUSY_MEMORY_S; what followed the last batch counts as idle."""
        if self._at is None or now <= self._at:
            return self._share
        return self._share * math.exp((self._at - now) / BUSY_MEMORY_S)


def price_hz(
    lost: float, busy: float, budget_s: float, spread_s: float, tightest_s: float, times: ServiceTimes, limit: int
) -> float:
    """Tickets that a second of a worker is worth, 0 without lasting loss.

    Where each ticket waits for one batch and then runs in the next, a budget allows batches of half its length: the
    best throughput of these is what a busy worker can keep up, and most of it is the price. A worker that idles, as
    between the bursts of a fleet in step, has no other use for its time, however many are lost.

    Args:
        lost: share of recent tickets that were refused.
        busy: share of its recent time that the worker was busy.
        budget_s: the usual time between a ticket's arrival and its deadline.
        spread_s: how far a budget is from the usual one, on average.
        tightest_s: the smallest budget that came lately; infinite where none is known, which says nothing.
        limit: most members of a batch.
    """
    if lost <= LOSS_FROM:
        return 0.0
    differing = UNLIKE * budget_s
    alike = 1.0 - spread_s / differing if spread_s < differing else 0.0
    full = LOSS_FULL + alike * (LOSS_FULL_ALIKE - LOSS_FULL)
    if times.tail[times.max_batch] <= tightest_s < math.inf:
        alike, full = 1.0, LOSS_FULL_ROOMY
    pressure = min(1.0, (lost - LOSS_FROM) / (full - LOSS_FROM)) * (1.0 - (1.0 - busy) / IDLE_FREE)
    if pressure <= 0.0:
        return 0.0
    sustained = 1.0 / times.median[1]
    for bucket in times.buckets:
        if bucket > min(limit, times.max_batch) or 2.0 * times.median[bucket] > budget_s:
            break
        sustained = max(sustained, bucket / times.median[bucket])
    return pressure * (WORTH + alike * (WORTH_ALIKE - WORTH)) * sustained
