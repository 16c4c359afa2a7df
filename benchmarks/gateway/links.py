"""One robot's connection in each protocol that the gateway speaks: it sends an observation, and says what came of it.

Nothing is retried here: a connection that is refused, reset or closed raises OSError or EOFError. Frames are small, so
that the robots cost this machine little.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import time
import types
from abc import ABC, abstractmethod
from typing import Any

import grpc
import msgspec
import numpy as np
from taktline_protocol.codecs import MediaType, decode_chunk, decode_error, encode
from taktline_protocol.messages import Array, Image, Observation
from taktline_protocol.stream import Ack, Answer, Backpressure, Goodbye, Refusal
from taktline_protocol.stream_codec import decode_from_gateway

from benchmarks.gateway.robots import CAMERAS, STATE_DIM, OpenpiRobot, StreamRobot, WebSocketConnection

CHUNK = "chunk"
"""What a link says of an answer with actions."""
PIXELS = np.zeros((32, 32, 3), np.uint8)
STATE = np.zeros(STATE_DIM)
FRAME = Image("raw", PIXELS.tobytes(), PIXELS.shape)


class Link(ABC):
    """One connection of one robot.

    Attributes:
        leaving: the gateway has said that it goes, or closes this connection.
    """

    leaving = False

    def __init__(self, host: str, port: int, name: str, policy: str, budget_ms: float) -> None:
        self.host, self.port, self.name, self.policy, self.budget_ms = host, port, name, policy, budget_ms

    @abstractmethod
    async def open(self) -> None:
        """Connects."""

    @abstractmethod
    async def ask(self, seq: int) -> str:
        """Sends one observation; returns CHUNK, or the code of the error that came."""

    @abstractmethod
    async def cut(self) -> None:
        """Ends the connection, whatever its state."""


class HttpLink(Link):
    """One HTTP/1.1 connection on which requests follow each other."""

    _writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Connects."""
        self._reader, self._writer = await asyncio.open_connection(self.host, self.port)

    async def post(self, path: str, body: bytes, *headers: str) -> tuple[int, bytes]:
        """Status and body of the answer."""
        assert self._writer is not None
        lines = (f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers)
        self._writer.write("\r\n".join((*lines, "\r\n")).encode() + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        at = head.index(b"content-length:") + 15
        answer = await self._reader.readexactly(int(head[at : head.index(b"\r\n", at)]))
        self.leaving = b"connection: close" in head
        return int(head[9:12]), answer

    async def cut(self) -> None:
        """Ends the connection."""
        if self._writer is not None:
            self._writer.close()


class RestLink(HttpLink):
    """POST /v1/policies/{policy}/act."""

    async def ask(self, seq: int) -> str:
        """One observation."""
        now = time.monotonic()
        observation = Observation(
            robot_id=self.name,
            session_id=self.name,
            seq=seq,
            captured_at=now,
            sent_at=now,
            budget_ms=self.budget_ms,
            images=dict.fromkeys(CAMERAS, FRAME),
            state=Array.from_numpy(STATE),
            instruction="go",
        )
        body = encode(observation, MediaType.MSGPACK)
        path = f"/v1/policies/{self.policy}/act"
        status, answer = await self.post(path, body, "Content-Type: application/msgpack")
        if status != 200:
            return decode_error(answer, MediaType.MSGPACK).code
        chunk = decode_chunk(answer, MediaType.MSGPACK)
        assert chunk.seq == seq and chunk.robot_id == self.name  # noqa: PT018
        return CHUNK


class KserveLink(HttpLink):
    """The Open Inference Protocol with its binary extension."""

    async def ask(self, seq: int) -> str:
        """One observation."""
        tensors = [(camera, "UINT8", PIXELS.shape, PIXELS.tobytes()) for camera in CAMERAS]
        tensors.append(("state", "FP64", STATE.shape, STATE.tobytes()))
        tensors.append(("instruction", "BYTES", (1,), b"\x02\0\0\0go"))
        inputs = [
            {"name": name, "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(data)}}
            for name, kind, shape, data in tensors
        ]
        about = {"budget_ms": self.budget_ms, "robot_id": self.name, "binary_data_output": True}
        head = msgspec.json.encode({"id": str(seq), "parameters": about, "inputs": inputs})
        length = f"Inference-Header-Content-Length: {len(head)}"
        body = head + b"".join(data for *_, data in tensors)
        status, answer = await self.post(f"/v2/models/{self.policy}/infer", body, length)
        if status != 200:
            return str(msgspec.json.decode(answer)["code"])
        assert answer.startswith(b'{"model_name"') and b'"id":"%d"' % seq in answer  # noqa: PT018
        return CHUNK


class StreamLink(Link):
    """Taktline's own stream."""

    async def open(self) -> None:
        """Connects and says hello."""
        self._robot = StreamRobot(self.host, self.port, self.name, self.policy)
        await self._robot.open()
        self._first = True

    async def ask(self, seq: int) -> str:
        """One observation."""
        self._robot.observe(seq, self.budget_ms, instruction=self._first)
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

    async def cut(self) -> None:
        """Ends the connection."""
        self._robot.cut()


class OpenpiLink(Link):
    """openpi's protocol."""

    async def open(self) -> None:
        """Connects and reads the metadata."""
        self._robot = OpenpiRobot(self.host, self.port, self.name)
        await self._robot.open()

    async def ask(self, seq: int) -> str:
        """One observation."""
        self._robot.send_frame()
        opcode, payload = await self._robot.receive()
        if opcode == 2:
            msgspec.msgpack.decode(payload)
            return CHUNK
        return payload.decode().partition(":")[0]

    async def cut(self) -> None:
        """Ends the connection."""
        self._robot.cut()


class VlaEvalLink(Link):
    """The evaluation harness' protocol; every observation reaches a worker where the route's execute_steps is 1."""

    async def open(self) -> None:
        """Connects, says hello and begins an episode."""
        self._robot = WebSocketConnection(self.host, self.port, self.name)
        await self._robot.open()
        self._send("hello", {"harness_version": "0", "protocol_version": 1}, 0)
        await self._robot.receive()
        self._send("episode_start", {"task": "go"}, 0)
        images = {
            camera: {"__image__": True, "format": "raw", "data": FRAME.data, "shape": FRAME.shape, "dtype": "|u1"}
            for camera in CAMERAS
        }
        state = {"__ndarray__": True, "data": STATE.tobytes(), "dtype": STATE.dtype.str, "shape": STATE.shape}
        self._observation = {"images": images, "state": state, "task_description": "go"}

    def _send(self, kind: str, payload: dict[str, Any], seq: int) -> None:
        message = {"type": kind, "payload": payload, "seq": seq, "timestamp": time.time()}
        self._robot.send(msgspec.msgpack.encode(message))

    async def ask(self, seq: int) -> str:
        """One observation."""
        self._send("observation", self._observation, seq)
        _, payload = await self._robot.receive()
        answer = msgspec.msgpack.decode(payload)
        assert answer["seq"] == seq, answer  # one request is outstanding at a time
        if answer["type"] == "action":
            return CHUNK
        return str(answer["payload"]["error"]).split(": ")[1]

    async def cut(self) -> None:
        """Ends the connection."""
        self._robot.cut()


class GrootLink(Link):
    """GR00T's protocol: ZeroMQ's own (ZMTP 3.0) spoken on a bare socket, as of a REQ.

    The library would connect again unseen, and its REQ waits for ever for an answer that died with the gateway.
    """

    _GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    _writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Connects and shakes hands."""
        self._reader, self._writer = await asyncio.open_connection(self.host, self.port)
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"
        self._writer.write(self._GREETING + b"\x04" + bytes((len(ready),)) + ready)
        await self._reader.readexactly(len(self._GREETING))
        await self._frame()
        array = {"nd": True, "kind": b""}
        pixels = {**array, "type": "|u1", "shape": (1, 1, *PIXELS.shape), "data": FRAME.data}
        state = {**array, "type": "<f4", "shape": (1, 1, STATE_DIM), "data": STATE.astype("<f4").tobytes()}
        observation = {
            "video": dict.fromkeys(CAMERAS, pixels),
            "state": {"state": state},
            "language": {"task": [["go"]]},
        }
        request = {"endpoint": "get_action", "data": {"observation": observation, "options": None}}
        self._request = msgspec.msgpack.encode(request)

    async def _frame(self) -> tuple[int, bytes]:
        flags = (await self._reader.readexactly(1))[0]
        size = int.from_bytes(await self._reader.readexactly(8 if flags & 2 else 1), "big")
        return flags, await self._reader.readexactly(size)

    async def ask(self, seq: int) -> str:
        """One observation."""
        assert self._writer is not None
        self._writer.write(b"\x01\x00\x02" + len(self._request).to_bytes(8, "big") + self._request)
        more = 1
        while more:  # an empty frame stands before the answer
            flags, payload = await self._frame()
            more = flags & 1
        answer = msgspec.msgpack.decode(payload)
        return CHUNK if isinstance(answer, list) else str(answer["error"]).partition(":")[0]

    async def cut(self) -> None:
        """Ends the connection."""
        if self._writer is not None:
            self._writer.close()


class LerobotLink(Link):
    """LeRobot's asynchronous inference: an observation is pushed, and its chunk pulled, one after the other."""

    _channel: grpc.aio.Channel | None = None
    _pulling: asyncio.Future[bytes | str] | None = None

    async def open(self) -> None:
        """Connects and names the policy."""
        # Else all channels of this process to one address share a connection, which is what a session is.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        self._channel = grpc.aio.insecure_channel(f"{self.host}:{self.port}", options=options)
        names = [f"j{number}" for number in range(STATE_DIM)]
        features = {"observation.state": {"dtype": "float32", "shape": (STATE_DIM,), "names": names}}
        features |= {f"observation.images.{camera}": {"dtype": "image", "shape": PIXELS.shape} for camera in CAMERAS}
        setup = _pickled(
            "RemotePolicyConfig",
            policy_type="pi0",
            pretrained_name_or_path=self.policy,
            lerobot_features=features,
            actions_per_chunk=50,
            device="cpu",
            rename_map={},
        )
        self._values: dict[str, Any] = {**dict.fromkeys(names, 0.0), **dict.fromkeys(CAMERAS, PIXELS), "task": "go"}
        await self._call("Ready", b"")
        said = await self._call("SendPolicyInstructions", _field(1, setup))
        if isinstance(said, str):
            raise ConnectionError(said)
        self._pulling = asyncio.create_task(self._call("GetActions", b""))

    async def _call(self, method: str, message: bytes, *, pieces: bool = False) -> bytes | str:
        """The answer, or the code of the error that the gateway gave. Raises ConnectionError where it gave none."""
        assert self._channel is not None
        path = f"/transport.AsyncInference/{method}"
        try:
            if pieces:
                answer: bytes = await self._channel.stream_unary(path)(iter((message,)))
            else:
                answer = await self._channel.unary_unary(path)(message)
            return answer
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise ConnectionError(error.details()) from error
            return str(error.details()).partition(":")[0]

    async def ask(self, seq: int) -> str:
        """One observation. As LeRobot's client this one is in a pull at all times, so the chunk comes to that."""
        record = _pickled(
            "TimedObservation", timestamp=time.time(), timestep=seq, observation=self._values, must_go=True
        )
        said = await self._call("SendObservations", b"\x08\x03" + _field(2, record), pieces=True)
        if isinstance(said, str):
            return said
        while True:
            assert self._pulling is not None
            pulled = await asyncio.shield(self._pulling)
            self._pulling = asyncio.create_task(self._call("GetActions", b""))
            if pulled:  # an empty one says that there is nothing yet
                return pulled if isinstance(pulled, str) else CHUNK

    async def cut(self) -> None:
        """Ends the connection."""
        if self._pulling is not None:
            self._pulling.cancel()
            await asyncio.gather(self._pulling, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()


def _field(number: int, data: bytes) -> bytes:
    """A protobuf field of bytes."""
    size, length = len(data), bytearray()
    while size > 127:
        length.append(128 | size & 127)
        size >>= 7
    return bytes((number << 3 | 2,)) + bytes(length) + bytes((size,)) + data


_HELPERS = types.ModuleType("lerobot.async_inference.helpers")
for _name in ("RemotePolicyConfig", "TimedObservation"):
    setattr(_HELPERS, _name, type(_name, (), {"__module__": _HELPERS.__name__}))


def _pickled(kind: str, **fields: Any) -> bytes:
    """What LeRobot's client would send: an instance of its class, here of a stand-in with that name."""
    record = getattr(_HELPERS, kind)()
    record.__dict__.update(fields)
    names = ("lerobot", "lerobot.async_inference", _HELPERS.__name__)
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(dict.fromkeys(names, _HELPERS))
    try:
        return pickle.dumps(record)
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
