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
KEPT_A_SECOND = 4
"""Of each second's chunks in time, late chunks and cycles so many are remembered for a minute, however many come."""


class Recent:
    """Counts since the gateway started, and the last margins and control cycles.

    Attributes:
        margins: (serial number, margin in ms, cause or empty, when).
        cycles: (serial number, X, Y, when).
        minute_margins: as `margins`, few of each second, but of the whole minute; minute_cycles likewise.
        marks: (when, chunks, misses by cause) as they were before the first event of each second that had any.
        codes: requests by outcome.
        misses: missed deadlines by cause.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.margins: deque[tuple[int, float, str, float]] = deque(maxlen=KEPT)
        self.cycles: deque[tuple[int, float, float, float]] = deque(maxlen=KEPT)
        seconds = int(WINDOW_S / MARK_S) + 1
        self.minute_margins: deque[tuple[int, float, str, float]] = deque(maxlen=2 * KEPT_A_SECOND * seconds)
        self.minute_cycles: deque[tuple[int, float, float, float]] = deque(maxlen=KEPT_A_SECOND * seconds)
        self._in_time = self._late = self._cycles = 0
        """Of this second."""
        self.marks: deque[tuple[float, int, dict[str, int]]] = deque(maxlen=seconds)
        self.codes: dict[str, int] = {"ok": 0}
        self.misses: dict[str, int] = dict.fromkeys(metrics.MISS_CAUSES, 0)
        self.serial = 0

    def answered(self, margin_ms: float, cause: str | None, cycle: Cycle | None) -> None:
        """Notes one chunk that was sent."""
        now = self._mark()
        self.serial += 1
        self.codes["ok"] += 1
        margin = self.serial, margin_ms, cause or "", now
        self.margins.append(margin)
        if cause is not None:
            self.misses[cause] += 1
            self._late += 1
        else:
            self._in_time += 1
        if (self._in_time if cause is None else self._late) <= KEPT_A_SECOND:
            self.minute_margins.append(margin)
        if cycle is not None:
            point = self.serial, cycle.x, cycle.y, now
            self.cycles.append(point)
            self._cycles += 1
            if self._cycles <= KEPT_A_SECOND:
                self.minute_cycles.append(point)

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
            self._in_time = self._late = self._cycles = 0
        return now
