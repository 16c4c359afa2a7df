"""Structured log lines on stderr: one JSON object each, with whatever fields the call adds."""

from __future__ import annotations

import json
import logging
import sys

from taktline_local.container import timestamp

STANDARD = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's time, level, logger, text, and extra fields."""
        line = {"time": timestamp(), "level": record.levelname.lower(), "logger": record.name}
        line["message"] = record.getMessage()
        line |= {key: value for key, value in record.__dict__.items() if key not in STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Send this process's log there."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
