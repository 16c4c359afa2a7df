"""Ageing: tickets of the low classes that have waited long move up, within a share that the high classes can spare."""

from __future__ import annotations

from collections import deque

from taktline_gateway.deadline_queue import DeadlineQueue, Priority, Ticket

AGED_AFTER_S = 5.0
"""A background or rollout ticket that has waited so long may move up to production."""
AGED_SHARE = 0.05
"""What ageing may take of the service at most: so many tickets for each production or safety ticket served."""
CREDIT_MAX = 8.0
LOW = (Priority.BACKGROUND, Priority.ROLLOUT)
_LOW_RANK = 2 * Priority.BACKGROUND


class Ageing:
    """Keeps the low classes by arrival and says which ticket moves up; constant time an operation (amortised)."""

    def __init__(self, queue: DeadlineQueue) -> None:
        self._queue = queue
        self._waiting: dict[Priority, deque[Ticket]] = {priority: deque() for priority in LOW}
        self._credit = 0.0

    def enter(self, ticket: Ticket) -> None:
        """A ticket was queued; only those of the low classes that have not moved up count."""
        if ticket.rank >= _LOW_RANK:
            waiting = self._waiting[ticket.priority]
            self._trim(waiting)
            waiting.append(ticket)

    def served(self, count: int) -> None:
        """So many tickets of the high classes leave for a worker, and earn the low ones their share."""
        self._credit = min(CREDIT_MAX, self._credit + AGED_SHARE * count)

    def unserved(self, count: int) -> None:
        """So many of those have come back from their worker as they were."""
        self._credit = max(0.0, self._credit - AGED_SHARE * count)

    def next(self, now: float) -> Ticket | None:
        """The low ticket that may move up now, the longest waiting one of the higher class first; None without one."""
        if self._credit < 1.0:
            return None
        for waiting in self._waiting.values():
            self._trim(waiting)
            if waiting and now - waiting[0].arrived_at >= AGED_AFTER_S:
                self._credit -= 1.0
                return waiting.popleft()
        return None

    def _trim(self, waiting: deque[Ticket]) -> None:
        while waiting and (waiting[0].rank < _LOW_RANK or waiting[0] not in self._queue):
            waiting.popleft()
