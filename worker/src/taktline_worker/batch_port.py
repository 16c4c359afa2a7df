"""The worker's batch port: batches with their camera frames as they came, in front of the same service as gRPC's."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from taktline_protocol import worker_pb2
from taktline_protocol.batch_frames import (
    VERSION,
    Answer,
    Body,
    Call,
    Cancel,
    Failure,
    FrameProtocol,
    Head,
    Open,
    WireError,
    as_socket,
    frame,
    images_of,
)
from taktline_protocol.rpc import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

TOKEN_BYTES = 16
Frame = tuple[str, tuple[int, ...], bytes | memoryview]
"""Encoding, shape and bytes of one image."""
Frames = Sequence[Mapping[str, Frame]]
"""The frames of each item, by camera."""


class Abort(Exception):
    """A call ends without a result: the name of a gRPC status, and why."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class CallContext:
    """What a service asks of a call, under the names that gRPC gives it."""

    def __init__(self, call: Call) -> None:
        self._ends_at = time.monotonic() + call.timeout_s
        self._metadata = tuple(call.metadata.items())
        self.cancelled = False

    def time_remaining(self) -> float:
        """Seconds until the caller gives up."""
        return self._ends_at - time.monotonic()

    def is_active(self) -> bool:
        """Whether somebody still waits."""
        return not self.cancelled

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """What came beside the message."""
        return self._metadata

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """Ends the call without a result."""
        raise Abort(code.name, details)


Infer = Callable[[worker_pb2.InferRequest, Frames, CallContext], Coroutine[Any, Any, worker_pb2.InferResponse]]


class BatchConnection(FrameProtocol):
    """One gateway's connection. `infer` runs on the loop; what it raises becomes the call's failure."""

    def __init__(self, token: bytes, infer: Infer, connections: set[BatchConnection]) -> None:
        super().__init__()
        self.most_bytes = 0  # whoever has not opened has nothing to send but an opening
        self._token = token
        self._infer = infer
        self._connections = connections
        self._opened = False
        self._leaving = False
        self.gone = asyncio.Event()
        self._calls: dict[int, tuple[asyncio.Task[None], CallContext]] = {}

    def running(self) -> list[asyncio.Task[None]]:
        """The calls that run now."""
        return [task for task, _ in self._calls.values()]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A gateway has connected."""
        super().connection_made(transport)
        as_socket(transport).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody waits for what runs."""
        self._connections.discard(self)
        self.gone.set()
        for _, context in self._calls.values():
            context.cancelled = True

    def leave(self) -> None:
        """Refuses calls from now on."""
        self._leaving = True

    def close(self) -> None:
        """Ends the connection once all that was written has been sent."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Ends the connection."""
        if self.transport is not None:
            self.transport.abort()

    def frame_received(self, head: Head, body: Body) -> None:
        """The opening, a batch, or word that nobody waits for one."""
        if isinstance(head, Open):
            if head.version != VERSION or not hmac.compare_digest(head.token, self._token):
                raise WireError("another version, or a port that was another worker's")
            self._opened = True
            self.most_bytes = MAX_MESSAGE_BYTES
        elif not self._opened:
            raise WireError("no opening")
        elif isinstance(head, Call):
            self._begin(head, images_of(head, body), bytes(body[: head.request]))
        elif isinstance(head, Cancel):
            found = self._calls.get(head.number)
            if found is not None:
                found[1].cancelled = True
        else:
            raise WireError(f"{type(head).__name__} from a gateway")

    def _begin(self, call: Call, images: Frames, request: bytes) -> None:
        try:
            message = worker_pb2.InferRequest.FromString(request)
        except DecodeError as error:
            raise WireError("an unreadable request") from error
        if len(message.items) != len(images):
            raise WireError("frames of another number of items")
        if self._leaving:
            self._write(Failure(call.number, "UNAVAILABLE", "the worker is going away"))
            return
        context = CallContext(call)
        task = asyncio.get_running_loop().create_task(self._run(call.number, message, images, context))
        self._calls[call.number] = (task, context)

    async def _run(self, number: int, request: worker_pb2.InferRequest, images: Frames, context: CallContext) -> None:
        try:
            response = await self._infer(request, images, context)
            self._write(Answer(number), response.SerializeToString())
        except Abort as abort:
            self._write(Failure(number, abort.code, abort.details))
        except Exception as error:
            logger.exception("a batch failed")
            self._write(Failure(number, "UNKNOWN", f"{type(error).__name__}: {error}"[:300]))
        finally:
            self._calls.pop(number, None)

    def _write(self, head: Head, body: bytes = b"") -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(b"".join(frame(head, (body,))))


async def listen(host: str, infer: Infer) -> BatchListener:
    """Listens on a free port of `host`, on the running loop. Raises OSError."""
    connections: set[BatchConnection] = set()
    token = os.urandom(TOKEN_BYTES)
    loop = asyncio.get_running_loop()
    six = ":" in host
    bound = socket.create_server(
        (host, 0),
        family=socket.AF_INET6 if six else socket.AF_INET,
        dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),  # as gRPC listens there
    )
    server = await loop.create_server(lambda: BatchConnection(token, infer, connections), sock=bound)
    return BatchListener(server, token, connections)


class BatchListener:
    """An open batch port."""

    def __init__(self, server: asyncio.AbstractServer, token: bytes, connections: set[BatchConnection]) -> None:
        self._server = server
        self._connections = connections
        self.token = token
        self.port: int = server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def close(self, grace_s: float) -> None:
        """Takes no more connections and calls, lets what runs finish and be sent for so long, and closes."""
        ends_at = time.monotonic() + grace_s
        self._server.close()
        for connection in self._connections:
            connection.leave()
        running = [task for connection in self._connections for task in connection.running()]
        if running:
            await asyncio.wait(running, timeout=grace_s)
        for connection in list(self._connections):
            connection.close()
        with contextlib.suppress(TimeoutError):  # a gateway that reads nothing
            async with asyncio.timeout(max(0.0, ends_at - time.monotonic())):
                for connection in list(self._connections):
                    await connection.gone.wait()
        for connection in list(self._connections):
            connection.abort()


class BatchPort:
    """A batch port with a loop and threads of its own, for a service whose calls wait."""

    def __init__(
        self,
        host: str,
        infer: Callable[[worker_pb2.InferRequest, Frames, CallContext], worker_pb2.InferResponse],
        threads: int,
    ) -> None:
        """Listens at once. Raises OSError where `host` cannot be listened on."""
        self._loop = asyncio.new_event_loop()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="batch")
        self._thread = threading.Thread(target=self._loop.run_forever, name="batch-port", daemon=True)
        self._thread.start()

        async def run(
            request: worker_pb2.InferRequest, images: Frames, context: CallContext
        ) -> worker_pb2.InferResponse:
            return await self._loop.run_in_executor(self._pool, infer, request, images, context)

        try:
            self._listener = asyncio.run_coroutine_threadsafe(listen(host, run), self._loop).result()
        except OSError:
            self._stop()
            raise
        self.port, self.token = self._listener.port, self._listener.token

    def close(self, grace_s: float) -> None:
        """Lets running calls finish for so long, and stops."""
        asyncio.run_coroutine_threadsafe(self._listener.close(grace_s), self._loop).result()
        self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._pool.shutdown(wait=False)
        self._loop.close()
