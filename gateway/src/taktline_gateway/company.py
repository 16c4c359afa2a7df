"""Whether an idle worker waits for a batch to get company."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from taktline_gateway.arrivals import Arrivals
from taktline_gateway.batching import GRAIN, LOOKAHEAD, TAIL_QUANTILE, follow
from taktline_gateway.foresight import MOST_ROBOTS, Step, foreseen
from taktline_gateway.service_times import ServiceTimes

LIKELY = 0.5
"""Where robots keep no rhythm, so large a share of the arrivals must have followed another one within the wait."""
PATIENT = 2.0
"""An arrival that is waited for may be late by so many standard deviations: then it is looked at again."""


class Company:
    """Decides it for one queue, and keeps to it until those have come who are waited for, or time is up."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._until = 0.0
        self._for: tuple[object, ...] = ()  # the worker, how many there are, the longest wait, the first one due
        self._size = 0

    def forget(self) -> None:
        """What was decided is looked at again: a worker came, failed or has other times. One that left is noticed."""
        self._for = ()

    def foreseen(
        self,
        dues: Sequence[float],
        oldest: Callable[[], float],
        times: ServiceTimes,
        limit: int,
        workers: int,
        max_wait_s: float,
        *,
        begins: float,
        now: float,
    ) -> Step | None:
        """What an only worker does first where it is known who comes, and when (`foresight`); arguments as there."""
        if workers > 1 or limit == 1 or not max_wait_s or len(dues) > MOST_ROBOTS:
            return None
        return foreseen(dues, self._arrivals, times, limit, begins=begins, latest=oldest() + max_wait_s, now=now)

    def until(
        self,
        dues: Sequence[float],
        going: tuple[int, int],
        oldest: Callable[[], float],
        times: ServiceTimes,
        limit: int,
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
            oldest: gives when the first of them came; none waits longer than `max_wait_s`.
            limit: the most that a batch may have.
            workers: how many there are: each has its share of those who are still to come.
            in_flight: how many tickets are on workers: their robots do not come now.
            begins: when the worker can begin.
            price_hz: what a second of it is worth (`overload`).
        """
        limit = min(limit, times.max_batch)
        here = len(dues)
        if here >= limit or not max_wait_s:
            return None
        latest = oldest() + max_wait_s
        if latest <= now:
            return None
        if not self._arrivals.in_rhythm(max_wait_s):
            if self._arrivals.company < LIKELY or self._arrivals.active_robots(now) <= here + in_flight:
                return None
            until = min(latest, dues[0] - times.tail[here + 1])  # one more must make none of them late
            return until if until > now else None
        asked_for = (times, workers, latest, dues[0])
        if now < self._until and here < self._size and self._for == asked_for:
            return self._until
        plan = self._planned(dues, going, latest, times, limit, workers, begins, price_hz, now)
        if plan is None:
            return None
        self._until, self._size = plan
        self._for = asked_for
        return self._until

    def _planned(
        self,
        dues: Sequence[float],
        going: tuple[int, int],
        latest: float,
        times: ServiceTimes,
        limit: int,
        workers: int,
        begins: float,
        price_hz: float,
        now: float,
    ) -> tuple[float, int] | None:
        """(until when to wait, for how many in all), where it is known who is missing, and when each is expected.

        Each plan waits for the next ones that fill a bucket, or for all of them, and serves the others as they follow.
        It is judged as batches are (`batching.weigh_batch`): by how many are expected on time, those who are missing
        too, then by the least waiting. When a wait ends is as uncertain as the arrival that it is for, and that counts
        like what batches take beyond their medians. So it lasts as long as it pays, beyond the tail of the first ones
        too where one who is about to come is worth that risk, and where a batch now and one of the others serve more
        there is none.
        """
        share = slice(workers - 1, None, workers)
        missing = self._arrivals.coming(now, latest, LOOKAHEAD, limit * workers)
        at, coming, spread_s = missing.at[share], missing.due[share], missing.spread_s[share]
        if not at:
            return None
        rate_hz = self._arrivals.rate_hz(now) / workers

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
        best, plan = judged(dues[start : start + size], left + coming, 0.0, 0.0), None
        here, most = len(dues), min(len(at), limit - len(dues))
        for more in sorted({bucket - here for bucket in times.buckets if here < bucket < here + most} | {most}):
            last, spread = at[more - 1], spread_s[more - 1]
            if last >= latest:
                break
            found = judged(sorted([*dues, *coming[:more]]), coming[more:], max(0.0, last - begins), spread)
            if found < best:
                best, plan = found, (min(latest, last + PATIENT * spread), here + more)
        return plan
