"""One ticket against the table: a table that refuses everything is never measured again, and may be wrong."""

from __future__ import annotations

from taktline_gateway.deadline_queue import Ticket
from taktline_gateway.fleet import Fleet
from taktline_gateway.held_ticket import HeldTicket
from taktline_gateway.worker_state import Batch


class TableTrial(HeldTicket):
    """Holds one ticket at most that by the table cannot be made, for a worker that has sat idle for `TRIAL_AFTER_S`.

    It is launched by the next decision; until then a newer one of the same robot takes its place like any other's.
    """

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet

    def take(self, ticket: Ticket, now: float) -> bool:
        """Whether it is kept: no other robot's is, and there is a worker that it can be tried on."""
        if (self.ticket is not None and self.ticket.source != ticket.source) or self._fleet.rusty(now) is None:
            return False
        self.ticket = ticket
        return True

    def launch(self, now: float) -> Batch | None:
        """Sends it; None where its worker has left since: it is still held then."""
        worker = None if self.ticket is None else self._fleet.rusty(now)
        ticket = None if worker is None else self.drop()
        if worker is None or ticket is None:
            return None
        worker.trial = True
        return worker.launch((ticket,), 0, now)
