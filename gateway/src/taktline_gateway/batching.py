"""Which tickets make the next batch: as many deadlines as possible, then as little waiting as the load allows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from taktline_gateway.service_times import ServiceTimes

LOOKAHEAD = 256
"""Tickets that a decision looks at. A queue deeper than this is served for throughput."""
OVERLOAD_FROM = 0.1
OVERLOAD_FULL = 0.4
"""Shares of lost tickets from which a second of the worker is worth something, and at which it is worth the most."""
OVERLOAD_WORTH = 0.9
"""What such a second is worth then, in units of the best throughput: nearly what could be served in it instead."""


def choose_batch(
    deadlines: Sequence[float],
    now: float,
    times: ServiceTimes,
    limit: int,
    rate_hz: float = 0.0,
    beyond: int = 0,
    lost: float = 0.0,
) -> tuple[int, int]:
    """(start, size) of the slice of `deadlines` to launch now on a worker with these times.

    `deadlines` are those of the tickets in sight, in service order; `rate_hz` is the arrival rate, `beyond` counts the
    tickets out of sight, `lost` is the share of recent tickets that were refused.

    Candidates begin at the head, with every bucket that keeps the most urgent member on time by the tail, and behind as
    many heads as stand in the way of a larger bucket. Each is judged by how many of the tickets in sight would be on
    time when the rest follows greedily. Between equals the one with the least total waiting wins: of those in sight,
    and of those expected to arrive meanwhile. So a large batch is formed where the load needs its throughput and a
    small one where it would only delay. Under lasting overload the worker's time has a price, as others could be served
    in it: then tight heads give way to fuller batches.

    With k tickets in sight, b buckets and batches of B: O(b * (log k + k / B)) steps and one copy of k numbers.
    """
    count = min(len(deadlines), LOOKAHEAD)
    limit = min(limit, times.max_batch)
    head = max(1, _feasible(deadlines, 0, count, now, times, limit))
    if head == 1 and count == 1:
        return (0, 1)
    candidates = {(0, head), (0, times.thrifty(head))}
    for bucket in times.buckets:
        size = min(bucket, limit)
        if size < head:
            candidates.add((0, size))
        elif size > head:
            needed = now + times.tail[size]
            start = bisect_left(deadlines, needed, 0, count)
            if start < count and start:
                candidates.add((start, _feasible(deadlines, start, count, now, times, limit)))
    if len(candidates) == 1:
        return candidates.pop()
    return max(candidates, key=lambda candidate: _score(candidate, deadlines, now, times, limit, rate_hz, beyond, lost))


def _feasible(deadlines: Sequence[float], start: int, count: int, now: float, times: ServiceTimes, limit: int) -> int:
    """Largest batch from `start` that keeps its most urgent member on time; deadlines may step back at a class end."""
    size = times.largest_within(deadlines[start] - now, min(limit, count - start))
    while size > 1:
        tightest = min(deadlines[start : start + size])
        fitting = times.largest_within(tightest - now, size)
        if fitting >= size:
            break
        size = max(fitting, 1)
    return size


def _score(
    candidate: tuple[int, int],
    deadlines: Sequence[float],
    now: float,
    times: ServiceTimes,
    limit: int,
    rate_hz: float,
    beyond: int,
    lost: float,
) -> tuple[float, float]:
    """(tickets on time, minus their total wait in s) when `candidate` goes first and what is behind it follows.

    The heads before a candidate count as lost: they stood in its way because they could not wait.
    """
    start, size = candidate
    elapsed = times.median[size]
    # A lone head may be past its tail, and still have an even chance.
    on_time = size if size > 1 or deadlines[start] >= now + elapsed else 0
    waited = size * elapsed
    index = start + size
    total = min(len(deadlines), LOOKAHEAD)
    while index < total:
        size = times.thrifty(times.largest_within(deadlines[index] - now - elapsed, min(limit, total - index)))
        if size:
            on_time += size
            elapsed += times.median[size]
            waited += size * elapsed
            index += size
        else:
            index = bisect_left(deadlines, now + elapsed + times.tail[1], index + 1, total)
    pressure = min(1.0, max(0.0, lost - OVERLOAD_FROM) / (OVERLOAD_FULL - OVERLOAD_FROM))
    worth = on_time - pressure * OVERLOAD_WORTH * times.best_rate * elapsed
    if beyond:
        return (worth, -elapsed)
    # Whoever arrives while these are served waits for their end: rate * elapsed arrivals, half of elapsed each.
    return (worth, -(waited + 0.5 * rate_hz * elapsed * elapsed))
