"""Which replica gets a batch: the one that is predicted to finish it first. Pure; the time is handed in."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

STUCK_FACTOR = 20.0
STUCK_FLOOR_S = 10.0


@dataclass(slots=True)
class _Batch:
    """One batch on a replica. `began` is when it was at the head, which is when the engine could begin it."""

    duration: float
    began: float | None


def limit_s(duration: float) -> float:
    """How long a batch of a predicted duration may take before its replica counts as stuck."""
    return max(STUCK_FLOOR_S, STUCK_FACTOR * duration)


class Assignment:
    """Batches outstanding on each replica. Replicas run their batches one after the other, in order of arrival.

    Times are seconds of one monotonic clock. Not thread-safe: the caller holds a lock.
    """

    def __init__(self) -> None:
        self._tables: dict[int, dict[int, float]] = {}
        self._outstanding: dict[int, dict[int, _Batch]] = {}
        self._numbers = itertools.count()

    @property
    def replicas(self) -> tuple[int, ...]:
        """The replicas that may get batches."""
        return tuple(self._tables)

    def add(self, replica: int, t_sync: Mapping[int, float]) -> None:
        """Makes a replica available.

        Args:
            t_sync: bucket -> seconds of a full batch, as the replica measured it.
        """
        self._tables[replica] = dict(sorted(t_sync.items()))
        self._outstanding[replica] = {}

    def remove(self, replica: int) -> None:
        """The replica is gone with what it held."""
        self._tables.pop(replica, None)
        self._outstanding.pop(replica, None)

    def duration(self, replica: int, size: int) -> float:
        """Predicted seconds of a batch: T_sync of its bucket; a larger one than any bucket runs in parts."""
        table = self._tables[replica]
        largest = next(reversed(table))
        parts, rest = divmod(size, largest)
        seconds = parts * table[largest]
        if rest:
            seconds += next(seconds for bucket, seconds in table.items() if bucket >= rest)
        return seconds

    def completion(self, replica: int, size: int, now: float) -> float:
        """When the replica would finish a batch of `size` that is sent now."""
        at = now
        for batch in self._outstanding[replica].values():
            end = (at if batch.began is None else batch.began) + batch.duration
            # One that takes longer than predicted is expected to take as long again as it is overdue.
            at = end if end >= at else at + (at - end)
        return at + self.duration(replica, size)

    def stuck(self, now: float) -> list[int]:
        """Replicas whose oldest batch takes so much longer than predicted that it will not end (`limit_s`)."""
        found = []
        for replica, queue in self._outstanding.items():
            head = next(iter(queue.values()), None)
            if head is not None and head.began is not None and now - head.began > limit_s(head.duration):
                found.append(replica)
        return found

    def assign(self, size: int, now: float) -> tuple[int, int] | None:
        """(replica, ticket) of the replica that finishes first, the least loaded of equals; None without any."""
        if not self._tables:
            return None
        chosen = min(
            self._tables,
            key=lambda replica: (self.completion(replica, size, now), len(self._outstanding[replica]), replica),
        )
        queue = self._outstanding[chosen]
        ticket = next(self._numbers)
        queue[ticket] = _Batch(self.duration(chosen, size), None if queue else now)
        return chosen, ticket

    def leads(self, replica: int, ticket: int) -> bool:
        """Whether a batch is the oldest of its replica, which the engine may be running."""
        return next(iter(self._outstanding.get(replica, ())), None) == ticket

    def finished(self, replica: int, ticket: int, now: float) -> None:
        """A batch has left the replica, answered or not. Does nothing where the replica is gone."""
        queue = self._outstanding.get(replica)
        if queue is None or queue.pop(ticket, None) is None or not queue:
            return
        head = next(iter(queue.values()))
        if head.began is None:
            head.began = now
