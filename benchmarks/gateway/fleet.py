"""Robots that account for every request: exactly one outcome each, with the time it took against its deadline.

A robot that loses its connection counts the request it had open as `connection` and connects again, to the next
gateway where there are several. Nothing is retried: what a client saw is what is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from taktline_protocol.codecs import MediaType, decode_chunk, decode_error, encode
from taktline_protocol.messages import Array, Image, Observation
from taktline_protocol.stream import Ack, Answer, Backpressure, Goodbye, Refusal
from taktline_protocol.stream_codec import decode_from_gateway

from benchmarks.gateway.robots import CAMERAS, STATE_DIM, OpenpiRobot, StreamRobot

RECONNECT_S = 0.05
CONNECTION = "connection"
"""The client saw its connection refused, reset or closed."""
SILENT = "silent"
"""Neither an answer nor an error within the deadline and the bound: what must never happen."""
CHUNK = "chunk"
FRAME = Image("raw", bytes(3 * 32 * 32), (32, 32, 3))


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One request: when it was sent (monotonic, s), what came, how long after its deadline (ms; negative is before)."""

    robot: str
    protocol: str
    sent_at: float
    word: str
    over_ms: float
    took_ms: float


@dataclasses.dataclass
class Book:
    """All outcomes of a run."""

    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    sent: int = 0

    def words(self) -> Counter[str]:
        """How many of each."""
        return Counter(outcome.word for outcome in self.outcomes)

    @property
    def worst_over_ms(self) -> float:
        """The longest that a client was left without a word after its deadline."""
        return max((outcome.over_ms for outcome in self.outcomes), default=0.0)

    def chunks_after(self, instant: float) -> int:
        """Chunks for requests sent after an instant."""
        return sum(outcome.word == CHUNK and outcome.sent_at > instant for outcome in self.outcomes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What each robot does.

    Attributes:
        addresses: (host, port) of the gateways, in the order in which they are tried.
        period_s: from one request to the next.
        bound_s: how long after its deadline a request may at most go without a word.
    """

    policy: str
    addresses: Sequence[tuple[str, int]]
    openpi_addresses: Sequence[tuple[str, int]] = ()
    period_s: float = 0.05
    budget_ms: float = 500.0
    bound_s: float = 3.0


class AccountedRobot:
    """Asks at a fixed rate until told to stop."""

    def __init__(self, protocol: str, number: int, plan: Plan, book: Book) -> None:
        self.name = f"{protocol}-{number}-{os.urandom(3).hex()}"
        self._protocol = protocol
        self._plan = plan
        self._book = book
        self._at = number
        self._seq = 0
        self._link: _Link | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """One request a period; a late answer delays the next request, as a robot that waits for its chunk."""
        plan = self._plan
        due = time.monotonic() + plan.period_s * (self._at % 16) / 16
        while not stop.is_set():
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            sent_at = time.monotonic()
            due = max(due + plan.period_s, sent_at)
            self._seq += 1
            self._book.sent += 1
            limit_s = plan.budget_ms / 1e3 + plan.bound_s
            try:
                async with asyncio.timeout(limit_s):
                    word = await self._ask()
            except TimeoutError:
                word = SILENT
                self._drop()
            except (OSError, EOFError, asyncio.IncompleteReadError, ConnectionError):
                word = CONNECTION
                self._drop()
            took_ms = 1e3 * (time.monotonic() - sent_at)
            self._book.outcomes.append(
                Outcome(self.name, self._protocol, sent_at, word, took_ms - plan.budget_ms, took_ms)
            )
            if word == CONNECTION:
                await asyncio.sleep(RECONNECT_S)
        self._drop()

    async def _ask(self) -> str:
        if self._link is None:
            plan = self._plan
            addresses = plan.openpi_addresses if self._protocol == "openpi" else plan.addresses
            host, port = addresses[self._at % len(addresses)]
            link = _LINKS[self._protocol](host, port, self.name, plan)
            await link.open()
            self._link = link
        word = await self._link.ask(self._seq)
        if self._link.leaving:
            self._drop()
        return word

    def _drop(self) -> None:
        self._at += 1  # the next gateway, where there is one
        link, self._link = self._link, None
        if link is not None:
            link.cut()


class _Link(ABC):
    leaving = False

    def __init__(self, host: str, port: int, name: str, plan: Plan) -> None:
        self.host, self.port, self.name, self.plan = host, port, name, plan

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def ask(self, seq: int) -> str: ...

    @abstractmethod
    def cut(self) -> None: ...


class _RestLink(_Link):
    _writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self.host, self.port)

    async def ask(self, seq: int) -> str:
        assert self._writer is not None
        now = time.monotonic()
        observation = Observation(
            robot_id=self.name,
            session_id=self.name,
            seq=seq,
            captured_at=now,
            sent_at=now,
            budget_ms=self.plan.budget_ms,
            images=dict.fromkeys(CAMERAS, FRAME),
            state=Array.from_numpy(np.zeros(STATE_DIM)),
            instruction="go",
        )
        body = encode(observation, MediaType.MSGPACK)
        self._writer.write(
            f"POST /v1/policies/{self.plan.policy}/act HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        at = head.index(b"content-length:") + 15
        answer = await self._reader.readexactly(int(head[at : head.index(b"\r\n", at)]))
        self.leaving = b"connection: close" in head
        if head[9:12] == b"200":
            chunk = decode_chunk(answer, MediaType.MSGPACK)
            assert chunk.seq == seq and chunk.robot_id == self.name  # noqa: PT018
            return CHUNK
        return decode_error(answer, MediaType.MSGPACK).code

    def cut(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _StreamLink(_Link):
    async def open(self) -> None:
        self._robot = StreamRobot(self.host, self.port, self.name, self.plan.policy)
        await self._robot.open()
        self._first = True

    async def ask(self, seq: int) -> str:
        self._robot.observe(seq, self.plan.budget_ms, instruction=self._first)
        self._first = False
        while True:
            _, payload = await self._robot.receive()
            frame = decode_from_gateway(payload)
            if isinstance(frame, Goodbye):
                self.leaving = True
            elif isinstance(frame, Answer) and frame.seq == seq:
                return CHUNK
            elif isinstance(frame, Refusal) and frame.seq == seq:
                return frame.code
            else:
                assert isinstance(frame, Ack | Backpressure | Answer | Refusal), frame

    def cut(self) -> None:
        self._robot.cut()


class _OpenpiLink(_Link):
    async def open(self) -> None:
        self._robot = OpenpiRobot(self.host, self.port, self.name)
        await self._robot.open()

    async def ask(self, seq: int) -> str:
        self._robot.send_frame()
        opcode, payload = await self._robot.receive()
        if opcode == 2:
            msgspec.msgpack.decode(payload)
            return CHUNK
        return payload.decode().partition(":")[0]

    def cut(self) -> None:
        self._robot.cut()


_LINKS: dict[str, type[_Link]] = {"rest": _RestLink, "stream": _StreamLink, "openpi": _OpenpiLink}


@contextlib.asynccontextmanager
async def fleet(plan: Plan, protocols: Sequence[str], robots: int):  # type: ignore[no-untyped-def]
    """Robots of each protocol in turn, for as long as the context lasts; yields their book, complete on leaving."""
    book = Book()
    stop = asyncio.Event()
    drivers = [
        asyncio.create_task(AccountedRobot(protocols[number % len(protocols)], number, plan, book).run(stop))
        for number in range(robots)
    ]
    try:
        yield book
    finally:
        stop.set()
        await asyncio.gather(*drivers)
