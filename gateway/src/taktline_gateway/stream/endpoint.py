"""WS /v1/policies/{policy}/stream: the streams of one gateway, and what they share."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send
from taktline_protocol import ErrorCode, Observation, PolicyInfo, TaktlineError
from taktline_protocol.limits import Limits
from taktline_protocol.messages import AdmissionAnswer
from taktline_protocol.stream import Hello

from taktline_gateway.access.control import Credential
from taktline_gateway.access.http import credential_of, principal_of
from taktline_gateway.access.rights import Principal
from taktline_gateway.compat.gateway_service import GatewayService
from taktline_gateway.logs import log
from taktline_gateway.service import Gateway
from taktline_gateway.stream.conversation import Conversation
from taktline_gateway.stream.sessions import Session, Sessions, belongs
from taktline_gateway.stream.settings import StreamSettings
from taktline_gateway.stream.store import SessionStore
from taktline_gateway.stream.telemetry import StreamTelemetry
from taktline_gateway.stream.transport import ABORT, HEAR_AT_ONCE, SEND_AT_ONCE

STREAM_PATH = "/v1/policies/{policy}/stream"
WATCH_S = 0.05
"""How often the streams look whether the gateway drains."""
CANCEL_AGAIN_S = 0.5
MOST_CANCELS = 10
"""How long a cancellation may go unheard before it is repeated."""
TICK_S = 1.0
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Who opened a connection, and what it presented."""

    principal: Principal
    credential: Credential


class Streams:
    """All streams of one gateway: an ASGI endpoint, the sessions behind it, and their housekeeping."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.settings: StreamSettings = gateway.settings.stream
        self.service = GatewayService(gateway)
        most = 2 * self.settings.max_streams
        cameras = gateway.settings.limits.cameras
        self.sessions = Sessions(self.settings.resume_s, self.settings.held_bytes, time.monotonic, most, cameras)
        url = self.settings.redis_url
        self._store = SessionStore(url, self.settings.resume_s) if url else None
        self.telemetry = StreamTelemetry(
            gateway.telemetry.registry,
            lambda: gateway.lanes,
            self._connected,
            lambda: None if self._store is None else self._store.up,
        )
        self._drain_begun = False
        self._conversations: set[Conversation] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def limits(self) -> Limits:
        """Limits of one observation."""
        return self.service.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        await receive()  # websocket.connect
        await send({"type": "websocket.accept"})
        caller = Caller(principal_of(scope), credential_of(scope))
        conversation = Conversation(
            self,
            scope["path_params"]["policy"],
            caller,
            receive,
            send,
            scope.get(ABORT, _cannot_abort),
            scope.get(SEND_AT_ONCE, _cannot_send_at_once),
            scope.get(HEAR_AT_ONCE, _cannot_hear_at_once),
        )
        self._conversations.add(conversation)
        try:
            began = time.monotonic()
            word = await conversation.run()
            self.telemetry.closed(conversation.policy, word)
            log(
                _logger,
                logging.INFO,
                "stream_closed",
                policy=conversation.policy[:128],
                robot=conversation.robot_id,
                code=word,
                lasted_s=round(time.monotonic() - began, 3),
            )
        finally:
            self._conversations.discard(conversation)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Housekeeping for as long as the gateway runs."""
        keepers = [asyncio.create_task(self._keep())]
        if self._store is not None:
            await self._store.flush(())  # so that the first hellos find it, if it is there
            keepers.append(asyncio.create_task(self._keep_stored(self._store)))
        try:
            yield
        finally:
            await end(keepers)
            if self._store is not None:
                await self._store.close()
            await end(self._tasks)

    # ----- what conversations need

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[None]:
        """Runs `work` beside the conversation that began it, also where that one ends first."""
        task = asyncio.get_running_loop().create_task(_guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def check_open(self) -> None:
        """Raises TaktlineError `draining`."""
        self._gateway.check_open()

    def draining_error(self) -> TaktlineError:
        """What a robot is told when the gateway goes away."""
        return TaktlineError(
            ErrorCode.DRAINING,
            "this gateway is shutting down",
            "connect again: another gateway takes the session; answers under way still come here",
            retry_after_ms=0.0,
        )

    def principal_at_once(self, caller: Caller) -> Principal | None:
        """Who asks, where everyone may; None where `principal` is to be asked."""
        return caller.principal if self._gateway.access.open else None

    async def principal(self, caller: Caller, policy: str, robot_id: str, request_id: str) -> Principal:
        """Who asks; found anew for each observation, as a key may be revoked while its connection lives.

        Raises:
            TaktlineError: `unauthenticated` or `forbidden`.
        """
        access = self._gateway.access
        if access.open:
            return caller.principal
        principal = await access.authenticate(caller.credential)
        access.authorise(principal, caller.credential, "act", policy, robot=robot_id, request_id=request_id)
        return principal

    def counted(
        self, caller: Caller, principal: Principal, policy: str, observation: Observation | None, error: TaktlineError
    ) -> TaktlineError:
        """`error`, or `rate_limited`: what is refused before it is served counts against the caller's rates, too."""
        size = 0 if observation is None else sum(len(image.data) for image in observation.images.values())
        try:
            robot = "" if observation is None else observation.robot_id
            self._gateway.access.admit(principal, caller.credential, "act", policy, size, robot=robot)
        except TaktlineError as over:
            return over
        return error

    def admit(self, policy: str, principal: Principal, hello: Hello, seq: int, now: float) -> PolicyInfo:
        """Whether a robot may open a stream; `seq` is the newest of its session. Raises TaktlineError."""
        self._gateway.check_open()
        info = self._gateway.lane(policy, principal).info()
        if len(self._conversations) > self.settings.max_streams:
            raise TaktlineError(
                ErrorCode.OVERLOADED,
                f"this gateway holds {self.settings.max_streams} streams, its limit",
                "connect to another gateway, or raise --stream-max",
                retry_after_ms=1000.0,
            )
        self._gateway.robots.arrive(principal.robot(hello.robot_id), hello.session_id, seq, now)
        return info

    def admission(self, policy: str, principal: Principal, hello: Hello) -> AdmissionAnswer | None:
        """Whether there is room for the robot; None where it did not ask, or no worker has told its times yet."""
        if hello.asks is None:
            return None
        try:
            return self._gateway.lane(policy, principal).admission(
                msgspec.structs.replace(hello.asks, robot_id=hello.robot_id), principal.tenant
            )
        except TaktlineError:
            # Without a worker there is no answer yet; the robot asks again with POST .../admission.
            return None

    async def find(self, policy: str, robot: str, hello: Hello) -> tuple[Session | None, str]:
        """The session that a hello names, if any, and how it counts: new, resumed, moved or lost.

        Nothing changes by that; `sessions.take` it at once, or leave it with the connection that it has.
        """
        if not hello.token:
            return None, "new"
        found = self.sessions.find(policy, robot, hello)
        if found is not None:
            return found, "resumed"
        if self._store is not None:
            moved = await self._store.load(hello.token)
            found = self.sessions.find(policy, robot, hello)
            if found is not None:  # another connection of this robot was faster
                return found, "resumed"
            if moved is not None and belongs(moved, policy, robot, hello):
                return moved, "moved"
        return None, "lost"

    def alive(self, session: Session, now: float) -> None:
        """The robot pinged: its id stays its own."""
        self._gateway.robots.touch(session.robot, now)

    def end(self, session: Session) -> None:
        """The robot said bye: its id is free."""
        session.link = None
        self.sessions.end(session)
        self._gateway.robots.leave(session.robot, session.session_id)
        if self._store is not None:
            self.spawn(self._store.drop(session.token))

    # ----- housekeeping

    async def _keep(self) -> None:
        ticked = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            tick = now - ticked >= TICK_S
            if tick:
                ticked = now
            try:
                self._look_after(now, tick=tick)
            except Exception:
                # Whatever is wrong with one stream, the others must not lose their keeper.
                log(_logger, logging.ERROR, "internal", exc_info=True, stream=True)

    def _look_after(self, now: float, *, tick: bool) -> None:
        if self._gateway.draining and not self._drain_begun:
            self._drain_begun = True
            self.spawn(self._drain())
        for conversation in list(self._conversations):
            if tick:
                conversation.tick(now)
        if tick:
            self.sessions.expire()

    async def _drain(self) -> None:
        """Writes the sessions down first, so that the next gateway finds them, then says goodbye."""
        if self._store is not None:
            await self._store.flush(self.sessions, everything=True)
        while True:
            for conversation in list(self._conversations):
                conversation.drain()
            await asyncio.sleep(WATCH_S)  # for connections that were being opened

    async def _keep_stored(self, store: SessionStore) -> None:
        while True:
            await asyncio.sleep(self.settings.store_every_s)
            try:
                await store.flush(self.sessions)
            except Exception:
                log(_logger, logging.ERROR, "internal", exc_info=True, stream=True)

    def _connected(self) -> Counter[str]:
        return Counter(conversation.policy for conversation in self._conversations)


async def end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels until it is heard: Redis' client may take a cancellation for a timeout of its own, and go on.

    A task that never hears it is left, and logged: the gateway ends all the same.
    """
    left = set(tasks)
    for _ in range(MOST_CANCELS):
        if not left:
            return
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
    if left:
        log(_logger, logging.ERROR, "internal", stream=True, tasks_left=[task.get_name() for task in left])


async def _guarded(work: Coroutine[Any, Any, Any]) -> None:
    try:
        await work
    except Exception:
        log(_logger, logging.ERROR, "internal", exc_info=True, stream=True)


def _cannot_abort() -> None:
    """For servers that offer no way to cut a connection; the keepalive ping of the server ends it later."""


def _cannot_send_at_once(body: bytes) -> bool:
    """For the same."""
    return False


def _cannot_hear_at_once(hear: Callable[[bytes], bool]) -> None:
    """For the same: every message goes through `receive`."""
