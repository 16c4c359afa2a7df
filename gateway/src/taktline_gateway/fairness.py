"""Who has had more than their share: virtual time of tenants, and of the robots within each tenant."""

from __future__ import annotations

from collections.abc import Sequence

from taktline_gateway.accounts import Account, Level
from taktline_gateway.deadline_queue import Ticket

ROBOT_BURST = 3.0
"""Requests that a robot may be served ahead of its share, before its next ones stand behind everybody else's."""
TENANT_BURST = 16.0
LOSS_WEIGHT = 1 / 64
"""Weight of the newest ticket in the running share of those that a class lost."""
LOSS_FROM = 0.02
"""As long as a class loses no more, all can be served: to hold one back would lose deadlines for nobody's sake."""


class Shares:
    """Shares of one priority class, by what was served since the last time that nobody was kept waiting.

    Virtual time is what an equal division would have given everyone (weighted fair queueing: each service advances it
    by 1 over the weights of all who asked lately). A tenant that is more than a burst ahead of it is over its share; so
    is a robot that also asks for more than the other robots of its tenant. Equal robots are left to their deadlines,
    which serve more of them. Nobody collects credit by being away: no account lags behind virtual time. Every debt
    is forgiven whenever a batch takes all who wait and nobody was refused since the batch before, and when a worker
    idles with an empty queue: then no one was served at another's cost.

    Each operation takes constant time a ticket (amortised).
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._turned_away = False
        self._lost = 0.0
        self._epoch = 0
        self._tenants = Level(TENANT_BURST)

    def arrive(self, ticket: Ticket, now: float) -> bool:
        """A ticket comes; whether its tenant, or its robot within the tenant, has had more than its share.

        As long as hardly anybody is refused, nobody has had it at another's cost.
        """
        tenant = self._tenants.ask(ticket.tenant, ticket.tenant_weight, now)
        if tenant.robots is None:
            tenant.robots = Level(ROBOT_BURST, tenant)
        account = ticket.account = tenant.robots.ask(ticket.robot, ticket.robot_weight, now)
        ticket.charged = -1
        return self._lost > LOSS_FROM and (account.over(self._epoch) or tenant.over(self._epoch))

    def enter(self) -> None:
        """A ticket is queued."""
        self._waiting += 1

    def leave(self) -> None:
        """A queued ticket has left unserved, or moved."""
        self._waiting -= 1

    def turn_away(self) -> None:
        """A ticket is refused."""
        self._turned_away = True
        self._lost += LOSS_WEIGHT * (1.0 - self._lost)

    def serve(self, tickets: Sequence[Ticket]) -> None:
        """These go to a worker; one that has been there before (it failed, or fell silent) has been charged for it."""
        self._waiting -= len(tickets)
        self._lost *= (1.0 - LOSS_WEIGHT) ** len(tickets)
        if not self._waiting and not self._turned_away:
            self._epoch += 1
            return
        self._turned_away = False
        epoch, several = self._epoch, len(self._tenants.accounts) > 1
        by_tenant: dict[Account, int] = {}
        for ticket in tickets:
            account = ticket.account
            if account is None or ticket.charged >= 0:  # without an account where nobody looked at its share
                continue
            ticket.charged = epoch
            # `_charge(account, 1, epoch)`, written out: it runs for every ticket of every batch.
            level, weight = account.level, account.weight
            now = level.now
            had = account.served
            if account.epoch != epoch or had < now:
                had = now
                account.epoch = epoch
            served, most = had + 1.0 / weight, now + (2.0 * level.burst + 1.0) / weight
            account.served = served if served < most else most
            weights = level.weights
            level.now = now + 1.0 / (weights if weights > weight else weight)
            if several:
                tenant = level.tenant
                if tenant is not None:
                    by_tenant[tenant] = by_tenant.get(tenant, 0) + 1
        for tenant, count in by_tenant.items():
            _charge(tenant, count, epoch)

    def refund(self, ticket: Ticket) -> None:
        """It comes back unserved: what it was charged is taken back, unless that is forgiven already."""
        account, charged = ticket.account, ticket.charged
        ticket.charged = -1
        if account is None or charged != self._epoch:
            return
        _charge(account, -1, charged)
        tenant = account.level.tenant
        if tenant is not None and len(self._tenants.accounts) > 1:
            _charge(tenant, -1, charged)

    def forgive(self) -> None:
        """A worker idles and nobody waits: everybody starts anew."""
        self._turned_away = False
        self._epoch += 1


def _charge(account: Account, count: int, epoch: int) -> None:
    level, weight = account.level, account.weight
    now, weights = level.now, level.weights
    had = account.served if account.epoch == epoch and account.served > now else now
    # A debt is bounded, so that a sender that stops flooding is soon like the others.
    most = now + (2.0 * level.burst + 1.0) / weight
    served = had + count / weight
    account.served = served if served < most else most
    account.epoch = epoch
    level.now = now + count / (weights if weights > weight else weight)
