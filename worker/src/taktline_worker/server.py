"""The worker process: load, check, warm, calibrate, serve, drain."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import grpc
import torch
from taktline_protocol import worker_pb2_grpc
from taktline_protocol.deployment import EngineConfig
from taktline_protocol.rpc import SERVER_OPTIONS
from taktline_protocol.tracing import tracing_from_environment

from taktline_worker.adapter import Adapter
from taktline_worker.batch_port import BatchPort
from taktline_worker.cores import usable_cores
from taktline_worker.engine import Engine
from taktline_worker.instruments import Instruments
from taktline_worker.lifecycle import (
    SERVICE_NAME,
    Health,
    ServeOptions,
    address_error,
    bind,
    check_address,
    keep_freed_memory,
    read_config,
    run,
    spare_what_is_loaded,
    split_address,
)
from taktline_worker.models.registry import load_adapter
from taktline_worker.service import MAX_WAITING_BATCHES, WorkerService
from taktline_worker.tls import interceptors, server_context, server_credentials
from taktline_worker.tracing import BatchTraces

logger = logging.getLogger(__name__)

__all__ = ["SERVICE_NAME", "ServeOptions", "Worker", "read_config", "serve"]


class Worker:
    """A loaded policy on a port.

    Args:
        load: the policy's adapter, by default as its family's loader makes it.

    Raises:
        TaktlineError: what loading refuses, or CONFIG_INVALID for a port that cannot be had.
    """

    def __init__(
        self, config: EngineConfig, options: ServeOptions, load: Callable[[EngineConfig], Adapter] = load_adapter
    ) -> None:
        self._options = options
        self._policy = config.policy
        # A wrong address, or a wrong exporter of traces, must not cost the minutes that loading takes.
        self._traces = BatchTraces(tracing_from_environment("taktline-worker", version("taktline-worker")))
        for address in filter(None, (options.listen, options.metrics_listen, options.batch_address())):
            check_address(address)
        began = time.monotonic()
        credentials = server_credentials(options.tls) if options.tls is not None else None
        adapter = load(config)
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
            interceptors=interceptors(options.tls),
        )
        service = WorkerService(config, self.engine, timings, instruments, self._traces)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, self._server)  # type: ignore[no-untyped-call]  # generated
        self._health = Health(self._server, options.health_listen)
        self.port = bind(self._server, options.listen, credentials)
        self._batches = service.batches = _batch_port(options, service)
        if options.metrics_listen:
            host, port = split_address(options.metrics_listen)
            try:
                bound = instruments.serve(host, port)
            except OSError as error:
                raise address_error(options.metrics_listen, str(error)) from error
            logger.info("metrics", extra={"policy": config.policy, "address": f"{host}:{bound}"})

    def start(self) -> None:
        """Begins to serve, then reports SERVING."""
        keep_freed_memory()
        spare_what_is_loaded()
        self._server.start()
        self._health.set(serving=True)
        batch_port = self._batches.port if self._batches is not None else 0
        logger.info("serving", extra={"policy": self._policy, "port": self.port, "batch_port": batch_port})

    def drain(self, hurry: threading.Event | None = None) -> None:
        """Reports NOT_SERVING, lingers, lets running calls finish, and stops.

        Args:
            hurry: cuts the lingering short when set.
        """
        self._health.set(serving=False)
        logger.info("draining", extra={"policy": self._policy})
        (hurry or threading.Event()).wait(self._options.linger_s)
        stopped = self._server.stop(self._options.grace_s)
        if self._batches is not None:
            self._batches.close(self._options.grace_s)
        stopped.wait()
        self.engine.close()
        self._traces.close()
        logger.info("stopped", extra={"policy": self._policy})


def _batch_port(options: ServeOptions, service: WorkerService) -> BatchPort | None:
    """The batch port, where there is to be one. Raises TaktlineError CONFIG_INVALID where it cannot be had."""
    address = options.batch_address()
    if not address:
        return None
    host, port = split_address(address)
    context = server_context(options.tls) if options.tls is not None else None
    try:
        return BatchPort(host, service.infer, service.coming, MAX_WAITING_BATCHES + 8, port, context, service.begin)
    except OSError as error:
        raise address_error(address, error.strerror or str(error)) from error


def _gpu_memory() -> tuple[int, int] | None:
    """Bytes that this process has allocated and reserved on its GPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def serve(config: EngineConfig, options: ServeOptions) -> None:
    """Serves until SIGTERM or SIGINT, then drains (`lifecycle.run`).

    Raises:
        TaktlineError: the policy was refused before anything was served.
    """
    # PyTorch counts the machine's cores, whatever quota a container has of them.
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    run(lambda: Worker(config, options), config.policy)
