"""Which tickets make the next batch: as large as the measured times allow without making a member late."""

from __future__ import annotations

from collections.abc import Sequence

from taktline_gateway.service_times import ServiceTimes

LOOKAHEAD = 64
"""Tickets that a decision looks at; beyond two full batches the future is guesswork anyway."""


def choose_batch(deadlines: Sequence[float], now: float, times: ServiceTimes, limit: int) -> tuple[int, int]:
    """(start, size) of the slice of `deadlines` to launch now on a worker with these times.

    `deadlines` are in service order. Candidates are, for every bucket, the largest batch in it that keeps its most
    urgent member on time by the tail, beginning at the head, or after as many heads as stand in the way of that bucket.
    Each is judged by how many of the tickets in sight would still be on time when the rest follows greedily; ties go to
    the shorter total time. So a tight head does not cost a larger batch behind it more than itself.

    With k tickets in sight and b buckets: O(b * k) steps, k <= LOOKAHEAD.
    """
    count = min(len(deadlines), LOOKAHEAD)
    limit = min(limit, times.max_batch)
    head = _feasible(deadlines, 0, count, now, times, limit)
    if head >= min(count, limit):
        # Everything in sight goes, and on time: nothing else can be better.
        return (0, head)
    candidates = {(0, max(head, 1))}
    for bucket in times.buckets:
        size = min(bucket, limit)
        if size < head:
            candidates.add((0, size))
        elif size > head:
            needed = now + times.tail[size]
            start = next((index for index in range(count) if deadlines[index] >= needed), count)
            if start < count and start:
                candidates.add((start, _feasible(deadlines, start, count, now, times, limit)))
    if len(candidates) == 1:
        return candidates.pop()
    return max(candidates, key=lambda candidate: _score(candidate, deadlines, count, now, times, limit))


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
    candidate: tuple[int, int], deadlines: Sequence[float], count: int, now: float, times: ServiceTimes, limit: int
) -> tuple[int, float]:
    """(tickets on time, minus the time until they are done) when `candidate` goes first and the rest follows."""
    start, size = candidate
    at = now + times.median[size]
    on_time = sum(1 for index in range(start, start + size) if deadlines[index] >= now + times.median[size])
    rest = [*deadlines[:start], *deadlines[start + size : count]]
    index = 0
    total = len(rest)
    while index < total:
        size = times.largest_within(rest[index] - at, min(limit, total - index))
        if not size:
            index += 1
            continue
        on_time += size
        at += times.median[size]
        index += size
    return (on_time, -at)
