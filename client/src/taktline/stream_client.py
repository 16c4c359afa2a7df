"""A robot's end of the timed stream: connects, resumes, sends observations and hands out their answers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from urllib.parse import quote

import msgspec
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.messages import ActionChunk, Observation
from taktline_protocol.stream import (
    VERSIONS,
    Answer,
    Backpressure,
    Bye,
    Cancel,
    Clock,
    FromGateway,
    FromRobot,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Progress,
    Refusal,
    Welcome,
)
from taktline_protocol.stream_codec import decode_from_gateway, encode_frame, to_chunk, to_observe
from websockets.exceptions import ConnectionClosed

from taktline.access import Access
from taktline.address import unreachable, websocket
from taktline.clock import ClockEstimate, GatewayClock
from taktline.encoding import NamedFrame
from taktline.held_frames import HeldFrames
from taktline.observing import LATE_S
from taktline.robot_metrics import RobotMetrics
from taktline.stream_connecting import BACKOFF_MAX_S, RETRIED, Connector
from taktline.stream_errors import asked_to_pause, budget_spent, closed, closed_meanwhile, overtaken, superseded
from taktline.stream_link import CLOSE_S, Link, NoStream, Timeout, check_fits, noticing_loss, typed
from taktline.stream_waiting import Waiting

PING_S = 1.0
FIRST_PINGS = 5
FIRST_PING_S = 0.02
DEAD_S = 5.0
"""A connection on which not even a pong came for so long is given up."""
MAX_RESENDS = 3
_CLIENT = f"taktline {version('taktline')}"


class StreamClient:
    """One session. All of it runs on one event loop."""

    def __init__(
        self, url: str, policy: str, robot_id: str, session_id: str, access: Access, metrics: RobotMetrics
    ) -> None:
        self._uri = f"{websocket(url)}/v1/policies/{quote(policy, safe='')}/stream"
        self._policy = policy
        self._robot_id = robot_id
        self._session_id = session_id
        self._access = access
        self._metrics = metrics
        self.clock = GatewayClock()
        self._held = HeldFrames()
        self._waiting: dict[int, Waiting] = {}
        self._connector = Connector(self._uri, access, self._hello, self._begin, self._fail_lost)
        self._goodbye: TaktlineError | None = None
        """Why the last connection ended, where the gateway said so."""
        self._token = b""
        self._seq = 0
        self._answered = self._sent_seq = 0
        self._pause_until = 0.0
        self._told: ClockEstimate | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(
        self, observation: Observation, frames: Mapping[str, NamedFrame], timeout_s: float
    ) -> tuple[ActionChunk, Observation, float, float]:
        """The chunk, the observation as it was last sent, the round trip in ms, and how much was outside the gateway.

        Raises:
            TaktlineError: every refusal; `gateway_unreachable` where nothing answers within `timeout_s`, or until
                LATE_S after the budget.
            NoStream: the gateway does not speak streams.
        """
        if self._closed:
            raise closed()
        self._check_pause()
        loop = asyncio.get_running_loop()
        waiting = Waiting(observation, observation, frames, loop.create_future())
        timeout_s = min(timeout_s, waiting.left_s(time.monotonic()) + LATE_S)
        self._seq = max(self._seq, waiting.seq)
        self._waiting[waiting.seq] = waiting
        timer = loop.call_later(timeout_s, waiting.give_up)
        try:
            waiting.sending = True
            try:
                await self._send(waiting, timeout_s)
            finally:
                waiting.sending = False
            chunk, outside_ms = await waiting.answer
        except (Timeout, asyncio.CancelledError) as error:
            self._cancel(waiting)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise unreachable(self._uri, "did not answer in time") from error
        finally:
            timer.cancel()
            self._waiting.pop(waiting.seq, None)
            waiting.done()
            if self._metrics.progress is not None and self._metrics.progress.seq == waiting.seq:
                self._metrics.progress = None
        return chunk, waiting.stamped, 1e3 * (time.monotonic() - waiting.sent_at), outside_ms

    async def connect(self, timeout_s: float) -> Welcome:
        """Opens the connection where it is not; what the gateway said. Raises as `ask`."""
        return (await self._connector.wait(timeout_s)).welcome

    async def close(self) -> None:
        """Says bye, so that the robot id is free at once, and closes."""
        self._closed = True
        link = self._connector.close()
        for waiting in self._waiting.values():
            waiting.fail(closed_meanwhile())
        if link is not None:
            await self._quietly(link, Bye(), CLOSE_S)
            await link.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _check_pause(self) -> None:
        pause_s = self._pause_until - time.monotonic()
        if pause_s > 0:
            self._metrics.pauses += 1
            raise asked_to_pause(pause_s)

    async def _send(self, waiting: Waiting, timeout_s: float) -> None:
        """Sends an observation, with what is left of its budget, over the connection as soon as there is one.

        Raises Timeout where what is open takes nothing for so long.
        """
        end = time.monotonic() + timeout_s
        reserved_s = (waiting.observation.actuate_ms + waiting.observation.network_ms) / 1e3
        while True:
            now = time.monotonic()
            link = await self._connector.wait(min(end - now, max(0.05, waiting.left_s(now))))
            if waiting.pending_on is link:
                return
            now = time.monotonic()
            with noticing_loss(link):
                await self._tell_clock(link, now, end - now)
            if link.gone or link.leaving or link is not self._connector.link:
                continue
            if waiting.seq < self._sent_seq:  # the gateway would refuse it, and not hold what it says
                raise overtaken(self._sent_seq)
            now = time.monotonic()
            left_s = waiting.left_s(now)
            if waiting.sends and left_s <= reserved_s:
                raise budget_spent()
            whole, unchanged, say = self._held.split(waiting.frames, waiting.observation.instruction)
            waiting.stamped = stamped = msgspec.structs.replace(
                waiting.observation, sent_at=now, budget_ms=max(0.0, 1e3 * left_s)
            )
            body = encode_frame(to_observe(stamped, whole, unchanged, instruction=say))
            check_fits(link, len(body), whole)
            waiting.link, waiting.sent_at = link, now
            waiting.sends += 1
            self._sent_seq = waiting.seq
            # The message is on its way before anything is waited for: what is sent behind it may refer to its frames.
            self._held.sent(waiting.frames, waiting.observation.instruction, waiting.seq)
            with noticing_loss(link):
                await self._write(link, body, end - now)
            if link.gone:
                continue
            self._metrics.sent(len(whole), len(unchanged), again=waiting.sends > 1)
            return

    def _cancel(self, waiting: Waiting) -> None:
        link = waiting.link
        if link is not None and not link.gone and not waiting.answered:
            self._spawn(self._quietly(link, Cancel(waiting.seq)))

    # ----- the connection

    def _hello(self) -> Hello:
        return Hello(VERSIONS, self._robot_id, self._session_id, self._seq, self._answered, self._token, _CLIENT)

    def _begin(self, link: Link) -> None:
        """A connection is open: take over what the gateway holds, and send again what it has not."""
        welcome = link.welcome
        self._metrics.connects += 1
        self._metrics.resumed += welcome.resumed
        self._token = welcome.token
        self._held.begin(welcome.held)
        self.clock.reset()
        self._told = None
        lost = [
            w for w in self._waiting.values() if w.sends and (w.link is None or w.link.gone) and not w.answer.done()
        ]
        for waiting in lost:
            if waiting.seq in welcome.pending:
                waiting.link = waiting.pending_on = link
        self._send_again([w for w in lost if w.link is not link])
        self._spawn(self._read(link))
        self._spawn(self._ping(link))

    def _send_again(self, again: list[Waiting]) -> None:
        """Sends the newest of what a lost connection carried, over the next one; the others are superseded."""
        newest = max((w.seq for w in again), default=0)
        for waiting in again:
            if waiting.seq == newest:
                self._resend_soon(waiting)
            else:
                waiting.fail(superseded(newest))

    def _fail_lost(self, error: Exception) -> None:
        """No connection will come: what the lost one carried is told why."""
        for waiting in self._waiting.values():
            if waiting.sends and (waiting.link is None or waiting.link.gone):
                waiting.fail(error)

    def _resend_soon(self, waiting: Waiting) -> None:
        """Once, however many say so: a gateway that leaves refuses what it holds, and its connection goes, too."""
        if not waiting.sending:
            waiting.sending = True
            self._spawn(self._resend(waiting))

    async def _resend(self, waiting: Waiting) -> None:
        try:
            if waiting.answer.done():
                return
            if waiting.sends > MAX_RESENDS:
                raise self._goodbye or unreachable(self._uri, "lost its connection again and again")
            await self._send(waiting, BACKOFF_MAX_S + max(0.0, waiting.left_s(time.monotonic())))
        except (TaktlineError, NoStream, Timeout) as error:
            waiting.fail(error)
        finally:
            waiting.sending = False

    async def _read(self, link: Link) -> None:
        link.listen(partial(self._came, link))
        try:
            with contextlib.suppress(ConnectionClosed, OSError):
                while True:  # what came before now without a turn of the loop between, and so in order
                    self._came(link, await link.receive())
        except asyncio.CancelledError:  # the event loop ends, where the robot was not closed: it needs no other one
            self._connector.close()
            raise
        except TaktlineError as error:
            # Not a gateway, or one of another make: nothing that follows can be trusted.
            self._connector.failure = error
        finally:
            await self._lost(link)

    def _came(self, link: Link, body: bytes) -> None:
        self._metrics.bytes_received += len(body)
        self._hear(link, decode_from_gateway(body), time.monotonic())

    async def _lost(self, link: Link) -> None:
        link.gone = True
        await link.close()
        self._connector.lost(link)
        self._goodbye = fatal = link.goodbye
        carried = [w for w in self._waiting.values() if w.link is link and not w.answer.done()]
        if fatal is not None and fatal.code not in RETRIED and not self._renewed(link, fatal):
            broken = fatal.code is ErrorCode.INVALID_BODY
            if not broken or len(carried) == 1:  # of several nobody knows which one was no frame
                for waiting in carried:
                    waiting.fail(fatal)
                carried = []
            if not broken:
                return
        # Also where nothing waits: the next observation should find a connection.
        if self._connector.link is None:
            self._connector.start()
        self._send_again(carried)

    async def _ping(self, link: Link) -> None:
        sent = 0
        with contextlib.suppress(ConnectionClosed, OSError):
            while not link.gone:
                now = time.monotonic()
                left_s = link.heard_at + DEAD_S - now
                if left_s < 0:
                    link.abort()
                    return
                try:
                    await self._put(link, Ping(now), left_s)
                except Timeout:
                    continue  # a connection that takes nothing is not alive for that
                sent += 1
                await asyncio.sleep(FIRST_PING_S if sent < FIRST_PINGS else PING_S)

    async def _put(self, link: Link, frame: FromRobot, timeout_s: float) -> None:
        await self._write(link, encode_frame(frame), timeout_s)

    async def _write(self, link: Link, body: bytes, timeout_s: float) -> None:
        self._metrics.bytes_sent += len(body)
        await link.send(body, timeout_s)

    async def _quietly(self, link: Link, frame: FromRobot, timeout_s: float = DEAD_S) -> None:
        with contextlib.suppress(ConnectionClosed, OSError, Timeout):
            await self._put(link, frame, timeout_s)

    async def _tell_clock(self, link: Link, now: float, timeout_s: float) -> None:
        found = self.clock.estimate(now)
        if found is None:
            return
        self._metrics.clock = found
        if self._told is None or found.differs(self._told):
            self._told = found
            await self._put(link, Clock(found.offset_s, found.error_s), timeout_s)

    # ----- what the gateway says

    def _hear(self, link: Link, frame: FromGateway, now: float) -> None:
        link.heard_at = now
        if isinstance(frame, Answer):
            self._answer(link, frame, now)
        elif isinstance(frame, Refusal):
            self._refusal(link, frame, now)
        elif isinstance(frame, Pong):
            self._note_clock(link, frame.ping_sent_at, frame, now)
        elif isinstance(frame, Backpressure):
            if frame.pause_ms > 0 and math.isfinite(frame.pause_ms):
                self._pause_until = now + min(frame.pause_ms, 60_000.0) / 1e3
        elif isinstance(frame, Progress):
            if frame.seq in self._waiting:
                self._metrics.progress = frame
        elif isinstance(frame, Goodbye):
            link.goodbye = typed(frame)
            if link.goodbye.code is ErrorCode.DRAINING:
                self._leave(link)
            link.leaving = True

    def _leave(self, link: Link) -> None:
        """The next connection is made beside this one, over which the unanswered are still answered."""
        link.leaving = True
        if self._connector.link is link:
            self._connector.start()

    def _answer(self, link: Link, frame: Answer, now: float) -> None:
        waiting = self._waiting.get(frame.seq)
        self._answered = max(self._answered, frame.seq)
        if link is self._connector.link:
            self._held.took(frame.seq)
        if waiting is None or waiting.answer.done():
            return  # given up, or answered before a resume
        sent_at = waiting.sent_at
        outside_ms = 1e3 * max(0.0, (now - sent_at) - (frame.sent_at - frame.received_at))
        try:
            waiting.answer.set_result((to_chunk(frame, self._policy, self._robot_id), outside_ms))
        except TaktlineError as error:
            waiting.fail(error)
        if waiting.link is link:  # noted behind the robot, which goes on in the loop's next turn
            asyncio.get_running_loop().call_soon(self._note_clock, link, sent_at, frame, now)

    def _refusal(self, link: Link, frame: Refusal, now: float) -> None:
        if not frame.held:
            self._held.forget()
        elif link is self._connector.link:
            self._held.took(frame.seq)
        waiting = self._waiting.get(frame.seq)
        if waiting is None or waiting.answer.done():
            return
        if waiting.link is link:
            self._note_clock(link, waiting.sent_at, frame, now)
        waiting.pending_on = None
        error = typed(frame)
        renewed = self._renewed(link, error)
        if renewed or error.code is ErrorCode.DRAINING:  # may come ahead of the goodbye
            self._leave(link)
        again = renewed or error.code in (ErrorCode.KEYFRAME_NEEDED, ErrorCode.DRAINING)
        if again and waiting.sends < MAX_RESENDS and waiting.left_s(now) > 0:
            self._resend_soon(waiting)
            return
        self._answered = max(self._answered, frame.seq)
        waiting.fail(error)

    def _renewed(self, link: Link, error: TaktlineError) -> bool:
        """Whether what a connection shows is no longer known, and a new one would show another key."""
        return error.code is ErrorCode.UNAUTHENTICATED and self._access.renewed(link.shown)

    def _note_clock(self, link: Link, sent_at: float, frame: Answer | Refusal | Pong, now: float) -> None:
        if link is self._connector.link:  # the gateway that leaves has another clock
            self.clock.note(sent_at, frame.received_at, frame.sent_at, now)

    def _spawn(self, work) -> None:  # type: ignore[no-untyped-def]
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
