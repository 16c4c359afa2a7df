"""JSON and msgpack encodings of the one schema; every failure to decode is a TaktlineError."""

from __future__ import annotations

from enum import Enum
from typing import Any, Generic, TypeVar

import msgspec

from taktline_protocol.checks import check_array, check_observation
from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_protocol.limits import (
    DEFAULT_LIMITS,
    Limits,
    check_body_size,
    check_structure_json,
    check_structure_msgpack,
)
from taktline_protocol.messages import ActionChunk, AdmissionQuestion, ErrorBody, Observation, PolicyInfo, PolicyList

T = TypeVar("T")


class MediaType(str, Enum):  # noqa: UP042 (robots run Python 3.10)
    """The two encodings, by their media type."""

    JSON = "application/json"
    MSGPACK = "application/msgpack"


_ALIASES = {
    "application/json": MediaType.JSON,
    "application/msgpack": MediaType.MSGPACK,
    "application/x-msgpack": MediaType.MSGPACK,
    "application/vnd.msgpack": MediaType.MSGPACK,
}

# An answer of the gateway is small but its arrays are not bounded by the request limits.
ANSWER_LIMITS = Limits(body_bytes=64 * 1024 * 1024, items=100_000)

_json_encode = msgspec.json.Encoder().encode
_msgpack_encode = msgspec.msgpack.Encoder().encode


def media_type(content_type: str) -> MediaType:
    """Encoding named by a Content-Type header. Raises TaktlineError `unsupported_media_type`."""
    name, _, parameters = content_type.partition(";")
    media = _ALIASES.get(name.strip().lower())
    charset = parameters.strip().lower().replace('"', "")
    if media is None or (charset.startswith("charset=") and charset not in ("charset=utf-8", "charset=utf8")):
        raise TaktlineError(
            ErrorCode.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Type {content_type[:100]!r} is not read here" if content_type else "Content-Type is missing",
            "send application/json (UTF-8, bytes as base64) or application/msgpack",
        )
    return media


def accepted_media_type(accept: str, default: MediaType) -> MediaType:
    """First encoding of an Accept header that is spoken here, else `default` (also where nothing matches)."""
    for part in accept.split(","):
        name, _, parameters = part.partition(";")
        media = _ALIASES.get(name.strip().lower())
        if media is not None and parameters.replace(" ", "").lower() not in ("q=0", "q=0.0"):
            return media
    return default


def encode(message: msgspec.Struct, media: MediaType) -> bytes:
    """Encodes any message of the schema."""
    return _json_encode(message) if media is MediaType.JSON else _msgpack_encode(message)


class Decoder(Generic[T]):
    """Decodes one message type from both encodings, behind the limits."""

    def __init__(self, message: type[T]) -> None:
        self._name = message.__name__
        self._json: msgspec.json.Decoder[Any] = msgspec.json.Decoder(message)
        self._msgpack: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(message)

    def decode(self, body: bytes, media: MediaType, limits: Limits) -> T:
        """Decodes `body`. Raises TaktlineError `body_too_large` or `invalid_body`, nothing else."""
        check_body_size(len(body), limits)
        try:
            if media is MediaType.JSON:
                check_structure_json(body, limits)
                message: T = self._json.decode(body)
            else:
                check_structure_msgpack(body, limits)
                message = self._msgpack.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise TaktlineError(
                ErrorCode.INVALID_BODY,
                f"the body is no {self._name} in {media.value}: {str(error)[:300]}",
                "compare it with the worked example in /openapi.json",
            ) from error
        return message


_observations = Decoder(Observation)
_chunks = Decoder(ActionChunk)
_errors = Decoder(ErrorBody)
_policies = Decoder(PolicyList)
_policy = Decoder(PolicyInfo)
_questions = Decoder(AdmissionQuestion)


def decode_observation(body: bytes, media: MediaType, limits: Limits = DEFAULT_LIMITS) -> Observation:
    """Decodes and checks one observation: size, structure, schema, then every limit; no image is decoded.

    Raises:
        TaktlineError: the codes of `check_observation`, `body_too_large`, `invalid_body`.
    """
    observation = _observations.decode(body, media, limits)
    check_observation(observation, limits)
    return observation


def decode_admission_question(body: bytes, media: MediaType, limits: Limits = DEFAULT_LIMITS) -> AdmissionQuestion:
    """Decodes a robot's question for a place. Raises TaktlineError `invalid_body` or `body_too_large`."""
    return _questions.decode(body, media, limits)


def decode_chunk(body: bytes, media: MediaType) -> ActionChunk:
    """Decodes one answer, its array checked. Raises TaktlineError `invalid_body` or `body_too_large`."""
    chunk = _chunks.decode(body, media, ANSWER_LIMITS)
    check_array("actions", chunk.actions)
    if chunk.actions.dtype != "float32" or len(chunk.actions.shape) != 2:
        raise TaktlineError(
            ErrorCode.INVALID_BODY,
            f"actions are {chunk.actions.dtype} of shape {list(chunk.actions.shape)}, not float32 (H, D)",
            "check that the address is a Taktline gateway",
        )
    return chunk


def decode_error(body: bytes, media: MediaType) -> ErrorBody:
    """Decodes a typed error. Raises TaktlineError `invalid_body` or `body_too_large`."""
    return _errors.decode(body, media, ANSWER_LIMITS)


def decode_policies(body: bytes, media: MediaType) -> PolicyList:
    """Decodes the answer of GET /v1/policies. Raises TaktlineError `invalid_body` or `body_too_large`."""
    return _policies.decode(body, media, ANSWER_LIMITS)


def decode_policy(body: bytes, media: MediaType) -> PolicyInfo:
    """Decodes the answer of GET /v1/policies/{policy}. Raises TaktlineError `invalid_body` or `body_too_large`."""
    return _policy.decode(body, media, ANSWER_LIMITS)


def error_body(error: TaktlineError, request_id: str = "") -> ErrorBody:
    """The wire form of `error`."""
    return ErrorBody(
        code=error.code.value,
        message=error.message,
        next_step=error.next_step,
        request_id=request_id,
        retry_after_ms=error.retry_after_ms,
        safe_action=error.safe_action,
        buffer_ms=error.buffer_ms,
    )


def error_from_body(body: ErrorBody) -> TaktlineError:
    """The exception of a received error body; a code unknown to this version becomes `internal`, named in the text."""
    try:
        code = ErrorCode(body.code)
        message = body.message
    except ValueError:
        code, message = ErrorCode.INTERNAL, f"{body.code}: {body.message}"
    error = TaktlineError(code, message, body.next_step, retry_after_ms=body.retry_after_ms)
    error.safe_action, error.buffer_ms = body.safe_action, body.buffer_ms
    return error
