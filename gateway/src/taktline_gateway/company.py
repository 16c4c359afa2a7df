"""Whether an idle worker waits a moment for a batch to get company."""

from __future__ import annotations

from collections.abc import Sequence

from taktline_gateway.arrivals import Arrivals
from taktline_gateway.deadline_queue import Ticket
from taktline_gateway.service_times import ServiceTimes

LIKELY = 0.5
"""So large a share of the arrivals must have followed another one within the wait."""


def company_until(
    tickets: Sequence[Ticket],
    dues: Sequence[float],
    times: ServiceTimes,
    limit: int,
    arrivals: Arrivals,
    in_flight: int,
    max_wait_s: float,
    now: float,
) -> float | None:
    """Until when these tickets, due at `dues` in that order, may wait for company; None to launch now.

    They wait only for robots that may still come, only where arrivals have been following one another within the
    wait, only if one batch of `limit` could take them all and one more, never beyond the oldest one's wait, and never
    so long that one more member would make any of them late.

    Args:
        in_flight: how many tickets are on workers: their robots do not come now.
        max_wait_s: how long a ticket may wait for company.
    """
    size = len(dues)
    if not max_wait_s or size >= min(limit, times.max_batch) or arrivals.company < LIKELY:
        return None
    if arrivals.active_robots(now) <= size + in_flight:
        return None
    oldest = min(ticket.arrived_at for ticket in tickets)
    until = min(oldest + max_wait_s, dues[0] - times.tail[size + 1])
    return until if until > now else None
