"""WebSocket listeners of the client protocols: one port each, no extensions.

The `websockets` server is used directly rather than through ASGI, which has no ping; the fence behind answers needs it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from taktline_protocol import TaktlineError
from taktline_protocol.deployment import ClientProtocol
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from taktline_gateway.access.http import secret_in
from taktline_gateway.compat.fenced_connection import FencedConnection, counted
from taktline_gateway.compat.ports import Listen
from taktline_gateway.compat.service import Caller, PolicyService
from taktline_gateway.logs import log
from taktline_gateway.tls import ServerTls

OPEN_TIMEOUT_S = 10.0
QUEUED_FRAMES = 2
"""Frames read ahead of the handler; the rest stays in the kernel's buffers and slows its sender down."""
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """One connection as its handshake describes it; an empty `policy` means the only one served."""

    caller: Caller
    policy: str


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
            create_connection=counted(self._service.connections),
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
        try:
            target = urlsplit(request.path)
        except ValueError:
            return connection.respond(HTTPStatus.BAD_REQUEST, "invalid_body: the path of the request is none\n")
        robot = parse_qs(target.query).get("robot", [None])[0]
        key = secret_in(request.headers.get("Authorization", ""))
        policy = self._policy_at(target.path)
        try:
            connection.caller = caller = await self._service.identify(
                Caller.connecting(self._protocol, connection.peer, robot, key)
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
