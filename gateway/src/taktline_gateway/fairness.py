"""Who has had more than their share: virtual time of tenants, and of the robots within each tenant."""

from __future__ import annotations

from collections import OrderedDict

from taktline_gateway.deadline_queue import Ticket

ROBOT_BURST = 3.0
"""Requests that a robot may be served ahead of its share, before its next ones stand behind everybody else's."""
TENANT_BURST = 16.0
WANTS_S = 1.0
"""Whoever asked within this time, served or not, counts as one to share with."""
KEPT = 4096
"""Accounts kept before those that owe nothing are dropped."""


class Shares:
    """Shares of one priority class, kept by counting what was served while somebody else was kept waiting.

    An account is what a sender was given, in requests over its weight; virtual time is what an equal division would
    have given it (weighted fair queueing: each service advances it by 1 over the weights of all who asked lately).
    Whoever is more than a burst ahead of virtual time is over its share. Nobody collects credit by being away: an
    account never lags behind virtual time. A batch that takes everybody who waits is not counted at all, and an idle
    worker with an empty queue forgives every debt.

    Each operation takes constant time (amortised).
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._turned_away = False
        self._tenants = _Level(TENANT_BURST)
        self._robots: dict[str, _Level] = {}

    def arrive(self, ticket: Ticket, now: float) -> bool:
        """A ticket comes; whether its tenant, or its robot within the tenant, has had more than its share."""
        level = self._robots.get(ticket.tenant)
        if level is None:
            level = self._robots[ticket.tenant] = _Level(ROBOT_BURST)
        over_tenant = self._tenants.ask(ticket.tenant, ticket.tenant_weight, now)
        return level.ask(ticket.robot, ticket.robot_weight, now) or over_tenant

    def enter(self) -> None:
        """A ticket is queued."""
        self._waiting += 1

    def leave(self) -> None:
        """A queued ticket has left unserved, or moved."""
        self._waiting -= 1

    def turn_away(self) -> None:
        """A ticket is refused."""
        self._turned_away = True

    def serve(self, tickets: list[Ticket]) -> None:
        """These go to a worker. They are counted if others are left behind, or were refused since the last batch."""
        self._waiting -= len(tickets)
        if self._waiting or self._turned_away:
            self._turned_away = False
            for ticket in tickets:
                self._tenants.charge(ticket.tenant, ticket.tenant_weight)
                level = self._robots.get(ticket.tenant)
                if level is not None:
                    level.charge(ticket.robot, ticket.robot_weight)

    def forgive(self) -> None:
        """A worker idles and nobody waits: everybody starts anew."""
        self._turned_away = False
        if self._robots:
            self._tenants = _Level(TENANT_BURST)
            self._robots.clear()


class _Level:
    """Accounts of senders that share one thing."""

    __slots__ = ("_burst", "_now", "_served", "_wants", "_weights")

    def __init__(self, burst: float) -> None:
        self._burst = burst
        self._now = 0.0  # virtual time
        self._served: dict[str, float] = {}
        self._wants: OrderedDict[str, tuple[float, float]] = OrderedDict()  # sender -> (asked last, weight)
        self._weights = 0.0  # of all in `_wants`

    def ask(self, name: str, weight: float, now: float) -> bool:
        known = self._wants.get(name)
        if known is not None:
            self._weights -= known[1]
            self._wants.move_to_end(name)
        self._wants[name] = (now, weight)
        self._weights += weight
        while True:
            oldest = next(iter(self._wants))
            asked, its_weight = self._wants[oldest]
            if now - asked <= WANTS_S:
                break
            del self._wants[oldest]
            self._weights -= its_weight
        return self._served.get(name, 0.0) > self._now + self._burst / weight

    def charge(self, name: str, weight: float) -> None:
        now = self._now
        had = max(now, self._served.get(name, 0.0))
        # A debt is bounded, so that a sender that stops flooding is soon like the others.
        self._served[name] = min(had + 1.0 / weight, now + (2.0 * self._burst + 1.0) / weight)
        self._now = now + 1.0 / max(self._weights, weight)
        if len(self._served) > KEPT:
            self._served = {key: value for key, value in self._served.items() if value > self._now}
