"""How many deadlines a schedule could meet that knew all arrivals beforehand: exact, up to the rounding of time.

The schedule of one worker is a sequence of batches. Where the worker is free at some instant, all that matters of what
it did before is how many requests it has served and which of those that have come are still to be served: a *label*.
From each label the search goes on with every bucket that more requests can use than the next smaller one, filled with
the most urgent that it serves in time, and with idling until the next arrival.

- A batch takes the most urgent of those that it serves in time: leaving one of them for later in exchange for a less
  urgent one is never better, as the less urgent one can take its place then.
- Of two labels at one instant the first dominates where it is ahead by at least as many as its missing requests could
  bring: each request that the other one still has is matched with one of its own that is due no earlier and takes the
  other's place in any schedule; those without a match are one each.

What is not dominated stays a handful, so traces of thousands of requests are solved in seconds. Should it ever be more
than `MOST_LABELS` at one instant, the rest are joined into one that is at least as good as each of them (`upper`), or
dropped (`reached`): both sides stay what they are called.

Time is cut into slots. `upper` rounds in the schedule's favour (requests come early, are due late, batches are short),
so no real schedule serves more; `reached` rounds against it, so a real schedule serves as many. Durations are the
medians.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from benchmarks.gateway.times import Engine
from benchmarks.gateway.traces import Job

SLOT_S = 0.0005
MOST_LABELS = 64
_EPSILON = 1e-9

Label = tuple[int, int, int]
"""(requests served, bit set of those that have come and are not served, how many have come)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """Share of the requests that the best offline schedule meets: at least `reached`, at most `upper`."""

    reached: float
    upper: float


def offline_bounds(jobs: Sequence[Job], engine: Engine, *, slot_s: float = SLOT_S) -> Bounds:
    """Bounds of the share of `jobs` that the best schedule of one worker serves in time."""
    if not jobs:
        return Bounds(1.0, 1.0)
    reached, upper = (_Search(jobs, engine, slot_s, kind).solve() for kind in (False, True))
    return Bounds(reached / len(jobs), upper / len(jobs))


class _Search:
    """One trace on one worker, in slots; requests are bits in the order in which they are due."""

    def __init__(self, jobs: Sequence[Job], engine: Engine, slot_s: float, favourable: bool) -> None:
        early, late = (math.floor, math.ceil) if favourable else (math.ceil, math.floor)
        nudge = _EPSILON if favourable else -_EPSILON
        rows = sorted((late(job.deadline / slot_s - nudge), early(job.arrival / slot_s + nudge)) for job in jobs)
        self._favourable = favourable
        self._buckets = engine.buckets
        self._due = [due for due, _ in rows]
        self._lengths = [max(1, early(engine.median_s(bucket) / slot_s + nudge)) for bucket in engine.buckets]
        by_arrival = sorted(range(len(rows)), key=lambda index: rows[index][1])
        self._arrivals = [rows[index][1] for index in by_arrival]
        self._come = [0]  # bit sets of the first 0, 1, 2, ... that come
        for index in by_arrival:
            self._come.append(self._come[-1] | 1 << index)
        self._labels: dict[int, list[Label]] = {}
        self._slots: list[int] = []

    def solve(self) -> int:
        """Most requests that are served in time."""
        best = 0
        self._reach(self._arrivals[0], 0, 0, 0)
        while self._slots:
            slot = heapq.heappop(self._slots)
            coming = bisect_right(self._arrivals, slot)
            for served, waiting, come in self._undominated(self._labels.pop(slot)):
                best = max(best, served)
                if coming < len(self._arrivals):
                    self._reach(self._arrivals[coming], served, waiting, come)
                used = 0
                for bucket, length in zip(self._buckets, self._lengths, strict=True):
                    eligible = _from(waiting, bisect_left(self._due, slot + length))
                    count = eligible.bit_count()
                    if count <= used:
                        break  # a smaller bucket serves as many and is done sooner
                    members = eligible if count <= bucket else _lowest(eligible, bucket)
                    self._reach(slot + length, served + min(count, bucket), waiting & ~members, come)
                    used = bucket
        return best

    def _reach(self, slot: int, served: int, waiting: int, come: int) -> None:
        """A schedule is free at this slot; of those that `waiting` and have come since, the hopeless are forgotten."""
        arrived = bisect_right(self._arrivals, slot)
        waiting |= self._come[arrived] & ~self._come[come]
        waiting = _from(waiting, bisect_left(self._due, slot + self._lengths[0]))
        if slot not in self._labels:
            self._labels[slot] = []
            heapq.heappush(self._slots, slot)
        self._labels[slot].append((served, waiting, arrived))

    def _undominated(self, labels: list[Label]) -> list[Label]:
        kept: list[Label] = []
        for label in sorted(set(labels), key=lambda one: (-one[0], -one[1].bit_count())):
            if not any(_dominates(other, label) for other in kept):
                kept = [other for other in kept if not _dominates(label, other)]
                kept.append(label)
        if len(kept) > MOST_LABELS:
            kept.sort(key=lambda one: one[0] + one[1].bit_count(), reverse=True)
            rest = kept[MOST_LABELS - 1 :]
            del kept[MOST_LABELS - 1 :]
            if self._favourable:
                together = functools.reduce(lambda bits, one: bits | one[1], rest, 0)
                kept.append((max(one[0] for one in rest), together, rest[0][2]))
        return kept


def _dominates(one: Label, other: Label) -> bool:
    """Whether nothing that follows `other` serves more in all than something that follows `one`."""
    lead = one[0] - other[0]
    missing, spare = other[1] & ~one[1], one[1] & ~other[1]
    unmatched = 0
    while missing:
        # From the least urgent down: a spare request stands in for one that is due before it.
        top = missing.bit_length() - 1
        later = spare >> top
        if later:
            spare ^= 1 << (top + later.bit_length() - 1)
        else:
            unmatched += 1
            if unmatched > lead:
                return False
        missing ^= 1 << top
    return unmatched <= lead


def _from(bits: int, index: int) -> int:
    """The bits from `index` up."""
    return bits >> index << index


def _lowest(bits: int, count: int) -> int:
    """The `count` lowest bits that are set; there are more."""
    low, high = 0, bits.bit_length()
    while low < high:
        middle = (low + high) // 2
        if (bits & ((1 << middle) - 1)).bit_count() >= count:
            high = middle
        else:
            low = middle + 1
    return bits & ((1 << low) - 1)


def optimum(jobs: Sequence[Job], engine: Engine) -> int:
    """Most of `jobs` that one worker can serve in time, exactly, with median durations; for a dozen of them at most.

    Exhaustive over what the worker does next: idle until the next arrival, or a batch of any size. Of those that a
    batch of one size could serve in time it takes the most urgent: leaving one of them for later in exchange for a less
    urgent one is never better, as the less urgent one can take its place then.
    """
    ordered = sorted(jobs, key=lambda job: job.deadline)

    @functools.cache
    def best(now: float, left: frozenset[int]) -> int:
        alive = frozenset(
            index
            for index in left
            if ordered[index].deadline >= max(now, ordered[index].arrival) + engine.median_s(1) - 1e-9
        )
        here = sorted(index for index in alive if ordered[index].arrival <= now + 1e-9)
        later = [ordered[index].arrival for index in alive if ordered[index].arrival > now + 1e-9]
        found = best(min(later), alive) if later else 0
        for size in range(1, min(len(here), engine.buckets[-1]) + 1):
            end = round(now + engine.median_s(size), 9)
            fitting = [index for index in here if ordered[index].deadline >= end - 1e-9]
            if len(fitting) >= size:
                found = max(found, size + best(end, alive - frozenset(fitting[:size])))
        return found

    return best(0.0, frozenset(range(len(ordered))))
