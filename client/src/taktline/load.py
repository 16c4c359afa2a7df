"""Load for a gateway: robots over raw HTTP/1.1 connections, closed loop or at a fixed rate, every request accounted."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from urllib.parse import quote, urlsplit

import numpy as np
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.codecs import MediaType, decode_chunk, decode_error, encode
from taktline_protocol.messages import Image, PolicyInfo

from taktline.access import Access
from taktline.chunk import complete
from taktline.observing import Frame, Sender

TERMS = ("observe_ms", "transfer_ms", "queue_ms", "inference_ms", "actuate_ms")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What to send.

    Attributes:
        clients: robots, each with one connection and one request at a time.
        rate_hz: requests a second over all robots, on a fixed schedule; None is a closed loop.
        frame: the frame of every camera; None is noise of `side` x `side` raw pixels.
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
    """Runs the load to its end. Raises TaktlineError `gateway_unreachable` where no connection can be made."""
    return asyncio.run(_run(load))


async def _run(load: Load) -> Outcome:
    outcome = Outcome()
    began = time.monotonic()
    robots = [_Robot(load, index, began, outcome) for index in range(load.clients)]
    await asyncio.gather(*(robot.run() for robot in robots))
    outcome.elapsed_s = time.monotonic() - began
    return outcome


class _Robot:
    def __init__(self, load: Load, index: int, began: float, outcome: Outcome) -> None:
        self._load = load
        self._index = index
        self._began = began
        self._outcome = outcome
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
        noise = np.random.default_rng(index).integers(0, 256, (load.side, load.side, 3), dtype=np.uint8)
        frame: Frame = load.frame if load.frame is not None else Image("raw", noise.tobytes(), noise.shape)
        self._images = dict.fromkeys(load.info.cameras, frame)
        self._state = np.zeros(load.info.state_dim)

    async def run(self) -> None:
        load = self._load
        reader, writer = await self._connect()
        try:
            number = 0
            while True:
                due = time.monotonic()
                if load.rate_hz is not None:
                    due = self._began + (number * load.clients + self._index) / load.rate_hz
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                if due - self._began >= load.duration_s:
                    return
                try:
                    await self._ask(reader, writer, due)
                except (OSError, asyncio.IncompleteReadError):
                    self._outcome.errors["connection"] += 1
                    writer.close()
                    reader, writer = await self._connect()
                number += 1
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise TaktlineError(
                ErrorCode.GATEWAY_UNREACHABLE,
                f"the gateway at {self._load.url} cannot be reached",
                "check the URL and that the gateway runs: GET /healthz",
            ) from error

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, due: float) -> None:
        load, outcome = self._load, self._outcome
        late_ms = 1e3 * (time.monotonic() - due)
        observation = self._sender.observe(
            self._images, self._state, load.instruction, max(0.0, load.budget_ms - late_ms), captured_at=due
        )
        body = encode(observation, MediaType.MSGPACK)
        writer.write(self._head + b"%d\r\n\r\n" % len(body))
        writer.write(body)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head[9:12])
        headers = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:] if b": " in line)
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
        outcome.latencies_ms.append(1e3 * (now - due))
        outcome.margins_ms.append(chunk.margin_ms)
        outcome.batches.append(chunk.batch_size)
        for term in TERMS:
            outcome.terms_ms[term].append(getattr(chunk.timings, term))
