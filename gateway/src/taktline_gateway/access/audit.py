"""The audit log: who asked for what and what was decided, as JSON lines; never a key, a token or an image.

A robot asks many times a second. So the first decision of a kind (same caller, right, policy, outcome) is written at
once, and its repetitions as one line with their number when `WINDOW_S` is over.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import TextIO

from taktline_protocol import ErrorCode, TaktlineError

from taktline_gateway.logs import log

WINDOW_S = 60.0
KINDS_KEPT = 4096
"""Kinds remembered; beyond, the one that began first is written out and forgotten, so memory stays bounded."""
_logger = logging.getLogger("taktline.audit")


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """One kind of decision. `outcome` is `allowed` or an error code, `credential` how the caller is known."""

    outcome: str
    tenant: str
    caller: str
    right: str
    policy: str
    protocol: str
    address: str
    credential: str = ""


@dataclasses.dataclass(slots=True)
class _Repeated:
    since: float
    count: int = 0
    robot: str = ""
    request_id: str = ""


class AuditLog:
    """Writes to a file of its own (mode 0600, appended), or among the process's other log lines.

    A line that the file does not take, because its disk is full, goes among the others too, with the reason: robots
    are served on, and no decision is lost unseen.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Raises TaktlineError `config_invalid` where the file cannot be opened."""
        self._file: TextIO | None = None
        self._kinds: OrderedDict[Decision, _Repeated] = OrderedDict()  # by `since`
        if path is not None:
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise TaktlineError(
                    ErrorCode.CONFIG_INVALID,
                    f"the audit log {path} cannot be opened: {error.strerror}",
                    "give --audit-log a file in a folder that this process may write",
                ) from error
            self._file = os.fdopen(descriptor, "a", buffering=1)

    def note(self, decision: Decision, now: float, *, robot: str = "", request_id: str = "") -> None:
        """Counts one decision; `now` is monotonic."""
        seen = self._kinds.get(decision)
        if seen is not None and now - seen.since < WINDOW_S:
            seen.count += 1
            seen.robot, seen.request_id = robot, request_id
            return
        if seen is not None:
            self._flush(decision, seen)
        self._write("access_decision", {**_fields(decision), "robot": robot, "request_id": request_id})
        self._kinds[decision] = _Repeated(now)
        self._kinds.move_to_end(decision)
        while len(self._kinds) > KINDS_KEPT:
            self._flush(*self._kinds.popitem(last=False))

    def write_due(self, now: float) -> None:
        """Writes the repetitions whose time is over and forgets their kinds; for callers who do not come again."""
        while self._kinds:
            decision, seen = next(iter(self._kinds.items()))
            if now - seen.since < WINDOW_S:
                break
            del self._kinds[decision]
            self._flush(decision, seen)

    def event(self, event: str, **fields: object) -> None:
        """Writes one line about the access configuration itself."""
        self._write(event, fields)

    def close(self) -> None:
        """Writes what was counted and not yet written."""
        for decision, seen in self._kinds.items():
            self._flush(decision, seen)
        self._kinds.clear()
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                log(_logger, logging.ERROR, "audit_file_failed", exc_info=False, reason=error.strerror)
            self._file = None

    def _flush(self, decision: Decision, seen: _Repeated) -> None:
        if seen.count:
            last = {"last_robot": seen.robot, "last_request_id": seen.request_id}
            self._write("access_decisions", {**_fields(decision), "count": seen.count, **last})

    def _write(self, event: str, fields: dict[str, object]) -> None:
        shown = {name: value for name, value in fields.items() if value != ""}
        if self._file is None:
            log(_logger, logging.INFO, event, exc_info=False, **shown)
            return
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "event": event, **shown}
        try:
            self._file.write(json.dumps(line, default=str) + "\n")
        except OSError as error:
            log(_logger, logging.ERROR, event, exc_info=False, audit_file_failed=error.strerror, **shown)


def _fields(decision: Decision) -> dict[str, object]:
    return {field.name: getattr(decision, field.name) for field in dataclasses.fields(decision)}
