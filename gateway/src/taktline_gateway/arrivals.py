"""What recent arrivals say about the next ones: their rate, their company, who is active, how tight they are."""

from __future__ import annotations

import math
from collections import OrderedDict

from taktline_gateway.rhythms import Coming, Rhythms

ACTIVE_ROBOT_S = 2.0
"""A robot that sent nothing for so long is not waited for."""
RATE_MEMORY_S = 1.0
"""Time constant of the arrival rate."""
MOST_STRANGERS = 0.5
"""A fleet of which more robots than this share have no rhythm yet has none."""
COMPANY_WEIGHT = 1 / 32
"""Weight of the newest gap in the running share of arrivals that follow another within the wait."""
BUDGET_WEIGHT = 1 / 64
"""Weight of the newest budget in their running mean, and in their running distance from it."""
PATIENCE = 0.4
"""Tickets that it is worth, at most, if one waits for the whole of the usual budget while a batch runs."""
DIFFER_FROM, DIFFER_FULL = 0.3, 0.6
"""Budgets differ where they are off the usual one by more than this share of it on average, and fully at the second."""
TIGHT_MEMORY_S = 2.0
"""The tightest budget is remembered for one to two times so long."""


class Arrivals:
    """Running statistics of one queue's arrivals; every operation takes amortised constant time, but for rhythms."""

    def __init__(self) -> None:
        self.company = 0.0
        self.usual_budget_s = 0.0
        self.budget_spread_s = 0.0
        self._last: float | None = None
        self._rate = 0.0
        self._robots: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._rhythms = Rhythms()
        self._tight = self._tight_before = math.inf
        self._tight_since = 0.0

    def note(self, source: tuple[str, str], now: float, within_s: float, budget_s: float) -> None:
        """An observation came with so much time left; `within_s` is how close to the last one its company comes."""
        if self._last is not None:
            follows = 1.0 if now - self._last <= within_s else 0.0
            self.company += COMPANY_WEIGHT * (follows - self.company)
            self._rate = self._rate * math.exp((self._last - now) / RATE_MEMORY_S)
        self._rate += 1.0 / RATE_MEMORY_S
        self._last = now
        self._robots[source] = now
        self._robots.move_to_end(source)
        self._forget(now)
        self._rhythms.note(source, now, budget_s)

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

    def patience_hz(self) -> float:
        """What a second is worth that a ticket waits while others run, in tickets; 0 where budgets are alike.

        Where budgets differ, who waits and who comes meanwhile share the next batch, the tight with the loose. Where
        they are alike, all that wait become urgent together. It counts for robots without a rhythm: of the others it is
        known when they come, and what is left to wait falls in with the next of them; a fleet that follows hints loses
        the phases that it was given.
        """
        usual_s = self.usual_budget_s
        differ = self.budget_spread_s - DIFFER_FROM * usual_s
        if differ <= 0.0:
            return 0.0
        full = (DIFFER_FULL - DIFFER_FROM) * usual_s
        return PATIENCE / usual_s * min(1.0, differ / full) * self._rhythms.strangers

    def active_robots(self, now: float) -> int:
        """Robots that sent something within ACTIVE_ROBOT_S."""
        self._forget(now)
        return len(self._robots)

    def expected_within(self, seconds: float, now: float) -> float:
        """How many observations are likely to come: the next ones of robots in a rhythm, and of others by the rate.

        One that is overdue by less than half of its period may come or not.
        """
        expected, strangers = self._rhythms.expected_within(seconds, now)
        return expected + self.rate_hz(now) * seconds * strangers

    def coming(self, now: float, until: float, most: int, exact: int, every: int = 1) -> Coming:
        """The next observations of robots in a rhythm that are expected until then (`Rhythms.coming`)."""
        return self._rhythms.coming(now, until, most, exact, every)

    def in_rhythm(self, within_s: float) -> bool:
        """Whether most robots have a rhythm, and come no farther off it than that, by the standard deviation.

        Those that follow hints are moved by them, all the time where the fleet is being spread.
        """
        return self._rhythms.strangers <= MOST_STRANGERS and self._rhythms.spread_s <= within_s

    @property
    def remembered(self) -> int:
        """How many robots came lately, in a rhythm or not."""
        return len(self._rhythms)

    @property
    def spread_s(self) -> float:
        """How far off their rhythms robots come: the standard deviation over all of them."""
        return self._rhythms.spread_s

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
