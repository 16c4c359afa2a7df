"""The ticket that no worker is expected to make, kept for one that has nothing else to do: it may be quick for once."""

from __future__ import annotations

import math
from collections.abc import Callable

from taktline_gateway.arrivals import Arrivals
from taktline_gateway.batching import TAIL_QUANTILE
from taktline_gateway.deadline_queue import Priority, Ticket
from taktline_gateway.fleet import Fleet
from taktline_gateway.held_ticket import HeldTicket
from taktline_gateway.work import WHOLE
from taktline_gateway.worker_state import WorkerState

LEAST_CHANCE = 0.01
"""A ticket with less is not worth a batch, whatever else the worker could do."""
WHO_COMES = 0.3
"""So much of a ticket is lost for each one that comes while the batch runs."""


class LongShot(HeldTicket):
    """Holds one ticket at most; its operations take O(w) for w workers, `worker` O(w log r) with r rhythms remembered.

    Only of production: whoever asks for safety is told at once, and low classes are never in a hurry. None that
    `goes_elsewhere` when it is refused, and none of work that T_sync is not measured for.
    """

    def __init__(self, fleet: Fleet, arrivals: Arrivals, goes_elsewhere: Callable[[Ticket], bool]) -> None:
        super().__init__()
        self._fleet = fleet
        self._arrivals = arrivals
        self._goes_elsewhere = goes_elsewhere

    def take(self, ticket: Ticket, now: float, behind_s: float = 0.0, instead_of: Ticket | None = None) -> bool:
        """Whether a ticket that is to be refused is kept: it may be made, and no other is held but `instead_of`.

        Args:
            behind_s: how much later those that wait are expected to make it.
        """
        if self.ticket is not instead_of or not self._may(ticket, now, behind_s):
            return False
        self.ticket = ticket
        return True

    @property
    def ends_at(self) -> float:
        """The instant from which it is not worth a try any more; infinite where there is none."""
        return math.inf if self.ticket is None else self.ticket.deadline - self._fleet.luckiest_s()

    def worker(self, now: float) -> WorkerState | None:
        """The idle worker that it is worth to be tried on now, if there is one."""
        ticket = self.ticket
        if ticket is None:
            return None
        for worker in self._fleet.idle(now):
            times = worker.levels[worker.quickest]
            over = times.actions and ticket.passing(now + times.median[1]) >= times.actions
            if worker.flights or worker.probation or over:
                continue
            comes = self._arrivals.expected_within(times.median[1], now) / len(self._fleet)
            if chance(times.median[1], times.tail[1], ticket.deadline - now) >= max(LEAST_CHANCE, WHO_COMES * comes):
                return worker
        return None

    def _may(self, ticket: Ticket, now: float, behind_s: float) -> bool:
        plain = ticket.priority is Priority.PRODUCTION and not ticket.extra and not ticket.attempts
        if not plain or ticket.work is not WHOLE or self._goes_elsewhere(ticket):
            return False
        return self._fleet.luckiest_completion(now) + behind_s <= ticket.deadline


def chance(median: float, tail: float, seconds: float) -> float:
    """Of a batch of that median and 99th percentile to end within `seconds`: durations are log-normal."""
    if seconds <= 0.0 or tail <= median:
        return float(seconds >= median)
    return 0.5 + 0.5 * math.erf(TAIL_QUANTILE * math.log(seconds / median) / (math.log(tail / median) * math.sqrt(2.0)))
