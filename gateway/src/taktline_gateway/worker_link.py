"""One worker as the gateway sees it: a gRPC channel, its watched health, its Info, and its batches.

Batches go to the worker's batch port where it has one that can be reached, else through gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from taktline_protocol import worker_pb2, worker_pb2_grpc
from taktline_protocol.batch_frames import VERSION
from taktline_protocol.deployment import Target
from taktline_protocol.messages import BucketTime, PolicyInfo
from taktline_protocol.rpc import CHANNEL_OPTIONS, SERVICE_NAME, policy_info
from taktline_protocol.rpc_encoding import encode_request, image_chunks

from taktline_gateway.batch_channel import BatchChannel, Came, Member, WorkerCallError
from taktline_gateway.logs import log
from taktline_gateway.tls import WorkerTls

INFO_TIMEOUT_S = 5.0
RETRY_S = 0.25
FAULT_RETRY_S = 5.0
"""How often a worker is looked at again whose watch a fault has ended: each one is logged."""
LOOK_TIMEOUT_S = 1.0
UNREACHED_S = 10.0
"""How long a worker of the routing table may be no use to this gateway before its log says why."""
RECONNECT_S = 1.0
"""How often a batch port that was lost or cannot be reached is tried again."""
RENEWED_GRACE_S = 30.0
"""How long a batch may go on over a channel whose certificates have been replaced."""
_logger = logging.getLogger(__name__)


class WorkerLink:
    """Watches one worker and sends it batches. `on_up(link)` and `on_down(link)` tell when it may be used."""

    def __init__(
        self,
        policy: str,
        target: Target,
        on_up: Callable[[WorkerLink], None],
        on_down: Callable[[WorkerLink], None],
        tls: WorkerTls | None = None,
    ) -> None:
        self.policy = policy
        self.target = target
        self.info: PolicyInfo | None = None
        self.up = False
        self.failures = 0
        self.failed_at = 0.0
        self.idle = asyncio.Event()
        self.idle.set()
        self._calls = 0
        self._on_up = on_up
        self._on_down = on_down
        self._tls = tls
        self._watcher: asyncio.Task[None] | None = None
        self._teller: asyncio.Task[None] | None = None
        self._why = ""
        self._batches: BatchChannel | None = None
        self._batch_port: tuple[str, int, bytes] | None = None
        self._connector: asyncio.Task[None] | None = None
        self._batch_state = "none"
        self._closing: set[asyncio.Task[None]] = set()
        self._connect()
        self._forget_tls = tls.on_change(self._renew) if tls is not None else lambda: None

    @property
    def name(self) -> str:
        """The worker's address, its name in answers and logs."""
        return self.target.address

    @property
    def seats(self) -> tuple[str, ...]:
        """What the scheduler knows it as: one name for each batch that it runs at a time."""
        replicas = self.info.replicas if self.info is not None else 1
        return (self.name, *(f"{self.name}#{number}" for number in range(1, replicas)))

    @property
    def batch_state(self) -> str:
        """One of `metrics.BATCH_PORT_STATES`; unless it is open, batches go through gRPC."""
        return "open" if self._batches is not None and self._batches.open else self._batch_state

    @property
    def revision(self) -> str:
        """The model revision that the worker reports."""
        return self.info.revision if self.info is not None else self.target.revision

    def start(self) -> None:
        """Begins watching; needs a running event loop."""
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {self.name}")
        if self._teller is None:
            self._teller = asyncio.create_task(self._tell_unreached(), name=f"tell of {self.name}")

    async def close(self) -> None:
        """Stops watching and closes the channel; a batch in flight is cancelled."""
        self._forget_tls()
        for task in (self._watcher, self._teller, self._connector):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if self._batches is not None:
            self._batches.close()
        await self._channel.close()

    def infer(
        self,
        request: worker_pb2.InferRequest,
        members: Sequence[Member],
        timeout_s: float,
        metadata: tuple[tuple[str, str], ...] | None = None,
        came: Came | None = None,
    ) -> Coroutine[Any, Any, worker_pb2.InferResponse]:
        """Runs one batch: `request` without its items, and the items; to a batch port it is sent at once.

        What it gives waits for the response, or raises WorkerCallError. `came` hears of one that a batch port gives.
        """
        batches = self._batches
        if batches is None or not batches.open:
            return self._through_grpc(request, members, timeout_s, metadata)
        self._call_begins()
        call = batches.infer(request, members, timeout_s, metadata or (), came)
        call.add_done_callback(self._call_ends)
        return self._through_port(batches, call)

    async def _through_port(
        self, batches: BatchChannel, call: asyncio.Future[worker_pb2.InferResponse]
    ) -> worker_pb2.InferResponse:
        try:
            return await call
        except WorkerCallError:
            if not batches.open:
                await self._look()
            raise

    async def _through_grpc(
        self,
        request: worker_pb2.InferRequest,
        members: Sequence[Member],
        timeout_s: float,
        metadata: tuple[tuple[str, str], ...] | None,
    ) -> worker_pb2.InferResponse:
        self._call_begins()
        try:
            body = encode_request(request, [(item, image_chunks(images)) for item, images in members])
            response: worker_pb2.InferResponse = await self._infer(body, timeout=timeout_s, metadata=metadata)
            return response
        except grpc.aio.AioRpcError as error:
            raise WorkerCallError(error.code().name, error.details() or "no details") from error
        finally:
            self._call_ends()

    def _call_begins(self) -> None:
        self._calls += 1
        self.idle.clear()

    def _call_ends(self, _: object = None) -> None:
        self._calls -= 1
        if not self._calls:
            self.idle.set()

    def _connect(self) -> None:
        address = self.target.address
        if self._tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = self._tls.channel(address, CHANNEL_OPTIONS)
        self._worker = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        self._infer = self._channel.unary_unary(
            f"/{SERVICE_NAME}/Infer", response_deserializer=worker_pb2.InferResponse.FromString
        )
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def _renew(self) -> None:
        """Goes on over connections with the certificates of now; a batch in flight ends on the old ones."""
        old, batches, watcher = self._channel, self._batches, self._watcher
        self._batches = None
        self._leave_batch_port()
        self._connect()
        if watcher is not None:
            watcher.cancel()
            self.start()
        self._close_later(old.close(RENEWED_GRACE_S))
        if batches is not None:
            self._close_later(batches.finish(RENEWED_GRACE_S))

    def _close_later(self, work: Coroutine[Any, Any, None]) -> None:
        closing = asyncio.create_task(work)
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _watch(self) -> None:
        reason = ""
        while True:
            try:
                if reason:
                    self._go_down(reason)
                    reason = ""
                    await asyncio.sleep(FAULT_RETRY_S)
                await self._watch_once()
                await asyncio.sleep(RETRY_S)
            except Exception as error:  # a worker that nobody watches would be lost, or kept though it is gone
                reason = f"looking at it failed: {type(error).__name__}"
                log(_logger, logging.ERROR, "internal", exc_info=True, policy=self.policy, worker=self.name)

    async def _watch_once(self) -> None:
        """Follows the worker's health until that ends."""
        try:
            watch = self._health.Watch(health_pb2.HealthCheckRequest(service=""), wait_for_ready=True)
            async for response in watch:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    await self._come_up()
                else:
                    self._go_down("not serving")
        except grpc.aio.AioRpcError as error:
            self._go_down(str(error.code().name))

    async def _come_up(self) -> None:
        told = await self._worker.Info(worker_pb2.InfoRequest(), timeout=INFO_TIMEOUT_S)
        info = policy_info(told)
        reason = None
        if info.policy != self.policy:
            reason = f"it serves policy {info.policy!r}, the route says {self.policy!r}"
        elif self.target.revision and info.revision != self.target.revision:
            reason = f"it serves revision {info.revision!r}, the route says {self.target.revision!r}"
        elif not info.t_sync:
            reason = "it reports no calibrated batch times"
        elif not all(map(_timed, (*info.t_sync, *(time for level in info.cheaper for time in level.t_sync)))):
            reason = "it reports batch times that are no durations"
        if reason is not None:
            self._go_down(reason)
            log(_logger, logging.ERROR, "worker_refused", policy=self.policy, worker=self.name, reason=reason)
            return
        self.info = info
        await self._open_batches(told)
        if not self.up:
            self.up = True
            self.failures = 0
            if self._teller is not None:
                self._teller.cancel()
            log(_logger, logging.INFO, "worker_up", policy=self.policy, worker=self.name, revision=info.revision)
            self._on_up(self)

    async def _tell_unreached(self) -> None:
        """Says what keeps a worker from serving here: its watch waits for a connection without a word."""
        await asyncio.sleep(UNREACHED_S)
        reason = self._why
        try:
            await self._health.Check(health_pb2.HealthCheckRequest(service=""), timeout=LOOK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            reason = error.details() or error.code().name
        log(_logger, logging.WARNING, "worker_unreachable", policy=self.policy, worker=self.name, reason=reason[:400])

    def _go_down(self, reason: str) -> None:
        self._why = reason
        if self.up:
            self.up = False
            if self._teller is not None:
                self._teller.cancel()
            self._teller = asyncio.create_task(self._tell_unreached(), name=f"tell of {self.name}")
            log(_logger, logging.WARNING, "worker_down", policy=self.policy, worker=self.name, reason=reason)
            self._on_down(self)

    async def _look(self) -> None:
        """A batch port was lost: where its worker went with it, that is known before its batch is tried again."""
        try:
            await self._health.Check(health_pb2.HealthCheckRequest(service=""), timeout=LOOK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:  # the watch finds the same, a moment later
                self._go_down("the connection was lost")

    async def _open_batches(self, told: worker_pb2.InfoResponse) -> None:
        host = _tcp_host(self.target.address)
        port = (host, told.batch_port, told.batch_token) if host and told.batch_port else None
        if port is not None and told.batch_version != VERSION:
            port = None
            if self._batch_state != "version":
                reason = f"it speaks version {told.batch_version}, this gateway {VERSION}; batches go through gRPC"
                self._warn("batch_port_version", port=told.batch_port, reason=reason)
            self._leave_batch_port("version")
            return
        if port is not None and port == self._batch_port and self._connector is not None:
            return
        self._leave_batch_port()  # where there was one, another process answers at this address now
        if port is not None:
            self._batch_port, self._batch_state = port, "unreachable"
            first = asyncio.Event()
            self._connector = asyncio.create_task(self._keep_connected(port, first), name=f"batches {self.name}")
            await first.wait()

    def _leave_batch_port(self, state: str = "none") -> None:
        if self._connector is not None:
            self._connector.cancel()
        if self._batches is not None:
            self._batches.close()
        self._batch_port, self._batch_state, self._connector, self._batches = None, state, None, None

    async def _keep_connected(self, port: tuple[str, int, bytes], tried: asyncio.Event) -> None:
        """Keeps a connection to the batch port; while there is none, batches go through gRPC."""
        said = False
        while True:
            if self._batches is None or not self._batches.open:
                try:
                    tls = (self._tls.context, self._tls.files.name) if self._tls is not None else ()
                    self._batches = await BatchChannel.connect(*port, *tls)
                    said = False
                except OSError as error:
                    if not said:
                        said = True
                        reason = f"{error}; batches go through gRPC until it can be reached"
                        self._warn("batch_port_unreachable", port=port[1], reason=reason)
                except Exception:  # a fault of ours: gRPC goes on meanwhile, and the next try may do
                    log(_logger, logging.ERROR, "internal", exc_info=True, policy=self.policy, worker=self.name)
                    await asyncio.sleep(FAULT_RETRY_S)
                finally:
                    tried.set()
            await asyncio.sleep(RECONNECT_S)

    def _warn(self, message: str, *, port: int, reason: str) -> None:
        log(_logger, logging.WARNING, message, policy=self.policy, worker=self.name, port=port, reason=reason)


def _timed(time: BucketTime) -> bool:
    """Whether a batch of this size can be predicted: nothing takes no time."""
    return time.batch > 0 and 0.0 < time.median_ms < math.inf and 0.0 <= time.p99_ms < math.inf


def _tcp_host(address: str) -> str:
    """The host of a plain HOST:PORT; empty for gRPC's other kinds of names."""
    host, _, port = address.rpartition(":")
    return host.strip("[]") if port.isdigit() and "/" not in host and not host.startswith(("unix", "dns")) else ""
