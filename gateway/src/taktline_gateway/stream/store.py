"""Sessions in Redis, so that a robot may go on at another gateway: written behind the requests, read at a hello."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.messages import Image

from taktline_gateway.logs import log
from taktline_gateway.stream.sessions import HeldFrame, Session

PREFIX = "taktline:session:"
ANSWER_S = 0.25
"""A store that takes longer is taken for gone; a robot that says hello does not wait longer for it."""
FLUSH_BYTES = 4 * 1024 * 1024
"""Written at a time, which a link carries within `ANSWER_S`; the rest of a large fleet comes in the next writes."""
_logger = logging.getLogger(__name__)


class _Frame(msgspec.Struct, array_like=True, frozen=True):
    name: bytes
    encoding: Literal["jpeg", "png", "raw"]
    data: bytes
    height: Annotated[int, Meta(ge=0)]
    width: Annotated[int, Meta(ge=0)]


class _Record(msgspec.Struct, array_like=True, frozen=True):
    """What another gateway needs of a session."""

    policy: str
    robot: str
    robot_id: str
    session_id: str
    seq: int
    instruction: str | None
    held: dict[str, _Frame]


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Record)


class SessionStore:
    """The sessions of all gateways that share one Redis.

    Nothing here is called for a request. Changed sessions are written together, one round trip for all, a few times a
    second at most; a session is read only where a robot says hello with a token that this gateway does not know.
    """

    def __init__(self, url: str, resume_s: float) -> None:
        """Does not connect yet. Raises TaktlineError `config_invalid` where the URL is none."""
        self._ttl_s = math.ceil(2 * resume_s) + 10
        self.up = False
        self._said: bool | None = None
        self._writes = 0
        self.address = _address(url)
        try:
            self._redis = Redis.from_url(
                url,
                socket_timeout=ANSWER_S,
                socket_connect_timeout=ANSWER_S,
                retry=Retry(NoBackoff(), 0),
                health_check_interval=0,
            )
        except ValueError as error:
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"the Redis URL is not one: {error}",
                "use redis://[:password@]host:port/db, rediss:// for TLS, or unix://path",
            ) from error

    async def flush(self, sessions: Iterable[Session], *, everything: bool = False) -> None:
        """Writes the sessions that have changed, those first whose last write is longest ago; without any it pings.

        As many as fit `FLUSH_BYTES`; with `everything` all of them, in pieces of that size, until the store is gone.
        """
        due = deque(sorted((session for session in sessions if session.changed), key=lambda session: session.stored))
        while await self._write(_piece(due)) and everything and due:
            pass

    async def _write(self, chosen: Sequence[Session]) -> bool:
        try:
            if not chosen:
                await self._redis.ping()
            else:
                pipeline = self._redis.pipeline(transaction=False)
                for session in chosen:
                    session.changed = False
                    pipeline.set(_key(session.token), _encode(_record(session)), ex=self._ttl_s)
                await pipeline.execute()
        except (RedisError, OSError, TimeoutError) as error:
            for session in chosen:
                session.changed = True
            self._note(error)
            return False
        self._writes += 1
        for session in chosen:
            session.stored = self._writes
        self._note(None)
        return True

    async def load(self, token: bytes) -> Session | None:
        """The session of a token that another gateway gave out; None where there is none, or the store is gone."""
        if not self.up:
            return None
        try:
            body = await self._redis.get(_key(token))
        except (RedisError, OSError, TimeoutError) as error:
            self._note(error)
            return None
        if body is None:
            return None
        try:
            return _session(token, _decoder.decode(body.encode() if isinstance(body, str) else body))
        except msgspec.MsgspecError as error:
            # Written by another release; the robot begins anew, with a keyframe.
            log(_logger, logging.WARNING, "session_unreadable", reason=str(error)[:200])
            return None

    async def drop(self, token: bytes) -> None:
        """The session is over."""
        if self.up:
            try:
                await self._redis.delete(_key(token))
            except (RedisError, OSError, TimeoutError) as error:
                self._note(error)  # it expires by itself

    async def close(self) -> None:
        """Closes the connections."""
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    def _note(self, error: Exception | None) -> None:
        self.up = error is None
        if self.up == self._said:
            return
        self._said = self.up
        if error is None:
            log(_logger, logging.INFO, "session_store_up", store=self.address)
        else:
            log(
                _logger,
                logging.ERROR,
                "session_store_down",
                store=self.address,
                reason=str(error)[:200],
                message="requests go on; sessions cannot move to another gateway",
            )


def _piece(due: deque[Session]) -> list[Session]:
    """Takes sessions from the front, one at least, until they hold `FLUSH_BYTES`."""
    found: list[Session] = []
    size = 0
    while due and size < FLUSH_BYTES:
        found.append(due.popleft())
        size += found[-1].held_bytes
    return found


def _key(token: bytes) -> str:
    # Who can read the store must not learn tokens from its keys.
    return PREFIX + hashlib.sha256(token).hexdigest()


def _record(session: Session) -> _Record:
    held = {}
    for camera, frame in session.held.items():
        height, width, _ = frame.image.shape or (0, 0, 3)
        held[camera] = _Frame(frame.name, frame.image.encoding, frame.image.data, height, width)
    return _Record(
        session.policy,
        session.robot,
        session.robot_id,
        session.session_id,
        session.seq,
        session.instruction,
        held,
    )


def _session(token: bytes, record: _Record) -> Session:
    session = Session(record.policy, record.robot, record.robot_id, record.session_id, token, record.seq)
    session.instruction = record.instruction
    for camera, frame in record.held.items():
        shape = (frame.height, frame.width, 3) if frame.encoding == "raw" else None
        session.held[camera] = HeldFrame(frame.name, Image(frame.encoding, frame.data, shape))
        session.held_bytes += len(frame.data)
    return session


def _address(url: str) -> str:
    """The URL without its password, for logs."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
