"""The next batches of a small fleet in a steady rhythm, planned with those who are about to come."""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from taktline_gateway.arrivals import Arrivals
from taktline_gateway.rhythms import OFF_LEAST_S
from taktline_gateway.service_times import ServiceTimes

MOST_ROBOTS = 10
"""Larger fleets are not planned for: their turn is not in sight, and plans that leave a queue behind look as good."""
IN_SIGHT = 12
"""So many tickets, here or to come, are in a plan: more than a turn of the fleet."""
STEADY = 0.25
"""Robots may come so far off their rhythm, by the standard deviation, as a share of a batch of one."""
APART = 3.0
"""They have to be expected so many standard deviations apart: of a fleet in step nobody knows who comes first."""
ROOM = 0.3
"""A batch must fit by so much of the way from its median to its 99th percentile."""
LATE = 2.0
"""Whoever is waited for may be late by so many standard deviations: then it is looked at again."""
LONG_WAIT = 0.5
"""To wait longer than the longest wait costs so many tickets, so it has to save one."""
KEPT = 3
"""Plans that are followed further for each number of tickets, those that lose least."""


_Plan = tuple[float, float, float, tuple[int, ...]]
"""(tickets lost, when the worker is free, sum of completions, (start, size) of the first batch or nothing)."""


class Step(NamedTuple):
    """What a plan does first: `size` tickets from the `start`-th on are sent, at once or when the last has come.

    Attributes:
        wait_until: when that is looked at again; None to send them now.
    """

    start: int
    size: int
    wait_until: float | None


def foreseen(
    dues: Sequence[float],
    arrivals: Arrivals,
    times: ServiceTimes,
    limit: int,
    *,
    begins: float,
    latest: float,
    now: float,
) -> Step | None:
    """What to do first with tickets due at `dues`, ascending; None where it is not known well enough who comes.

    Args:
        limit: the most that a batch may have.
        begins: when the worker can begin.
        latest: who waits longer than until then has to save a ticket by it.
    """
    if not arrivals.in_rhythm(STEADY * times.median[1]) or arrivals.remembered > MOST_ROBOTS:
        return None
    coming = arrivals.coming(now, math.inf, IN_SIGHT, 0)
    at, spread_s = coming.at, max(arrivals.spread_s, OFF_LEAST_S)
    gaps = sorted(after - before for before, after in pairwise(at))
    if not gaps or gaps[3 * len(gaps) // 4] < APART * spread_s:
        return None
    rows = [(due, now) for due in dues]
    for due, when in zip(coming.due[: IN_SIGHT - len(dues)], at, strict=False):
        rows.append((due, when if when > now else now + spread_s))
    rows.sort()
    here, newest = [], now
    for _, when in rows:
        newest = max(newest, when)
        here.append(newest)
    first = plan([due for due, _ in rows], here, times, min(limit, times.max_batch), begins, latest)
    if first is None:
        return None
    start, size = first
    ready = here[start + size - 1]
    return Step(start, size, None if ready <= now else ready + LATE * spread_s)


def plan(
    due: Sequence[float], here: Sequence[float], times: ServiceTimes, limit: int, begins: float, latest: float
) -> tuple[int, int] | None:
    """(start, size) of the first batch of the plan that loses the fewest tickets; None where nobody can be served.

    A plan is a sequence of slices of the tickets in the order in which they are due, each begun when the worker is free
    and its last member is `here`; a slice is as large as a bucket, or all who have come by then, and it is in time for
    its most urgent member. Between two slices tickets may be lost. Of two plans that have come to the same ticket the
    one that lost more and is free later is left, and of the others the `KEPT` best are followed; in the end the fewest
    lost win, then the least sum of completions.

    With n tickets and b buckets: O(n b) steps.

    Args:
        here: when each has come, and all that are due before it; ascending.
        latest: a first batch that begins later costs `LONG_WAIT`.
    """
    count = len(due)
    median = times.median
    room = [low + ROOM * (high - low) for low, high in zip(median[: limit + 1], times.tail, strict=False)]
    found: list[list[_Plan]] = [[] for _ in range(count + 1)]
    found[0].append((0.0, begins, 0.0, ()))
    for index in range(count):
        left, urgent, plans = count - index, due[index], found[index]
        if len(plans) > 1:
            plans = _best(plans)
        lose = found[index + 1]
        for lost, free, completions, first in plans:
            lose.append((lost + 1.0, free, completions, first))
            come = bisect_right(here, free, index) - index
            for size in _sizes(times.buckets, left if left < limit else limit, come):
                ready = here[index + size - 1]
                start = ready if ready > free else free
                if start + room[size] > urgent:
                    break
                end = start + median[size]
                served = completions + size * (end - begins)
                if first:
                    found[index + size].append((lost, end, served, first))
                else:
                    waits = LONG_WAIT if ready > latest else 0.0
                    found[index + size].append((lost + waits, end, served, (index, size)))
    first = min((lost, completions, first) for lost, _, completions, first in found[count])[2]
    return (first[0], first[1]) if first else None


@functools.lru_cache(maxsize=1024)
def _sizes(buckets: tuple[int, ...], most: int, come: int) -> tuple[int, ...]:
    """Full buckets, `most`, and those who have come."""
    return tuple(sorted({*(bucket for bucket in buckets if bucket < most), most, min(come, most) or most}))


def _best(plans: list[_Plan]) -> list[_Plan]:
    plans.sort()
    kept = [plans[0]]
    for one in plans:
        if one[1] < kept[-1][1]:
            kept.append(one)
            if len(kept) == KEPT:
                break
    return kept
