"""What one robot's client counted: requests, bytes, reconnects and times, for logs and dashboards of the robot."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque

from taktline_protocol.stream import Progress

from taktline.clock import ClockEstimate

RECENT = 256


@dataclasses.dataclass
class RobotMetrics:
    """Counts since the client was made; times of the last `RECENT` answers.

    Attributes:
        transport: how observations travel now: stream or http.
        fallback: why http is used where the stream was wanted; empty otherwise.
        errors: error code -> answers with it.
        keyframes, deltas: observations sent with every camera whole, and with some by reference.
        cameras_whole, cameras_referenced: the same by camera.
        resent: observations that were sent once more: after a drop, a drain, or because a keyframe was needed.
        connects: connections opened; resumed: of these, those on which the session went on.
        clock: gateway clock minus robot clock.
        progress: of an observation that asked for a video and is not answered: stage and time since it came, as last
            told over the stream; None while there is none.
    """

    transport: str = ""
    fallback: str = ""
    observations: int = 0
    chunks: int = 0
    late: int = 0
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
    keyframes: int = 0
    deltas: int = 0
    cameras_whole: int = 0
    cameras_referenced: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    connects: int = 0
    resumed: int = 0
    resent: int = 0
    pauses: int = 0
    clock: ClockEstimate | None = None
    progress: Progress | None = None
    round_trips_ms: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=RECENT))
    margins_ms: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=RECENT))

    def sent(self, whole: int, referenced: int, *, again: bool) -> None:
        """Counts an observation that went out with so many cameras whole and by reference."""
        self.cameras_whole += whole
        self.cameras_referenced += referenced
        self.deltas += bool(referenced)
        self.keyframes += not referenced
        self.resent += again

    def round_trip_ms(self, share: float = 0.5) -> float | None:
        """The round trip that `share` of the recent answers stayed within; None before the first."""
        return _quantile(self.round_trips_ms, share)

    def margin_ms(self, share: float = 0.99) -> float | None:
        """The control margin that `share` of the recent chunks reached; None before the first."""
        return _quantile(self.margins_ms, 1.0 - share)

    def as_dict(self) -> dict[str, object]:
        """For a log line or a JSON file."""
        skipped = ("round_trips_ms", "margins_ms", "clock", "errors", "progress")
        found: dict[str, object] = {k: v for k, v in vars(self).items() if k not in skipped}
        found["errors"] = dict(self.errors)
        found["clock"] = None if self.clock is None else dataclasses.asdict(self.clock)
        found["round_trip_ms"] = {"p50": self.round_trip_ms(0.5), "p99": self.round_trip_ms(0.99)}
        found["margin_ms"] = {"p50": self.margin_ms(0.5), "p99": self.margin_ms(0.99)}
        return found


def _quantile(values: deque[float], share: float) -> float | None:
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * (len(ordered) - 1))))]
