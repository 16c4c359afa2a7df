"""Load for a gateway: robots that ask in a closed loop or at a fixed rate, every request accounted.

Over REST each robot is a raw HTTP/1.1 connection that is kept open; over the timed stream it is the SDK's own robot.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from urllib.parse import quote, urlsplit

import numpy as np
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.codecs import MediaType, decode_chunk, decode_error, encode
from taktline_protocol.messages import Image, PolicyInfo

from taktline.access import Access
from taktline.chunk import Chunk, complete
from taktline.observing import Frame, Sender
from taktline.robot import AsyncRobot

TERMS = ("observe_ms", "transfer_ms", "queue_ms", "inference_ms", "actuate_ms")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What to send.

    Attributes:
        clients: robots, each with one connection and one request at a time.
        rate_hz: requests a second over all robots, on a fixed schedule; None is a closed loop.
        frame: the frame of every camera; None is noise of `side` x `side` raw pixels.
        stream: over the timed stream instead of REST.
        still: the cameras show the same from observation to observation. Over the stream they are then sent by
            reference; noise changes every time where this is off. A `frame` is always still.
    """

    url: str
    info: PolicyInfo
    clients: int
    duration_s: float
    budget_ms: float
    instruction: str
    rate_hz: float | None = None
    frame: bytes | None = None
    side: int = 224
    stream: bool = False
    still: bool = False
    access: Access = dataclasses.field(default_factory=Access)
    # A new name for each run: the last run's robots may still count as live sessions.
    robots: str = dataclasses.field(default_factory=lambda: f"bench-{uuid.uuid4().hex[:8]}")


@dataclasses.dataclass
class Outcome:
    """What came back. Latencies in ms run from the moment a request was due, so a stalled client hides nothing."""

    elapsed_s: float = 0.0
    latencies_ms: list[float] = dataclasses.field(default_factory=list)
    margins_ms: list[float] = dataclasses.field(default_factory=list)
    terms_ms: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {term: [] for term in TERMS})
    batches: list[int] = dataclasses.field(default_factory=list)
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
    bytes_sent: int = 0
    cameras_whole: int = 0
    cameras_referenced: int = 0

    @property
    def answered(self) -> int:
        """Requests that got a chunk."""
        return len(self.latencies_ms)

    @property
    def misses(self) -> int:
        """Chunks that came after their deadline."""
        return sum(margin < 0 for margin in self.margins_ms)


def percentile(values: Sequence[float], share: float) -> float:
    """The value at `share` (0..1) of the sorted values, by nearest rank; NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


def run_load(load: Load) -> Outcome:
    """Runs the load to its end.

    Raises:
        TaktlineError: `gateway_unreachable` where no connection can be made; over the stream also what its hello was
            refused with.
    """
    return asyncio.run(_run(load))


async def _run(load: Load) -> Outcome:
    outcome = Outcome()
    began = time.monotonic()
    kind = _StreamRobot if load.stream else _HttpRobot
    robots = [kind(load, index, outcome) for index in range(load.clients)]
    try:
        await asyncio.gather(*(robot.open() for robot in robots))
        began = time.monotonic()
        await asyncio.gather(*(robot.run(began) for robot in robots))
        outcome.elapsed_s = time.monotonic() - began
    finally:
        await asyncio.gather(*(robot.close() for robot in robots))
    return outcome


class _Robot(ABC):
    """One robot with one request at a time; how it asks is the transport's."""

    def __init__(self, load: Load, index: int, outcome: Outcome) -> None:
        self._load = load
        self._index = index
        self._outcome = outcome
        rng = np.random.default_rng(index)
        shape = (load.side, load.side, 3)
        # Two frames in turn: a camera that changes is never the one that the gateway holds.
        self._frames: list[Frame] = [
            Image("raw", rng.integers(0, 256, shape, dtype=np.uint8).tobytes(), shape)
            for _ in range(1 if load.still else 2)
        ]
        if load.frame is not None:
            self._frames = [load.frame]
        self._state = np.zeros(load.info.state_dim)
        self._asked = 0

    @abstractmethod
    async def open(self) -> None:
        """Connects."""

    @abstractmethod
    async def close(self) -> None:
        """Leaves."""

    async def run(self, began: float) -> None:
        """Asks until the time is over."""
        load = self._load
        number = 0
        while True:
            due = time.monotonic()
            if load.rate_hz is not None:
                due = began + (number * load.clients + self._index) / load.rate_hz
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            if due - began >= load.duration_s:
                return
            await self._ask(due)
            number += 1

    @abstractmethod
    async def _ask(self, due: float) -> None:
        """One observation, due at an instant of the monotonic clock."""

    def _images(self) -> dict[str, Frame]:
        self._asked += 1
        return dict.fromkeys(self._load.info.cameras, self._frames[self._asked % len(self._frames)])

    def _left_ms(self, due: float) -> float:
        """The budget began when the request was due, however late it is sent."""
        return max(0.0, self._load.budget_ms - 1e3 * (time.monotonic() - due))

    def _answered(self, chunk: Chunk, latency_s: float) -> None:
        outcome = self._outcome
        outcome.latencies_ms.append(1e3 * latency_s)
        outcome.margins_ms.append(chunk.margin_ms)
        outcome.batches.append(chunk.batch_size)
        for term in TERMS:
            outcome.terms_ms[term].append(getattr(chunk.timings, term))


class _StreamRobot(_Robot):
    def __init__(self, load: Load, index: int, outcome: Outcome) -> None:
        super().__init__(load, index, outcome)
        name = f"{load.robots}-{index}"
        self._robot = AsyncRobot(load.url, load.info.policy, name, access=load.access, transport="stream")

    async def open(self) -> None:
        await self._robot.connect()

    async def close(self) -> None:
        await self._robot.close()
        metrics = self._robot.metrics
        self._outcome.bytes_sent += metrics.bytes_sent
        self._outcome.cameras_whole += metrics.cameras_whole
        self._outcome.cameras_referenced += metrics.cameras_referenced

    async def _ask(self, due: float) -> None:
        left_ms = self._left_ms(due)
        try:
            chunk = await self._robot.act(self._images(), self._state, self._load.instruction, left_ms, captured_at=due)
        except TaktlineError as error:
            self._outcome.errors[error.code.value] += 1
            if error.code is ErrorCode.OVERLOADED and error.retry_after_ms is not None:
                await asyncio.sleep(error.retry_after_ms / 1e3)  # the gateway's pause; to ask within it is no load
            return
        self._answered(chunk, time.monotonic() - due)


class _HttpRobot(_Robot):
    def __init__(self, load: Load, index: int, outcome: Outcome) -> None:
        super().__init__(load, index, outcome)
        self._sender = Sender(f"{load.robots}-{index}")
        parts = urlsplit(load.url)
        secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or (443 if secure else 80)
        self._tls = load.access.tls() if secure else None
        given = "".join(f"{name}: {value}\r\n" for name, value in load.access.headers().items())
        self._head = (
            f"POST /v1/policies/{quote(load.info.policy, safe='')}/act HTTP/1.1\r\nHost: {self._host}\r\n{given}"
            f"Content-Type: {MediaType.MSGPACK.value}\r\nContent-Length: "
        ).encode()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        try:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise TaktlineError(
                ErrorCode.GATEWAY_UNREACHABLE,
                f"the gateway at {self._load.url} cannot be reached",
                "check the URL and that the gateway runs: GET /healthz",
            ) from error

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def _ask(self, due: float) -> None:
        try:
            await self._post(due)
        except (OSError, asyncio.IncompleteReadError):
            self._outcome.errors["connection"] += 1
            await self.close()
            await self.open()

    async def _post(self, due: float) -> None:
        load, outcome = self._load, self._outcome
        reader, writer = self._reader, self._writer
        assert reader is not None
        assert writer is not None
        left_ms = self._left_ms(due)
        observation = self._sender.observe(self._images(), self._state, load.instruction, left_ms, captured_at=due)
        body = encode(observation, MediaType.MSGPACK)
        head = self._head + b"%d\r\n\r\n" % len(body)
        writer.write(head)
        writer.write(body)
        await writer.drain()
        outcome.bytes_sent += len(head) + len(body)
        outcome.cameras_whole += len(observation.images)
        answered = await reader.readuntil(b"\r\n\r\n")
        status = int(answered[9:12])
        headers = dict(line.split(b": ", 1) for line in answered.lower().split(b"\r\n")[1:] if b": " in line)
        answer = await reader.readexactly(int(headers[b"content-length"]))
        if headers.get(b"connection") == b"close":
            writer.close()
        if status != 200:
            outcome.errors[decode_error(answer, MediaType.MSGPACK).code] += 1
            return
        sent_at = observation.captured_at if observation.sent_at is None else observation.sent_at
        now = time.monotonic()
        chunk, unseen_ms = complete(decode_chunk(answer, MediaType.MSGPACK), observation, 1e3 * (now - sent_at))
        self._sender.note_network(unseen_ms)
        self._answered(chunk, now - due)
