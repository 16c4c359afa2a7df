"""The batch port's wire: one batch in, its results out, camera frames as raw bytes behind a small head.

gRPC stays the worker's interface (health, Info, Infer). Where a worker also opens a batch port, batches go there:
through gRPC each camera frame is copied five times on the way and every call crosses four threads, which cost more than
any other step between robot and engine (docs/architecture.md). Little-endian, both directions:

    u32 head bytes | u64 body bytes | head (msgpack) | body

The robot's frames are in the body as they came, so that the sender hands the kernel the very buffers that it received,
and the receiver reads the socket into the buffer that the engine decodes from.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from taktline_protocol.messages import Image
from taktline_protocol.rpc import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

VERSION = 2
"""Told in Info and said in `Open`. A worker of another version is sent its batches through gRPC."""
MAX_HEAD_BYTES = 1 << 20
PREFIX = struct.Struct("<IQ")
_SMALL = 1 << 16
_ZEROED = 1 << 18


def local_name(port: int, token: bytes) -> str:
    """The abstract Unix socket of Linux on which a port is found, too, within its own network namespace.

    The token in it keeps workers apart whose ports are the same. Others on the machine can list such names and take one
    whose worker has ended, as they can take its TCP port: who must be kept out is kept out by TLS.
    """
    return f"\0taktline-batch-{port}-{hashlib.sha256(token).hexdigest()[:32]}"


class ImageHead(msgspec.Struct, frozen=True, array_like=True):
    """One camera frame of the body; the frames follow the request in the order of their heads."""

    camera: str
    encoding: str
    shape: tuple[int, ...]
    size: int


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """The gateway's first frame: `token` is what the worker said in Info, so that a port that another process has by
    now is noticed."""

    version: int
    token: bytes


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """The worker's answer: it takes calls from now on. A refused opening is a `Failure` of `OPENING` instead, and the
    connection's end."""

    version: int


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """One batch. Body: a `worker_pb2.InferRequest` of `request` bytes without images, then the frames.

    Attributes:
        timeout_s: the batch's own deadline, relative.
        images: heads of the frames of each item.
        metadata: what gRPC would carry beside the message: trace context.
    """

    number: int
    timeout_s: float
    request: int
    images: list[list[ImageHead]]
    metadata: dict[str, str] = {}


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Nobody waits for this call any more."""

    number: int


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The result of a call. Body: a `worker_pb2.InferResponse`."""

    number: int


OPENING = 0
"""The number by which a refused opening goes; calls are counted from 1."""


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """A call without a result; `code` is the name of a gRPC status."""

    number: int
    code: str
    details: str


Head = Open | Opened | Call | Cancel | Answer | Failure
Body = memoryview
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Head] = msgspec.msgpack.Decoder(Head)


def image_heads(images: Mapping[str, Image]) -> list[ImageHead]:
    """The heads of one item's frames."""
    return [ImageHead(name, image.encoding, image.shape or (), len(image.data)) for name, image in images.items()]


def frame(head: Head, body: Sequence[bytes | memoryview] = ()) -> list[bytes | memoryview]:
    """The pieces of one frame, in order; nothing of the body is copied."""
    packed = _encode(head)
    return [PREFIX.pack(len(packed), sum(map(len, body))) + packed, *body]


class WireError(Exception):
    """What came is no frame of this wire; the connection is of no use any more."""


class FrameProtocol(asyncio.BufferedProtocol, ABC):
    """Reads frames: heads through a small buffer, a large body from the socket right into its own.

    A body is a writable memoryview that nobody else holds.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.most_bytes = MAX_MESSAGE_BYTES
        """The longest body that is taken."""
        self._small = bytearray(_SMALL)
        self._start = self._end = 0
        self._head: Head | None = None
        self._body = memoryview(b"")
        self._got = 0

    @abstractmethod
    def frame_received(self, head: Head, body: Body) -> None:
        """One whole frame. Raises WireError where it has no business here."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        if self._head is not None:
            return self._body[self._got :]
        return memoryview(self._small)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        try:
            if self._head is None:
                self._end += nbytes
                self._read_heads()
                return
            self._got += nbytes
            if self._got == len(self._body):
                head, body = self._head, self._body
                self._head, self._body = None, memoryview(b"")
                self.frame_received(head, body)
        except WireError as error:
            logger.warning("a batch connection is closed: %s", error)
            if self.transport is not None:
                self.transport.abort()

    def _read_heads(self) -> None:
        while self._end - self._start >= PREFIX.size:
            head_size, body_size = PREFIX.unpack_from(self._small, self._start)
            if head_size > MAX_HEAD_BYTES or body_size > self.most_bytes:
                raise WireError(f"a frame of {head_size} + {body_size} bytes")
            begin = self._start + PREFIX.size
            if self._end < begin + head_size:
                self._make_room(PREFIX.size + head_size)
                return
            try:
                head = _decoder.decode(memoryview(self._small)[begin : begin + head_size])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise WireError("an unreadable head") from error
            begin += head_size
            there = min(body_size, self._end - begin)
            # A large bytearray would take long to be zeroed; NumPy, which has rested since the last one, takes 15 us.
            small = body_size <= _ZEROED
            body = memoryview(bytearray(body_size)) if small else np.empty(body_size, np.uint8).data
            body[:there] = memoryview(self._small)[begin : begin + there]
            self._start = begin + there
            if there < body_size:
                self._start = self._end = 0
                self._head, self._body, self._got = head, body, there
                return
            self.frame_received(head, body)
        self._make_room(PREFIX.size)

    def _make_room(self, needed: int) -> None:
        """Moves what is left to the front, so that `needed` bytes fit."""
        left = self._small[self._start : self._end]
        if needed > len(self._small):
            self._small = bytearray(needed)
        self._small[: len(left)] = left
        self._start, self._end = 0, len(left)


def images_of(call: Call, body: Body) -> list[dict[str, tuple[str, tuple[int, ...], memoryview]]]:
    """The frames of each item of a call: camera -> (encoding, shape, bytes). Raises WireError where sizes disagree."""
    at = call.request
    found: list[dict[str, tuple[str, tuple[int, ...], memoryview]]] = []
    for heads in call.images:
        images = {}
        for head in heads:
            if head.size < 0 or at + head.size > len(body):
                raise WireError("frames beyond the body")
            images[head.camera] = (head.encoding, head.shape, body[at : at + head.size])
            at += head.size
        found.append(images)
    if call.request < 0 or at != len(body):
        raise WireError("a body of another size than its head says")
    return found


def as_socket(transport: asyncio.BaseTransport) -> Any:
    """The connection's socket, for its options."""
    return transport.get_extra_info("socket")
