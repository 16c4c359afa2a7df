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
"""Plans that are followed further from each ticket, those that lose least."""


_Plan = tuple[float, float, tuple[int, ...]]
"""(when the worker is free, sum of completions, (start, size) of the first batch or nothing)."""
_NEVER = (math.inf, ())


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
    if not count:
        return None
    median, buckets = times.median, times.buckets
    room = [low + ROOM * (high - low) for low, high in zip(median[: limit + 1], times.tail, strict=False)]
    # By tickets lost, the fewest first: the best plan to each ticket, so that nothing is made of plans that lose more
    # than the one that comes to the end.
    levels: dict[float, list[_Plan | None]] = {0.0: [(begins, 0.0, ()), *[None] * (count - 1)]}
    ends: dict[float, tuple[float, tuple[int, ...]]] = {}
    free_at, kept = [math.inf] * count, [0] * count  # of the plans to a ticket that are followed: the best, how many
    lost = 0.0
    while True:
        level = levels.pop(lost, [])
        later = levels.setdefault(lost + 1.0, [None] * count) if level else []
        for index, one in enumerate(level):
            if one is None or one[0] >= free_at[index] or kept[index] == KEPT:
                continue
            free, completions, first = one
            free_at[index] = free
            kept[index] += 1
            left, urgent = count - index, due[index]
            if left == 1:
                ends[lost + 1.0] = min(ends.get(lost + 1.0, _NEVER), (completions, first))
            elif (other := later[index + 1]) is None or one < other:
                later[index + 1] = one
            come = bisect_right(here, free, index) - index
            for size in _sizes(buckets, left if left < limit else limit, come):
                ready = here[index + size - 1]
                start = ready if ready > free else free
                if start + room[size] > urgent:
                    break
                end = start + median[size]
                served = completions + size * (end - begins)
                waits = not first and ready > latest
                then = lost + LONG_WAIT if waits else lost
                if size == left:
                    ends[then] = min(ends.get(then, _NEVER), (served, first or (index, size)))
                    continue
                found = levels.setdefault(then, [None] * count) if waits else level
                new = (end, served, first or (index, size))
                if (other := found[index + size]) is None or new < other:
                    found[index + size] = new
        if lost in ends:
            first = ends[lost][1]
            return (first[0], first[1]) if first else None
        lost = min([*levels, *ends])


@functools.lru_cache(maxsize=1024)
def _sizes(buckets: tuple[int, ...], most: int, come: int) -> tuple[int, ...]:
    """Full buckets, `most`, and those who have come."""
    return tuple(sorted({*(bucket for bucket in buckets if bucket < most), most, min(come, most) or most}))
