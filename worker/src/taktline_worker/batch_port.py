"""The worker's batch port: takes gateways' connections, with TLS where gRPC has it, and lets them finish at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import uvloop
from taktline_protocol.batch_frames import local_name

from taktline_worker.adapter import Frame
from taktline_worker.batch_connection import (
    Answered,
    BatchConnection,
    Begin,
    CallContext,
    Coming,
    Frames,
    Images,
    Infer,
    InferThere,
    InThreads,
)

__all__ = [
    "Answered",
    "BatchConnection",
    "BatchListener",
    "BatchPort",
    "CallContext",
    "Frame",
    "Frames",
    "Images",
    "listen",
]
logger = logging.getLogger(__name__)

TOKEN_BYTES = 16
OPEN_TIMEOUT_S = 5.0
"""Whoever has not said the token by then, TLS handshake included, is disconnected."""
MAX_ENTERING = 64
"""Connections that have not said it yet; one more disconnects the oldest of them, since a gateway says it at once."""
ACCEPT_AGAIN_S = 0.5


async def listen(
    host: str, infer: Infer | InThreads, port: int = 0, context: ssl.SSLContext | None = None
) -> BatchListener:
    """Listens on the running loop, on a free port of `host` where `port` is 0; TLS with a `context`. Raises OSError."""
    six = ":" in host
    bound = socket.create_server(
        (host, port),
        family=socket.AF_INET6 if six else socket.AF_INET,
        dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),  # as gRPC listens there
    )
    bound.setblocking(False)
    return BatchListener(bound, infer, context)


class BatchListener:
    """An open batch port, on the running loop; without TLS also a Unix socket, which costs gateways beside it less."""

    def __init__(self, bound: socket.socket, infer: Infer | InThreads, context: ssl.SSLContext | None) -> None:
        self.token = os.urandom(TOKEN_BYTES)
        self.port: int = bound.getsockname()[1]
        self._bound = [bound]
        local = _bind_locally(self.port, self.token) if context is None else None
        if local is not None:
            self._bound.append(local)
        self._infer = infer
        self._context = context
        self._connections: set[BatchConnection] = set()
        self._entering: dict[asyncio.Task[None], None] = {}
        loop = asyncio.get_running_loop()
        self._accepting = [loop.create_task(self._accept(one), name="batch port") for one in self._bound]

    async def close(self, grace_s: float) -> None:
        """Takes no more connections and calls, lets what runs finish and be sent for so long, and closes."""
        ends_at = time.monotonic() + grace_s
        ending = [*self._accepting, *self._entering]
        for task in ending:
            task.cancel()
        for connection in self._connections:
            connection.leave()
        await asyncio.gather(*ending, return_exceptions=True)
        for bound in self._bound:
            bound.close()
        for connection in self._connections:  # one more may have opened meanwhile
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

    async def _accept(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                taken, _ = await loop.sock_accept(bound)
            except OSError as error:  # such as no descriptor that is left
                logger.error("the batch port takes no connection", extra={"reason": str(error)})
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            if len(self._entering) >= MAX_ENTERING:
                oldest = next(iter(self._entering))
                del self._entering[oldest]
                oldest.cancel()
            entering = loop.create_task(self._enter(taken), name="batch connection")
            self._entering[entering] = None
            await asyncio.sleep(0)  # an accept that need not wait would never let the others on

    async def _enter(self, taken: socket.socket) -> None:
        """Sees a connection through its handshake and its opening."""
        connection = BatchConnection(self.token, self._infer, self._connections)
        task = asyncio.current_task()
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, taken, ssl=self._context)
                await connection.entered.wait()
                if not connection.opened:
                    await connection.gone.wait()
        except TimeoutError:
            logger.warning("a batch connection is closed: no opening within %g s", OPEN_TIMEOUT_S)
        except OSError as error:  # a handshake that failed; ssl.SSLError is one
            logger.warning("a batch connection is closed: %s", error)
        finally:
            if task is not None:
                self._entering.pop(task, None)
            if not connection.opened:
                connection.abort()


def _bind_locally(port: int, token: bytes) -> socket.socket | None:
    """Listens on the port's Unix socket; None on a system without them."""
    local = socket.socket(socket.AF_UNIX)
    try:
        local.bind(local_name(port, token))
        local.listen()
    except OSError as error:
        local.close()
        logger.info("the batch port has no Unix socket", extra={"reason": str(error)})
        return None
    local.setblocking(False)
    return local


class BatchPort:
    """A batch port with a loop and threads of its own, for a service whose calls wait."""

    def __init__(
        self,
        host: str,
        infer: InferThere,
        coming: Coming,
        threads: int,
        port: int = 0,
        context: ssl.SSLContext | None = None,
        begin: Begin | None = None,
    ) -> None:
        """Listens at once, as `listen`. Raises OSError where host and port cannot be listened on."""
        self._loop = uvloop.new_event_loop()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="batch")
        self._thread = threading.Thread(target=self._loop.run_forever, name="batch-port", daemon=True)
        self._thread.start()

        try:
            opening = listen(host, InThreads(infer, coming, self._pool, begin), port, context)
            self._listener = asyncio.run_coroutine_threadsafe(opening, self._loop).result()
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
