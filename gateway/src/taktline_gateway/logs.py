"""Structured logs: one JSON object a line on stderr, never image bytes or tokens."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any

_FIELDS = "taktline_fields"


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON line: time (UTC), level, logger, event and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line for `record`, with a traceback under `exception` where one is attached."""
        instant = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        line: dict[str, Any] = {
            "time": instant.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(level: str) -> None:
    """Sends all logging of this process to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def log(logger: logging.Logger, level: int, event: str, *, exc_info: bool = False, **fields: object) -> None:
    """Logs `event` with its fields, e.g. policy, robot, request_id, code."""
    if logger.isEnabledFor(level):
        logger.log(level, event, exc_info=exc_info, extra={_FIELDS: fields})
