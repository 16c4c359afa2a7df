"""What happened to one policy's requests of late, bounded, for the live page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from taktline_protocol import metrics

from taktline_gateway.cycles import Cycle

KEPT = 256
"""Margins and cycles that are remembered; a page shows as many as came since it was last told, and no more."""
WINDOW_S = 60.0
"""What a page that has just been opened is told of the time before."""
MARK_S = 1.0


class Recent:
    """Counts since the gateway started, and the last margins and control cycles.

    Attributes:
        margins: (serial number, margin in ms, cause or empty, when).
        cycles: (serial number, X, Y, when).
        marks: (when, chunks, misses by cause) as they were before the first event of each second that had any.
        codes: requests by outcome.
        misses: missed deadlines by cause.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.margins: deque[tuple[int, float, str, float]] = deque(maxlen=KEPT)
        self.cycles: deque[tuple[int, float, float, float]] = deque(maxlen=KEPT)
        self.marks: deque[tuple[float, int, dict[str, int]]] = deque(maxlen=int(WINDOW_S / MARK_S) + 1)
        self.codes: dict[str, int] = {"ok": 0}
        self.misses: dict[str, int] = dict.fromkeys(metrics.MISS_CAUSES, 0)
        self.serial = 0

    def answered(self, margin_ms: float, cause: str | None, cycle: Cycle | None) -> None:
        """Notes one chunk that was sent."""
        now = self._mark()
        self.serial += 1
        self.codes["ok"] += 1
        self.margins.append((self.serial, margin_ms, cause or "", now))
        if cause is not None:
            self.misses[cause] += 1
        if cycle is not None:
            self.cycles.append((self.serial, cycle.x, cycle.y, now))

    def refused(self, code: str, *, missed: bool) -> None:
        """Notes one request without a chunk; `code` is an error code, so there are few."""
        self._mark()
        self.codes[code] = self.codes.get(code, 0) + 1
        if missed:
            self.misses["refused"] += 1

    def _mark(self) -> float:
        now = self.clock()
        if not self.marks or now - self.marks[-1][0] >= MARK_S:
            self.marks.append((now, self.codes["ok"], dict(self.misses)))
        return now
