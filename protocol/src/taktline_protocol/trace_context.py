"""W3C trace context: the `traceparent` of a request, parsed and written; it needs no tracing library.

Format: W3C Trace Context, version 00: `00-<trace id, 32 hex>-<span id, 16 hex>-<flags, 2 hex>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

HEADER = "traceparent"
"""Name of the HTTP header and of the gRPC metadata key."""
MEMBERS_KEY = "taktline-traces"
"""gRPC metadata key: `index=traceparent` of every traced member of a batch, separated by commas."""
MAX_LENGTH = 256
MAX_INDEX_DIGITS = 6
_FORM = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(-.*)?"
)


class TraceContext(NamedTuple):
    """The trace and the span that a request belongs to; ids as integers, never 0."""

    trace_id: int
    span_id: int
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def parse_traceparent(text: str) -> TraceContext | None:
    """The context that `text` states; None where it states none, as the standard asks of malformed ones."""
    match = _FORM.fullmatch(text) if len(text) <= MAX_LENGTH else None
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match[5]):
        return None
    trace_id, span_id = int(match["trace"], 16), int(match["span"], 16)
    if not trace_id or not span_id:
        return None
    return TraceContext(trace_id, span_id, bool(int(match["flags"], 16) & 1))


def format_members(members: Iterable[tuple[int, TraceContext]]) -> str:
    """The metadata value that names the traced members of a batch."""
    return ",".join(f"{index}={context}" for index, context in members)


def parse_members(text: str) -> dict[int, TraceContext]:
    """The traced members of a batch by index; what is malformed is left out."""
    found = {}
    for part in text.split(","):
        index, _, traceparent = part.partition("=")
        context = parse_traceparent(traceparent)
        if context is not None and len(index) <= MAX_INDEX_DIGITS and index.isascii() and index.isdigit():
            found[int(index)] = context
    return found
