"""One ticket that is held beside the queue, for a worker that it may be tried on."""

from __future__ import annotations

from taktline_gateway.deadline_queue import Ticket


class HeldTicket:
    """Nobody's, or one robot's.

    Attributes:
        ticket: what is held; None where nothing is.
    """

    def __init__(self) -> None:
        self.ticket: Ticket | None = None

    def of(self, source: tuple[str, str]) -> Ticket | None:
        """The ticket, if it is this robot's."""
        return self.ticket if self.ticket is not None and self.ticket.source == source else None

    def drop(self) -> Ticket | None:
        """Gives it up."""
        ticket, self.ticket = self.ticket, None
        return ticket
