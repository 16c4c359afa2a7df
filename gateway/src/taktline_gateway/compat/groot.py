"""Isaac GR00T's ZeroMQ policy protocol: get_action, ping, reset, get_modality_config; `kill` does not exist here.

A ROUTER socket serves all clients at once: a client waits for its own answer only. Nothing of a request is printed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter, OrderedDict
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from taktline_protocol import Array, ErrorCode, TaktlineError

from taktline_gateway.access.keys import PortToken
from taktline_gateway.compat.groot_arrays import Generation, decode_groot, encode_groot
from taktline_gateway.compat.groot_connections import CountedClients
from taktline_gateway.compat.groot_observations import (
    action_map,
    is_flat,
    joined_keys,
    joined_mapping,
    mapping_of,
    modality_config,
    rows_of,
)
from taktline_gateway.compat.groot_options import check_no_options, rtc_of
from taktline_gateway.compat.observations import read_observation
from taktline_gateway.compat.ports import Listen
from taktline_gateway.compat.service import (
    Caller,
    Conversation,
    PolicyService,
    degraded_of,
    policy_of,
    until_ready,
)
from taktline_gateway.compat.wire_arrays import shown
from taktline_gateway.connections import HANDSHAKE_TIMEOUT_S, PROBE_AFTER_S, PROBE_EVERY_S, PROBES
from taktline_gateway.logs import log
from taktline_gateway.refusals import internal_error

COLD_WAIT_S = 10.0
"""GR00T's client gives up after 15 s; a request of a cold start waits for less."""
MAX_CLIENTS = 4096
"""Clients remembered, the longest silent forgotten first; a reconnect is a new client to ZeroMQ."""
MAX_IN_FLIGHT = 1024
QUEUED_MESSAGES = 4
_UNAUTHORIZED = "Unauthorized: Invalid API token"
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Client:
    caller: Caller
    generation: Generation = Generation.MSGPACK_NUMPY
    conversations: list[Conversation] = dataclasses.field(default_factory=list)
    """One for each place in its batch."""
    last: list[Array] = dataclasses.field(default_factory=list)
    """The chunk that each of those got last in this episode."""
    answering: asyncio.Task[None] | None = None


class GrootListener:
    """One port on which GR00T's protocol is spoken for one policy."""

    def __init__(self, listen: Listen, service: PolicyService, api_token: str = "") -> None:
        """`api_token` is what every request must carry, or its hash; empty asks for none."""
        self._listen = listen
        self._service = service
        self._token = PortToken(api_token) if api_token else None
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.ROUTER)
        self._counted = CountedClients(self._socket, service.connections, self._left)
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()
        self._identities: dict[int, bytes] = {}  # by the number of the connection's file
        self._overdue: Counter[int] = Counter()  # ends of connections, by the same, that are still to be heard of
        self._tasks: set[asyncio.Task[None]] = set()
        self._receiver: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to listen. Raises OSError where the address cannot be had."""
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, self._service.limits.body_bytes)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, int(1e3 * HANDSHAKE_TIMEOUT_S))
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, PROBE_AFTER_S)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, PROBE_EVERY_S)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, PROBES)
        self._socket.setsockopt(zmq.IPV6, 1 if ":" in self._listen.host else 0)
        host = f"[{self._listen.host}]" if ":" in self._listen.host else self._listen.host
        try:
            self._socket.bind(f"tcp://{host}:{self._listen.port}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, str(error)) from error
        self._counted.watch(self._listen.port)
        self._service.connections.remembered.append(self._clients)
        self._receiver = asyncio.create_task(self._receive())
        log(_logger, logging.INFO, "listening", protocol="groot", host=self._listen.host, port=self._listen.port)

    async def close(self) -> None:
        """Closes the port; answers already sent are still delivered."""
        tasks = [task for task in (self._receiver, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._counted.close()
        self._socket.close()
        self._context.term()

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            envelope = [frame.bytes for frame in frames[:-1]]
            if not envelope:
                continue
            client = self._client(envelope[0], frames[-1])
            self._came_by(int(frames[-1].get(zmq.SRCFD)), envelope[0])
            if client.answering is not None and not client.answering.done():
                # It gave up on that answer, which it would now take for this request's.
                client.answering.cancel()
            if len(self._tasks) >= MAX_IN_FLIGHT:
                busy = TaktlineError(ErrorCode.OVERLOADED, "too many requests are in flight here", "retry later")
                await self._send(envelope, client, {"error": str(busy)})
                continue
            task = asyncio.create_task(self._serve(envelope, client, frames[-1].bytes))
            client.answering = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _client(self, identity: bytes, frame: zmq.Frame) -> _Client:
        client = self._clients.get(identity)
        if client is None:
            try:
                peer = str(frame.get("Peer-Address"))
            except zmq.ZMQError:
                peer = ""
            client = self._clients[identity] = _Client(Caller.connecting("groot", peer))
            about: dict[str, Any] = {"peer": peer, "robot": client.caller.robot_id}
            log(_logger, logging.INFO, "client_connected", protocol="groot", **about)
            while len(self._clients) > MAX_CLIENTS:
                self._clients.popitem(last=False)
        self._clients.move_to_end(identity)
        return client

    def _came_by(self, file: int, identity: bytes) -> None:
        """A message of this client came by the connection with that number.

        The kernel gives a number away again as soon as it is free: where another client had it, that one has left, and
        word of its end must not be taken for the end of this one, whose answer would never come.
        """
        before = self._identities.get(file)
        if before is not None and before != identity:
            self._overdue[file] += 1
            self._forget(before)
        self._identities[file] = identity

    def _left(self, file: int) -> None:
        """A connection has ended."""
        if self._overdue[file]:
            self._overdue[file] -= 1
            return
        del self._overdue[file]
        self._forget(self._identities.pop(file, b""))

    def _forget(self, identity: bytes) -> None:
        """Nobody waits for its answer, and its observations leave the queue."""
        client = self._clients.pop(identity, None)
        if client is not None and client.answering is not None:
            client.answering.cancel()

    async def _serve(self, envelope: list[bytes], client: _Client, message: bytes) -> None:
        try:
            reply = await self._reply(client, message)
        except TaktlineError as error:
            reply = {"error": str(error)}
        except Exception:
            log(_logger, logging.ERROR, "internal", exc_info=True, protocol="groot", robot=client.caller.robot_id)
            reply = {"error": str(internal_error())}
        await self._send(envelope, client, reply)

    async def _send(self, envelope: list[bytes], client: _Client, reply: Any) -> None:
        await self._socket.send_multipart([*envelope, encode_groot(reply, client.generation)])

    async def _reply(self, client: _Client, message: bytes) -> Any:
        request, generation = decode_groot(message, self._service.limits)
        if generation is not None:
            client.generation = generation
        if not isinstance(request, dict):
            raise _invalid(f"the request is {type(request).__name__}, not a map")
        token = request.get("api_token")
        if self._token is not None and not self._token.matches(token):
            return {"error": _UNAUTHORIZED}
        key = token if isinstance(token, str) and self._token is None else None
        try:
            client.caller = await self._service.identify(dataclasses.replace(client.caller, api_key=key))
        except TaktlineError as error:
            return {"error": f"{_UNAUTHORIZED}: {error}"}
        endpoint = request.get("endpoint", "get_action")
        data = request.get("data") or {}
        if not isinstance(data, dict):
            raise _invalid("the request's data is no map")
        match endpoint:
            case "ping":
                return {"status": "ok", "message": "Server is running"}
            case "reset":
                check_no_options(data.get("options"))
                client.last = []
                for conversation in client.conversations:
                    conversation.begin_episode()
                return {}
            case "get_modality_config":
                policy = await self._ready(client)
                mapping = joined_mapping(self._service.mapping(policy, "groot"))
                return modality_config(self._service.info(policy), mapping)
            case "get_action":
                return await self._get_action(client, data.get("observation"), data.get("options"))
            case _:
                return {"error": f"Unknown endpoint: {shown(endpoint, 64)}"}

    async def _get_action(self, client: _Client, observation: Any, options: Any) -> list[dict[str, Any]]:
        policy = await self._ready(client)
        rows = rows_of(joined_keys(observation))
        mapping = joined_mapping(self._service.mapping(policy, "groot"))
        info = self._service.info(policy)
        reads = [read_observation(row, mapping_of(row, mapping), info, "groot") for row in rows]
        lasts = client.last if len(client.last) == len(reads) else [None] * len(reads)
        tails = [rtc_of(options, last) for last in lasts]
        while len(client.conversations) < len(reads):
            caller = client.caller
            if len(reads) > 1:
                caller = dataclasses.replace(caller, robot_id=f"{caller.robot_id}-{len(client.conversations)}")
            client.conversations.append(Conversation(self._service, caller, policy))
        for conversation in client.conversations:
            # The key of this very request, which may be another than the last one's.
            conversation.caller = dataclasses.replace(
                conversation.caller, api_key=client.caller.api_key, principal=client.caller.principal
            )
        acting = [
            asyncio.ensure_future(talk.act(read, rtc=tail))
            for talk, read, tail in zip(client.conversations, reads, tails, strict=False)
        ]
        try:
            chunks = await asyncio.gather(*acting)
        finally:
            for task in acting:
                task.cancel()
        facts: dict[str, list[Any]] = {
            "request_id": [chunk.request_id for chunk in chunks],
            "revision": [chunk.revision for chunk in chunks],
            "margin_ms": [chunk.margin_ms for chunk in chunks],
        }
        client.last = [chunk.actions for chunk in chunks]
        if options:
            facts["rtc"] = [None if chunk.rtc is None else msgspec.to_builtins(chunk.rtc) for chunk in chunks]
        if any(chunk.degraded for chunk in chunks):
            facts["degraded"] = [degraded_of(chunk) for chunk in chunks]
        return [action_map(chunks, mapping, flat=is_flat(observation)), facts]

    async def _ready(self, client: _Client) -> str:
        """The policy, as soon as a worker of it is ready. Raises TaktlineError after `COLD_WAIT_S`."""
        try:
            async with asyncio.timeout(COLD_WAIT_S):
                policy = await policy_of(self._service, client.caller, self._listen.policy)
                await until_ready(self._service, policy)
                return policy
        except TimeoutError as error:
            raise TaktlineError(
                ErrorCode.WORKER_UNAVAILABLE,
                f"no worker of policy {self._listen.policy or 'any'!r} is ready",
                "wait for GET /v1/policies/{policy} to say ready, or look at the worker's log",
            ) from error


def _invalid(message: str) -> TaktlineError:
    return TaktlineError(ErrorCode.INVALID_BODY, message, "send {endpoint, data} as GR00T's own client does")
