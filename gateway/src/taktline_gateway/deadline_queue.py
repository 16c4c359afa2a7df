"""The queue of one policy: by priority and fair share, then by deadline, with one place per robot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from enum import IntEnum

from taktline_gateway.accounts import Account
from taktline_gateway.due_list import DueList
from taktline_gateway.work import WHOLE, Work


class Priority(IntEnum):
    """Classes of traffic; a smaller value is served first."""

    SAFETY = 0
    PRODUCTION = 1
    BACKGROUND = 2
    ROLLOUT = 3


RANKS = 2 * len(Priority)
"""Each class twice: tickets within their sender's fair share, and those beyond it."""


@dataclasses.dataclass(slots=True, eq=False)
class Ticket:
    """One observation waiting for its batch.

    Attributes:
        robot: the robot's name; a newer ticket of the same tenant's robot supersedes a queued one.
        deadline: monotonic instant by which the worker's answer must be back at the gateway, in seconds.
        arrived_at: monotonic instant of admission.
        tenant: who the robot belongs to; empty where nobody is told apart.
        tenant_weight: the tenant's share against other tenants'; likewise robot_weight within its tenant.
        attempts: batches that this ticket was sent in and that failed or went silent.
        work: what it takes of a worker, as shares of T_sync.
        share: of T_sync, what its answer needs; set on admission.
        last_due: its deadline as T_sync counts: by then one that takes just that would have to be back.
        due: the instant it is ordered by: `last_due`, or an earlier one where ageing has moved it up.
        rank: its class and share, see `rank_of`; negative until it has been looked at.
        account: the sender's account in the books of its class.
        charged: in which time between two pardons it was charged to that; negative where it was not.
        extra: it asks for more than actions (an imagined video), which no T_sync table knows the time of.
    """

    robot: str
    seq: int
    deadline: float
    arrived_at: float
    priority: Priority = Priority.PRODUCTION
    tenant: str = ""
    tenant_weight: float = 1.0
    robot_weight: float = 1.0
    attempts: int = 0
    order: int = 0
    rank: int = -1
    account: Account | None = None
    charged: int = -1
    extra: bool = False
    work: Work = WHOLE
    share: float = 1.0

    due: float = dataclasses.field(init=False)
    last_due: float = dataclasses.field(init=False)
    source: tuple[str, str] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.due = self.last_due = self.deadline
        self.source = (self.tenant, self.robot)

    def passing(self, ends_at: float) -> int:
        """Actions that its robot executes before a batch that ends then answers it; 0 where it continues no chunk."""
        return 0


def rank_of(priority: Priority, *, over_share: bool) -> int:
    """Place of a ticket's list in service order."""
    return 2 * priority + over_share


def class_of(rank: int) -> Priority:
    """The class that a rank belongs to."""
    return _CLASSES[rank]


_CLASSES = tuple(Priority(rank // 2) for rank in range(RANKS))


class DeadlineQueue:
    """Tickets in service order: by rank, then earliest due instant first.

    Every operation takes O(log n) comparisons: the lists are sorted ones, not heaps, as tickets also leave from the
    middle (superseded, cancelled, disconnected) and admission asks how many are ahead.
    """

    def __init__(self) -> None:
        self._ranks = [DueList[Ticket]() for _ in range(RANKS)]
        self._sources: dict[tuple[str, str], Ticket] = {}
        self._orders = 0
        self._spared = 0.0
        self._earliest: Ticket | None = None
        self._looked = False
        """Whether it has been looked for since somebody joined or left."""

    @property
    def usual_share(self) -> float:
        """Of T_sync, what those that wait take at least, on average."""
        return 1.0 - self._spared / len(self._sources) if self._spared and self._sources else 1.0

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, ticket: Ticket) -> bool:
        return self._sources.get(ticket.source) is ticket

    def __iter__(self) -> Iterator[Ticket]:
        """In service order."""
        for entries in self._ranks:
            yield from entries

    def first_came(self) -> float:
        """When the first of those that wait came; O(n), not to be asked of an empty queue."""
        return min(ticket.arrived_at for ticket in self)

    def add(self, ticket: Ticket, rank: int | None = None) -> Ticket | None:
        """Queues `ticket`, within its share unless `rank` says otherwise; returns the older one that it replaces."""
        older = self._sources.get(ticket.source)
        if older is not None:
            self.remove(older)
        self._orders += 1
        ticket.order = self._orders
        ticket.rank = 2 * ticket.priority if rank is None else rank
        self._ranks[ticket.rank].add(ticket.due, ticket.order, ticket)
        self._sources[ticket.source] = ticket
        self._looked = False
        if ticket.share != 1.0:
            self._spared += 1.0 - ticket.share
        return older

    def remove(self, ticket: Ticket) -> bool:
        """Takes `ticket` out; False where it is not queued (any more)."""
        if self._sources.get(ticket.source) is not ticket:
            return False
        self._ranks[ticket.rank].remove(ticket.due, ticket.order)
        del self._sources[ticket.source]
        self._looked = False
        self._left(ticket)
        return True

    def _left(self, ticket: Ticket) -> None:
        if ticket.share != 1.0:
            self._spared = self._spared - 1.0 + ticket.share if self._sources else 0.0

    def queued(self, source: tuple[str, str]) -> Ticket | None:
        """The ticket of this (tenant, robot), if it is queued."""
        return self._sources.get(source)

    def ahead_of(self, due: float, rank: int) -> int:
        """How many queued tickets would be served before a new one that is due then."""
        return sum(map(len, self._ranks[:rank])) + self._ranks[rank].up_to(due)

    def count(self, rank: int) -> int:
        """Tickets of one rank."""
        return len(self._ranks[rank])

    def sight(self, rank: int, soonest: float, limit: int) -> tuple[int, list[float]]:
        """(position, instants): when the first `limit` tickets of a rank that are due at `soonest` or later are due."""
        entries = self._ranks[rank]
        position = entries.before(soonest)
        return position, entries.dues(position, limit)

    def members(self, rank: int, position: int, size: int) -> list[Ticket]:
        """The tickets that `sight` has shown from `position` of a rank on; they stay queued."""
        return self._ranks[rank].tickets(position, size)

    def take(self, rank: int, position: int, tickets: Sequence[Ticket]) -> None:
        """Removes these neighbours, which stand from `position` of a rank on."""
        sources = self._sources
        self._looked = False
        for ticket in tickets:
            del sources[ticket.source]
            self._left(ticket)
        self._ranks[rank].drop(position, len(tickets))

    def first(self, limit: int) -> list[Ticket]:
        """The first `limit` tickets in service order; they stay queued."""
        found: list[Ticket] = []
        for entries in self._ranks:
            if len(entries):
                found.extend(entries.tickets(0, limit - len(found)))
                if len(found) >= limit:
                    break
        return found

    def last(self) -> Ticket | None:
        """The ticket that would be served last."""
        entries = next((entries for entries in reversed(self._ranks) if len(entries)), None)
        return None if entries is None else entries.tickets(len(entries) - 1, 1)[0]

    def earliest(self) -> Ticket | None:
        """The ticket that is due first, over all ranks; a decision asks more than once."""
        if not self._looked:
            first = [entry for entry in map(DueList.first, self._ranks) if entry is not None]
            self._earliest = min(first)[2] if first else None  # the order is unique
            self._looked = True
        return self._earliest
