"""The queue of one policy: by priority, then by deadline, with one place per robot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import IntEnum

from sortedcontainers import SortedDict, SortedList


class Priority(IntEnum):
    """Classes of traffic; a smaller value is served first."""

    SAFETY = 0
    PRODUCTION = 1
    BACKGROUND = 2


@dataclasses.dataclass(slots=True, eq=False)
class Ticket:
    """One observation waiting for its batch.

    Attributes:
        robot: the robot's name; a newer ticket of the same robot supersedes a queued one.
        deadline: monotonic instant by which the worker's answer must be back at the gateway, in seconds.
        arrived_at: monotonic instant of admission.
        attempts: batches that this ticket was sent in and that failed.
    """

    robot: str
    seq: int
    deadline: float
    arrived_at: float
    priority: Priority = Priority.PRODUCTION
    attempts: int = 0
    order: int = 0

    @property
    def key(self) -> tuple[float, int]:
        """Order within a priority class: the deadline, then the arrival."""
        return (self.deadline, self.order)


class DeadlineQueue:
    """Tickets in earliest-deadline order within priority.

    Every operation takes O(log n) comparisons: the lists are sorted ones, not heaps, as tickets also leave from the
    middle (superseded, cancelled, disconnected) and admission asks how many are ahead.
    """

    def __init__(self) -> None:
        self._classes: SortedDict[Priority, SortedList[Ticket]] = SortedDict()
        self._robots: dict[str, Ticket] = {}
        self._orders = 0

    def __len__(self) -> int:
        return len(self._robots)

    def __contains__(self, ticket: Ticket) -> bool:
        return self._robots.get(ticket.robot) is ticket

    def __iter__(self) -> Iterator[Ticket]:
        """In service order: priority, then deadline."""
        for tickets in self._classes.values():
            yield from tickets

    def add(self, ticket: Ticket) -> Ticket | None:
        """Queues `ticket`; returns the older ticket of the same robot that it replaces, if one was queued."""
        older = self._robots.get(ticket.robot)
        if older is not None:
            self.remove(older)
        self._orders += 1
        ticket.order = self._orders
        tickets = self._classes.get(ticket.priority)
        if tickets is None:
            tickets = self._classes[ticket.priority] = SortedList(key=_key)
        tickets.add(ticket)
        self._robots[ticket.robot] = ticket
        return older

    def remove(self, ticket: Ticket) -> bool:
        """Takes `ticket` out; False where it is not queued (any more)."""
        if ticket not in self:
            return False
        self._classes[ticket.priority].remove(ticket)
        del self._robots[ticket.robot]
        return True

    def queued(self, robot: str) -> Ticket | None:
        """The robot's ticket, if it is queued."""
        return self._robots.get(robot)

    def ahead_of(self, deadline: float, priority: Priority) -> int:
        """How many queued tickets would be served before a new one with this deadline and priority."""
        count = 0
        for other, tickets in self._classes.items():
            if other < priority:
                count += len(tickets)
            elif other == priority:
                count += tickets.bisect_key_right((deadline, self._orders + 1))
        return count

    def first(self, limit: int) -> list[Ticket]:
        """The first `limit` tickets in service order; they stay queued."""
        found: list[Ticket] = []
        for tickets in self._classes.values():
            found.extend(tickets.islice(0, limit - len(found)))
            if len(found) >= limit:
                break
        return found

    def earliest_deadline(self) -> Ticket | None:
        """The ticket with the earliest deadline over all classes."""
        heads = [tickets[0] for tickets in self._classes.values() if tickets]
        return min(heads, key=_key, default=None)


def _key(ticket: Ticket) -> tuple[float, int]:
    return ticket.key
