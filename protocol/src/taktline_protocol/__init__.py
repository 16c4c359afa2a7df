"""The messages of Taktline: observations, action chunks, deadlines, typed errors and the worker RPC."""

from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_protocol.messages import (
    ActionChunk,
    Array,
    ErrorBody,
    Image,
    Observation,
    PolicyInfo,
    Timings,
)

__all__ = [
    "ActionChunk",
    "Array",
    "ErrorBody",
    "ErrorCode",
    "Image",
    "Observation",
    "PolicyInfo",
    "TaktlineError",
    "Timings",
]
