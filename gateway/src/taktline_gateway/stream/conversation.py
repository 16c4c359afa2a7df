"""One connection of a stream: hello, then observations in and answers out until one side leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.types import Receive, Send
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.stream import (
    Ack,
    Bye,
    Cancel,
    Clock,
    Observe,
    Ping,
    Pong,
)
from taktline_protocol.stream_codec import (
    decode_from_robot,
    encode_frame,
)

from taktline_gateway.logs import log
from taktline_gateway.refusals import internal_error
from taktline_gateway.stream.closing import closing_code, goodbye
from taktline_gateway.stream.greeting import arrive, welcome
from taktline_gateway.stream.intake import Intake
from taktline_gateway.stream.sessions import Session

if TYPE_CHECKING:
    from taktline_gateway.stream.endpoint import Caller, Streams

USEFUL_CLOCK_ERROR_S = 0.25
"""A clock estimate with a larger error says nothing about the budgets of robots."""
_logger = logging.getLogger(__name__)


class Ended(Exception):
    """The conversation is over: WebSocket close code, and the word that the metrics count it under."""

    def __init__(self, close_code: int, word: str) -> None:
        super().__init__(word)
        self.close_code = close_code
        self.word = word


class Conversation:
    """Speaks with one robot over one WebSocket that has been accepted."""

    def __init__(
        self,
        streams: Streams,
        policy: str,
        caller: Caller,
        receive: Receive,
        send: Send,
        abort: Callable[[], None],
        send_at_once: Callable[[bytes], bool],
        hear_at_once: Callable[[Callable[[bytes], bool]], None],
    ) -> None:
        """`abort` cuts the connection without waiting for its robot; `send_at_once` sends a message that need not
        wait, and says whether it did; `hear_at_once` gets what is asked whether it takes a message before `receive`."""
        self.policy = policy
        self._streams = streams
        self._caller = caller
        self._receive = receive
        self._send_message = send
        self._abort = abort
        self._send_at_once = send_at_once
        self._hear_at_once = hear_at_once
        self._settings = streams.settings
        self._turn = asyncio.Lock()
        self._session: Session | None = None
        self._open = True
        self._draining = False
        self._sending_since: float | None = None
        self._heard_at = time.monotonic()
        self._ack: asyncio.TimerHandle | None = None
        self._acked = 0
        self._ending: Ended | None = None
        self._hearing = True
        """Whether `run` has something to do before the next message."""
        self._intake = Intake(streams, policy, caller, self.deliver, self._acknowledge_later)

    # ----- the connection

    async def run(self) -> str:
        """Speaks until the end; returns the word that the end is counted under."""
        try:
            await self._greet()
            self._hear_at_once(self._heard)
            while True:
                self._hearing = False
                came = await self._frame()
                self._hearing = True
                await self._hear(came)
        except Ended as end:
            await self._close(end.close_code, end.word)
            return end.word
        except TaktlineError as error:
            await self._refuse_stream(error)
            return error.code.value
        except Exception:
            log(_logger, logging.ERROR, "internal", exc_info=True, policy=self.policy, stream=True)
            await self._refuse_stream(internal_error())
            return ErrorCode.INTERNAL.value
        finally:
            self._open = False
            self._intake.keep()
            if self._ack is not None:
                self._ack.cancel()
            session = self._session
            if session is not None and session.link is self:
                self._streams.sessions.away(session)

    async def _frame(self) -> tuple[bytes, float]:
        """The next frame and when it came. Raises Ended where the robot is gone."""
        message = await self._receive()
        self._intake.keep()
        if message["type"] == "websocket.disconnect":
            raise self._ending or Ended(1000, "dropped")
        self._heard_at = now = time.monotonic()
        body = message.get("bytes")
        if body is None:
            raise TaktlineError(
                ErrorCode.INVALID_BODY, "a text message came; frames are binary", "send msgpack in binary messages"
            )
        self._streams.telemetry.received(self.policy, len(body))
        return body, now

    async def deliver(self, body: bytes) -> bool:
        """Sends one frame, in turn; False where the connection is gone, or goes while it waits."""
        if not self.deliver_at_once(body):
            async with self._turn:
                if not self._open:
                    return False
                self._sending_since = time.monotonic()
                try:
                    await self._send_message({"type": "websocket.send", "bytes": body})
                except (OSError, RuntimeError):
                    # The server's way to say that the connection closed under us.
                    self._open = False
                    return False
                finally:
                    self._sending_since = None
            self._streams.telemetry.sent(self.policy, len(body))
        return True

    def deliver_at_once(self, body: bytes) -> bool:
        """Whether a frame has been written: not one that would have to wait, or has no connection."""
        if self._turn.locked() or not self._open or not self._send_at_once(body):
            return False
        self._streams.telemetry.sent(self.policy, len(body))
        return True

    def replaced(self) -> None:
        """The session goes on over another connection."""
        error = TaktlineError(
            ErrorCode.SUPERSEDED, "this session goes on over another connection", "use the newer connection"
        )
        self._leave_soon(error, 1008)

    def drain(self) -> None:
        """The gateway is going away: unanswered observations are answered, then the connection closes."""
        if self._draining or not self._open:
            return
        self._draining = True
        self._streams.spawn(self.deliver(encode_frame(goodbye(self._streams.draining_error()))))
        self.settled()

    def settled(self) -> None:
        """An observation of the session has its answer; where the gateway drains, the last one ends the stream."""
        session = self._session
        if self._draining and (session is None or not session.flights) and self._ending is None:
            self._ending = Ended(1001, ErrorCode.DRAINING.value)
            self._streams.spawn(self._close(1001, ErrorCode.DRAINING.value))

    def tick(self, now: float) -> None:
        """Housekeeping, about once a second: ends a connection that stalls or is silent."""
        sending = self._sending_since
        if sending is not None and now - sending > self._settings.stall_s:
            log(_logger, logging.WARNING, "slow_reader", policy=self.policy, robot=self.robot_id)
            self._ending = Ended(1008, ErrorCode.SLOW_READER.value)
            self._open = False
            self._abort()
        elif self._open and now - self._heard_at > self._settings.idle_s:
            self._leave_soon(
                TaktlineError(
                    ErrorCode.STREAM_IDLE,
                    f"nothing came for {self._settings.idle_s:g} s",
                    "ping at least that often; resume the session with its token",
                ),
                1001,
            )

    @property
    def robot_id(self) -> str | None:
        """The robot's name, once it has said hello."""
        return None if self._session is None else self._session.robot_id

    def _leave_soon(self, error: TaktlineError, close_code: int) -> None:
        if self._ending is None:
            self._ending = Ended(close_code, error.code.value)
            self._streams.spawn(self._refuse_stream(error, close_code))

    async def _refuse_stream(self, error: TaktlineError, close_code: int | None = None) -> None:
        await self.deliver(encode_frame(goodbye(error)))
        await self._close(closing_code(error.code) if close_code is None else close_code, error.code.value)

    async def _close(self, code: int, reason: str) -> None:
        async with self._turn:
            if self._open:
                self._open = False
                with contextlib.suppress(OSError, RuntimeError):  # the robot closed first
                    await self._send_message({"type": "websocket.close", "code": code, "reason": reason})

    # ----- hello

    async def _greet(self) -> None:
        try:
            async with asyncio.timeout(self._settings.hello_s):
                body, now = await self._frame()
        except TimeoutError as error:
            raise TaktlineError(
                ErrorCode.STREAM_IDLE, f"no hello came within {self._settings.hello_s:g} s", "send hello at once"
            ) from error
        arrival = await arrive(self._streams, self.policy, self._caller, body, now)
        self._streams.sessions.take(arrival.session, self, arrival.hello)
        self._session = arrival.session
        told, kept = welcome(self._streams, self.policy, arrival)
        await self.deliver(encode_frame(told))
        if kept is not None:
            await self.deliver(kept)

    # ----- what the robot says

    async def _hear(self, came: tuple[bytes, float]) -> None:
        body, now = came
        session = self._session
        assert session is not None
        frame = decode_from_robot(body, self._streams.limits)
        if isinstance(frame, Observe):
            await self._intake.observe(session, frame, now)
        elif isinstance(frame, Ping):
            self._streams.alive(session, now)
            await self.deliver(encode_frame(Pong(frame.sent_at, now, time.monotonic())))
        elif isinstance(frame, Clock):
            usable = math.isfinite(frame.offset_s) and frame.error_s <= USEFUL_CLOCK_ERROR_S
            self._intake.clock = frame if usable else None
        elif isinstance(frame, Cancel):
            session.cancel(
                frame.seq,
                TaktlineError(
                    ErrorCode.CANCELLED, f"observation {frame.seq} was cancelled by its robot", "nothing: it asked so"
                ),
            )
        elif isinstance(frame, Bye):
            self._streams.end(session)
            raise Ended(1000, "bye")
        else:
            raise TaktlineError(ErrorCode.INVALID_BODY, "hello came twice", "open a new connection for a new session")

    def _heard(self, body: bytes) -> bool:
        """Takes an observation in the turn that read it, where `run` has nothing to do before; else `run` has it."""
        session = self._session
        if session is None or self._hearing or not self._open:
            return False
        now = time.monotonic()
        try:
            if not self._intake.take(session, body, now):
                return False
        except Exception:
            log(_logger, logging.ERROR, "internal", exc_info=True, policy=self.policy, stream=True)
            self._leave_soon(internal_error(), closing_code(ErrorCode.INTERNAL))
            return True
        self._heard_at = now
        self._streams.telemetry.received(self.policy, len(body))
        return True

    # ----- answers

    def _acknowledge_later(self) -> None:
        if self._ack is None:
            self._ack = asyncio.get_running_loop().call_later(self._settings.ack_after_s, self._acknowledge)

    def _acknowledge(self) -> None:
        """Acknowledges what has no answer yet, and comes again while there is such."""
        self._ack = None
        session = self._session
        if session is None or not session.flights or not self._open:
            return
        newest = max(session.flights)
        if newest > self._acked:
            self._acked = newest
            self._streams.spawn(self.deliver(encode_frame(Ack(newest))))
