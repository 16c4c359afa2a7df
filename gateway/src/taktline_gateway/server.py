"""The process around the application: uvicorn, and a SIGTERM that loses no request."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import signal
import time
from collections import Counter
from collections.abc import Iterator

import uvicorn

from taktline_gateway.app import build_app
from taktline_gateway.http_protocol import guarded_http
from taktline_gateway.logs import log
from taktline_gateway.service import Gateway, Settings
from taktline_gateway.stream.endpoint import Streams
from taktline_gateway.stream.sessions import Sessions
from taktline_gateway.stream.transport import StreamTransport
from taktline_gateway.tls import following

KEEP_ALIVE_S = 75
"""Robots ask a few times a second and pause between episodes; a reconnect inside a control budget costs margin."""
PING_S = 20.0
"""From one ping of a stream to the next, and how long its pong may take; inference is never waited for meanwhile."""
GC_ALLOCATIONS = 20_000
KEPT_BYTES = 64 * 1024 * 1024
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_logger = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: SIGTERM here means drain, not stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: Settings, host: str, port: int) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP has been drained; under nohup no SIGHUP ends it.

    Raises:
        TaktlineError: `config_invalid` on a bad routing table.
    """
    gateway = Gateway(settings)
    streams = Streams(gateway)
    config = uvicorn.Config(
        build_app(gateway, streams),
        host=host,
        port=port,
        http=guarded_http(gateway.connections),
        log_config=None,
        access_log=False,
        # A caller's word about its own address is not taken: the audit log names the peer.
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        backlog=2048,
        ws=StreamTransport,
        ws_ping_interval=PING_S,
        ws_ping_timeout=PING_S,
        ws_max_size=settings.limits.body_bytes,
        # Camera frames are compressed already, and an inflating message is a bomb.
        ws_per_message_deflate=False,
    )
    config.load()
    if gateway.tls is not None:
        config.ssl = gateway.tls.context
    _settle_memory()
    server = _Server(config)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # whose default would lose what is unanswered
        loop.add_signal_handler(number, stop.set)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it, for who wants it to outlive a shell
        loop.add_signal_handler(signal.SIGHUP, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, _census, gateway, streams.sessions)
    drainer = asyncio.create_task(_drain_on(stop, gateway, server))
    async with following(gateway.tls, gateway.worker_tls):
        await server.serve()
    drainer.cancel()
    if not server.started:
        raise SystemExit(1)


def _settle_memory() -> None:
    """Keeps the collector's and the allocator's pauses out of requests.

    What exists by now lives as long as the process: the collector need not walk it again and again. Buffers of camera
    frames come and go with every batch: glibc would give their pages back to the kernel each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 20)
    with contextlib.suppress(OSError, AttributeError):  # another libc has neither the fault nor the call
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def _census(gateway: Gateway, sessions: Sessions) -> None:
    """Logs what this process holds at the moment, for who looks for a leak: kill -USR1."""
    gateway.robots.forget(time.monotonic())
    tasks = Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore[union-attr]
    log(
        _logger,
        logging.INFO,
        "census",
        tasks=dict(tasks.most_common(20)),
        task_count=tasks.total(),
        connections=gateway.connections.total,
        clients=sum(map(len, gateway.connections.remembered)),
        robots=len(gateway.robots),
        sessions=len(sessions),
        requests=gateway.requests,
        queued={policy: lane.depth for policy, lane in gateway.lanes.items()},
        unanswered={policy: lane.unanswered for policy, lane in gateway.lanes.items()},
    )


async def _drain_on(stop: asyncio.Event, gateway: Gateway, server: uvicorn.Server) -> None:
    await stop.wait()
    gateway.draining = True
    began = time.monotonic()
    log(_logger, logging.INFO, "drain_began", requests=gateway.requests)
    settings = gateway.settings
    while True:
        waited = time.monotonic() - began
        if (waited >= settings.drain_settle_s and not gateway.requests) or waited >= settings.drain_limit_s:
            break
        await asyncio.sleep(0.02)
    log(_logger, logging.INFO, "drain_ended", waited_s=round(time.monotonic() - began, 3), requests=gateway.requests)
    server.should_exit = True
