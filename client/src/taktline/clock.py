"""How far the gateway's clock is from the robot's, and how wrong that can be, from round trips."""

from __future__ import annotations

import dataclasses
from collections import deque

WINDOW_S = 30.0
DRIFT = 50e-6
"""Seconds a second by which two quartz clocks may run apart; the usual specification is 20 to 50 ppm each way."""


@dataclasses.dataclass(frozen=True)
class ClockEstimate:
    """Gateway clock minus robot clock, s, and the bound of its error, s."""

    offset_s: float
    error_s: float

    def differs(self, told: ClockEstimate) -> bool:
        """Whether the gateway, which was `told` another, should hear of this one."""
        moved = abs(self.offset_s - told.offset_s) > 0.5 * told.error_s
        return moved or not 0.7 < self.error_s / max(told.error_s, 1e-9) < 1.5


@dataclasses.dataclass(frozen=True)
class _Sample:
    at: float
    offset_s: float
    delay_s: float


class GatewayClock:
    """Keeps the estimate up to date: of the round trips of the last half minute the shortest one counts.

    With t0 sent and t3 received by the robot's clock, t1 received and t2 sent by the gateway's, the offset is
    ((t1 - t0) + (t2 - t3)) / 2, and whatever the two ways took of the delay (t3 - t0) - (t2 - t1), the true offset is
    within half of that delay (Mills, RFC 5905, section 8). A sample's bound grows with its age, counted from t0, by
    the clocks' drift.
    """

    def __init__(self, window_s: float = WINDOW_S, drift: float = DRIFT) -> None:
        self._window_s = window_s
        self._drift = drift
        # Ascending in time, and each sample better than all before it would still be: a monotonic queue.
        self._samples: deque[_Sample] = deque()

    def note(self, sent: float, received_there: float, sent_there: float, received: float) -> None:
        """Takes in one round trip; one whose stamps cannot be true is ignored."""
        delay = (received - sent) - (sent_there - received_there)
        # A little below zero is rounding, or the drift of the two clocks while the gateway had it.
        if not (-1e-3 <= delay < 60.0) or not sent_there >= received_there:
            return
        delay = max(0.0, delay)
        offset = ((received_there - sent) + (sent_there - received)) / 2
        sample = _Sample(sent, offset, delay)  # from then on the clocks drift apart
        if not all(self._agree(sample, other, received) for other in self._samples):
            # A clock has jumped, as one does while its machine is suspended; the newest stamps are of after that.
            self._samples = deque(other for other in self._samples if self._agree(sample, other, received))
        while self._samples and self._error(self._samples[-1], received) >= self._error(sample, received):
            self._samples.pop()
        self._samples.append(sample)
        while received - self._samples[0].at > self._window_s:
            self._samples.popleft()

    def estimate(self, now: float) -> ClockEstimate | None:
        """The estimate at `now`, robot clock; None before the first round trip."""
        if not self._samples:
            return None
        best = min(self._samples, key=lambda sample: self._error(sample, now))
        return ClockEstimate(best.offset_s, self._error(best, now))

    def reset(self) -> None:
        """Another gateway has another clock."""
        self._samples.clear()

    def _agree(self, one: _Sample, other: _Sample, now: float) -> bool:
        """Whether one offset can be within both bounds; the microsecond is for the rounding of stamps."""
        return abs(one.offset_s - other.offset_s) <= self._error(one, now) + self._error(other, now) + 1e-6

    def _error(self, sample: _Sample, now: float) -> float:
        return sample.delay_s / 2 + self._drift * max(0.0, now - sample.at)
