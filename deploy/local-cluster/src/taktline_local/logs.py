"""The local stack's log lines, in the one form of all services (`taktline_protocol.logs`)."""

from __future__ import annotations

import logging

from taktline_protocol import logs


def log_to_stderr(level: int = logging.INFO) -> None:
    """Send this process's log there, as JSON lines."""
    logs.configure("local", level, quieter={"httpx": logging.WARNING})
