"""Robots of the deadline-truth run: what they send, which faults they bring, and what they count for themselves."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from taktline import AsyncRobot, Chunk
from taktline_protocol import ActionChunk, Image, Observation, TaktlineError
from taktline_protocol.codecs import MediaType, decode_chunk, decode_error, encode

FRAME = Image("raw", bytes(3 * 8 * 8), (8, 8, 3))
SHAPE_WEIGHTS = {
    "ordinary": 800,
    "tight": 80,  # a budget near T_sync: some are met, some are late, some are refused
    "slow": 25,  # the worker takes longer than it ever told
    "spent": 10,  # a budget that is gone already
    "bad": 15,  # a state of the wrong size
    "strange": 5,  # a policy that is not served
    "corrupt": 10,  # the worker finds the image broken
    "not-finite": 4,  # the worker's actions are no numbers
    "failing": 4,  # the batch's call fails
    "pair": 25,  # two observations of one robot at once: the newer one wins
    "dropped": 20,  # the robot closes its connection at once
    "exit": 0.3,  # the worker dies with the batch
    "hang": 0.1,  # the worker never answers
}
_INSTRUCTIONS = {"slow": "slow 60", "corrupt": "item-error", "not-finite": "nan", "failing": "fail", "exit": "exit"}
_INSTRUCTIONS["hang"] = "hang"


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What one robot made of one request, by its own clock and count.

    Attributes:
        outcome: ok, an error code, or dropped.
        budget_ms: as it was sent.
        chunk: as it came; from the SDK, as it completes it: with the network in its terms.
        path_ms: from the capture to the whole answer, with the robot's own actuation; None without a chunk.
    """

    request_id: str
    outcome: str
    sent_at: float
    received_at: float
    budget_ms: float
    chunk: ActionChunk | Chunk | None = None
    path_ms: float | None = None

    @property
    def late(self) -> bool:
        """Whether the whole answer came after the hand-off deadline, by the robot's clock."""
        assert self.chunk is not None
        spent_ms = 1e3 * (self.received_at - self.sent_at) + self.chunk.timings.actuate_ms
        return spent_ms > self.budget_ms


class Tickets:
    """Hands out the run's requests: a number each, and a shape drawn from the weights."""

    def __init__(self, count: int, seed: int, weights: dict[str, float]) -> None:
        self._left = iter(range(count))
        self._random = random.Random(seed)
        self._shapes, self._weights = list(weights), list(weights.values())

    def __iter__(self) -> Iterator[tuple[int, str, random.Random]]:
        return self

    def __next__(self) -> tuple[int, str, random.Random]:
        number = next(self._left)
        (shape,) = self._random.choices(self._shapes, self._weights)
        return number, shape, random.Random(self._random.random())


class Robot:
    """One robot with a connection of its own, which asks, thinks and asks again until the tickets are out."""

    def __init__(self, port: int, name: str, tickets: Tickets, think_s: float, seen: list[Seen]) -> None:
        self._port = port
        self._name = name
        self._tickets = tickets
        self._think_s = think_s
        self._seen = seen
        self._seq = 0

    async def run(self) -> None:
        """Sends until nothing is left to send."""
        connection = _Connection(self._port)
        for number, shape, draw in self._tickets:
            if shape == "pair":
                # Its second half has no ticket of its own, and is told apart by its request id.
                other = _Connection(self._port)
                await asyncio.gather(
                    self._ask(connection, f"t{number}", shape, draw), self._ask(other, f"t{number}b", shape, draw)
                )
                other.close()
            elif shape == "dropped":
                await self._drop(f"t{number}", draw)
            else:
                await self._ask(connection, f"t{number}", shape, draw)
            await asyncio.sleep(draw.expovariate(1 / self._think_s) if self._think_s else 0)
        connection.close()

    def _observation(self, shape: str, draw: random.Random) -> Observation:
        self._seq += 1
        budget_ms = _budget_ms(shape, draw)
        now = time.monotonic()
        return Observation(
            robot_id=self._name,
            session_id=self._name,
            seq=self._seq,
            captured_at=now - draw.uniform(0, 0.01),
            sent_at=now,
            budget_ms=budget_ms,
            actuate_ms=draw.choice((0.0, 1.5)),
            images={"front": FRAME, "wrist": FRAME},
            state=[0.0] * (3 if shape == "bad" else 6),
            instruction=_INSTRUCTIONS.get(shape, "go"),
        )

    async def _ask(self, connection: _Connection, request_id: str, shape: str, draw: random.Random) -> None:
        observation = self._observation(shape, draw)
        policy = f"invented-{request_id}" if shape == "strange" else "scripted"
        status, body = await connection.post(policy, request_id, encode(observation, MediaType.MSGPACK))
        received_at = time.monotonic()
        assert observation.sent_at is not None
        about = (request_id, observation.sent_at, received_at, observation.budget_ms)
        self._seen.append(_seen(status, body, observation, *about))

    async def _drop(self, request_id: str, draw: random.Random) -> None:
        observation = self._observation("dropped", draw)
        connection = _Connection(self._port)
        await connection.send("scripted", request_id, encode(observation, MediaType.MSGPACK))
        await asyncio.sleep(draw.choice((0.0, 0.001, 0.004)))
        connection.close()
        now = time.monotonic()
        self._seen.append(Seen(request_id, "dropped", now, now, observation.budget_ms))


class SdkRobot:
    """One robot of the SDK on a stream. It is never told a request id, so its requests are known by `name#seq`."""

    def __init__(self, port: int, name: str, tickets: Tickets, think_s: float, seen: list[Seen]) -> None:
        self._port = port
        self._name = name
        self._tickets = tickets
        self._think_s = think_s
        self._seen = seen

    async def run(self) -> None:
        """Sends until nothing is left to send."""
        frame = np.zeros((8, 8, 3), np.uint8)
        async with AsyncRobot(f"http://127.0.0.1:{self._port}", "scripted", self._name, transport="stream") as robot:
            for seq, (_, shape, draw) in enumerate(self._tickets, 1):
                self._seen.append(await self._ask(robot, frame, f"{self._name}#{seq}", shape, draw))
                await asyncio.sleep(draw.expovariate(1 / self._think_s) if self._think_s else 0)

    async def _ask(
        self, robot: AsyncRobot, frame: NDArray[np.uint8], request_id: str, shape: str, draw: random.Random
    ) -> Seen:
        state = [0.0] * (3 if shape == "bad" else 6)
        budget_ms, actuate_ms, now = _budget_ms(shape, draw), draw.choice((0.0, 1.5)), time.monotonic()
        captured_at = now - draw.uniform(0, 0.01)
        instruction = _INSTRUCTIONS.get(shape, "go")
        try:
            chunk = await robot.act(
                {"front": frame, "wrist": frame},
                state,
                instruction,
                budget_ms,
                captured_at=captured_at,
                actuate_ms=actuate_ms,
            )
        except TaktlineError as error:
            return Seen(request_id, error.code.value, now, time.monotonic(), budget_ms)
        received_at = time.monotonic()
        terms = chunk.timings
        sent_ms = chunk.margin_ms + terms.critical_ms - terms.observe_ms
        path_ms = 1e3 * (received_at - captured_at) + actuate_ms
        return Seen(request_id, "ok", captured_at + 1e-3 * terms.observe_ms, received_at, sent_ms, chunk, path_ms)


def _budget_ms(shape: str, draw: random.Random) -> float:
    given = {"tight": draw.uniform(1, 40), "slow": draw.uniform(20, 60), "spent": -1.0}
    return given.get(shape, draw.uniform(200, 2000))


def _seen(
    status: int,
    body: bytes,
    observation: Observation,
    request_id: str,
    sent_at: float,
    received_at: float,
    budget_ms: float,
) -> Seen:
    if status != 200:
        code = decode_error(body, MediaType.MSGPACK).code
        return Seen(request_id, code, sent_at, received_at, budget_ms)
    chunk = decode_chunk(body, MediaType.MSGPACK)
    path_ms = 1e3 * (received_at - observation.captured_at) + observation.actuate_ms
    return Seen(request_id, "ok", sent_at, received_at, budget_ms, chunk, path_ms)


class _Connection:
    """One HTTP/1.1 connection, opened when it is needed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, policy: str, request_id: str, body: bytes) -> asyncio.StreamReader:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        head = (
            f"POST /v1/policies/{policy}/act HTTP/1.1\r\nhost: 127.0.0.1\r\nx-request-id: {request_id}\r\n"
            f"content-type: application/msgpack\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        return reader

    async def post(self, policy: str, request_id: str, body: bytes) -> tuple[int, bytes]:
        reader = await self.send(policy, request_id, body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        lines = head.split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        answer = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            self.close()
        return int(lines[0].split()[1]), answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
