"""The gateway's end of a worker's batch port: batches out and results in on this loop, without a thread between."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

from google.protobuf.message import DecodeError
from taktline_protocol import worker_pb2
from taktline_protocol.batch_frames import (
    OPENING,
    VERSION,
    Answer,
    Body,
    Call,
    Cancel,
    Failure,
    FrameProtocol,
    Head,
    Open,
    Opened,
    WireError,
    as_socket,
    frame,
    image_heads,
    local_name,
)
from taktline_protocol.messages import Image
from taktline_protocol.rpc_encoding import encode_request

CONNECT_TIMEOUT_S = 2.0
LOCAL_BUFFER_BYTES = 4 << 20
"""What a Unix socket is to hold, as a TCP connection's buffer grows to: a whole batch goes with one call."""
SILENT_S = 15
"""A host that is gone without a word is noticed after so long, as through gRPC's keepalive."""

Member = tuple[worker_pb2.InferItem, Mapping[str, Image]]
"""One item of a batch, and its frames apart from it."""
Came = Callable[[worker_pb2.InferResponse], None]
"""Hears of a response in the turn that read it, before whoever waits for it does; raises nothing."""


class WorkerCallError(Exception):
    """A batch that got no answer: the name of a gRPC status, and what is known beside it."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code
        self.details = details


class BatchChannel(FrameProtocol):
    """One connection to one worker's batch port."""

    def __init__(self) -> None:
        super().__init__()
        self._opened = False
        self._opening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number = OPENING
        self._calls: dict[int, asyncio.Future[worker_pb2.InferResponse]] = {}
        self._came: dict[int, Came] = {}

    @classmethod
    async def connect(
        cls, host: str, port: int, token: bytes, context: ssl.SSLContext | None = None, server_name: str = ""
    ) -> BatchChannel:
        """A connection on which the worker takes calls; past TCP where it runs beside this gateway and speaks no TLS.

        Args:
            context: encrypts; the worker's certificate must carry `server_name`, or else the host.

        Raises:
            OSError: there is none in time, or the worker refuses it; the reason is in its text.
        """
        loop = asyncio.get_running_loop()
        name = (server_name or host) if context is not None else None
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                local = _connect_locally(port, token) if context is None else None
                if local is not None:
                    transport, channel = await loop.create_unix_connection(cls, sock=local)
                else:
                    transport, channel = await loop.create_connection(
                        cls, host, port, ssl=context, server_hostname=name
                    )
                await channel._open(token)
        except BaseException as error:  # who cancels this has no channel to close
            if transport is not None:
                transport.abort()
            if isinstance(error, TimeoutError):
                raise OSError("the batch port does not answer") from error
            raise
        return channel

    @property
    def open(self) -> bool:
        """Whether calls may be made; false as soon as the other side has closed."""
        return self._opened and self.transport is not None and not self.transport.is_closing()

    def infer(
        self,
        request: worker_pb2.InferRequest,
        members: Sequence[Member],
        timeout_s: float,
        metadata: Sequence[tuple[str, str]],
        came: Came | None = None,
    ) -> asyncio.Future[worker_pb2.InferResponse]:
        """Sends one batch; its response, or a WorkerCallError. Cancelling it tells the worker that nobody waits."""
        self._number = number = self._number + 1
        small = encode_request(request, [(item, ()) for item, _ in members])
        images = [image_heads(frames) for _, frames in members]
        call = Call(number, timeout_s, len(small), images, dict(metadata))
        loop = asyncio.get_running_loop()
        result = loop.create_future()
        try:
            self._write(call, [small, *(image.data for _, frames in members for image in frames.values())])
        except WorkerCallError as error:
            result.set_exception(error)
            return result
        self._calls[number] = result
        if came is not None:
            self._came[number] = came
        result.add_done_callback(partial(self._ended, number, loop.call_later(timeout_s, self._too_late, number)))
        return result

    def _ended(self, number: int, timer: asyncio.TimerHandle, _: object) -> None:
        timer.cancel()
        self._came.pop(number, None)
        if self._calls.pop(number, None) is not None and self.open:  # nothing came
            self._write(Cancel(number))

    async def finish(self, grace_s: float) -> None:
        """Closes the connection once its calls have ended, at the latest after so long."""
        if self._calls:
            await asyncio.wait(self._calls.values(), timeout=grace_s)
        self.close()

    def close(self) -> None:
        """Closes the connection; its calls are cancelled."""
        for call in self._calls.values():
            call.cancel()
        if self.transport is not None:
            self.transport.abort()

    def frame_received(self, head: Head, body: Body) -> None:
        """A result, the lack of one, or what became of the opening."""
        if isinstance(head, Opened):
            self._opened = True
            self._opening_ends(None)
        elif isinstance(head, Answer):
            self._answered(head.number, bytes(body))
        elif isinstance(head, Failure) and head.number == OPENING:
            self._opening_ends(OSError(f"the batch port refuses the connection: {head.details[:200]}"))
        elif isinstance(head, Failure):
            self._fail(head.number, head.code, head.details)
        else:
            raise WireError(f"{type(head).__name__} from a worker")

    def connection_lost(self, exc: Exception | None) -> None:
        """What is under way gets no answer."""
        self._opened = False
        self._opening_ends(OSError("the batch port closed the connection"))
        for number in list(self._calls):
            self._fail(number, "UNAVAILABLE", "the connection to the worker was lost")

    async def _open(self, token: bytes) -> None:
        try:
            _watch_for_silence(as_socket(cast(asyncio.Transport, self.transport)))
            self._write(Open(VERSION, token))
        except (OSError, WorkerCallError) as error:  # it was closed in the same moment
            raise OSError("the batch port closed the connection") from error
        await self._opening

    def _opening_ends(self, error: OSError | None) -> None:
        if self._opening.done():
            return
        if error is None:
            self._opening.set_result(None)
        else:
            self._opening.set_exception(error)
            self._opening.exception()  # who has given up waiting need not hear of it

    def _too_late(self, number: int) -> None:
        call = self._calls.get(number)
        if call is not None and not call.done():
            call.set_exception(WorkerCallError("DEADLINE_EXCEEDED", "the worker did not answer in time"))

    def _answered(self, number: int, body: bytes) -> None:
        call = self._calls.pop(number, None)
        if call is None or call.done():
            return
        try:
            response = worker_pb2.InferResponse.FromString(body)
        except DecodeError as error:
            unreadable = WorkerCallError("INTERNAL", "the worker's answer cannot be read")
            unreadable.__cause__ = error
            call.set_exception(unreadable)
            return
        came = self._came.pop(number, None)
        if came is not None:
            came(response)
        call.set_result(response)

    def _fail(self, number: int, code: str, details: str) -> None:
        call = self._calls.pop(number, None)
        if call is not None and not call.done():
            call.set_exception(WorkerCallError(code, details))

    def _write(self, head: Head, body: Sequence[bytes | memoryview] = ()) -> None:
        if self.transport is None or self.transport.is_closing():
            raise WorkerCallError("UNAVAILABLE", "the connection to the worker was lost")
        self.transport.writelines(frame(head, body))


def _connect_locally(port: int, token: bytes) -> socket.socket | None:
    """A connection to the port's Unix socket; None where there is none in this network namespace."""
    local = socket.socket(socket.AF_UNIX)
    try:
        local.setblocking(False)
        local.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER_BYTES)
        local.connect(local_name(port, token))
    except OSError:
        local.close()
        return None
    return local


def _watch_for_silence(connection: socket.socket) -> None:
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 1),
        ("TCP_USER_TIMEOUT", 1000 * SILENT_S),
    ):
        with contextlib.suppress(AttributeError, OSError):  # another system knows it by another name, or not at all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
