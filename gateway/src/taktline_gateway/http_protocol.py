"""HTTP/1.1 with bounds that uvicorn has none for: how long a request's head may take, how large it may be, how many
connections are held."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from taktline_gateway.connections import TOO_MANY, ConnectionCounts
from taktline_gateway.logs import log

HEAD_TIMEOUT_S = 10.0
HEAD_BYTES = 32 * 1024
_logger = logging.getLogger(__name__)


def guarded_http(counts: ConnectionCounts, head_timeout_s: float = HEAD_TIMEOUT_S) -> type[HttpToolsProtocol]:
    """uvicorn's protocol class for one server, with the bounds of this module."""
    return type("CountedHttp", (GuardedHttp,), {"counts": counts, "head_timeout_s": head_timeout_s})


class GuardedHttp(HttpToolsProtocol):
    """Closes a connection whose request head does not come, comes too slowly, or is too large.

    A body has its own time limit, which the application knows.
    """

    counts: ConnectionCounts
    head_timeout_s: float

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._address: str | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes: int | None = 0
        """Bytes of the head so far; None while a body or an answer is on its way."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counts the connection, or refuses it."""
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if self.counts.full(address):
            log(_logger, logging.WARNING, "connection_refused", peer=address, connections=self.counts.total)
            self._close_with(503, TOO_MANY)
            return
        self._address = address
        self.counts.enter(address)
        # Small answers must not wait for the acknowledgement of the last one.
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Counts the connection out."""
        if self._address is not None:
            self.counts.leave(self._address)
            self._address = None
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bounds the head before it is parsed further."""
        if self.transport.is_closing():
            return
        if self._head_bytes is not None:
            if self._head_timer is None:  # the first bytes on a connection that was kept
                self._expect_head()
            self._head_bytes += len(data)
        super().data_received(data)
        # The parser has told in the meantime where the head ended.
        if self._head_bytes is not None and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._close_with(431, b"the request's headers are too large")

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._head_came()
        super().on_headers_complete()

    def handle_websocket_upgrade(self) -> None:
        """The connection goes on under another protocol, and is counted out when that ends."""
        address, self._address = self._address, None
        super().handle_websocket_upgrade()
        upgraded = self.transport.get_protocol()
        ended = upgraded.connection_lost

        def connection_lost(exc: Exception | None) -> None:
            if address is not None:
                self.counts.leave(address)
            ended(exc)

        upgraded.connection_lost = connection_lost  # type: ignore[method-assign]
        reading = getattr(upgraded, "reading", None)
        if reading is not None:
            reading.connection_lost = connection_lost
            self.transport.set_protocol(reading)

    def on_response_complete(self) -> None:
        """The next head may come."""
        if not self.pipeline:
            self._head_bytes = 0
        super().on_response_complete()

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _head_came(self) -> None:
        self._head_bytes = None
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._close_with(408, b"the request's headers did not arrive in time")

    def _close_with(self, status: int, text: bytes) -> None:
        reason = {408: b"Request Timeout", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}
        lines = (
            b"HTTP/1.1 %d %s" % (status, reason[status]),
            b"content-type: text/plain; charset=utf-8",
            b"content-length: %d" % (len(text) + 1),
            b"connection: close",
            b"",
            text + b"\n",
        )
        self.transport.write(b"\r\n".join(lines))
        self.transport.close()
