"""A robot's end of a stream for tests: frames out, frames in, nothing done by itself."""

from __future__ import annotations

import time

import msgspec
from taktline_protocol.messages import Image
from taktline_protocol.stream import Answer, Frame, Goodbye, Hello, Observe, Refusal, Vector, Welcome
from taktline_protocol.stream_codec import decode_from_gateway, encode_frame
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

RAW = Image("raw", bytes(3 * 8 * 8), (8, 8, 3))
STATE = Vector("float32", bytes(24))


def raw_frame(name: bytes, value: int = 0) -> Frame:
    return Frame("raw", bytes([value]) * (3 * 8 * 8), name, 8, 8)


class StreamRobot:
    """Connects on making; `welcome` is the answer to its hello."""

    def __init__(self, url: str, robot: str = "arm", policy: str = "scripted", greet: bool = True, **hello) -> None:
        headers = hello.pop("headers", None)
        uri = f"{url.replace('http', 'ws', 1)}/v1/policies/{policy}/stream"
        self.socket = connect(uri, max_size=None, compression=None, additional_headers=headers, legacy=True)
        self.robot = robot
        self.seq = hello.get("seq", 0)
        self.welcome: Welcome | None = None
        if greet:
            session = hello.pop("session_id", f"session of {robot}")
            self.send(Hello(hello.pop("versions", (1,)), robot, session, **hello))
            self.welcome = self.receive()

    def send(self, frame) -> None:
        self.socket.send(encode_frame(frame))

    def receive(self, timeout_s: float = 20.0):
        return decode_from_gateway(self.socket.recv(timeout=timeout_s))

    def until(self, kind, timeout_s: float = 20.0):
        """The next frame of this kind, skipping the others."""
        end = time.monotonic() + timeout_s
        while True:
            frame = self.receive(max(0.01, end - time.monotonic()))
            if isinstance(frame, kind):
                return frame

    def observe(self, instruction: str | None = "go", **changes) -> int:
        """Sends a keyframe, or what `changes` make of it; returns its sequence number."""
        self.seq += 1
        now = time.monotonic()
        frame = Observe(
            seq=self.seq,
            captured_at=now - 0.002,
            sent_at=now,
            budget_ms=20_000.0,
            state=STATE,
            images={"front": raw_frame(b"front--0"), "wrist": raw_frame(b"wrist--0")},
            instruction=instruction,
        )
        self.send(msgspec.structs.replace(frame, **changes))
        return self.seq

    def answer(self) -> Answer | Refusal:
        """The next answer or refusal."""
        return self.until((Answer, Refusal))

    def closed(self, timeout_s: float = 20.0) -> tuple[int, str]:
        """Reads until the connection closes; its close code and reason."""
        end = time.monotonic() + timeout_s
        try:
            while True:
                self.socket.recv(timeout=max(0.01, end - time.monotonic()))
        except ConnectionClosed as error:
            close = error.rcvd
            return (close.code, close.reason) if close is not None else (1006, "")

    def goodbye(self) -> tuple[Goodbye, tuple[int, str]]:
        return self.until(Goodbye), self.closed()

    def drop(self) -> None:
        """Breaks the connection without a word."""
        self.socket.socket.close()

    def close(self) -> None:
        self.socket.close()
