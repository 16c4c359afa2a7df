"""How a stream ends: the frame that says why, and the WebSocket's close code."""

from __future__ import annotations

from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.stream import Goodbye


def goodbye(error: TaktlineError) -> Goodbye:
    """The last frame of a stream that ends with an error."""
    return Goodbye(error.code.value, error.message, error.next_step, error.retry_after_ms)


_CLOSE_CODES = {
    ErrorCode.INVALID_BODY: 1007,
    ErrorCode.BODY_TOO_LARGE: 1009,
    ErrorCode.STREAM_VERSION: 1002,
    ErrorCode.STREAM_IDLE: 1001,
    ErrorCode.DRAINING: 1001,
    ErrorCode.OVERLOADED: 1013,
    ErrorCode.INTERNAL: 1011,
}


def closing_code(code: ErrorCode) -> int:
    """What a connection is closed with that ends for this reason."""
    return _CLOSE_CODES.get(code, 1008)
