"""The worker's log lines, in the one form of all services (`taktline_protocol.logs`)."""

from __future__ import annotations

from taktline_protocol import logs


def configure(level: str = "INFO") -> None:
    """Sends all logs of the process to stderr as JSON lines."""
    logs.configure("worker", level)
