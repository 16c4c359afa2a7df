"""Whether an idle worker waits for a batch to get company."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from taktline_gateway.arrivals import Arrivals
from taktline_gateway.batching import GRAIN, LOOKAHEAD, TAIL_QUANTILE, follow
from taktline_gateway.foresight import MOST_ROBOTS, Step, foreseen
from taktline_gateway.service_times import ServiceTimes

LIKELY = 0.5
"""Where robots keep no rhythm, so large a share of the arrivals must have followed another one within the wait."""
PATIENT = 2.0
"""An arrival that is waited for may be late by so many standard deviations: then it is looked at again."""
FEW = 8
"""Where no more are missing, waits for each number of them are weighed."""
SURE = 2.5
"""An arrival is sure to come before or after an instant that is so many standard deviations off."""
EDGE_S = 1e-5
"""A wait ends so long before the last start of its batch."""

_Judged = tuple[float, float]
"""(worth in tickets, summed waiting in s) of a plan."""


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

        Each plan waits for the next ones that fill a bucket, or for all of them, and where `FEW` are missing for any
        number of them; it serves the others as they follow. It is judged as batches are (`batching.weigh_batch`): by
        how many are expected on time, those who are missing too, then by the least waiting.

        A wait ends when the first of its batch could not bear it any longer. Where the last of those who are waited for
        may come before that or after it, both are weighed by their chance: the batch of all, and what those who are
        here by then come to, who go at once, all together or as many as fill a bucket. Where few are missing, the wait
        may also be as long as the second can bear it, or the third, and so on to the first of those who are missing:
        those before are left behind, to follow. Where that is all who are here, it is looked at again when one comes.

        With m plans of waits for k tickets in sight: O(m k / B) steps, m = b, or at most `FEW` (`FEW` + 1) / 2 where
        few are missing.
        """
        share = slice(workers - 1, None, workers)
        at, coming, spread_s = self._arrivals.coming(now, latest, LOOKAHEAD, limit * workers, workers)
        if not at:
            return None
        rate_hz, median = self._arrivals.rate_hz(now) / workers, times.median
        here, start, size = len(dues), *going
        line = [*dues, *coming]
        ordered = sorted(line)
        # Robots with like budgets are due in the order in which they come: so many first ones of them are.
        in_line = len(line) if ordered == line else next(n for n, due in enumerate(line) if due != ordered[n])

        def judged(dues: list[float], first: int, end: int, wait_s: float, spread_s: float = 0.0) -> _Judged:
            """Those from the first to the end go together, then the others."""
            if first or dues is not ordered:
                dues = [*dues[first:end], *sorted(dues[:first] + dues[end:])]
            variance = (TAIL_QUANTILE * spread_s) ** 2
            _, elapsed, waited, worth = follow(
                0,
                end - first,
                dues,
                begins,
                times,
                limit,
                price_hz,
                fits=median,
                wait_s=wait_s if wait_s > 0.0 else 0.0,
                variance=variance,
            )
            return worth, waited + rate_hz * elapsed * elapsed

        def after(more: int) -> list[float]:
            """Who is here when so many more have come, then the others."""
            end = here + more
            return ordered if end <= in_line else [*sorted(line[:end]), *line[end:]]

        if here <= in_line and not start and (workers == 1 or size == here):
            going_now = ordered
        else:
            others = [*dues[:start], *dues[start + size :]][share]
            going_now = [*dues[start : start + size], *others, *coming]
        worth, cost = judged(going_now, 0, size, 0.0)
        best, plan = (-round(worth / GRAIN), cost), None
        most = min(len(at), limit - here)
        few = most <= FEW
        buckets = {bucket - here for bucket in times.buckets if here < bucket < here + most}
        for more in range(1, most + 1) if few else sorted(buckets | {most}):
            last, spread = at[more - 1], spread_s[more - 1]
            if last >= latest:
                break
            all_due, together = after(more), here + more
            heads = min(here, FEW - more, together - size - 1)  # so that the batch is larger than the one now
            for behind in range(heads + 1 if few and heads > 0 else 1):
                ends = min(latest, all_due[behind] - median[together - behind] - EDGE_S)
                off = (ends - last) / spread
                open_ended = ends > now and abs(off) < SURE
                if open_ended:
                    worth, cost = judged(all_due, behind, together, min(last, ends) - begins)
                elif behind:
                    if off > 0.0:
                        break  # all of the batch are sure to come by then, and by any later end
                    continue
                else:
                    worth, cost = judged(all_due, 0, together, last - begins, spread)
                if -round(worth / GRAIN) > best[0]:
                    continue  # without some of them it is worth no more
                if open_ended:
                    chance = 0.5 + 0.5 * math.erf(off / math.sqrt(2.0))
                    came = bisect_right(at, ends, 0, more - 1)
                    if here + came == behind:
                        break  # nobody of a batch has come by then
                    less, more_cost = _without(after(came), here + came, behind, ends - begins, begins, times, judged)
                    worth, cost = less + chance * (worth - less), more_cost + chance * (cost - more_cost)
                found = -round(worth / GRAIN), cost
                if found < best:
                    until = min(latest, last + PATIENT * spread)
                    until = min(until, ends) if open_ended or ends > last else until
                    best, plan = found, (until, together if behind < here else here + 1)
        return plan


def _without(
    dues: list[float],
    here: int,
    behind: int,
    wait_s: float,
    begins: float,
    times: ServiceTimes,
    judged: Callable[[list[float], int, int, float], _Judged],
) -> _Judged:
    """What the first `here` come to when a wait ends: all but the first `behind`, or the largest bucket they fill."""
    best = judged(dues, behind, here, wait_s)
    size = max((bucket for bucket in times.buckets if bucket <= here), default=0)
    if 0 < size < here - behind:
        start = bisect_left(dues, begins + max(0.0, wait_s) + times.median[size], 0, here)
        if start + size <= here:
            other = judged(dues, start, start + size, wait_s)
            best = max(best, other, key=lambda one: one[0])
    return best
