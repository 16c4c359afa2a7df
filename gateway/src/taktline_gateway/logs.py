"""The gateway's log lines, in the one form of all services (`taktline_protocol.logs`)."""

from __future__ import annotations

from taktline_protocol import logs
from taktline_protocol.logs import log

__all__ = ["configure", "log"]


def configure(level: str) -> None:
    """Sends all logging of this process to stderr as JSON lines."""
    logs.configure("gateway", level, hidden=("color_message",))  # uvicorn's own, for terminals
