"""One form of log line for every Taktline process: a JSON object on stderr, with the same field names everywhere.

`time` (UTC, ms), `level`, `service`, `logger` and `message` are in every line, `traceback` where an error is attached.
The fields of a call come from `log(..., policy=...)` or `extra={"policy": ...}`. These names mean the same in every
service: `policy`, `pool`, `revision`, `robot`, `request_id`, `seq`, `code` and `next_step` (of a TaktlineError),
`reason` (a sentence), `cause` (of a missed deadline its one cause, else what set a thing off), `worker` (its address),
`trace_id` and `span_id`.

Bytes never reach a line, only their number; secrets are blotted out by the name of their field and by their form.

A reader of stderr that stops reading (a collector that hangs, Ctrl-S in a terminal) holds up nobody: lines are dropped,
and `log_lines_lost` says how many as soon as it reads again.
"""

from __future__ import annotations

import logging
import os
import re
import select
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import msgspec

TEXT_CHARACTERS = 4000
"""Longer text is cut: what a peer sent may be in an error message, and a line has to stay a line."""
TRACEBACK_CHARACTERS = 12_000
ITEMS = 200
DEPTH = 6
REDACTED = "[redacted]"
PATIENCE_MS = 5
"""How long the first line waits for a reader that is behind; those after it do not, until it has caught up."""
RESERVED = frozenset({"time", "level", "service", "logger", "message", "traceback"})
"""Names of the line's own fields; a field of a call with such a name is written with `_` behind it."""

CREDENTIAL_KINDS = ("key", "token", "anonymous")
"""What a field `credential` may say: how a caller is known, as the audit log tells it."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_SECRET_NAMES = re.compile(
    r"(^|_)(authorization|credentials?|cookie|passwd|password|secret|private_key|api_?key|x_api_key"
    r"|(access|refresh|bearer|id|api|resume|auth)_?token|token)$",
    re.IGNORECASE,
)
_SECRET_FORMS = re.compile(
    r"(?P<key>tkl_[a-z0-9][a-z0-9-]*_)[\w-]{20,}"  # an API key of ours: its name may be shown
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # a JSON web token
    r"|(?P<scheme>\b(?:bearer|basic)\s+)[\w~+/.=-]{8,}"
    r"|(?P<parameter>\b(?:api_?key|access_token|token|password|secret)=)[^\s&\"']+",
    re.IGNORECASE,
)

Fields = Mapping[str, object]


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON.

    Args:
        service: gateway, worker, operator or local.
        context: fields to add to every line of the moment, such as the trace that is being served.
        hidden: fields whose name begins so are left out: what a library attaches for itself.
    """

    def __init__(self, service: str, context: Callable[[], Fields] | None = None, hidden: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._service = service
        self._context = context
        self._hidden = hidden

    def format(self, record: logging.LogRecord) -> str:
        """The line; a value that JSON has no form for becomes text, and none makes this raise."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": _text(_message(record)),
        }
        if self._context is not None:
            line.update(self._context())
        for name, value in vars(record).items():
            if name in _STANDARD or value is None or name.startswith(self._hidden):
                continue
            name = name.rstrip("_")
            line[f"{name}_" if name in RESERVED else name] = _clean(name, value, DEPTH)
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = _traceback(record.exc_info)
        if record.stack_info:
            line["stack"] = _text(record.stack_info)
        return msgspec.json.encode(line).decode()


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes each line whole, or drops it where that would mean to wait for whoever reads stderr."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lost = 0
        self._cut = False  # within a long line

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the line; one that says how many were lost goes before it."""
        try:
            descriptor = self.stream.fileno()
        except (AttributeError, OSError, ValueError):  # none, no file, or closed
            super().emit(record)
            return
        try:
            if self._lost and self._taken(descriptor, _lost_lines(self._lost)):
                self._lost = 0
            if self._lost or not self._taken(descriptor, record):
                self._lost += 1
        except Exception:
            self.handleError(record)

    def _taken(self, descriptor: int, record: logging.LogRecord) -> bool:
        line = ("\n" * self._cut + self.format(record) + self.terminator).encode()
        room = select.poll()
        room.register(descriptor, select.POLLOUT)
        while line:
            # A pipe that has room takes so many bytes without making anybody wait.
            if not room.poll(0 if self._lost else PATIENCE_MS):
                return False
            line = line[os.write(descriptor, line[: select.PIPE_BUF]) :]
            self._cut = bool(line)
        return True


def _lost_lines(count: int) -> logging.LogRecord:
    about = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": "log_lines_lost"}
    return logging.makeLogRecord({**about, "lines": count})


def configure(
    service: str,
    level: str | int = "INFO",
    *,
    context: Callable[[], Fields] | None = None,
    hidden: tuple[str, ...] = (),
    quieter: Mapping[str, int] | None = None,
) -> None:
    """Sends all logging of this process to stderr as JSON lines.

    Args:
        service, context, hidden: see JsonFormatter.
        quieter: least levels of loggers that would say too much.
    """
    handler = StderrHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service, context, hidden))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    logging.raiseExceptions = False  # stderr that is closed or full must not end the thread that has something to say
    root.setLevel(level.upper() if isinstance(level, str) else level)
    for name, least in (quieter or {}).items():
        logging.getLogger(name).setLevel(least)


def log(logger: logging.Logger, level: int, message: str, /, *, exc_info: bool = False, **fields: object) -> None:
    """Logs `message` with its fields; a field that is None is left out.

    A field may have the name of one of the line's own (`message`, say); it is then written with `_` behind.
    """
    if logger.isEnabledFor(level):
        extra = {f"{name}_" if name in RESERVED or name in _STANDARD else name: value for name, value in fields.items()}
        logger.log(level, message, exc_info=exc_info, extra=extra)


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # a message that does not fit its arguments must not lose the line
        return f"{record.msg!r} {record.args!r}"


def _traceback(exc_info: Any) -> str:
    """The traceback; of one that is too long the end, which says what went wrong and where."""
    text = _safe("".join(traceback.format_exception(*exc_info)).rstrip())
    cut = len(text) - TRACEBACK_CHARACTERS
    return text if cut <= 0 else f"({cut} characters before) ...{text[cut:]}"


def _safe(text: str) -> str:
    # A lone surrogate (an undecodable file name, say) has no UTF-8.
    return _SECRET_FORMS.sub(_blot, text).encode("utf-8", "backslashreplace").decode()


def _text(text: str) -> str:
    text = _safe(text)
    if len(text) > TEXT_CHARACTERS:
        return f"{text[:TEXT_CHARACTERS]}... ({len(text) - TEXT_CHARACTERS} characters more)"
    return text


def _blot(match: re.Match[str]) -> str:
    shown = match.group("key") or match.group("scheme") or match.group("parameter") or ""
    return shown + REDACTED


def _clean(name: str, value: object, depth: int) -> object:
    """`value` as JSON has it: no bytes, no secret, bounded in length and depth."""
    if _SECRET_NAMES.search(name) and not (name == "credential" and value in CREDENTIAL_KINDS):
        return REDACTED
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(str(value))
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, float):
        return float(value) if abs(value) < float("inf") else str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"[{memoryview(value).nbytes} bytes]"
    if depth and isinstance(value, Mapping):
        pairs = list(value.items())[:ITEMS]
        return {_text(str(key)): _clean(str(key), item, depth - 1) for key, item in pairs}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_clean("", item, depth - 1) for item in list(value)[:ITEMS]]
    if hasattr(value, "__array__"):
        return f"[array {getattr(value, 'dtype', '')}{list(getattr(value, 'shape', ()))}]"
    try:
        return _text(str(value))
    except Exception as error:  # whatever its __str__ does, the line must not be lost
        return f"[{type(value).__name__}, which has no text: {type(error).__name__}]"
