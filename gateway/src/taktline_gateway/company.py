"""Whether an idle worker waits for a batch to get company."""

from __future__ import annotations

from collections.abc import Sequence

from taktline_gateway.arrivals import Arrivals
from taktline_gateway.batching import GRAIN, TAIL_QUANTILE, follow
from taktline_gateway.service_times import ServiceTimes

LIKELY = 0.5
"""Where more of the robots than this share have no rhythm, so large a share of the arrivals must have followed another
one within the wait."""
PATIENT = 2.0
"""An arrival that is waited for may be late by so many standard deviations: then it is looked at again."""


def company_until(
    dues: Sequence[float],
    going: tuple[int, int],
    oldest: float,
    times: ServiceTimes,
    limit: int,
    arrivals: Arrivals,
    *,
    workers: int,
    in_flight: int,
    max_wait_s: float,
    begins: float,
    price_hz: float,
    now: float,
) -> float | None:
    """Until when tickets due at `dues`, in that order, may wait for company; None to launch now.

    Args:
        going: (start, size) of the slice that would be launched now.
        oldest: when the first of them came; none waits longer than `max_wait_s`.
        limit: the most that a batch may have.
        workers: how many there are: each has its share of those who are still to come.
        in_flight: how many tickets are on workers: their robots do not come now.
        begins: when the worker can begin.
        price_hz: what a second of it is worth (`overload`).
    """
    limit = min(limit, times.max_batch)
    latest = oldest + max_wait_s
    if len(dues) >= limit or latest <= now:
        return None
    if arrivals.strangers <= LIKELY:
        return _planned(dues, going, latest, times, limit, arrivals, workers, begins, price_hz, now)
    if arrivals.company < LIKELY or arrivals.active_robots(now) <= len(dues) + in_flight:
        return None
    until = min(latest, dues[0] - times.tail[len(dues) + 1])  # one more must make none of them late
    return until if until > now else None


def _planned(
    dues: Sequence[float],
    going: tuple[int, int],
    latest: float,
    times: ServiceTimes,
    limit: int,
    arrivals: Arrivals,
    workers: int,
    begins: float,
    price_hz: float,
    now: float,
) -> float | None:
    """The same where it is known who is missing, and when each is expected.

    Each plan waits for the next ones that fill a bucket, or for all of them, and serves the others as they follow. It
    is judged as batches are (`batching.weigh_batch`): by how many are expected on time, those who are missing too, then
    by the least waiting. When a wait ends is as uncertain as the arrival that it is for, and that counts like what
    batches take beyond their medians. So it lasts as long as it pays, beyond the tail of the first ones too where one
    who is about to come is worth that risk, and where a batch now and one of the others serve more there is none.
    """
    share = slice(workers - 1, None, workers)
    missing = arrivals.coming(now, latest, 2 * limit)[share]
    if not missing:
        return None
    rate_hz = arrivals.rate_hz(now) / workers
    coming = [one.due for one in missing]

    def judged(first: Sequence[float], others: list[float], wait_s: float, spread_s: float) -> tuple[int, float]:
        variance = (TAIL_QUANTILE * spread_s) ** 2
        _, elapsed, waited, worth = follow(
            0,
            len(first),
            [*first, *sorted(others)],
            begins,
            times,
            limit,
            price_hz,
            fits=times.median,
            wait_s=wait_s,
            variance=variance,
        )
        return -round(worth / GRAIN), waited + rate_hz * elapsed * elapsed

    start, size = going
    left = [*dues[:start], *dues[start + size :]][share]
    best = judged(dues[start : start + size], left + coming, 0.0, 0.0)
    until = None
    here, most = len(dues), min(len(missing), limit - len(dues))
    for more in sorted({bucket - here for bucket in times.buckets if here < bucket < here + most} | {most}):
        last = missing[more - 1]
        if last.at >= latest:
            break
        plan = judged(sorted([*dues, *coming[:more]]), coming[more:], max(0.0, last.at - begins), last.spread_s)
        if plan < best:
            best, until = plan, min(latest, last.at + PATIENT * last.spread_s)
    return until
