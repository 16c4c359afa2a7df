"""What happened to one policy's requests of late, bounded, for the live page."""

from __future__ import annotations

from collections import deque

from taktline_protocol import metrics

from taktline_gateway.cycles import Cycle

KEPT = 256
"""Margins and cycles that are remembered; a page shows as many as came since it was last told, and no more."""


class Recent:
    """Counts since the gateway started, and the last margins and control cycles.

    Attributes:
        margins: (serial number, margin in ms, cause or empty).
        cycles: (serial number, X, Y).
        codes: requests by outcome.
        misses: missed deadlines by cause.
    """

    def __init__(self) -> None:
        self.margins: deque[tuple[int, float, str]] = deque(maxlen=KEPT)
        self.cycles: deque[tuple[int, float, float]] = deque(maxlen=KEPT)
        self.codes: dict[str, int] = {"ok": 0}
        self.misses: dict[str, int] = dict.fromkeys(metrics.MISS_CAUSES, 0)
        self.serial = 0

    def answered(self, margin_ms: float, cause: str | None, cycle: Cycle | None) -> None:
        """Notes one chunk that was sent."""
        self.serial += 1
        self.codes["ok"] += 1
        self.margins.append((self.serial, margin_ms, cause or ""))
        if cause is not None:
            self.misses[cause] += 1
        if cycle is not None:
            self.cycles.append((self.serial, cycle.x, cycle.y))

    def refused(self, code: str, *, missed: bool) -> None:
        """Notes one request without a chunk; `code` is an error code, so there are few."""
        self.codes[code] = self.codes.get(code, 0) + 1
        if missed:
            self.misses["refused"] += 1
