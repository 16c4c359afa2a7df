"""LeRobot's asynchronous inference service (gRPC), for any number of robots on one port.

A robot pushes observations and pulls chunks over one connection, which is its session: nothing in a message says who it
is. The newest observation is the one that a pull answers; none is filtered by likeness to the last.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import grpc
import numpy as np
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.limits import MIB

from taktline_gateway.access.http import secret_in
from taktline_gateway.compat.lerobot_messages import (
    BEGIN,
    CLIENT_MESSAGE_BYTES,
    END,
    MIDDLE,
    actions_message,
    observation_piece,
    setup_data,
)
from taktline_gateway.compat.lerobot_pickle import Record, read_record, value_of, write_actions
from taktline_gateway.compat.observations import read_observation
from taktline_gateway.compat.ports import Listen
from taktline_gateway.compat.service import Caller, Conversation, PolicyService, until_ready
from taktline_gateway.compat.wire_arrays import shown
from taktline_gateway.connections import HANDSHAKE_TIMEOUT_S, address_of, peers_at
from taktline_gateway.logs import log
from taktline_gateway.refusals import internal_error
from taktline_gateway.tls import ServerTls, expired_but_resumed

SERVICE = "transport.AsyncInference"
PULL_WAIT_S = 2.0
"""How long a pull waits for an observation before it answers `nothing yet`, as the reference server does."""
PUSH_TIMEOUT_S = 10.0
MAX_SESSIONS = 4096
"""Robots remembered, the longest silent forgotten first."""
LOOK_EVERY_S = 5.0
HELD_BYTES = 256 * MIB
"""Of observations that no pull has taken; beyond it the robots that were silent for longest lose theirs."""
STATE_KEY = "observation.state"
IMAGE_PREFIX = "observation.images."
# Never UNAVAILABLE or DEADLINE_EXCEEDED: the client's channel repeats those by itself.
_STATUS = {
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorCode.WORKER_FAILED: grpc.StatusCode.ABORTED,
    ErrorCode.WORKER_UNAVAILABLE: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.DRAINING: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorCode.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    ErrorCode.RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.DEADLINE_UNREACHABLE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.DEADLINE_EXPIRED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.SUPERSEDED: grpc.StatusCode.ABORTED,
}
_logger = logging.getLogger(__name__)
Context = Any
"""grpc.aio.ServicerContext, which carries no types."""


@dataclasses.dataclass(slots=True)
class _Session:
    """One robot: what it said about itself, and its newest observation that no pull has taken."""

    conversation: Conversation
    module: str
    state_names: tuple[str, ...]
    image_names: dict[str, str]
    actions_per_chunk: int
    newest: Record | None = None
    held: int = 0
    """Bytes of that observation."""
    arrived: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class LerobotListener:
    """One port of the service, for one policy or for the one that each client's model path names."""

    def __init__(
        self, listen: Listen, service: PolicyService, tls: ServerTls | None = None, held_bytes: int = HELD_BYTES
    ) -> None:
        self._listen = listen
        self._tls = tls
        self._service = service
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._held_bytes = held_bytes
        self._held = 0
        self._port = listen.port
        self._following: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", CLIENT_MESSAGE_BYTES),
                ("grpc.max_send_message_length", CLIENT_MESSAGE_BYTES),
                # A robot that is gone without a word is noticed, and a connection on which no word comes.
                ("grpc.keepalive_time_ms", 60_000),
                ("grpc.keepalive_timeout_ms", 20_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                # gRPC's own count: it hands on no connection that could be counted with those of the other ports.
                ("grpc.max_allowed_incoming_connections", service.connections.most),
                ("grpc.server_handshake_timeout_ms", int(1e3 * HANDSHAKE_TIMEOUT_S)),
                ("grpc.so_reuseport", 0),  # else a second process on this port takes half of the robots unnoticed
            ]
        )
        handlers = {
            "Ready": grpc.unary_unary_rpc_method_handler(self._ready),
            "SendPolicyInstructions": grpc.unary_unary_rpc_method_handler(self._instructions),
            "SendObservations": grpc.stream_unary_rpc_method_handler(self._observations),
            "GetActions": grpc.unary_unary_rpc_method_handler(self._actions),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def start(self) -> None:
        """Begins to listen. Raises RuntimeError where the address cannot be had."""
        host = f"[{self._listen.host}]" if ":" in self._listen.host else self._listen.host
        address = f"{host}:{self._listen.port}"
        if self._tls is None:
            self._port = self._server.add_insecure_port(address)
        else:
            self._port = self._server.add_secure_port(address, self._tls.grpc_credentials())
        await self._server.start()
        self._following = asyncio.create_task(self._follow())
        self._service.connections.remembered.append(self._sessions)
        log(_logger, logging.INFO, "listening", protocol="lerobot", host=self._listen.host, port=self._listen.port)

    async def close(self) -> None:
        """Closes the port after the pulls in flight."""
        if self._following is not None:
            self._following.cancel()
        await self._server.stop(PULL_WAIT_S)

    async def _ready(self, request: bytes, context: Context) -> bytes:
        """A robot begins; what an earlier one left on this connection is forgotten."""
        await self._check_certificate(context)
        self._forget(context.peer())
        return b""

    async def _instructions(self, request: bytes, context: Context) -> bytes:
        """Binds the connection to a policy, once a worker of it is ready. Nothing that a client names is loaded."""
        await self._check_certificate(context)
        try:
            setup = read_record(setup_data(request), "RemotePolicyConfig")
            key = next(
                (secret_in(value) for name, value in context.invocation_metadata() if name == "authorization"), None
            )
            caller = await self._service.identify(Caller.connecting("lerobot", context.peer(), api_key=key))
            policy = self._policy(caller, setup.fields.get("pretrained_name_or_path"))
            self._service.check_may_act(caller, policy)
            session = _session_of(setup, Conversation(self._service, caller, policy))
        except TaktlineError as error:
            await self._abort(context, error)
        log(_logger, logging.INFO, "client_connected", protocol="lerobot", peer=caller.peer, robot=caller.robot_id)
        await until_ready(self._service, policy)
        self._remember(caller.peer, session)
        return b""

    async def _observations(self, pieces: AsyncIterator[bytes], context: Context) -> bytes:
        """Takes an observation; it replaces the one that no pull has taken yet."""
        try:
            async with asyncio.timeout(PUSH_TIMEOUT_S):
                data = await self._joined(pieces)
            session = self._session(context)
            self._hold(session, read_record(data, "TimedObservation"), len(data))
        except TaktlineError as error:
            await self._abort(context, error)
        except TimeoutError:
            await self._abort(context, _invalid(f"the observation did not arrive within {PUSH_TIMEOUT_S:g} s"))
        session.arrived.set()
        return b""

    async def _joined(self, pieces: AsyncIterator[bytes]) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for piece in pieces:
            state, data = observation_piece(piece)
            if state == BEGIN:
                parts, size = [], 0
            elif state not in (MIDDLE, END):
                raise _invalid(f"transfer state {state} is not known")
            size += len(data)
            if size > self._service.limits.body_bytes:
                raise TaktlineError(
                    ErrorCode.BODY_TOO_LARGE,
                    f"the observation is over {self._service.limits.body_bytes} bytes",
                    "send fewer or smaller images",
                )
            parts.append(data)
            if state == END:
                return b"".join(parts)
        raise _invalid("the observation ends early")

    async def _actions(self, request: bytes, context: Context) -> bytes:
        """Answers a pull with a chunk for the newest observation; empty where none comes in time."""
        try:
            session = self._session(context)
            try:
                async with asyncio.timeout(PULL_WAIT_S):
                    await session.arrived.wait()
            except TimeoutError:
                return b""
            session.arrived.clear()
            record = session.newest
            self._hold(session, None, 0)
            return b"" if record is None else await self._chunk(session, record)
        except TaktlineError as error:
            await self._abort(context, error)
        except Exception:
            log(_logger, logging.ERROR, "internal", exc_info=True, protocol="lerobot", peer=context.peer())
            await self._abort(context, internal_error())
        raise AssertionError("abort raises")

    async def _chunk(self, session: _Session, record: Record) -> bytes:
        conversation = session.conversation
        policy = conversation.policy
        mapping = self._service.mapping(policy, "lerobot")
        timestep, timestamp = _times(record)
        read = read_observation(_observation(session, record), mapping, self._service.info(policy), "lerobot")
        chunk = await conversation.act(read)
        rows = chunk.actions.to_numpy().astype(np.float32, copy=False)[: session.actions_per_chunk]
        dt_s = 1 / mapping.control_hz if mapping.control_hz > 0 else chunk.dt_s
        return actions_message(write_actions(session.module, rows, timestep, timestamp, dt_s))

    def _policy(self, caller: Caller, model: Any) -> str:
        """The policy of this port, else the one with the name of the client's model path or of its last part."""
        if self._listen.policy:
            return self._listen.policy
        served = self._service.policies(caller)
        if isinstance(model, str):
            for name in (model, model.rstrip("/").rpartition("/")[2]):
                if name in served:
                    return name
        raise TaktlineError(
            ErrorCode.UNKNOWN_POLICY,
            f"no policy is called {shown(model, 128)!r} (served: {', '.join(served)[:300] or 'none'})",
            "give the client a policy's name as its model path; weights are never loaded on a client's word",
        )

    def _session(self, context: Context) -> _Session:
        session = self._sessions.get(context.peer())
        if session is None:
            # A renewed connection is not matched to an old session: another robot's chunk would be worse than none.
            raise TaktlineError(
                ErrorCode.INVALID_BODY,
                "this connection has sent no policy instructions",
                "start the client anew: it sends them once, when it begins",
            )
        self._sessions.move_to_end(context.peer())
        return session

    def _hold(self, session: _Session, record: Record | None, size: int) -> None:
        """What the session has for the next pull; where that is too much for all, the longest silent lose theirs."""
        self._held += size - session.held
        session.newest, session.held = record, size
        if self._held > self._held_bytes:
            for other in self._sessions.values():
                if other is not session and other.held:
                    self._held -= other.held
                    other.newest, other.held = None, 0
                if self._held <= self._held_bytes:
                    break

    def _remember(self, peer: str, session: _Session) -> None:
        self._forget(peer)
        self._sessions[peer] = session
        while len(self._sessions) > MAX_SESSIONS:
            self._forget(next(iter(self._sessions)))

    async def _follow(self) -> None:
        """Forgets the robots whose connections have ended: gRPC tells nobody, but the kernel knows."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            known = list(self._sessions)
            if known:
                try:
                    there = await asyncio.to_thread(peers_at, self._port)
                except FileNotFoundError:  # no /proc here: only `MAX_SESSIONS` bounds them
                    return
                except OSError:  # no descriptor is left to look with: who is not seen may be there
                    continue
                for peer in known:
                    if peer_of(peer) not in there:
                        self._forget(peer)

    def _forget(self, peer: str) -> None:
        session = self._sessions.pop(peer, None)
        if session is not None:
            self._held -= session.held
            session.newest, session.held = None, 0

    async def _check_certificate(self, context: Context) -> None:
        """Refuses who came by a resumed session after its certificate had expired."""
        if self._tls is not None and self._tls.files.ca is not None and expired_but_resumed(context.auth_context()):
            await self._abort(
                context,
                TaktlineError(
                    ErrorCode.UNAUTHENTICATED,
                    "the certificate of this client has expired since its TLS session began",
                    "give the client a new certificate and start it anew",
                ),
            )

    async def _abort(self, context: Context, error: TaktlineError) -> None:
        status = _STATUS.get(error.code, grpc.StatusCode.INVALID_ARGUMENT)
        log(_logger, logging.INFO, "client_refused", protocol="lerobot", peer=context.peer(), code=error.code.value)
        await context.abort(status, str(error))


def peer_of(text: str) -> tuple[str, int]:
    """(address, port) of what gRPC says of a peer, as `ipv6:%5B::1%5D:4711`."""
    host, _, port = unquote(text).partition(":")[2].rpartition(":")
    return address_of(host.strip("[]")), int(port) if port.isdigit() else 0


def _session_of(setup: Record, conversation: Conversation) -> _Session:
    """Reads what a robot says about itself. Raises TaktlineError `invalid_body`."""
    features, count = setup.fields.get("lerobot_features"), setup.fields.get("actions_per_chunk")
    renames = setup.fields.get("rename_map") or {}
    if type(features) is not dict or type(count) is not int or count < 1 or type(renames) is not dict:
        raise _invalid("the policy instructions have no features or no chunk length")
    state = features.get(STATE_KEY)
    names = state.get("names") if type(state) is dict else None
    if type(names) is not list or any(type(name) is not str for name in names):
        raise _invalid(f"the features name no {STATE_KEY}")
    images: dict[str, str] = {}
    for key in features:
        if key.startswith(IMAGE_PREFIX):
            renamed = renames.get(key, key)
            if type(renamed) is not str:
                raise _invalid("the rename map holds what is no name")
            images[key[len(IMAGE_PREFIX) :]] = renamed
    return _Session(conversation, setup.module, tuple(names), images, count)


def _observation(session: _Session, record: Record) -> dict[str, Any]:
    """The observation under LeRobot's feature names. Raises TaktlineError."""
    raw = record.fields.get("observation")
    if type(raw) is not dict:
        raise _invalid("the observation is no map")
    missing = [name for name in session.state_names if name not in raw]
    if missing:
        raise TaktlineError(
            ErrorCode.STATE_INVALID,
            f"the observation has no {', '.join(name[:32] for name in missing[:8])}",
            "send every motor that the policy instructions name",
        )
    state = [value_of(raw[name]) for name in session.state_names]
    return {
        STATE_KEY: [float(value) if type(value) in (int, float) else math.nan for value in state],
        "task": _plain("task", raw.get("task")),
        **{key: _plain(name, value_of(raw[name])) for name, key in session.image_names.items() if name in raw},
    }


def _plain(name: str, value: Any) -> Any:
    """A text, number, array or nothing, as LeRobot's client sends: what reads them on walks no lists or maps.

    Those may share what they hold, or hold themselves, and then have no end. Raises TaktlineError.
    """
    if value is None or type(value) in (str, bool, int, float) or isinstance(value, np.ndarray):
        return value
    raise _invalid(f"the observation's {name[:64]!r} is a {type(value).__name__}")


def _times(record: Record) -> tuple[int, float]:
    timestep, timestamp = record.fields.get("timestep"), record.fields.get("timestamp")
    if type(timestep) is not int or not 0 <= timestep < 2**62 or not isinstance(timestamp, int | float):
        raise _invalid("the observation has no timestep or timestamp")
    return timestep, float(timestamp)


def _invalid(message: str) -> TaktlineError:
    return TaktlineError(ErrorCode.INVALID_BODY, message, "use LeRobot's own client; see docs/compat.md")
