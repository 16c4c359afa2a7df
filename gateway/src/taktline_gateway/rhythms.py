"""When robots are likely to send their next observations: each one's last, and the period before it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict

RHYTHMS = 256
"""Robots whose rhythm is remembered, those that came last."""
RHYTHM_MEMORY_S = 20.0
"""A robot that sent nothing for so long has no rhythm any more."""
OVERDUE = 0.5
"""Share of its period by which a robot may be overdue and still come, as likely as not."""


class Rhythms:
    """The last observations of the robots that came last.

    Both operations take O(log r) comparisons for r robots: the instants at which they are expected, and those at which
    they are given up, lie in sorted lists.
    """

    def __init__(self) -> None:
        self._robots: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()  # (came last, period or 0)
        self._next: list[float] = []
        self._given_up: list[float] = []

    def note(self, source: tuple[str, str], now: float) -> None:
        """An observation of this robot came."""
        before = self._robots.pop(source, None)
        period = 0.0
        if before is not None:
            self._leave(*before)
            period = now - before[0]
        self._robots[source] = (now, period)
        if period:
            insort(self._next, now + period)
            insort(self._given_up, now + (1.0 + OVERDUE) * period)
        if len(self._robots) > RHYTHMS:
            self._leave(*self._robots.popitem(last=False)[1])

    def expected_within(self, seconds: float, now: float) -> tuple[float, float]:
        """(how many robots in a rhythm are likely to send their next one, the share of robots without a rhythm yet)."""
        while self._robots and now - next(iter(self._robots.values()))[0] > RHYTHM_MEMORY_S:
            self._leave(*self._robots.popitem(last=False)[1])
        if not self._robots:
            return 0.0, 0.0
        due = bisect_right(self._next, now)
        coming = bisect_right(self._next, now + seconds) - due
        overdue = due - bisect_right(self._given_up, now)
        return coming + 0.5 * overdue, self.strangers

    @property
    def strangers(self) -> float:
        """The share of robots without a rhythm yet; 1 where none came at all."""
        return 1.0 - len(self._next) / len(self._robots) if self._robots else 1.0

    def _leave(self, last: float, period: float) -> None:
        if period:
            del self._next[bisect_left(self._next, last + period)]
            del self._given_up[bisect_left(self._given_up, last + (1.0 + OVERDUE) * period)]
