"""The worker process: load, check, warm, calibrate, serve, drain."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType

import grpc
import msgspec
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from taktline_protocol import ErrorCode, TaktlineError, worker_pb2, worker_pb2_grpc
from taktline_protocol.deployment import EngineConfig
from taktline_protocol.tracing import tracing_from_environment
from taktline_protocol.rpc import SERVER_OPTIONS
from taktline_protocol.tracing import tracing_from_environment

from taktline_worker.engine import Engine
from taktline_worker.instruments import Instruments
from taktline_worker.models.registry import load_adapter
from taktline_worker.service import MAX_WAITING_BATCHES, WorkerService
from taktline_worker.tracing import BatchTraces
from taktline_worker.tls import TlsFiles, server_credentials
from taktline_worker.tracing import BatchTraces

logger = logging.getLogger(__name__)

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How the process listens and leaves.

    Attributes:
        listen: gRPC host:port; port 0 takes a free one.
        metrics_listen: Prometheus host:port, or empty.
        linger_s: after SIGTERM, how long calls are still taken, so that gateways see NOT_SERVING first.
        grace_s: after that, how long calls that run may take.
        tls: certificates of the gRPC port; None speaks plain text.
    """

    listen: str
    metrics_listen: str = ""
    linger_s: float = 1.0
    grace_s: float = 30.0
    tls: TlsFiles | None = None


def read_config(path: Path) -> EngineConfig:
    """Reads `engine.json`.

    Raises:
        TaktlineError: CONFIG_INVALID where it is absent or does not fit.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineConfig)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID, f"{path} is no engine config: {error}", "the operator writes this file; see docs"
        ) from error


class Worker:
    """A loaded policy on a port.

    Raises:
        TaktlineError: what loading refuses, or CONFIG_INVALID for a port that cannot be had.
    """

    def __init__(self, config: EngineConfig, options: ServeOptions) -> None:
        self._options = options
        self._policy = config.policy
        # A wrong address, or a wrong exporter of traces, must not cost the minutes that loading takes.
        self._traces = BatchTraces(tracing_from_environment("taktline-worker", version("taktline-worker")))
        for address in filter(None, (options.listen, options.metrics_listen)):
            check_address(address)
        began = time.monotonic()
        credentials = server_credentials(options.tls) if options.tls is not None else None
        adapter = load_adapter(config)
        loaded = time.monotonic()
        logger.info(
            "loaded",
            extra={
                "policy": config.policy,
                "family": adapter.description.family,
                "revision": config.model.revision,
                "precision": adapter.description.precision,
                "device": adapter.description.device,
            },
        )
        self.engine = Engine(adapter, config.engine.buckets)
        timings = self.engine.calibrate()
        for timing in timings:
            logger.info(
                "calibrated",
                extra={
                    "policy": config.policy,
                    "bucket": timing.batch,
                    "median_ms": round(timing.median_ms, 3),
                    "p99_ms": round(timing.p99_ms, 3),
                    "runs": timing.runs,
                },
            )
        instruments = Instruments(config.policy)
        stages_s = {"load": loaded - began, "calibrate": time.monotonic() - loaded}
        instruments.started(adapter, config.model.revision, timings, stages_s, _gpu_memory)
        self._server = grpc.server(
            ThreadPoolExecutor(MAX_WAITING_BATCHES + 8, thread_name_prefix="rpc"),
            # With those of the protocol: gateways ping an idle worker, which gRPC's defaults take for an attack.
            options=(*SERVER_OPTIONS, ("grpc.so_reuseport", 0)),
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(  # type: ignore[no-untyped-call]  # generated code
            WorkerService(config, self.engine, timings, instruments, self._traces), self._server
        )
        self._health = health.HealthServicer(
            experimental_non_blocking=True, experimental_thread_pool=ThreadPoolExecutor(4, thread_name_prefix="health")
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.port = _bind(self._server, options.listen, credentials)
        if options.metrics_listen:
            host, port = split_address(options.metrics_listen)
            try:
                bound = instruments.serve(host, port)
            except OSError as error:
                raise _address_error(options.metrics_listen, str(error)) from error
            logger.info("metrics", extra={"policy": config.policy, "address": f"{host}:{bound}"})

    def start(self) -> None:
        """Begins to serve, then reports SERVING."""
        self._server.start()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)
        logger.info("serving", extra={"policy": self._policy, "port": self.port})

    def drain(self, hurry: threading.Event | None = None) -> None:
        """Reports NOT_SERVING, lingers, lets running calls finish, and stops.

        Args:
            hurry: cuts the lingering short when set.
        """
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        logger.info("draining", extra={"policy": self._policy})
        (hurry or threading.Event()).wait(self._options.linger_s)
        self._server.stop(self._options.grace_s).wait()
        self.engine.close()
        self._traces.close()
        logger.info("stopped", extra={"policy": self._policy})

    def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", SERVICE_NAME):
            self._health.set(service, status)


def _gpu_memory() -> tuple[int, int] | None:
    """Bytes that this process has allocated and reserved on its GPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def serve(config: EngineConfig, options: ServeOptions) -> None:
    """Serves until SIGTERM or SIGINT, then drains; a second signal cuts the lingering short.

    A signal that comes while the policy is still being loaded ends the process at once.

    Raises:
        TaktlineError: the policy was refused before anything was served.
    """
    serving, stop, hurry = threading.Event(), threading.Event(), threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        del number, frame
        if not serving.is_set():
            raise _StoppedError
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        worker = Worker(config, options)
        serving.set()
    except _StoppedError:
        logger.info("stopped while loading", extra={"policy": config.policy})
        return
    worker.start()
    stop.wait()
    worker.drain(hurry)


class _StoppedError(BaseException):
    """Raised by the signal handler in the main thread while nothing is served yet.

    No Exception: the handler may run inside logging or a library that catches those.
    """


def split_address(address: str) -> tuple[str, int]:
    """`host:port` as its two parts.

    Raises:
        TaktlineError: CONFIG_INVALID where it is not of that form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise _address_error(address, "it is not HOST:PORT")
    return host.strip("[]"), int(port)


def check_address(address: str) -> None:
    """Binds `address` for an instant.

    Raises:
        TaktlineError: CONFIG_INVALID where it is malformed, taken, or not this machine's.
    """
    host, port = split_address(address)
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise _address_error(address, error.strerror or str(error)) from error


def _bind(server: grpc.Server, listen: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is not None:
            return int(server.add_secure_port(listen, credentials))
        return int(server.add_insecure_port(listen))
    except RuntimeError as error:
        raise _address_error(listen, "the port was taken meanwhile") from error


def _address_error(address: str, reason: str) -> TaktlineError:
    return TaktlineError(
        ErrorCode.CONFIG_INVALID, f"cannot listen on {address}: {reason}", "choose a free HOST:PORT of this machine"
    )
