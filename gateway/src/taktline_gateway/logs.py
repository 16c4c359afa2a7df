"""The gateway's log lines, in the one form of all services (`taktline_protocol.logs`)."""

from __future__ import annotations

import logging

from taktline_protocol import logs
from taktline_protocol.logs import log

__all__ = ["configure", "log"]


def configure(level: str) -> None:
    """Sends all logging of this process to stderr as JSON lines."""
    logs.configure("gateway", level, hidden=("color_message",))  # uvicorn's own, for terminals
    logging.getLogger("uvicorn.error").addFilter(_no_false_alarm)


def _no_false_alarm(record: logging.LogRecord) -> bool:
    """False for the error that uvicorn logs of each WebSocket that the application refuses with an answer of its own.

    It follows uvicorn's own line that the connection was rejected, and the audit log says why.
    """
    return record.msg != "ASGI callable returned without completing handshake."
