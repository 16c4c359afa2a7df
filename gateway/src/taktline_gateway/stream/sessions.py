"""Sessions of streams: what outlives a connection, for how long, and within which memory."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Protocol

from taktline_protocol import TaktlineError
from taktline_protocol.messages import Image
from taktline_protocol.stream import TOKEN_BYTES, Hello

from taktline_gateway.compat.gateway_service import UnderWay, Withdraw


@dataclasses.dataclass(frozen=True, slots=True)
class HeldFrame:
    """The last frame of one camera, under the name that its robot gave it."""

    name: bytes
    image: Image


@dataclasses.dataclass(slots=True, eq=False)
class Flight:
    """One observation; `told` sends its robot progress meanwhile, where it asked for a video. `answered`: the
    connection that its answer was sent on; it is about to go."""

    seq: int
    received_at: float
    request_id: str
    withdraw: Withdraw | None = None
    under_way: UnderWay | None = None
    told: asyncio.Task[None] | None = None
    answered: Link | None = None
    left: bool = False
    gone: bool = False
    reason: TaktlineError | None = None

    def admitted(self, withdraw: Withdraw, under_way: UnderWay | None = None) -> None:
        """It is in the queue now, unless it was to leave before it came there."""
        self.withdraw, self.under_way = withdraw, under_way
        if self.left:
            withdraw(self.reason)

    def leave(self, reason: TaktlineError | None) -> bool:
        """Takes it out of the queue, answered with `reason`; False where a worker has it."""
        self.left, self.reason = True, reason
        # Where it is not in the queue yet, it leaves as it comes there.
        self.gone = self.withdraw is None or self.withdraw(reason)
        return self.gone


class Link(Protocol):
    """A connection as its session sees it."""

    def deliver(self, body: bytes) -> Awaitable[bool]:
        """Sends one frame; False where the connection is gone."""

    def deliver_at_once(self, body: bytes) -> bool:
        """Whether one frame has been sent, without waiting for anything."""

    def replaced(self) -> None:
        """Another connection has taken the session over."""

    def settled(self) -> None:
        """An observation of the session has got its answer."""


@dataclasses.dataclass(slots=True, eq=False)
class Session:
    """One robot's session with one policy.

    Attributes:
        robot: the robot's name among those of all tenants.
        seq: highest sequence number seen.
        held: camera -> the last frame that came whole.
        flights: by sequence number; they go on while the connection is away.
        kept: the newest answer that found no connection, and its sequence number.
        link: the connection, None while it is away.
        changed: something that another gateway would need has changed since it was last stored.
        stored: the number of the store's write that it was last in, 0 before the first.
    """

    policy: str
    robot: str
    robot_id: str
    session_id: str
    token: bytes
    seq: int = 0
    instruction: str | None = None
    held: dict[str, HeldFrame] = dataclasses.field(default_factory=dict)
    held_bytes: int = 0
    flights: dict[int, Flight] = dataclasses.field(default_factory=dict)
    kept: tuple[int, bytes] | None = None
    link: Link | None = None
    away_since: float = 0.0
    changed: bool = True
    stored: int = 0

    def drop(self, camera: str) -> None:
        """Keeps no frame of this camera any longer; none was kept of one that is not known."""
        if (frame := self.held.pop(camera, None)) is not None:
            self.held_bytes -= len(frame.image.data)

    def make_room(self, window: int, error: TaktlineError) -> bool:
        """Whether one more may be under way: of what is still queued the oldest gives way to it, with `error`."""
        under_way = [flight for flight in self.flights.values() if not flight.gone]
        return len(under_way) < window or any(flight.leave(error) for flight in under_way)

    async def answer(self, seq: int, body: bytes) -> None:
        """Hands an answer to the connection, or keeps it for the next one; an older kept answer gives way."""
        tried = None
        while (link := self.link) is not None and link is not tried:  # it may move to another while one does not read
            if await link.deliver(body):
                return
            tried = link
        if self.kept is None or self.kept[0] <= seq:
            self.kept = (seq, body)

    def away(self) -> None:
        """The connection is gone: what is still queued leaves, what a worker has goes on."""
        self.link = None
        for flight in list(self.flights.values()):
            flight.leave(None)

    def coming(self) -> tuple[int, ...]:
        """Observations whose answer still comes; what has left the queue with a connection gets none."""
        return tuple(seq for seq, flight in self.flights.items() if not flight.gone or flight.reason is not None)

    def cancel(self, seq: int, error: TaktlineError) -> None:
        """Takes one observation out of the queue, answered with `error`; nothing where it is too late."""
        flight = self.flights.get(seq)
        if flight is not None:
            flight.leave(error)


class Sessions:
    """The sessions of one gateway process, by token."""

    def __init__(
        self, resume_s: float, held_bytes: int, clock: Callable[[], float], most: int = 20_000, cameras: int = 16
    ) -> None:
        """`most`: sessions kept at once; beyond it those away go first, however short their absence.

        `cameras`: most whose frames one session keeps.
        """
        self._resume_s = resume_s
        self._cameras = cameras
        self._most = most
        self._held_limit = held_bytes
        self._clock = clock
        self._by_token: OrderedDict[bytes, Session] = OrderedDict()  # the one used last at the end
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_token.values()))

    def open(self, policy: str, robot: str, hello: Hello) -> Session:
        """A new session."""
        session = Session(policy, robot, hello.robot_id, hello.session_id, os.urandom(TOKEN_BYTES), seq=hello.seq)
        if len(self._by_token) >= self._most:
            away = next((other for other in self._by_token.values() if other.link is None), None)
            if away is not None:
                self._drop(away)
        self._by_token[session.token] = session
        return session

    def find(self, policy: str, robot: str, hello: Hello) -> Session | None:
        """The session that the token names; None where there is none (any more), or it is another robot's."""
        session = self._by_token.get(hello.token)
        if session is None or not belongs(session, policy, robot, hello):
            return None
        if session.link is None and self._clock() - session.away_since > self._resume_s:
            self._drop(session)
            return None
        return session

    def take(self, session: Session, link: Link, hello: Hello) -> None:
        """The session goes on over `link`; a connection that it still has is told that it was replaced.

        One that another gateway had is taken in.
        """
        if session.link is not None:
            session.link.replaced()
            self.away(session)
        if self._by_token.get(session.token) is not session:
            self._by_token[session.token] = session
            self.held_bytes += session.held_bytes
        session.link = link
        session.seq = max(session.seq, hello.seq)
        self._by_token.move_to_end(session.token)

    def hold(self, session: Session, images: Mapping[str, HeldFrame], instruction: str | None) -> None:
        """Keeps the frames that came whole; where memory is short, sessions idle longest lose all of theirs."""
        if self._by_token.get(session.token) is not session:
            return  # dropped meanwhile: nobody would ever give its memory back
        before = session.held_bytes
        for camera, frame in images.items():
            session.drop(camera)
            session.held[camera] = frame
            session.held_bytes += len(frame.image.data)
        while len(session.held) > self._cameras:  # names of cameras are its robot's: what came last counts
            session.drop(next(iter(session.held)))
        self.held_bytes += session.held_bytes - before
        if instruction is not None:
            session.instruction = instruction
        session.changed = True
        self._by_token.move_to_end(session.token)
        if self.held_bytes > self._held_limit:
            self._make_room(session)

    def away(self, session: Session) -> None:
        """The session's connection is gone; it can be resumed for a while."""
        session.away()
        session.away_since = self._clock()

    def end(self, session: Session) -> None:
        """The robot said bye."""
        session.away()
        self._drop(session)

    def expire(self) -> list[Session]:
        """Drops and returns the sessions that were away for too long."""
        now = self._clock()
        late = [s for s in self._by_token.values() if s.link is None and now - s.away_since > self._resume_s]
        for session in late:
            self._drop(session)
        return late

    def _drop(self, session: Session) -> None:
        if self._by_token.pop(session.token, None) is not None:
            self._forget(session)

    def _forget(self, session: Session) -> None:
        self.held_bytes -= session.held_bytes
        session.held_bytes = 0
        session.held.clear()

    def _make_room(self, spared: Session) -> None:
        for session in self._by_token.values():
            if self.held_bytes <= self._held_limit:
                return
            if session is not spared and session.held:
                self._forget(session)
                session.changed = True


def belongs(session: Session, policy: str, robot: str, hello: Hello) -> bool:
    """Whether a hello is from the robot whose session this is."""
    return (session.policy, session.robot, session.session_id) == (policy, robot, hello.session_id)
