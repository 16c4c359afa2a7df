"""The port of a pod with several replicas: one worker to the gateway, with as many batches in flight as replicas."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from taktline_protocol import ErrorCode, TaktlineError, worker_pb2
from taktline_protocol.deployment import EngineConfig
from taktline_protocol.rpc import SERVER_OPTIONS

from taktline_worker.cores import usable_cores
from taktline_worker.lifecycle import (
    SERVICE_NAME,
    Health,
    ServeOptions,
    address_error,
    bind,
    check_address,
    run,
    split_address,
)
from taktline_worker.replicas.assignment import Assignment
from taktline_worker.replicas.child import Launch, Replica
from taktline_worker.replicas.metrics import ReplicaMetrics
from taktline_worker.replicas.request import count_items
from taktline_worker.tls import interceptors, server_credentials

logger = logging.getLogger(__name__)

WAITING_PER_REPLICA = 8
WATCH_S = 1.0
# Keys of a call that gRPC writes itself.
_OWN_METADATA = ("user-agent", "content-type", "te", "grpc-")


class ReplicaRefusedError(Exception):
    """A replica refused the policy or its configuration; the message is the line it ended with."""


@dataclass(slots=True)
class _Fleet:
    """What the threads share, under `lock`."""

    assignment: Assignment
    infos: dict[int, worker_pb2.InfoResponse]
    restarts: int = 0


class Front:
    """Starts the replicas, waits until all serve, then forwards batches to whichever is predicted to be done first.

    A replica that ends takes the batches it held with it: their observations get `worker_failed`, all others go on. It
    is started again; while none serves the health is NOT_SERVING.

    Raises:
        TaktlineError: CONFIG_INVALID for an address, or devices that differ.
        ReplicaRefusedError: what a replica refused.
    """

    def __init__(self, config: EngineConfig, config_path: Path, options: ServeOptions) -> None:
        self._options, self._policy = options, config.policy
        for address in filter(None, (options.listen, options.metrics_listen)):
            check_address(address)
        credentials = server_credentials(options.tls) if options.tls is not None else None
        count = config.engine.parallel.dp
        self._changed = threading.Condition()
        self._fleet = _Fleet(Assignment(), {})
        self._started = False
        self._left = threading.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="taktline-replicas-"))
        self.replicas = [
            Replica(launch, self._up, self._down)
            for launch in launches(config, config_path, options, self._folder, dict(os.environ))
        ]
        try:
            for replica in self.replicas:
                replica.start()
            self._wait_for_all(count)
            self._server = grpc.server(
                ThreadPoolExecutor(count * WAITING_PER_REPLICA + 8, thread_name_prefix="rpc"),
                options=(*SERVER_OPTIONS, ("grpc.so_reuseport", 0)),
                interceptors=interceptors(options.tls),
            )
            self._server.add_generic_rpc_handlers((_handlers(self),))
            self._health = Health(self._server, options.health_listen)
            self.port = bind(self._server, options.listen, credentials)
            if options.metrics_listen:
                self._serve_metrics(options.metrics_listen)
        except BaseException:
            self._stop_replicas()
            raise

    def start(self) -> None:
        """Begins to serve, then reports SERVING."""
        self._server.start()
        with self._changed:
            self._started = True
            self._health.set(serving=bool(self._fleet.infos))
        threading.Thread(target=self._watch, name="stuck", daemon=True).start()
        logger.info("serving", extra={"policy": self._policy, "port": self.port, "replicas": len(self.replicas)})

    def drain(self, hurry: threading.Event | None = None) -> None:
        """Reports NOT_SERVING, lingers, lets running calls finish, and stops the replicas.

        Args:
            hurry: cuts the lingering short when set.
        """
        with self._changed:
            self._started = False
            self._health.set(serving=False)
        logger.info("draining", extra={"policy": self._policy})
        (hurry or threading.Event()).wait(self._options.linger_s)
        self._server.stop(self._options.grace_s).wait()
        self._stop_replicas()
        logger.info("stopped", extra={"policy": self._policy})

    def info(self) -> worker_pb2.InfoResponse:
        """What all replicas are, with the slowest one's time of each bucket and the number of batches in flight."""
        with self._changed:
            infos = list(self._fleet.infos.values())
        merged = worker_pb2.InfoResponse()
        merged.CopyFrom(infos[0])
        for other in infos[1:]:
            _keep_slower(merged.t_sync, other.t_sync)
            for level, its in zip(merged.cheaper, other.cheaper, strict=True):
                _keep_slower(level.t_sync, its.t_sync)
        merged.replicas = len(self.replicas)
        return merged

    def infer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Forwards one batch, bytes in and bytes out; the batch of a replica that ended becomes errors of its items."""
        size = count_items(request)
        with self._changed:
            chosen = self._fleet.assignment.assign(size, time.monotonic())
        if chosen is None:
            return _failed(request, "no replica of this worker serves now; they are being restarted")
        index, ticket = chosen
        # Neither deadline nor cancellation of the caller ends the call: the replica has the batch until it answers, and
        # only so is one noticed that never does.
        call = self.replicas[index].infer.future(request, metadata=_passed_on(context))
        call.add_done_callback(lambda _: self._finished(index, ticket))
        gone = partial(self._caller_gone, call, index, ticket)
        if not context.add_callback(gone):
            gone()
        try:
            response: bytes = call.result(context.time_remaining())
            self._finished(index, ticket)  # the callback may come behind the next batch
            return response
        except grpc.FutureTimeoutError:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"replica {index} has not answered in time")
        except grpc.FutureCancelledError:
            context.abort(grpc.StatusCode.CANCELLED, "the caller has left")
        except grpc.RpcError as error:
            return self._lost(request, size, index, error, context)
        raise AssertionError("abort raises")

    def _lost(
        self, request: bytes, size: int, index: int, error: grpc.RpcError, context: grpc.ServicerContext
    ) -> bytes:
        code, details = error.code(), error.details()
        if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
            context.abort(code, details)
        reason = f"{code.name}: {details}"[:300]
        logger.error(
            "a replica lost a batch",
            extra={"policy": self._policy, "replica": index, "items": size, "reason": reason},
        )
        if code is not grpc.StatusCode.UNAVAILABLE:
            return _failed(request, f"replica {index} failed this batch ({reason})", "send a fresh observation")
        # Gone, or cut off: it gets nothing more from this instant on, and is started anew.
        with self._changed:
            self._fleet.assignment.remove(index)
        self.replicas[index].end()
        return _failed(request, f"replica {index} ended while it held this batch")

    def _finished(self, index: int, ticket: int) -> None:
        with self._changed:
            self._fleet.assignment.finished(index, ticket, time.monotonic())

    def _caller_gone(self, call: grpc.Future, index: int, ticket: int) -> None:
        """Takes back what nobody waits for, unless the engine may be at it: that ends when it ends."""
        with self._changed:
            at_work = self._fleet.assignment.leads(index, ticket)
        if not at_work:
            call.cancel()

    def _watch(self) -> None:
        """Ends replicas that are stuck in a batch, as a hung device leaves them: alive, and of no use."""
        while not self._left.wait(WATCH_S):
            with self._changed:
                stuck = self._fleet.assignment.stuck(time.monotonic())
                for index in stuck:
                    self._fleet.assignment.remove(index)
            for index in stuck:
                logger.error("a replica is stuck in a batch", extra={"policy": self._policy, "replica": index})
                self.replicas[index].end()

    def _up(self, replica: Replica, info: worker_pb2.InfoResponse) -> None:
        with self._changed:
            self._fleet.infos[replica.index] = info
            self._fleet.assignment.add(replica.index, {t.batch: t.median_ms / 1e3 for t in info.t_sync})
            if self._started:
                self._health.set(serving=True)
            self._changed.notify_all()
        logger.info(
            "replica serves",
            extra={"policy": self._policy, "replica": replica.index, "pid": replica.pid, "device": info.device},
        )

    def _down(self, replica: Replica, code: int) -> None:
        del code  # the replica logs it
        with self._changed:
            self._fleet.infos.pop(replica.index, None)
            self._fleet.assignment.remove(replica.index)
            self._fleet.restarts += 1
            if self._started and not self._fleet.infos:
                self._health.set(serving=False)
            self._changed.notify_all()

    def _wait_for_all(self, count: int) -> None:
        with self._changed:
            # In turns: a signal is only seen between two waits.
            while len(self._fleet.infos) < count:
                self._changed.wait(0.2)
                refused = next((replica.refusal for replica in self.replicas if replica.refusal), "")
                if refused and self._fleet.restarts:
                    raise ReplicaRefusedError(refused)
            devices = {info.device.split(":")[0] for info in self._fleet.infos.values()}
        if len(devices) > 1:
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"of {count} replicas some run on {' and some on '.join(sorted(devices))}",
                "set parallel.dp to the number of GPUs of the pod, or engine.device to cuda",
            )

    def _serve_metrics(self, address: str) -> None:
        host, port = split_address(address)
        try:
            bound = ReplicaMetrics(self._policy, self._metrics_addresses, lambda: self._fleet.restarts).serve(
                host, port
            )
        except OSError as error:
            raise address_error(address, str(error)) from error
        logger.info("metrics", extra={"policy": self._policy, "address": f"{host}:{bound}"})

    def _metrics_addresses(self) -> dict[int, str]:
        with self._changed:
            serving = list(self._fleet.infos)
        return {index: self.replicas[index].metrics_address for index in serving}

    def _stop_replicas(self) -> None:
        self._left.set()
        stoppers = [threading.Thread(target=replica.stop) for replica in self.replicas]
        for stopper in stoppers:
            stopper.start()
        for stopper in stoppers:
            stopper.join()
        shutil.rmtree(self._folder, ignore_errors=True)


def _keep_slower(times: Iterable[worker_pb2.BucketTime], others: Iterable[worker_pb2.BucketTime]) -> None:
    for own, other in zip(times, others, strict=True):
        own.median_ms, own.p99_ms = max(own.median_ms, other.median_ms), max(own.p99_ms, other.p99_ms)


def launches(
    config: EngineConfig, config_path: Path, options: ServeOptions, folder: Path, environment: dict[str, str]
) -> list[Launch]:
    """How to start each replica: replica i gets the i-th cfg x tp of the visible GPUs, or its share of the cores.

    Raises:
        TaktlineError: CONFIG_INVALID where fewer GPUs are visible than replicas wanted.
    """
    count, each = config.engine.parallel.dp, config.engine.parallel.cfg * config.engine.parallel.tp
    visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if config.engine.device != "cpu" and visible and len(visible) < count * each:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"parallel.dp is {count}, and CUDA_VISIBLE_DEVICES names {len(visible)}"
            + (f", where each replica needs {each} (cfg x tp)" if each > 1 else ""),
            "give the pod one GPU for each replica" if each == 1 else f"give the pod {count * each} GPUs",
        )
    share = max(1, usable_cores() // count)
    found = []
    for index in range(count):
        own = dict(environment)
        if config.engine.device != "cpu":
            mine = range(index * each, (index + 1) * each)
            own["CUDA_VISIBLE_DEVICES"] = ",".join(visible[at] if visible else str(at) for at in mine)
        own.setdefault("OMP_NUM_THREADS", str(share))
        socket = folder / f"{index}.sock"
        command = (
            *(sys.executable, "-c", "import sys; from taktline_worker.cli import main; sys.exit(main())", "replica"),
            *("--config", str(config_path), "--socket", str(socket), "--grace-s", str(options.grace_s)),
            *("--log-level", logging.getLevelName(logging.getLogger().getEffectiveLevel())),
        )
        found.append(Launch(index, command, own, socket, options.grace_s + 5.0))
    return found


def serve(config: EngineConfig, config_path: Path, options: ServeOptions) -> None:
    """Serves until SIGTERM or SIGINT, then drains (`lifecycle.run`).

    Raises:
        TaktlineError: the configuration was refused before anything was served.
        ReplicaRefusedError: a replica refused.
    """
    run(lambda: Front(config, config_path, options), config.policy)


def _handlers(front: Front) -> grpc.GenericRpcHandler:
    def info(request: bytes, context: grpc.ServicerContext) -> bytes:
        del request
        try:
            return front.info().SerializeToString()
        except IndexError:
            context.abort(grpc.StatusCode.UNAVAILABLE, "no replica serves now")
            raise

    return grpc.method_handlers_generic_handler(
        SERVICE_NAME,
        {
            "Info": grpc.unary_unary_rpc_method_handler(info),
            "Infer": grpc.unary_unary_rpc_method_handler(front.infer),
        },
    )


def _passed_on(context: grpc.ServicerContext) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in context.invocation_metadata() if not key.startswith(_OWN_METADATA)]


def _failed(
    request: bytes, reason: str, next_step: str = "send a fresh observation; the replica is being restarted"
) -> bytes:
    """The answer of a batch that no replica ran: an error for each item, so that nobody blames the whole worker."""
    parsed = worker_pb2.InferRequest()
    try:
        parsed.ParseFromString(request)
    except DecodeError:
        logger.warning("a batch that no replica ran is no message")
    error = worker_pb2.Error(
        code=ErrorCode.WORKER_FAILED.value,
        message=reason,
        next_step=next_step,
    )
    results = [worker_pb2.InferResult(request_id=item.request_id, error=error) for item in parsed.items]
    return worker_pb2.InferResponse(results=results, revision=parsed.revision).SerializeToString()
