"""What becomes of a robot's observations: resolved, checked, queued and answered, and their frames kept."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from taktline_protocol import ActionChunk, ErrorCode, Observation, TaktlineError
from taktline_protocol.checks import check_observation
from taktline_protocol.stream import Backpressure, Clock, FromGateway, Observe
from taktline_protocol.stream_codec import decode_from_robot, encode_frame, to_answer, to_refusal

from taktline_gateway.access.rights import Principal
from taktline_gateway.http_io import Exchange
from taktline_gateway.logs import log
from taktline_gateway.pending import ClientGone, failing
from taktline_gateway.refusals import internal_error
from taktline_gateway.stream.progress import report
from taktline_gateway.stream.resolving import budget_from, resolve
from taktline_gateway.stream.sessions import Flight, HeldFrame, Session

if TYPE_CHECKING:
    from taktline_gateway.stream.endpoint import Caller, Streams

_BUSY = frozenset({ErrorCode.OVERLOADED, ErrorCode.RATE_LIMITED})
_logger = logging.getLogger(__name__)


class Intake:
    """The observations of one connection.

    Attributes:
        clock: the robot's estimate of its clock, where that is of use.
    """

    def __init__(
        self,
        streams: Streams,
        policy: str,
        caller: Caller,
        deliver: Callable[[bytes], Awaitable[bool]],
        acknowledge: Callable[[], None],
    ) -> None:
        """`deliver` sends a frame; `acknowledge` hears that there is an observation without an answer."""
        self.clock: Clock | None = None
        self._streams = streams
        self._policy = policy
        self._caller = caller
        self._deliver = deliver
        self._acknowledge = acknowledge
        self._settings = streams.settings
        self._unkept: tuple[Session, Observe, Observation] | None = None
        """An observation that is queued, and whose frames are still to be kept."""

    async def observe(self, session: Session, frame: Observe, now: float) -> None:
        """Queues an observation that came at `now`, or refuses it."""
        exchange = Exchange({"headers": ()})
        observation: Observation | None = None
        principal: Principal | None = None
        try:
            principal = await self._streams.principal(self._caller, self._policy, session.robot_id, exchange.request_id)
            observation = resolve(session, frame)
            check_observation(observation, self._streams.limits)
        except TaktlineError as error:
            counted = error
            if principal is not None:
                counted = self._streams.counted(self._caller, principal, self._policy, observation, error)
            await self._refuse(session, exchange, observation, frame.seq, now, counted, held=False)
            return
        refusal = self._begin(session, exchange, principal, observation, now)
        self._unkept = session, frame, observation
        if refusal is None:
            for _ in range(2):  # so that it is sent to a worker, where one is free, before what it need not wait for
                await asyncio.sleep(0)
        self.keep()
        await self._say(session, exchange, principal, observation, now, refusal)

    def take(self, session: Session, body: bytes, now: float) -> bool:
        """The same of a message that came at `now`, without waiting; whether it is an observation that is queued or
        refused now.

        One a turn, so that others have theirs, and only where nobody need be asked who the robot is.
        """
        principal = self._streams.principal_at_once(self._caller)
        if principal is None or self._unkept is not None:
            return False
        try:
            frame = decode_from_robot(body, self._streams.limits)
            if not isinstance(frame, Observe):
                return False
            observation = resolve(session, frame)
            check_observation(observation, self._streams.limits)
        except TaktlineError:
            return False  # who hears the message in its turn finds the same, and says so
        exchange = Exchange({"headers": ()})
        refusal = self._begin(session, exchange, principal, observation, now)
        self._unkept = session, frame, observation
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self.keep)  # behind its sending to a worker, where one is free
        if refusal is not None or len(session.flights) >= self._settings.window:
            self._streams.spawn(self._say(session, exchange, principal, observation, now, refusal))
        return True

    def keep(self) -> None:
        """The frames of the last observation are held for those that refer to them."""
        if self._unkept is None:
            return
        (session, frame, observation), self._unkept = self._unkept, None
        images = {camera: HeldFrame(f.name, observation.images[camera]) for camera, f in frame.images.items()}
        self._streams.sessions.hold(session, images, frame.instruction)
        self._streams.telemetry.observation(self._policy, keyframe=not frame.unchanged)

    async def _say(
        self,
        session: Session,
        exchange: Exchange,
        principal: Principal,
        observation: Observation,
        now: float,
        refusal: TaktlineError | None,
    ) -> None:
        """An observation is in the queue, or is refused: what its robot hears of that."""
        if refusal is not None:
            counted = self._streams.counted(self._caller, principal, self._policy, observation, refusal)
            await self._refuse(session, exchange, observation, observation.seq, now, counted, held=True)
        elif len(session.flights) >= self._settings.window:
            await self._deliver(encode_frame(Backpressure("window", 0.0, len(session.flights))))

    def _begin(
        self, session: Session, exchange: Exchange, principal: Principal, observation: Observation, now: float
    ) -> TaktlineError | None:
        """Queues an observation that came at `now`; or why it may not be."""
        session.seq = observation.seq
        try:
            self._streams.check_open()
        except TaktlineError as error:
            return error
        window = self._settings.window
        if len(session.flights) >= window and not session.make_room(window, _overtaken(observation.seq)):
            return TaktlineError(
                ErrorCode.OVERLOADED,
                f"{len(session.flights)} observations of this robot are unanswered; the window is {window}",
                "wait for an answer before sending more",
            )
        started_at, observation = budget_from(observation, now, self.clock)
        flight = Flight(observation.seq, now, exchange.request_id)
        session.flights[observation.seq] = flight
        if observation.imagine is not None:
            flight.told = self._streams.spawn(report(session, flight, self._settings.progress_every_s))
        try:
            coming = self._streams.service.serve(
                self._policy,
                observation,
                exchange,
                credential=self._caller.credential,
                principal=principal,
                received_at=started_at,
                checked=True,
                admitted=flight.admitted,
                tell=partial(_tell, session, flight),
            )
        except TaktlineError as error:
            coming = failing(error)
        self._streams.spawn(self._serve(session, flight, exchange, coming))
        self._acknowledge()
        return None

    # ----- answers

    async def _serve(
        self, session: Session, flight: Flight, exchange: Exchange, coming: Awaitable[ActionChunk]
    ) -> None:
        pressure: Backpressure | None = None
        try:
            try:
                chunk = await coming
                answer: FromGateway | None = None
                # Where another connection took the session over in the turn of the answer, it was promised it.
                if flight.answered is None or flight.answered is not session.link:
                    answer = to_answer(chunk, flight.received_at, time.monotonic())
            except ClientGone:
                answer = None  # it left the queue with its connection
            except Exception as fault:
                error = fault if isinstance(fault, TaktlineError) else internal_error()
                if error is not fault:
                    log(_logger, logging.ERROR, "internal", exc_info=True, policy=self._policy, stream=True)
                answer = to_refusal(
                    flight.seq, error, flight.received_at, time.monotonic(), held=True, request_id=exchange.request_id
                )
                if error.code in _BUSY and error.retry_after_ms is not None:
                    pressure = Backpressure("queue", error.retry_after_ms, len(session.flights) - 1)
            # Unanswered until its answer is sent: so a robot that reads slowly fills its own window and nothing else.
            if answer is not None:
                await session.answer(flight.seq, encode_frame(answer))
        finally:
            if flight.told is not None:
                flight.told.cancel()
            if session.flights.get(flight.seq) is flight:  # it may have been sent again, under the same number
                del session.flights[flight.seq]
            link = session.link
            if link is not None:
                link.settled()
        if pressure is not None and link is not None:
            await link.deliver(encode_frame(pressure))

    async def _refuse(
        self,
        session: Session,
        exchange: Exchange,
        observation: Observation | None,
        seq: int,
        received_at: float,
        error: TaktlineError,
        *,
        held: bool,
    ) -> None:
        self._streams.service.refuse(self._policy, exchange, observation, error)
        refusal = to_refusal(seq, error, received_at, time.monotonic(), held=held, request_id=exchange.request_id)
        await self._deliver(encode_frame(refusal))


def _tell(session: Session, flight: Flight, chunk: ActionChunk) -> None:
    """Sends an answer in the turn that brought it, where its connection takes it at once."""
    link = session.link
    if link is not None and link.deliver_at_once(encode_frame(to_answer(chunk, flight.received_at, time.monotonic()))):
        flight.answered = link


def _overtaken(seq: int) -> TaktlineError:
    return TaktlineError(
        ErrorCode.SUPERSEDED,
        f"the window was full when observation {seq} came",
        "use the chunk of the newer observation",
    )
