"""Cheap robots for measuring servers: raw sockets, requests encoded ahead, one answer awaited before the next request.

They look at nothing of an answer but its size and status, so that what is measured is the server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec
import numpy as np
from taktline_protocol.codecs import MediaType, encode
from taktline_protocol.messages import Array, Image, Observation
from taktline_protocol.stream import Ack, Answer, Frame, Hello, Vector, Welcome
from taktline_protocol.stream import Observe as ObserveFrame
from taktline_protocol.stream_codec import decode_from_gateway, encode_frame

SIDE = 224
CAMERAS = ("front", "wrist")
STATE_DIM = 8
BUDGET_MS = 60_000.0


@dataclasses.dataclass
class Count:
    """What a run saw: latencies in seconds, and what was no good answer."""

    latencies: list[float] = dataclasses.field(default_factory=list)
    errors: int = 0


class Connection:
    """A bare TCP connection."""

    def __init__(self, host: str, port: int, name: str) -> None:
        self._host, self._port, self._name = host, port, name

    async def open(self) -> None:
        """Connects."""
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)

    async def close(self) -> None:
        """Ends the connection."""
        self._writer.close()

    def cut(self) -> None:
        """Ends the connection without waiting for anything."""
        if hasattr(self, "_writer"):
            self._writer.transport.abort()


class Robot(Connection, ABC):
    """One connection with frames; `ask` sends a request and returns whether its answer was good."""

    def __init__(self, host: str, port: int, name: str) -> None:
        super().__init__(host, port, name)
        noise = np.random.default_rng(len(name) + hash(name) % 1000)
        self._frames = {camera: noise.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for camera in CAMERAS}

    @abstractmethod
    async def ask(self) -> bool:
        """One request and its answer."""


class HttpRobot(Robot):
    """POSTs a constant body."""

    def __init__(self, host: str, port: int, name: str, path: str, body: bytes) -> None:
        super().__init__(host, port, name)
        self._request = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/msgpack\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body

    async def ask(self) -> bool:
        """One request and its answer."""
        self._writer.write(self._request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        at = head.lower().index(b"content-length:") + 15
        await self._reader.readexactly(int(head[at : head.index(b"\r\n", at)]))
        return head[9:12] == b"200"


class WebSocketConnection(Connection):
    """Frames of the WebSocket protocol, masked with zeros: the server unmasks as ever, the robot need not mask."""

    path = "/"

    async def open(self) -> None:
        """Connects and upgrades."""
        await super().open()
        key = "AAAAAAAAAAAAAAAAAAAAAA=="
        self._writer.write(
            f"GET {self.path} HTTP/1.1\r\nHost: {self._host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        head = await self._reader.readuntil(b"\r\n\r\n")
        if b" 101 " not in head:
            raise ConnectionError(head.decode(errors="replace"))

    def send(self, payload: bytes, opcode: int = 2) -> None:
        """One masked frame."""
        size = len(payload)
        if size < 126:
            head = bytes((0x80 | opcode, 0x80 | size))
        elif size < 65536:
            head = bytes((0x80 | opcode, 0x80 | 126)) + size.to_bytes(2, "big")
        else:
            head = bytes((0x80 | opcode, 0x80 | 127)) + size.to_bytes(8, "big")
        self._writer.write(head + bytes(4))
        self._writer.write(payload)

    async def receive(self) -> tuple[int, bytes]:
        """Opcode and payload of the next data frame; pings are answered on the way."""
        while True:
            first, second = await self._reader.readexactly(2)
            size = second & 0x7F
            if size == 126:
                size = int.from_bytes(await self._reader.readexactly(2), "big")
            elif size == 127:
                size = int.from_bytes(await self._reader.readexactly(8), "big")
            payload = await self._reader.readexactly(size) if size else b""
            opcode = first & 0x0F
            if opcode == 9:
                self.send(payload, 10)
            elif opcode == 8:
                raise ConnectionError(payload[2:].decode(errors="replace"))
            elif opcode != 10:
                return opcode, payload


class OpenpiRobot(WebSocketConnection, Robot):
    """openpi's protocol: a map of arrays, its keys and layout as openpi's packer writes them."""

    async def open(self) -> None:
        """Connects and reads the metadata."""
        await super().open()
        await self.receive()
        observation: dict[str, object] = {camera: _packed(frame) for camera, frame in self._frames.items()}
        observation |= {"state": _packed(np.zeros(STATE_DIM)), "prompt": "pick up the block"}
        self._frame = msgspec.msgpack.encode(observation)

    def send_frame(self) -> None:
        """One observation."""
        self.send(self._frame)

    async def ask(self) -> bool:
        """One observation and its result."""
        self.send_frame()
        opcode, _ = await self.receive()
        return opcode == 2


class StreamRobot(WebSocketConnection, Robot):
    """Taktline's own stream; every observation carries both frames whole, as the other protocols do."""

    def __init__(self, host: str, port: int, name: str, policy: str) -> None:
        super().__init__(host, port, name)
        self.path = f"/v1/policies/{policy}/stream"
        self._seq = 0

    async def open(self) -> None:
        """Connects and says hello."""
        await super().open()
        self.send(encode_frame(Hello(versions=(1,), robot_id=self._name, session_id=os.urandom(8).hex())))
        _, payload = await self.receive()
        welcome = decode_from_gateway(payload)
        if not isinstance(welcome, Welcome):
            raise ConnectionError(f"the gateway said {welcome}")
        self._images = {camera: _stream_frame(frame) for camera, frame in self._frames.items()}
        self._state = Vector("float64", np.zeros(STATE_DIM).tobytes())

    def observe(self, seq: int, budget_ms: float, *, instruction: bool) -> None:
        """Sends one observation, a keyframe but for the instruction."""
        now = time.monotonic()
        frame = ObserveFrame(
            seq=seq,
            captured_at=now,
            sent_at=now,
            budget_ms=budget_ms,
            state=self._state,
            images=self._images,
            instruction="pick up the block" if instruction else None,
        )
        self.send(encode_frame(frame))

    async def ask(self) -> bool:
        """One observation and its answer."""
        self._seq += 1
        self.observe(self._seq, BUDGET_MS, instruction=self._seq == 1)
        while True:
            _, payload = await self.receive()
            answer = decode_from_gateway(payload)
            if getattr(answer, "seq", None) == self._seq and not isinstance(answer, Ack):
                return isinstance(answer, Answer)


def rest_body(name: str) -> bytes:
    """An observation for POST /act in msgpack; without a session, so that it may be sent again and again."""
    noise = np.random.default_rng(7)
    images = {
        camera: Image("raw", noise.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8).tobytes(), (SIDE, SIDE, 3))
        for camera in CAMERAS
    }
    observation = Observation(
        robot_id=name,
        seq=1,
        captured_at=1.0,
        sent_at=1.0,
        budget_ms=BUDGET_MS,
        images=images,
        state=Array.from_numpy(np.zeros(STATE_DIM)),
        instruction="pick up the block",
    )
    return encode(observation, MediaType.MSGPACK)


def bare_body() -> bytes:
    """The same observation for the bare servers, in openpi's layout."""
    noise = np.random.default_rng(7)
    observation: dict[str, object] = {
        camera: _packed(noise.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)) for camera in CAMERAS
    }
    return msgspec.msgpack.encode(observation | {"state": _packed(np.zeros(STATE_DIM)), "prompt": "pick up the block"})


async def run(make: Callable[[int], Robot], clients: int, seconds: float, warm_s: float) -> Count:
    """A closed loop of `clients` robots; the first `warm_s` are not counted."""
    robots = [make(number) for number in range(clients)]
    await asyncio.gather(*(robot.open() for robot in robots))
    count = Count()
    began = time.perf_counter() + warm_s

    async def drive(robot: Robot) -> None:
        while (sent := time.perf_counter()) < began + seconds:
            good = await robot.ask()
            done = time.perf_counter()
            if sent >= began:
                count.latencies.append(done - sent)
                count.errors += not good
        await robot.close()

    await asyncio.gather(*(drive(robot) for robot in robots))
    return count


def _packed(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> dict[bytes, object]:
    return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}


def _stream_frame(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Frame:
    return Frame(encoding="raw", data=array.tobytes(), name=os.urandom(16), height=SIDE, width=SIDE)
