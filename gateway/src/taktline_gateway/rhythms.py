"""When robots are likely to send their next observations: the rhythm of each, and how far off it they come."""

from __future__ import annotations

import functools
import math
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from operator import add
from statistics import NormalDist
from typing import NamedTuple

RHYTHMS = 256
"""Robots whose rhythm is remembered, those that came last."""
RHYTHM_MEMORY_S = 20.0
"""A robot that sent nothing for so long has no rhythm any more."""
OVERDUE = 0.5
"""Share of its period by which a robot may be overdue and still come, as likely as not."""
OFF_BEAT = 0.3
"""Whoever comes off its rhythm by more than this share of its period begins a new one."""
BEATS = 40
"""So many of a robot's last observations make its rhythm."""
OFF_WEIGHT = 1 / 64
"""Weight of the newest observation in the mean square of how far off robots come."""
OFF_FIRST_S, OFF_FIRST = 0.0025, 4
"""How far off is assumed before any came in a rhythm, and the number of observations that it counts for."""
OFF_LEAST_S = 1e-4
PRESENT = 3.0
"""Whoever is overdue by more than so many standard deviations is not waited for."""
_inv_cdf = NormalDist().inv_cdf
_SQRT2 = math.sqrt(2.0)
_DENSITY = 1.0 / math.sqrt(2.0 * math.pi)


class Rhythm(NamedTuple):
    """What a robot's last observations say of its next one.

    Attributes:
        came: when the last one came; `budget_s` is what it had left.
        expected: when the next one is expected.
        period_s: time between them; 0 where only one came.
        beats: how many make this rhythm, BEATS at most.
    """

    came: float
    budget_s: float
    expected: float = 0.0
    period_s: float = 0.0
    beats: int = 1

    def off_s(self, now: float) -> float | None:
        """How much later than expected one comes at `now`; None where that begins a new rhythm."""
        off = now - self.expected
        return off if self.period_s and abs(off) <= OFF_BEAT * self.period_s else None

    def after(self, now: float, budget_s: float) -> Rhythm:
        """With one that comes now: a line through the instants by least squares, whose gains stay at those of BEATS."""
        off = self.off_s(now)
        if off is None:
            gap = now - self.came
            return Rhythm(now, budget_s, now + gap, gap, 2)
        beats = min(self.beats + 1, BEATS)
        gain = off / (beats * (beats + 1))
        period_s = self.period_s + 6.0 * gain
        return Rhythm(now, budget_s, self.expected + (4.0 * beats - 2.0) * gain + period_s, period_s, beats)


@functools.lru_cache(maxsize=1024)
def _positions(count: int, exact: int, every: int) -> tuple[float, ...]:
    """The plotting positions of each so-many-th of the first `exact` among `count`."""
    return tuple((index + 0.625) / (count + 0.25) for index in range(every - 1, exact, every))


class Spreads:
    """Standard deviations of order statistics, each made when it is asked for: of many who come, few are."""

    __slots__ = ("_count", "_offs", "_sigma")

    def __init__(self, offs: list[tuple[float, float, float]], count: int, sigma: float) -> None:
        """
        Args:
            offs: of each its plotting position among `count`, its standard normal quantile, and what is left to it.
            sigma: the standard deviation of one.
        """
        self._offs, self._count, self._sigma = offs, count, sigma

    def __len__(self) -> int:
        return len(self._offs)

    def __getitem__(self, index: int) -> float:
        share, off, left = self._offs[index]
        density = _DENSITY * math.exp(-0.5 * off * off) / (left * self._sigma)
        return math.sqrt(share * (1.0 - share) / (self._count + 2)) / density


class Coming(NamedTuple):
    """The next observations of several robots, in the order in which they are expected.

    Attributes:
        at: when each is expected; `due` is when it would be due.
        spread_s: the standard deviation of the first ones of `at`.
    """

    at: list[float]
    due: list[float]
    spread_s: Spreads


class Rhythms:
    """The rhythms of the robots that came last.

    `note` and `expected_within` take O(log r) comparisons for r robots: the instants at which they are expected, and
    those at which they are given up, lie in sorted lists. `coming` takes as many, and a step for each that it names.
    """

    def __init__(self) -> None:
        self._robots: OrderedDict[tuple[str, str], Rhythm] = OrderedDict()
        # When each is expected, ascending, and what it has left then: flat, as many are looked at in one decision.
        self._expected, self._left = array("d"), array("d")
        self._given_up: list[float] = []
        self._square = OFF_FIRST_S**2
        self._seen = OFF_FIRST

    def __len__(self) -> int:
        """How many robots are remembered."""
        return len(self._robots)

    def note(self, source: tuple[str, str], now: float, budget_s: float) -> None:
        """An observation of this robot came, with so much time left."""
        before = self._robots.pop(source, None)
        robot = Rhythm(now, budget_s)
        if before is not None:
            self._leave(before)
            off = before.off_s(now)
            if off is not None:
                self._seen += 1
                self._square += max(OFF_WEIGHT, 1.0 / self._seen) * (off * off - self._square)
            robot = before.after(now, budget_s)
        self._robots[source] = robot
        if robot.period_s:
            at = bisect_left(self._expected, robot.expected)
            while at < len(self._left) and (self._expected[at], self._left[at]) < (robot.expected, budget_s):
                at += 1
            self._expected.insert(at, robot.expected)
            self._left.insert(at, budget_s)
            insort(self._given_up, robot.expected + OVERDUE * robot.period_s)
        if len(self._robots) > RHYTHMS:
            self._leave(self._robots.popitem(last=False)[1])

    def expected_within(self, seconds: float, now: float) -> tuple[float, float]:
        """(how many robots in a rhythm are likely to send their next one, the share of robots without a rhythm yet)."""
        self._forget(now)
        if not self._robots:
            return 0.0, 0.0
        due = bisect_right(self._expected, now)
        coming = bisect_right(self._expected, now + seconds) - due
        overdue = due - bisect_right(self._given_up, now)
        return coming + 0.5 * overdue, self.strangers

    def coming(self, now: float, until: float, most: int, exact: int, every: int = 1) -> Coming:
        """The next observations that are expected until then, `most` at most.

        How far off robots come is taken to be normal. Of n who are missing, the i-th is expected at the quantile (i -
        3/8) / (n + 1/4) of what is left to it, given that it has not come yet (Blom's plotting positions: of n alike
        they are the means of the order statistics), with the variance of that order statistic. So much is asked of the
        first `exact` of them, of the others when their rhythm says.

        Args:
            every: only each so-many-th of them is told, from that one on: the share of one worker of so many.
        """
        self._forget(now)
        sigma = max(OFF_LEAST_S, self.spread_s)
        first = bisect_left(self._expected, now - PRESENT * sigma)
        count = min(most, bisect_right(self._expected, until, first) - first)
        told = slice(first + every - 1, first + count, every)
        at, left_s = self._expected[told].tolist(), self._left[told]
        apart_s, inv_cdf, erf, offs = sigma * _SQRT2, _inv_cdf, math.erf, []
        for number, share in enumerate(_positions(count, min(exact, count), every)):
            expected = at[number]
            left = 0.5 - 0.5 * erf((now - expected) / apart_s)
            off = inv_cdf(1.0 - (1.0 - share) * left)
            offs.append((share, off, left))
            when = expected + sigma * off
            at[number] = when if when > now else now
        for number in range(len(offs), bisect_left(at, now, len(offs))):
            at[number] = now
        due = list(map(add, at, left_s))
        return Coming(at, due, Spreads(offs, count, sigma))

    @property
    def spread_s(self) -> float:
        """How far off their rhythms robots come: the standard deviation over all of them."""
        return math.sqrt(self._square)

    @property
    def strangers(self) -> float:
        """The share of robots without a rhythm yet; 1 where none came at all."""
        return 1.0 - len(self._expected) / len(self._robots) if self._robots else 1.0

    def _forget(self, now: float) -> None:
        while self._robots and now - next(iter(self._robots.values())).came > RHYTHM_MEMORY_S:
            self._leave(self._robots.popitem(last=False)[1])

    def _leave(self, robot: Rhythm) -> None:
        if robot.period_s:
            at = bisect_left(self._expected, robot.expected)
            while self._left[at] != robot.budget_s:
                at += 1
            del self._expected[at], self._left[at]
            del self._given_up[bisect_left(self._given_up, robot.expected + OVERDUE * robot.period_s)]
