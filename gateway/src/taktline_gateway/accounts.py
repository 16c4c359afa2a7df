"""What senders were given and ask for: virtual time of tenants, and of the robots within each tenant."""

from __future__ import annotations

from collections import OrderedDict

DEMANDING = 1.5
"""A robot that asks for so many times the average, by weight, may be over its share; among equals deadlines decide."""
WINDOW_S = 2.0
"""Asking is counted over one to two times so long."""
WANTS_S = 1.0
"""Whoever asked within this time, served or not, counts as one to share with; later it starts anew."""


class _Asks:
    """Counts what was asked lately: in the present window and the one before it."""

    __slots__ = ("_before", "_count", "_window")

    def __init__(self) -> None:
        self._window = 0
        self._count = self._before = 0

    def note(self, now: float) -> int:
        """One more; returns how many lately."""
        window = int(now / WINDOW_S)
        if window != self._window:
            self._before = self._count if window == self._window + 1 else 0
            self._window, self._count = window, 0
        self._count += 1
        return self._count + self._before


class Account:
    """What one sender was given, in requests over its weight, against the virtual time of those it shares with."""

    __slots__ = ("asked_at", "asks", "demanding", "epoch", "level", "robots", "served", "weight")

    def __init__(self, level: Level) -> None:
        self.level = level
        self.asked_at = 0.0
        self.asks = _Asks()
        self.demanding = True  # of a tenant always: tenants share by weight whatever they ask for
        self.weight = 0.0
        self.served = 0.0
        self.epoch = -1  # the one that `served` was counted in; a debt of an earlier one is forgiven
        self.robots: Level | None = None  # of a tenant: its robots' accounts

    def over(self, epoch: int) -> bool:
        """Whether it asks for more than the others, and had more than its share and a burst."""
        return self.demanding and self.epoch == epoch and self.served > self.level.now + self.level.burst / self.weight


class Level:
    """Accounts of senders that share one thing; `now` is virtual time, `weights` the sum over the accounts."""

    __slots__ = ("accounts", "asks", "burst", "now", "tenant", "weights")

    def __init__(self, burst: float, tenant: Account | None = None) -> None:
        self.burst = burst
        self.tenant = tenant
        self.asks = _Asks()
        self.now = 0.0
        self.weights = 0.0
        self.accounts: OrderedDict[str, Account] = OrderedDict()

    def ask(self, name: str, weight: float, now: float) -> Account:
        """The account of a sender that asks now; those that have not asked for WANTS_S are closed."""
        accounts = self.accounts
        account = accounts.get(name)
        if account is None:
            account = accounts[name] = Account(self)
        else:
            accounts.move_to_end(name)
        self.weights += weight - account.weight
        account.weight = weight
        account.asked_at = now
        while True:
            oldest = next(iter(accounts.values()))
            if now - oldest.asked_at <= WANTS_S:
                break
            self.weights -= oldest.weight
            accounts.popitem(last=False)
        if self.tenant is not None:
            average = self.asks.note(now) / self.weights
            account.demanding = account.asks.note(now) / weight > DEMANDING * average
        return account
