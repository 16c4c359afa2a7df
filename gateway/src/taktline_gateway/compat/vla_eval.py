"""The vla-eval harness's model-server protocol: hello, episodes, observations in, one action or a chunk out.

Every message is a msgpack map of `type`, `payload`, `seq` and `timestamp`. The harness asks once a control step and
wants one action, so the server holds the chunk of each connection and asks a worker only when it has run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from websockets.exceptions import ConnectionClosed

from taktline_gateway.compat.fenced_connection import FencedConnection
from taktline_gateway.compat.observations import read_observation
from taktline_gateway.compat.ports import Listen
from taktline_gateway.compat.service import Conversation, PolicyService, policy_of, until_ready
from taktline_gateway.compat.websocket_listener import Arrival, WebSocketListener, unless_closed
from taktline_gateway.compat.wire_arrays import decode, encode_vla_eval, shown
from taktline_gateway.logs import log
from taktline_gateway.refusals import internal_error
from taktline_gateway.tls import ServerTls

PROTOCOL_VERSION = 1
HEALTH = ("/health", '{"status": "ok"}\n', "application/json")
HELLO_WAIT_S = 20.0
"""The harness gives up on a hello after 30 s and does not try again, so a cold start may hold it for less."""
ABANDONED_S = 25.0
"""The harness gives up on an answer after 30 s; one that is older while a newer observation waits is not sent."""
_TYPES = frozenset({"hello", "observation", "action", "episode_start", "episode_end", "error"})
_logger = logging.getLogger(__name__)


def vla_eval_listener(listen: Listen, service: PolicyService, tls: ServerTls | None = None) -> WebSocketListener:
    """A listener that speaks vla-eval's protocol. No keepalive: the harness's loop stands still while it simulates."""
    return WebSocketListener(
        "vla-eval", listen, service, VlaEvalServer(service).converse, health=HEALTH, keepalive_s=None, tls=tls
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message; `payload` is decoded."""

    type: str
    payload: dict[str, Any]
    seq: int


def message_of(frame: Any) -> Message:
    """Checks the form of a decoded frame. Raises TaktlineError `invalid_body`."""
    if not isinstance(frame, dict) or not {"type", "payload", "seq", "timestamp"} <= frame.keys():
        raise _invalid("a message is a map of type, payload, seq and timestamp")
    kind, payload, seq = frame["type"], frame["payload"], frame["seq"]
    if type(kind) is not str or kind not in _TYPES or not isinstance(payload, dict) or type(seq) is not int:
        raise _invalid(f"the message of type {shown(kind, 32)!r} has no map as payload, or no whole number as seq")
    return Message(kind, payload, seq)


class VlaEvalServer:
    """Speaks the protocol on any number of connections."""

    def __init__(self, service: PolicyService) -> None:
        self._service = service

    async def converse(self, connection: FencedConnection, arrival: Arrival) -> None:
        """Serves one client until it leaves. Raises ConnectionClosed."""
        policy: str = await unless_closed(connection, policy_of(self._service, arrival.caller, arrival.policy))
        session = _Session(self._service, connection, Conversation(self._service, arrival.caller, policy))
        try:
            while True:
                await session.take(await connection.recv())
        finally:
            session.abandon()


class _Session:
    """One connection: its episode's chunk, the observation being answered, and the newest one behind it."""

    def __init__(self, service: PolicyService, connection: FencedConnection, conversation: Conversation) -> None:
        self._service = service
        self._connection = connection
        self._conversation = conversation
        self._rows: list[NDArray[np.generic]] = []
        self._episode = 0
        self._answering: asyncio.Task[None] | None = None
        self._next: Message | None = None

    async def take(self, frame: bytes | str) -> None:
        """Acts on one frame. Raises ConnectionClosed."""
        try:
            if isinstance(frame, str):
                raise _invalid("the frame is text")
            message = message_of(decode(frame, self._service.limits))
        except TaktlineError as error:
            await self._send("error", {"error": str(error)}, 0)
            return
        if message.type == "hello":
            await self._hello(message.seq)
        elif message.type in ("episode_start", "episode_end"):
            self._rows = []
            self._episode += 1
            self._conversation.begin_episode()
        elif message.type == "observation":
            await self._observation(message)

    def abandon(self) -> None:
        """The client is gone."""
        if self._answering is not None:
            self._answering.cancel()

    async def _hello(self, seq: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HELLO_WAIT_S):
                await unless_closed(self._connection, until_ready(self._service, self._conversation.policy))
        policy = self._conversation.policy
        payload: dict[str, Any] = {
            "harness_version": version("taktline-gateway"),
            "protocol_version": PROTOCOL_VERSION,
            "model_server": f"taktline/{policy}",
            "capabilities": {},
        }
        with contextlib.suppress(TaktlineError):  # a policy that is not applied yet has no route to read
            # The harness hands these to its benchmark, e.g. so that it sends the wrist camera.
            payload["observation_params"] = self._service.mapping(policy, "vla-eval").metadata
        await self._send("hello", payload, seq)

    async def _observation(self, message: Message) -> None:
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer_all(message))
            return
        # A client in real time sends on while it waits: the newest observation is the one worth an answer.
        overtaken, self._next = self._next, message
        if overtaken is not None:
            await self._send(
                "error", {"error": f"observation_failed: superseded: observation {message.seq} came"}, overtaken.seq
            )

    async def _answer_all(self, message: Message | None) -> None:
        """Answers an observation, then the newest that came meanwhile, until none is left."""
        with contextlib.suppress(ConnectionClosed):
            while message is not None:
                began_at = time.monotonic()
                kind, payload = await self._answer(message)
                if self._next is None or time.monotonic() - began_at < ABANDONED_S:
                    await self._send(kind, payload, message.seq)
                message, self._next = self._next, None

    async def _answer(self, message: Message) -> tuple[str, dict[str, Any]]:
        policy, service, episode = self._conversation.policy, self._service, self._episode
        try:
            if not self._rows:
                mapping = service.mapping(policy, "vla-eval")
                read = read_observation(message.payload, mapping, service.info(policy), "vla-eval")
                chunk = await self._conversation.act(read)
                rows = list(chunk.actions.to_numpy())[: mapping.execute_steps or None]
                if self._episode != episode:
                    # The rest of this chunk belongs to an episode that has ended.
                    return "action", {"actions": rows[0]}
                self._rows = rows
            return "action", {"actions": self._rows.pop(0)}
        except TaktlineError as error:
            return "error", {"error": f"observation_failed: {error}"}
        except Exception:
            log(
                _logger,
                logging.ERROR,
                "internal",
                exc_info=True,
                protocol="vla-eval",
                policy=policy,
                robot=self._conversation.caller.robot_id,
            )
            return "error", {"error": f"observation_failed: {internal_error()}"}

    async def _send(self, kind: str, payload: dict[str, Any], seq: int) -> None:
        message = {"type": kind, "payload": payload, "seq": seq, "timestamp": time.time()}
        await self._connection.send(encode_vla_eval(message))


def _invalid(message: str) -> TaktlineError:
    return TaktlineError(ErrorCode.INVALID_BODY, message, "compare it with docs/compat.md")
