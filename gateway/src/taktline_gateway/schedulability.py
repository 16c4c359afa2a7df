"""Whether one more robot can be served in time: its rate times the cost of a batch, and the wait behind one. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from taktline_gateway.service_times import ServiceTimes

TARGET_LOAD = 0.8
"""Share of the workers' time that may be promised: the rest is for bunching, retries and batches that take longer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """What one robot asks for: observations a second, the budget of each, s, and what share of T_sync each needs."""

    rate_hz: float
    budget_s: float
    share: float = 1.0

    @property
    def load_hz(self) -> float:
        """As many observations of all of T_sync a second take the same time."""
        return self.rate_hz * self.share


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of the test.

    Attributes:
        admissible: whether all demands together can be met.
        utilisation: promised share of the workers' time with the batch below, the new robot included.
        batch: size of the batches that would meet every budget with the least load; 0 where none does.
        worst_s: how long an observation takes at worst then: a batch that has just begun, and its own.
        spare: how many more robots like the new one would fit beside it.
        reason: what stands in the way: `budget` or `rate`; empty where nothing does.
    """

    admissible: bool
    utilisation: float
    batch: int
    worst_s: float
    spare: int
    reason: str = ""


def schedulable(new: Demand, rate_hz: float, tightest_s: float, workers: Sequence[ServiceTimes]) -> Verdict:
    """Tests a new robot beside robots whose loads are `rate_hz` together, the tightest of them having `tightest_s`.

    A batch cannot be interrupted, so at worst an observation comes just after one has begun, waits for its end, and is
    served in the next: the tail of two batches must fit in the tightest budget. Of the sizes for which it does, the
    one with the highest rate bounds what can be promised: sum of rates <= TARGET_LOAD * sum over the workers of
    B / T_sync(B). This is sufficient for robots out of step; it is no proof for any pattern of arrivals. Where a robot
    needs a share of T_sync, its rate and its own batch count by that; the batch before may take all of it, unless the
    robot is alone.
    """
    if not workers:
        return Verdict(False, 0.0, 0, 0.0, 0, "rate")
    budget_s = min(new.budget_s, tightest_s)
    batches = new.share + (1.0 if rate_hz > 1e-9 else new.share)
    best: tuple[float, int, float] | None = None
    sizes = sorted({min(bucket, times.max_batch) for times in workers for bucket in times.buckets})
    for size in sizes:
        rate = sum(min(size, times.max_batch) / times.median[min(size, times.max_batch)] for times in workers)
        worst_s = max(batches * times.tail[min(size, times.max_batch)] for times in workers)
        if worst_s <= budget_s and (best is None or rate > best[0]):
            best = (rate, size, worst_s)
    if best is None:
        worst_s = max(batches * times.tail[1] for times in workers)
        return Verdict(False, (rate_hz + new.load_hz) / _rate_of_one(workers), 0, worst_s, 0, "budget")
    rate, size, worst_s = best
    left_hz = TARGET_LOAD * rate - rate_hz - new.load_hz
    spare = int(min(1e9, (left_hz + 1e-9) / new.load_hz)) if left_hz >= -1e-9 and new.load_hz > 0 else 0
    fits = left_hz >= -1e-9
    return Verdict(fits, (rate_hz + new.load_hz) / rate, size, worst_s, spare, "" if fits else "rate")


def _rate_of_one(workers: Sequence[ServiceTimes]) -> float:
    return sum(1.0 / times.median[1] for times in workers)
