"""The queue of one policy with the books behind its order: shares of what was served, ageing, what was lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from taktline_gateway.ageing import Ageing
from taktline_gateway.composition import LOW_RANK
from taktline_gateway.deadline_queue import DeadlineQueue, Priority, Ticket, class_of, rank_of
from taktline_gateway.fairness import Shares
from taktline_gateway.overload import LOSS_WEIGHT


class QueueBooks:
    """Enters whatever joins and leaves a queue into its books.

    What was served is entered after the decision that sent it: the batch is to be on its way first.

    Attributes:
        lost: share of the recent tickets that were refused.
    """

    def __init__(self, queue: DeadlineQueue) -> None:
        self.lost = 0.0
        self._queue = queue
        self._shares: dict[Priority, Shares] = {
            priority: Shares() for priority in Priority if priority is not Priority.SAFETY
        }
        self._ageing = Ageing(queue)
        self._unsettled: list[tuple[Shares, Sequence[Ticket]]] = []

    def ask(self, ticket: Ticket, now: float) -> int:
        """A ticket comes: the rank that it has from now on."""
        self.settle()
        shares = self._shares.get(ticket.priority)
        ticket.rank = rank_of(ticket.priority, over_share=shares is not None and shares.arrive(ticket, now))
        return ticket.rank

    def rank(self, ticket: Ticket, now: float) -> int:
        """The rank of one that comes back: that of when it asked."""
        return ticket.rank if ticket.rank >= 0 else self.ask(ticket, now)

    def add(self, ticket: Ticket, rank: int) -> None:
        """Queues a ticket."""
        self.settle()
        shares = self._shares.get(class_of(rank))
        if shares is not None:
            shares.enter()
        self._queue.add(ticket, rank)
        self._ageing.enter(ticket)

    def remove(self, ticket: Ticket) -> bool:
        """Takes a ticket out unserved; False where it is not queued."""
        if not self._queue.remove(ticket):
            return False
        self.settle()
        shares = self._shares.get(class_of(ticket.rank))
        if shares is not None:
            shares.leave()
        return True

    def displace(self, rank: int) -> Ticket | None:
        """Takes out the ticket that would be served last, for one of `rank`; None where that one would be behind it."""
        last = self._queue.last()
        if last is None or last.rank <= rank:
            return None
        self.remove(last)
        return last

    def aged(self, now: float) -> Ticket | None:
        """The ticket of the low classes that has waited long enough to move up, if there is one."""
        return self._ageing.next(now)

    def move_up(self, ticket: Ticket, due: float) -> None:
        """Puts a ticket among production's, ordered by `due`."""
        self.remove(ticket)
        ticket.due = due
        self.add(ticket, rank_of(Priority.PRODUCTION, over_share=False))

    def take(self, slices: Iterable[tuple[int, int, int]], tickets: Sequence[Ticket]) -> None:
        """Moves the members of a batch out of the queue: (rank, position, how many) of each of its slices."""
        size = 0
        for rank, position, count in slices:
            members = tickets[size : size + count]
            self._queue.take(rank, position, members)
            shares = self._shares.get(class_of(rank))
            if shares is not None:
                self._unsettled.append((shares, members))
            size += count
            if rank < LOW_RANK:
                self._ageing.served(count)
        self.lost *= (1.0 - LOSS_WEIGHT) ** size

    def take_back(self, tickets: Sequence[Ticket]) -> None:
        """These were taken and not served: nobody has had anything, and they may be queued again."""
        self.settle()
        self.lost = min(1.0, self.lost / (1.0 - LOSS_WEIGHT) ** len(tickets))
        for ticket in tickets:
            shares = self._shares.get(class_of(ticket.rank))
            if shares is not None:
                shares.refund(ticket)
        self._ageing.unserved(sum(ticket.rank < LOW_RANK for ticket in tickets))

    def turn_away(self, ticket: Ticket) -> None:
        """A ticket is refused for want of time."""
        self.settle()
        self.lost += LOSS_WEIGHT * (1.0 - self.lost)
        shares = self._shares.get(ticket.priority)
        if shares is not None:
            shares.turn_away()

    def forgive(self) -> None:
        """A worker idles and nobody waits: nobody was served at another's cost."""
        for shares in self._shares.values():
            shares.forgive()

    def settle(self) -> None:
        """Enters what was served into the books of shares."""
        for shares, members in self._unsettled:
            shares.serve(members)
        self._unsettled.clear()
