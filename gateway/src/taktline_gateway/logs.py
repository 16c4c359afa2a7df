"""The gateway's log lines, in the one form of all services (`taktline_protocol.logs`)."""

from __future__ import annotations

import logging
from contextvars import ContextVar

from taktline_protocol import logs
from taktline_protocol.logs import log

__all__ = ["REFUSAL_SENT", "configure", "log"]

REFUSAL_SENT = ContextVar("REFUSAL_SENT", default=False)
"""Set in the task of a WebSocket that the application has refused with an answer of its own."""


def configure(level: str) -> None:
    """Sends all logging of this process to stderr as JSON lines."""
    logs.configure("gateway", level, hidden=("color_message",))  # uvicorn's own, for terminals
    logging.getLogger("uvicorn.error").addFilter(_no_false_alarm)


def _no_false_alarm(record: logging.LogRecord) -> bool:
    """False for the error that uvicorn logs of each WebSocket that the application refuses with an answer of its own.

    It follows uvicorn's own line that the connection was rejected, and the audit log says why. Of an application that
    returned without an answer it is the only trace.
    """
    return record.msg != "ASGI callable returned without completing handshake." or not REFUSAL_SENT.get()
