"""Typed errors: one stable code each, the same in REST bodies, stream messages, RPC results, logs and conditions."""

from __future__ import annotations

import errno
from enum import Enum
from typing import Literal


class ErrorCode(str, Enum):  # noqa: UP042 (robots run Python 3.10)
    """Stable error codes. A code is never renamed; a new cause gets a new code."""

    # The request cannot be understood.
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    INVALID_BODY = "invalid_body"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    BODY_TOO_LARGE = "body_too_large"
    # The observation does not fit the policy.
    UNKNOWN_POLICY = "unknown_policy"
    CAMERA_MISSING = "camera_missing"
    CAMERA_UNKNOWN = "camera_unknown"
    IMAGE_CORRUPT = "image_corrupt"
    IMAGE_TOO_LARGE = "image_too_large"
    STATE_INVALID = "state_invalid"
    INSTRUCTION_INVALID = "instruction_invalid"
    GOAL_INVALID = "goal_invalid"
    SEARCH_INVALID = "search_invalid"
    RTC_INVALID = "rtc_invalid"
    IMAGINE_INVALID = "imagine_invalid"
    # Time.
    BUDGET_INVALID = "budget_invalid"
    DEADLINE_EXPIRED = "deadline_expired"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    # Access.
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    # Traffic.
    RATE_LIMITED = "rate_limited"
    ROBOT_CONFLICT = "robot_conflict"
    SUPERSEDED = "superseded"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    # The stream.
    KEYFRAME_NEEDED = "keyframe_needed"
    CANCELLED = "cancelled"
    STREAM_VERSION = "stream_version"
    STREAM_IDLE = "stream_idle"
    SLOW_READER = "slow_reader"
    # The platform.
    WORKER_UNAVAILABLE = "worker_unavailable"
    WORKER_FAILED = "worker_failed"
    GATEWAY_UNREACHABLE = "gateway_unreachable"
    CHECKPOINT_INVALID = "checkpoint_invalid"
    CONFIG_INVALID = "config_invalid"
    # The delivery of a checkpoint to a node.
    MODEL_UNREACHABLE = "model_unreachable"
    MODEL_DENIED = "model_denied"
    MODEL_ABSENT = "model_absent"
    MODEL_MISMATCH = "model_mismatch"
    MODEL_UNSAFE = "model_unsafe"
    DISK_FULL = "disk_full"
    INTERNAL = "internal"


HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.METHOD_NOT_ALLOWED: 405,
    ErrorCode.INVALID_BODY: 400,
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: 415,
    ErrorCode.BODY_TOO_LARGE: 413,
    ErrorCode.UNKNOWN_POLICY: 404,
    ErrorCode.CAMERA_MISSING: 422,
    ErrorCode.CAMERA_UNKNOWN: 422,
    ErrorCode.IMAGE_CORRUPT: 422,
    ErrorCode.IMAGE_TOO_LARGE: 422,
    ErrorCode.STATE_INVALID: 422,
    ErrorCode.INSTRUCTION_INVALID: 422,
    ErrorCode.GOAL_INVALID: 422,
    ErrorCode.SEARCH_INVALID: 422,
    ErrorCode.RTC_INVALID: 422,
    ErrorCode.IMAGINE_INVALID: 422,
    ErrorCode.BUDGET_INVALID: 422,
    ErrorCode.DEADLINE_EXPIRED: 504,
    ErrorCode.DEADLINE_UNREACHABLE: 503,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.ROBOT_CONFLICT: 409,
    ErrorCode.SUPERSEDED: 409,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.DRAINING: 503,
    ErrorCode.KEYFRAME_NEEDED: 409,
    ErrorCode.CANCELLED: 409,
    ErrorCode.STREAM_VERSION: 400,
    ErrorCode.STREAM_IDLE: 408,
    ErrorCode.SLOW_READER: 408,
    ErrorCode.WORKER_UNAVAILABLE: 503,
    ErrorCode.WORKER_FAILED: 502,
    ErrorCode.GATEWAY_UNREACHABLE: 504,
    ErrorCode.CHECKPOINT_INVALID: 500,
    ErrorCode.CONFIG_INVALID: 500,
    ErrorCode.MODEL_UNREACHABLE: 500,
    ErrorCode.MODEL_DENIED: 500,
    ErrorCode.MODEL_ABSENT: 500,
    ErrorCode.MODEL_MISMATCH: 500,
    ErrorCode.MODEL_UNSAFE: 500,
    ErrorCode.DISK_FULL: 500,
    ErrorCode.INTERNAL: 500,
}


class TaktlineError(Exception):
    """An error with a stable code, a sentence for a person, and the next step.

    Attributes:
        code: stable identifier, never localised.
        message: what went wrong, with the values that matter.
        next_step: what the reader can do about it.
        retry_after_ms: when a retry may succeed; None when the same request never will.
        safe_action: for a robot that was shed: `continue` with its buffer or `hold`; None where it is its own fault.
        buffer_ms: how long that buffer lasts.
    """

    safe_action: Literal["continue", "hold"] | None = None
    buffer_ms: float | None = None

    def __init__(self, code: ErrorCode, message: str, next_step: str, *, retry_after_ms: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.next_step = next_step
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        safe = {"continue": f"; until then continue, {self.buffer_ms} ms are buffered", "hold": "; until then hold"}
        return f"{self.code.value}: {self.message} ({self.next_step}{safe.get(self.safe_action or '', '')})"

    @property
    def http_status(self) -> int:
        """HTTP status of this error's code."""
        return HTTP_STATUS[self.code]


def of_files(error: OSError) -> TaktlineError | None:
    """What a person is told of a file or folder that cannot be used, or of a full disk; None for any other error."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = "the output" if error.filename is None else error.filename
        return TaktlineError(
            ErrorCode.DISK_FULL, f"{where} cannot be written: {reason}", "make room there, or name another place"
        )
    if error.filename is None:
        return None
    return TaktlineError(
        ErrorCode.CONFIG_INVALID, f"{error.filename} cannot be used: {reason}", "check that path and the rights to it"
    )
