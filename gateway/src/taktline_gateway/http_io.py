"""Bytes in and out of one HTTP exchange: bounded body reading, typed replies, request ids."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Iterable

import msgspec
from starlette.types import Message, Receive, Scope, Send
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.codecs import MediaType, accepted_media_type, encode, error_body, media_type
from taktline_protocol.limits import MIB, Limits, check_body_size

from taktline_gateway.pending import Pending

REQUEST_ID_MAX = 64
LINGER_S = 2.0
LINGER_BYTES = 32 * MIB
_SCOPE_KEY = "taktline.exchange"
_ids = random.Random()  # seeded by the system; ids are no secrets, and a system call each is too much


class Disconnected(Exception):
    """The client closed the connection before its body was complete."""


class Exchange:
    """The headers of one request that matter here, read once."""

    __slots__ = (
        "accept",
        "content_encoding",
        "content_length",
        "content_type",
        "pending",
        "received_at",
        "request_id",
        "traceparent",
    )

    def __init__(self, scope: Scope) -> None:
        self.received_at = time.monotonic()
        self.content_type = self.accept = self.content_encoding = self.traceparent = ""
        self.pending: Pending | None = None  # once its observation waits for a batch
        self.content_length: int | None = None
        given = b""
        for name, value in scope["headers"]:
            if name == b"content-type":
                self.content_type = value.decode("latin-1")
            elif name == b"content-encoding":
                self.content_encoding = value.decode("latin-1")
            elif name == b"accept":
                self.accept = value.decode("latin-1")
            elif name == b"content-length" and value.isdigit():
                self.content_length = int(value)
            elif name == b"x-request-id":
                given = value
            elif name == b"traceparent":
                self.traceparent = value.decode("latin-1")
        self.request_id = _request_id(given)

    def body_media(self) -> MediaType:
        """Encoding of the body. Raises TaktlineError `unsupported_media_type`, also for a compressed one: a bomb."""
        if self.content_encoding.lower() not in ("", "identity"):
            raise TaktlineError(
                ErrorCode.UNSUPPORTED_MEDIA_TYPE,
                f"Content-Encoding {self.content_encoding[:50]!r} is not read here",
                "send the body as it is: camera frames are compressed already",
            )
        return media_type(self.content_type)

    def answer_media(self) -> MediaType:
        """Encoding of the answer: what Accept names, else the body's own, else JSON."""
        try:
            default = media_type(self.content_type)
        except TaktlineError:
            default = MediaType.JSON
        return accepted_media_type(self.accept, default) if self.accept else default


def exchange_of(scope: Scope) -> Exchange:
    """The exchange of this request: one object, so that header, body and log name the same request id."""
    exchange: Exchange | None = scope.get(_SCOPE_KEY)
    if exchange is None:
        exchange = scope[_SCOPE_KEY] = Exchange(scope)
    return exchange


async def read_body(exchange: Exchange, receive: Receive, limits: Limits, timeout_s: float) -> bytes:
    """Reads the body, refusing it as soon as it is over the limit or too slow.

    Raises:
        TaktlineError: `body_too_large`, or `invalid_body` after `timeout_s`.
        Disconnected: the client went away.
    """
    if exchange.content_length is not None:
        check_body_size(exchange.content_length, limits)
    try:
        async with asyncio.timeout(timeout_s):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            body: bytes = message.get("body", b"")
            if not message.get("more_body", False):
                check_body_size(len(body), limits)
                return body
            chunks = [body]
            size = len(body)
            while message.get("more_body", False):
                check_body_size(size, limits)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                chunk = message.get("body", b"")
                size += len(chunk)
                chunks.append(chunk)
    except TimeoutError as error:
        raise TaktlineError(
            ErrorCode.INVALID_BODY,
            f"the body did not arrive within {timeout_s:g} s",
            "send the body at once; check the network between robot and gateway",
        ) from error
    check_body_size(size, limits)
    return b"".join(chunks)


async def send_message(
    send: Send,
    exchange: Exchange,
    message: msgspec.Struct,
    *,
    status: int = 200,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """Sends one message in the encoding that the client asked for."""
    media = exchange.answer_media()
    await send_bytes(send, exchange, encode(message, media), media.value.encode(), status=status, headers=headers)


async def send_bytes(
    send: Send,
    exchange: Exchange,
    body: bytes,
    content_type: bytes,
    *,
    status: int = 200,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """Sends one whole answer with its request id."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type),
                (b"content-length", b"%d" % len(body)),
                (b"x-request-id", exchange.request_id.encode()),
                *headers,
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def send_error(
    send: Send,
    exchange: Exchange,
    error: TaktlineError,
    *,
    close: bool = False,
    unread: Receive | None = None,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """Sends a typed error.

    Args:
        close: the connection ends with this answer.
        unread: where the body was not read to its end: what is left of it. It is thrown away for a moment after the
            answer, as a connection closed on unread bytes is reset, and the client then loses the answer too.
    """
    sent = list(headers)
    close = close or unread is not None
    if error.retry_after_ms is not None:
        sent.append((b"retry-after", b"%d" % math.ceil(error.retry_after_ms / 1e3)))
    if close:
        sent.append((b"connection", b"close"))
    body = error_body(error, exchange.request_id)
    if unread is None:
        await send_message(send, exchange, body, status=error.http_status, headers=sent)
        return

    async def send_open(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    await send_message(send_open, exchange, body, status=error.http_status, headers=sent)
    await _discard(unread)
    await send({"type": "http.response.body", "body": b""})


async def _discard(receive: Receive) -> None:
    left = LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while left > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))


def _request_id(given: bytes) -> str:
    """The client's own id where it is printable ASCII of sane length, else a new one."""
    if 0 < len(given) <= REQUEST_ID_MAX and given.isascii():
        text = given.decode()
        if text.isprintable() and " " not in text:
            return text
    return f"{_ids.getrandbits(64):016x}"
