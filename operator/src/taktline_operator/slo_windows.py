"""Burn-rate windows: which pairs of windows alert, at which multiple of the error budget, for each SLO period.

An alert fires when the long AND the short window burn the error budget faster than `factor`: the long one shows that it
matters, the short one that it still happens, so the alert also clears soon. A share of the period's budget that is
spent within the long window gives the factor: share x period / long window (Google's SRE workbook, chapter 5).
"""

from __future__ import annotations

import re
from typing import NamedTuple

PAGE, TICKET, INFO = "page", "ticket", "info"

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(duration: str) -> float:
    """The length of a duration like `5m` or `3d`.

    Raises:
        ValueError: not a number with one of the units s, m, h, d.
    """
    match = re.fullmatch(r"([0-9]+)([smhd])", duration)
    if match is None:
        raise ValueError(f"{duration!r} is not a duration like 5m, 6h or 3d")
    return int(match.group(1)) * _UNITS_S[match.group(2)]


class BurnPair(NamedTuple):
    """Two windows of one alert and the share of the period's error budget that the long one may spend."""

    severity: str
    long: str
    short: str
    budget_share: float

    def factor(self, period_days: int) -> float:
        """How many times faster than evenly the budget must burn in both windows."""
        return self.budget_share * period_days * _UNITS_S["d"] / seconds(self.long)


# A month leaves room for the usual shares. A week's budget is small: the same shares would alert on an even burn, so a
# shift-wise period gives each alert a larger share.
_MONTH = (
    BurnPair(PAGE, "1h", "5m", 0.02),
    BurnPair(PAGE, "6h", "30m", 0.05),
    BurnPair(TICKET, "1d", "2h", 0.10),
    BurnPair(TICKET, "3d", "6h", 0.10),
)
_WEEK = (
    BurnPair(PAGE, "1h", "5m", 0.08),
    BurnPair(PAGE, "6h", "30m", 0.125),
    BurnPair(TICKET, "1d", "2h", 0.20),
    BurnPair(TICKET, "3d", "6h", 0.42),
)
PERIODS: dict[int, tuple[BurnPair, ...]] = {7: _WEEK, 28: _MONTH, 30: _MONTH}
"""Burn pairs by SLO period in days."""
DEFAULT_PERIOD_DAYS = 28


class Clock(NamedTuple):
    """How long the windows really are. Anything but 1 is for tests: a window keeps its name and lasts `scale` of it."""

    scale: float = 1.0

    def __call__(self, duration: str) -> str:
        """The PromQL duration that stands for `duration`."""
        return duration if self.scale == 1.0 else f"{max(1, round(1e3 * self.scale * seconds(duration)))}ms"
