"""The operator's log lines, in the one form of all services (`taktline_protocol.logs`)."""

from __future__ import annotations

import logging

from taktline_protocol import logs

# kopf reports every single event it hands over; what the operator does with it is in our own lines.
_QUIETER = {"kopf": logging.WARNING, "aiohttp.access": logging.WARNING}


def configure(level: int = logging.INFO) -> None:
    """Send all logs of this process to stderr as JSON lines."""
    logs.configure("operator", level, hidden=("k8s",), quieter=_QUIETER)
