"""What recent arrivals say about the next ones: their rate, their company, who is active, how tight they are."""

from __future__ import annotations

import math
from collections import OrderedDict

ACTIVE_ROBOT_S = 2.0
"""A robot that sent nothing for so long is not waited for."""
RATE_MEMORY_S = 1.0
"""Time constant of the arrival rate."""
COMPANY_WEIGHT = 1 / 32
"""Weight of the newest gap in the running share of arrivals that follow another within the wait."""
BUDGET_WEIGHT = 1 / 64
"""Weight of the newest budget in their running mean, and in their running distance from it."""
TIGHT_MEMORY_S = 2.0
"""The tightest budget is remembered for one to two times so long."""


class Arrivals:
    """Running statistics of one queue's arrivals; every operation takes amortised constant time."""

    def __init__(self) -> None:
        self.company = 0.0
        self.usual_budget_s = 0.0
        self.budget_spread_s = 0.0
        self._last: float | None = None
        self._rate = 0.0
        self._robots: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._tight = self._tight_before = math.inf
        self._tight_since = 0.0

    def note(self, source: tuple[str, str], now: float, within_s: float) -> None:
        """An observation came; `within_s` is how close to the last one it must be to count as its company."""
        if self._last is not None:
            follows = 1.0 if now - self._last <= within_s else 0.0
            self.company += COMPANY_WEIGHT * (follows - self.company)
            self._rate = self._rate * math.exp((self._last - now) / RATE_MEMORY_S)
        self._rate += 1.0 / RATE_MEMORY_S
        self._last = now
        self._robots[source] = now
        self._robots.move_to_end(source)
        self._forget(now)

    def note_budget(self, budget_s: float, now: float) -> None:
        """A ticket with a real deadline came with so much time left."""
        self._turn(now)
        off = budget_s - self.usual_budget_s
        if self.usual_budget_s:
            self.usual_budget_s += BUDGET_WEIGHT * off
            self.budget_spread_s += BUDGET_WEIGHT * (abs(off) - self.budget_spread_s)
        else:
            self.usual_budget_s = budget_s
        if budget_s < self._tight:
            self._tight = budget_s

    def rate_hz(self, now: float) -> float:
        """Arrivals a second, forgetting with a time constant of RATE_MEMORY_S."""
        return 0.0 if self._last is None else self._rate * math.exp((self._last - now) / RATE_MEMORY_S)

    def active_robots(self, now: float) -> int:
        """Robots that sent something within ACTIVE_ROBOT_S."""
        self._forget(now)
        return len(self._robots)

    def tightest_s(self, now: float) -> float:
        """The smallest budget that came lately; infinite where none did."""
        self._turn(now)
        return min(self._tight, self._tight_before)

    def _turn(self, now: float) -> None:
        age = now - self._tight_since
        if age >= TIGHT_MEMORY_S:
            self._tight_before = self._tight if age < 2 * TIGHT_MEMORY_S else math.inf
            self._tight = math.inf
            self._tight_since = now

    def _forget(self, now: float) -> None:
        while self._robots:
            robot, seen = next(iter(self._robots.items()))
            if now - seen <= ACTIVE_ROBOT_S:
                break
            del self._robots[robot]
