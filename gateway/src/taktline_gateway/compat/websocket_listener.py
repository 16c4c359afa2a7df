"""WebSocket listeners of the client protocols: one port each, no extensions, and a fence behind every answer.

The `websockets` server is used directly rather than through ASGI, which has no ping: the fence needs one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import struct
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from taktline_protocol import TaktlineError
from taktline_protocol.deployment import ClientProtocol
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State

from taktline_gateway.access.http import secret_in
from taktline_gateway.compat.ports import Listen
from taktline_gateway.compat.service import Caller, PolicyService
from taktline_gateway.frame_reader import DirectReading, read_in_chunks
from taktline_gateway.logs import log
from taktline_gateway.tls import ServerTls

OPEN_TIMEOUT_S = 10.0
DATA = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
_TEXT, _BINARY, _PING_OF_8 = 0x81, 0x82, b"\x89\x08"  # of frames in one piece
QUEUED_FRAMES = 2
"""Frames read ahead of the handler; the rest stays in the kernel's buffers and slows its sender down."""
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """One connection as its handshake describes it; an empty `policy` means the only one served."""

    caller: Caller
    policy: str


class FencedConnection(ServerConnection):
    """A connection whose client waits for each answer before it sends again, and which notices when one did not.

    Such protocols have no request id. A client that gave up on an answer and sends again would take the late answer
    for the new one's. Two marks show it: a message that arrives while another is unanswered, and one that arrives
    before the pong to the ping that went out just ahead of the last answer (pings are answered in order, so its
    sender had not yet seen that answer). In both cases `overtaken` is set, at the moment the message arrives.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reading = DirectReading(self, read_in_chunks(self.protocol), self)
        self.caller: Caller | None = None
        """Who it is, once its handshake has been read."""
        self.longest = 0
        """The longest message that is taken without the library's parser."""
        self.overtaken: asyncio.Future[None] = self.loop.create_future()
        self._unanswered = False
        self._answers = 0
        self._fence: asyncio.Future[float] | None = None
        self._fragmented = False
        self._waiting: asyncio.Future[bytes | None] | None = None
        self._going_on: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self.recv_messages.resume = self._resume_reading
        transport.set_protocol(self._reading)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        super().connection_lost(exc)
        self._look()

    def process_event(self, event: Any) -> None:
        """Looks at each frame in the order of arrival, before it is queued for `recv`."""
        if not isinstance(event, Frame) or event.opcode not in DATA:
            super().process_event(event)
            return
        self._fragmented = not event.fin
        if event.opcode is not Opcode.CONT:
            self._message_began()
        super().process_event(event)
        self._look()

    def room(self) -> int:
        """The longest message that `message_arrived` may be told of now."""
        if self.protocol.state is not State.OPEN or self._fragmented or self.recv_messages.paused:
            return 0
        return self.longest

    def waits(self) -> bool:
        """Whether messages wait for the handler, so that no more are to be read."""
        return self.recv_messages.paused

    def message_arrived(self, data: bytes) -> None:
        """A whole message, past the library."""
        self._message_began()
        waiting = self._waiting
        if waiting is not None and not waiting.done():
            waiting.set_result(data)
        elif not self.recv_messages.closed:
            self.recv_messages.put(Frame(Opcode.BINARY, data))

    def pong_arrived(self, number: int) -> bool:
        """A pong, past the library; False where it does not answer the only ping under way."""
        if number != self._answers or self._fence is None or len(self.pending_pings) != 1:
            return False
        if self.pending_pings.pop(number.to_bytes(8, "big"), None) is None:
            return False
        self._fence = None
        return True

    async def next_message(self) -> bytes | str:
        """What `recv` gives, at less cost where a message came past the library. Raises ConnectionClosed."""
        if not self.recv_messages.frames and not self.recv_messages.closed:
            self._waiting = self.loop.create_future()
            try:
                message = await self._waiting
            finally:
                self._waiting = None
            if message is not None:
                return message
        return await self.recv()

    async def answer(self, message: bytes | str) -> None:
        """Sends the answer to the last message. Raises ConnectionClosed."""
        if self.protocol.state is not State.OPEN:
            await self.send(message)  # which waits for the end and says why
            return
        # As `ping` and `send` would, without two waits and two writes for one answer.
        self._answers += 1
        mark = self._answers.to_bytes(8, "big")
        self._fence = self.loop.create_future()
        self.pending_pings[mark] = (self._fence, self.loop.time())
        self._unanswered = False
        parts = [_PING_OF_8, mark]
        if not self.overtaken.done():
            data = message.encode() if isinstance(message, str) else message
            parts += (_head(_TEXT if isinstance(message, str) else _BINARY, len(data)), data)
        self.transport.write(b"".join(parts))
        if self.paused or self.transport.is_closing():
            await self.drain()

    def rest_follows(self) -> None:
        """Reads nothing until the next turn of the loop has gone on with what is held."""
        self.transport.pause_reading()
        if self._going_on is None:
            self._going_on = self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._going_on = None
        if not self.recv_messages.paused:  # else its handler goes on
            self._resume_reading()

    def _resume_reading(self) -> None:
        """The handler has taken messages that waited: on with what was read after them, then with the socket."""
        if self._reading.go_on() and not self.recv_messages.paused:
            self.transport.resume_reading()

    def _message_began(self) -> None:
        fenced = self._fence is not None and not self._fence.done()
        if (self._unanswered or fenced) and not self.overtaken.done():
            self.overtaken.set_result(None)
        self._unanswered = True

    def _look(self) -> None:
        """Something came, or the end: whoever waits for a message is to look for it where the library keeps it."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def _head(opcode: int, size: int) -> bytes:
    """The head of a frame in one piece, without a mask."""
    if size < 126:
        return bytes((opcode, size))
    return struct.pack("!BBH", opcode, 126, size) if size < 65_536 else struct.pack("!BBQ", opcode, 127, size)


Converse = Callable[[FencedConnection, Arrival], Awaitable[None]]


class WebSocketListener:
    """One port on which one protocol is spoken for one policy at `/`, and for all at `/v1/policies/{policy}/NAME`."""

    def __init__(
        self,
        protocol: ClientProtocol,
        listen: Listen,
        service: PolicyService,
        converse: Converse,
        *,
        health: tuple[str, str, str],
        keepalive_s: float | None,
        tls: ServerTls | None = None,
    ) -> None:
        """
        Args:
            converse: speaks the protocol on one connection until it ends.
            health: path, body and content type of the protocol's own health answer.
            keepalive_s: ping interval; None for clients whose loop may stand still for long.
        """
        self._protocol = protocol
        self._listen = listen
        self._service = service
        self._converse = converse
        self._health = health
        self._keepalive_s = keepalive_s
        self._tls = tls
        self._server: Server | None = None

    async def start(self) -> None:
        """Begins to listen. Raises OSError where the address cannot be had."""
        self._server = await serve(
            self._handle,
            self._listen.host,
            self._listen.port,
            ssl=self._tls.context if self._tls is not None else None,
            process_request=self._process_request,
            create_connection=FencedConnection,
            compression=None,
            max_size=self._service.limits.body_bytes,
            max_queue=QUEUED_FRAMES,
            open_timeout=OPEN_TIMEOUT_S,
            ping_interval=self._keepalive_s,
            ping_timeout=self._keepalive_s,
            server_header=None,
        )
        log(_logger, logging.INFO, "listening", protocol=self._protocol, host=self._listen.host, port=self.port)

    @property
    def port(self) -> int:
        """The port in use, also where 0 was asked for."""
        if self._server is None:
            return self._listen.port
        port: int = next(iter(self._server.sockets)).getsockname()[1]
        return port

    async def close(self) -> None:
        """Closes the port and every connection."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _process_request(self, connection: ServerConnection, request: Request) -> Response | None:
        assert isinstance(connection, FencedConnection)
        connection.longest = self._service.limits.body_bytes
        path, body, content_type = self._health
        if request.path == path:
            response = connection.respond(HTTPStatus.OK, body)
            del response.headers["Content-Type"]
            response.headers["Content-Type"] = content_type
            return response
        target = urlsplit(request.path)
        robot = parse_qs(target.query).get("robot", [None])[0]
        key = secret_in(request.headers.get("Authorization", ""))
        policy = self._policy_at(target.path)
        try:
            connection.caller = caller = await self._service.identify(
                Caller.connecting(self._protocol, _peer(connection), robot, key)
            )
            if policy:
                self._service.check_may_act(caller, policy)
        except TaktlineError as error:
            return connection.respond(HTTPStatus(error.http_status), f"{error}\n")
        served = self._service.policies(caller)
        if policy is None or (policy and policy != self._listen.policy and policy not in served):
            return connection.respond(
                HTTPStatus.NOT_FOUND, f"not_found: there is nothing here. {self._where(served)}\n"
            )
        if not policy and len(served) > 1:
            return connection.respond(
                HTTPStatus.NOT_FOUND, f"unknown_policy: {len(served)} policies are served here. {self._where(served)}\n"
            )
        return None

    def _where(self, served: list[str]) -> str:
        names = ", ".join(served[:20]) or "none yet"
        return f"Connect to /v1/policies/POLICY/{self._protocol}; policies: {names}."

    def _policy_at(self, path: str) -> str | None:
        """The policy that a path names; empty for the only one, None where the path means nothing here."""
        if path in ("", "/"):
            return self._listen.policy
        parts = path.split("/")
        if len(parts) == 5 and parts[:3] == ["", "v1", "policies"] and parts[4] == self._protocol and parts[3]:
            return unquote(parts[3])
        return None

    async def _handle(self, connection: ServerConnection) -> None:
        assert isinstance(connection, FencedConnection)
        assert connection.request is not None
        caller = connection.caller
        assert caller is not None
        policy = self._policy_at(urlsplit(connection.request.path).path) or ""
        about: dict[str, Any] = {
            "protocol": self._protocol,
            "peer": caller.peer,
            "robot": caller.robot_id,
            "policy": policy or None,
        }
        log(_logger, logging.INFO, "client_connected", **about)
        try:
            await self._converse(connection, Arrival(caller, policy))
        except ConnectionClosed:
            pass
        except TaktlineError as error:
            log(_logger, logging.INFO, "client_refused", code=error.code.value, reason=error.message, **about)
            await connection.close(CloseCode.POLICY_VIOLATION, error.code.value)
        except Exception:
            log(_logger, logging.ERROR, "internal", exc_info=True, **about)
            await connection.close(CloseCode.INTERNAL_ERROR, "internal")
        finally:
            self._service.leave(caller)
            log(_logger, logging.INFO, "client_left", code=connection.close_code, **about)


def _peer(connection: ServerConnection) -> str:
    address = connection.remote_address
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)


async def unless_closed(connection: ServerConnection, work: Awaitable[Any]) -> Any:
    """The result of `work`, given up when the client leaves (raises ConnectionClosed)."""
    working = asyncio.ensure_future(work)
    closing = asyncio.ensure_future(connection.wait_closed())
    try:
        await asyncio.wait({working, closing}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise connection.protocol.close_exc
        return working.result()
    finally:
        working.cancel()
        closing.cancel()
        await asyncio.gather(working, closing, return_exceptions=True)
