"""One gateway's connection to the batch port: its opening, its calls, and how each of them ends."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, NoReturn, cast

import grpc
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
    images_of,
)
from taktline_protocol.rpc import MAX_MESSAGE_BYTES

from taktline_worker.adapter import Frame
from taktline_worker.direct_write import DirectWrite
from taktline_worker.observation import EncodedImage

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""Openings beyond it are refused. A gateway holds one connection to a worker, two while it tries out a revision."""
SAY_LIMIT_S = 0.1
"""Longer no thread waits for the loop to write its answer."""
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
        self.received = time.monotonic()
        """When its last byte had come."""
        self._ends_at = self.received + call.timeout_s
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
Answered = Callable[[worker_pb2.InferResponse | bytes], None]
"""Gets a response, as it is or serialised."""
Images = Sequence[Mapping[str, EncodedImage]]
Coming = Callable[[worker_pb2.InferRequest, Frames], Images]
"""Takes the frames of a batch on the loop, as soon as they have come."""
InferThere = Callable[[worker_pb2.InferRequest, Images, CallContext, Answered], None]
"""Runs a batch in the thread that calls it, and hands out the response once; or raises."""


Begin = Callable[[worker_pb2.InferRequest, Images, CallContext], Callable[[Answered], None] | None]
"""As `InferThere`, up to where it begins to wait, and what goes on from there in another thread; None where it would
wait before."""


class InThreads:
    """Batches that are run by threads of a pool, for a service whose calls wait."""

    def __init__(self, infer: InferThere, coming: Coming, pool: Executor, begin: Begin | None = None) -> None:
        """`begin` is tried on the loop where no other call runs."""
        self.infer = infer
        self.coming = coming
        self.pool = pool
        self.begin = begin


class BatchConnection(FrameProtocol):
    """One gateway's connection. `infer` runs on the loop, or in threads; what it raises becomes the call's failure.

    Attributes:
        opened: whether the gateway has said its token.
        entered: set once it has, or once the connection is of no use.
        gone: set once the connection has ended.
    """

    def __init__(self, token: bytes, infer: Infer | InThreads, connections: set[BatchConnection]) -> None:
        """`connections` are those of the port; this one is among them while it lasts."""
        super().__init__()
        self.most_bytes = 0  # whoever has not opened has nothing to send but an opening
        self.opened = False
        self.entered = asyncio.Event()
        self.gone = asyncio.Event()
        self._token = token
        self._infer = infer
        self._connections = connections
        self._refused = False
        self._leaving = False
        self._calls: dict[int, tuple[asyncio.Future[None], CallContext]] = {}
        self._writing: DirectWrite | None = None

    def running(self) -> list[asyncio.Future[None]]:
        """The calls that run now."""
        return [call for call, _ in self._calls.values()]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A gateway has connected."""
        super().connection_made(transport)
        self._writing = DirectWrite(cast(asyncio.Transport, transport))  # uvloop's is none by name
        taken = as_socket(transport)
        if taken.family != socket.AF_UNIX:
            taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody waits for what runs."""
        self._connections.discard(self)
        if self._writing is not None:
            self._writing.close()
        self.entered.set()
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
        if self._refused:
            return
        if isinstance(head, Open):
            self._open(head)
        elif not self.opened:
            raise WireError("no opening")
        elif isinstance(head, Call):
            self._begin(head, images_of(head, body), bytes(body[: head.request]))
        elif isinstance(head, Cancel):
            found = self._calls.get(head.number)
            if found is not None:
                found[1].cancelled = True
        else:
            raise WireError(f"{type(head).__name__} from a gateway")

    def _open(self, opening: Open) -> None:
        if self.opened:
            raise WireError("a second opening")
        if opening.version != VERSION:
            self._refuse("FAILED_PRECONDITION", f"this port speaks version {VERSION}, not {opening.version}")
        elif not hmac.compare_digest(opening.token, self._token):
            self._refuse("UNAUTHENTICATED", "the token is not this worker's")
        elif sum(connection.opened for connection in self._connections) >= MAX_CONNECTIONS:
            self._refuse("RESOURCE_EXHAUSTED", f"{MAX_CONNECTIONS} connections are open")
        else:
            self.opened = True
            self.most_bytes = MAX_MESSAGE_BYTES
            self._write(Opened(VERSION))
            self.entered.set()

    def _refuse(self, code: str, details: str) -> None:
        logger.warning("a batch connection is refused: %s", details)
        self._refused = True
        self._write(Failure(OPENING, code, details))
        self.entered.set()
        self.close()

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
        context, loop = CallContext(call), asyncio.get_running_loop()
        if isinstance(self._infer, InThreads):
            done = loop.create_future()
            self._calls[call.number] = (done, context)
            work = _Work(call.number, partial(self._tell, loop, call.number))
            self._infer.pool.submit(work, self._begun(self._infer, message, images, context))
        else:
            task = loop.create_task(self._run(self._infer, call.number, message, images, context))
            self._calls[call.number] = (task, context)

    def _begun(
        self, infer: InThreads, message: worker_pb2.InferRequest, frames: Frames, context: CallContext
    ) -> Callable[[Answered], None]:
        """What is left of a call for a thread."""
        alone = sum(len(connection._calls) for connection in self._connections) <= 1
        try:
            images = infer.coming(message, frames)
            rest = infer.begin(message, images, context) if infer.begin is not None and alone else None
        except Exception as error:
            return partial(_raise, error)
        return partial(infer.infer, message, images, context) if rest is None else rest

    def _tell(self, loop: asyncio.AbstractEventLoop, number: int, pieces: list[bytes | memoryview]) -> None:
        """In a thread. Where the loop has to write, it goes on when that is said: it would hold the interpreter's lock
        while the loop wakes."""
        left = self._writing is not None and self._writing.now(b"".join(pieces))
        said = threading.Event() if left else None
        loop.call_soon_threadsafe(self._finish, number, said)
        if said is not None:
            said.wait(SAY_LIMIT_S)

    def _finish(self, number: int, said: threading.Event | None) -> None:
        """A thread has answered a call, but for what is left to be written where it waits for that."""
        found = self._calls.pop(number, None)
        try:
            if said is not None and self._writing is not None:
                self._writing.rest()
        finally:  # whoever drains waits for the one, the thread for the other
            if found is not None:
                found[0].set_result(None)
            if said is not None:
                said.set()

    async def _run(
        self, infer: Infer, number: int, request: worker_pb2.InferRequest, images: Frames, context: CallContext
    ) -> None:
        try:
            response = await infer(request, images, context)
            self._write(Answer(number), response.SerializeToString())
        except Abort as abort:
            self._write(Failure(number, abort.code, abort.details))
        except Exception as error:
            self._write(_fault(number, error))
        finally:
            self._calls.pop(number, None)

    def _write(self, head: Head, body: bytes = b"") -> None:
        if self._writing is not None:
            self._writing.write(b"".join(frame(head, (body,))))


class _Work:
    """One call in a thread of the pool: says once what becomes of it, and goes on with what nobody waits for."""

    def __init__(self, number: int, tell: Callable[[list[bytes | memoryview]], object]) -> None:
        self._number, self._tell, self._told = number, tell, False

    def __call__(self, run: Callable[[Answered], None]) -> None:
        try:
            run(self._answer)
            if not self._told:
                raise RuntimeError("there is no answer")
        except Abort as abort:
            self._say(frame(Failure(self._number, abort.code, abort.details)))
        except Exception as error:
            self._say(frame(_fault(self._number, error)))

    def _answer(self, response: worker_pb2.InferResponse | bytes) -> None:
        body = response if isinstance(response, bytes) else response.SerializeToString()
        self._say(frame(Answer(self._number), (body,)))

    def _say(self, pieces: list[bytes | memoryview]) -> None:
        if not self._told:
            self._told = True
            with contextlib.suppress(RuntimeError):  # the port has been closed, and its loop with it
                self._tell(pieces)


def _raise(error: Exception, _: Answered) -> None:
    raise error


def _fault(number: int, error: Exception) -> Failure:
    logger.error("a batch failed", exc_info=error)
    return Failure(number, "UNKNOWN", f"{type(error).__name__}: {error}"[:300])
