"""What the API server says when it refuses, for those who decide by it and need no client."""

from __future__ import annotations

import json


class ApiError(Exception):
    """The API server refused a request or gave no answer.

    Attributes:
        status: HTTP status; 0 when no answer came.
        reason: the Status object's reason, for example `NotFound` or `Conflict`.
        retry_after_s: what the server asked to wait; None when it did not say.
        causes: reasons of the Status object's details, for example `NamespaceTerminating`.
        kind: the kind that was asked for; empty where that is not known.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        retry_after_s: float | None = None,
        causes: frozenset[str] = frozenset(),
        kind: str = "",
    ) -> None:
        super().__init__(f"{status or 'no answer'} {reason}: {message}")
        self.causes = causes
        self.kind = kind
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


def is_without_rights(error: ApiError) -> bool:
    """Whether the API server refused because of who asks: not for a quota, an admission policy or a namespace's end."""
    return error.status == 403 and " cannot " in error.message and not error.causes


def decoded(status: int, content: bytes, retry_after: str | None, kind: str) -> ApiError:
    """The error that an answer of the API server is, from its status code, its body and its Retry-After header."""
    try:
        body = json.loads(content)
        reason, message = str(body.get("reason", "")), str(body.get("message", ""))
        details = body.get("details") or {}
        causes = frozenset(str(cause.get("reason", "")) for cause in details.get("causes") or [])
    except (ValueError, AttributeError):
        reason, message, causes = "", content[:200].decode("utf-8", "replace"), frozenset()
    seconds = float(retry_after) if retry_after and retry_after.isdigit() else None
    return ApiError(status, reason, message, seconds, causes, kind)
