"""How a worker process starts, listens and leaves, whatever it serves: config, addresses, health, signals."""

from __future__ import annotations

import ctypes
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

import grpc
import msgspec
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from taktline_protocol import ErrorCode, TaktlineError, worker_pb2
from taktline_protocol.deployment import EngineConfig
from taktline_protocol.limits import MIB

from taktline_worker.tls import TlsFiles

logger = logging.getLogger(__name__)

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
_UNIX = "unix:"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 512 * MIB
_KEPT_BLOCK_BYTES = 32 * MIB  # the most that glibc takes


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How the process listens and leaves.

    Attributes:
        listen: gRPC host:port; port 0 takes a free one. Replicas listen on `unix:PATH`.
        metrics_listen: Prometheus host:port, or empty.
        linger_s: after SIGTERM, how long calls are still taken, so that gateways see NOT_SERVING first.
        grace_s: after that, how long calls that run may take.
        tls: certificates of the gRPC port and the batch port; None speaks plain text.
        health_listen: host:port that answers health checks in plain text, or empty: a kubelet's probes know no TLS.
        batch_port: TCP port of `listen`'s host on which batches are taken beside gRPC; 0 is any free one, None opens
            none. Replicas, which serve one worker, have none.
    """

    listen: str
    metrics_listen: str = ""
    linger_s: float = 1.0
    grace_s: float = 30.0
    tls: TlsFiles | None = None
    health_listen: str = ""
    batch_port: int | None = 0

    def batch_address(self) -> str:
        """HOST:PORT of the batch port, empty where there is none.

        Raises:
            TaktlineError: CONFIG_INVALID for a `listen` that is not HOST:PORT, or has the same port.
        """
        if self.batch_port is None or self.listen.startswith(_UNIX):
            return ""
        host, port = split_address(self.listen)
        if self.batch_port and self.batch_port == port:
            raise address_error(self.listen, "it is the batch port, too")
        return f"[{host}]:{self.batch_port}" if ":" in host else f"{host}:{self.batch_port}"


class Serving(Protocol):
    """What `run` starts and drains."""

    def start(self) -> None:
        """Begins to serve."""

    def drain(self, hurry: threading.Event | None = None) -> None:
        """Lets running calls finish and stops; `hurry` cuts waiting short."""


class Health:
    """The standard health service, under the empty name and the worker's.

    Args:
        server: the worker's own, which answers health checks as well.
        listen: host:port of one more that answers nothing else, in plain text and from now on; empty for none.

    Raises:
        TaktlineError: CONFIG_INVALID where the address cannot be listened on.
    """

    def __init__(self, server: grpc.Server, listen: str = "") -> None:
        self._servicer = health.HealthServicer(
            experimental_non_blocking=True, experimental_thread_pool=ThreadPoolExecutor(4, thread_name_prefix="health")
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        self.set(serving=False)
        self._plain = grpc.server(ThreadPoolExecutor(2, thread_name_prefix="probes")) if listen else None
        if self._plain is not None:
            health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._plain)
            check_address(listen)
            bind(self._plain, listen, None)
            self._plain.start()

    def set(self, *, serving: bool) -> None:
        """Tells every watcher."""
        status = health_pb2.HealthCheckResponse
        for service in ("", SERVICE_NAME):
            self._servicer.set(service, status.SERVING if serving else status.NOT_SERVING)


def read_config(path: Path) -> EngineConfig:
    """Reads `engine.json`.

    Raises:
        TaktlineError: CONFIG_INVALID where it is absent or does not fit.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineConfig)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"{path} is no engine config: {reason}",
            "the operator writes this file; its fields: docs/engine.md",
        ) from error


def run(make: Callable[[], Serving], policy: str) -> None:
    """Serves what `make` returns until SIGTERM or SIGINT, then drains; a second signal cuts the lingering short.

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
        server = make()
        serving.set()
    except _StoppedError:
        logger.info("stopped while loading", extra={"policy": policy})
        return
    server.start()
    stop.wait()
    server.drain(hurry)


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
        raise address_error(address, "it is not HOST:PORT")
    return host.strip("[]"), int(port)


def check_address(address: str) -> None:
    """Binds `address` for an instant; a Unix socket is left to `bind`.

    Raises:
        TaktlineError: CONFIG_INVALID where it is malformed, taken, or not this machine's.
    """
    if address.startswith(_UNIX):
        return
    host, port = split_address(address)
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise address_error(address, error.strerror or str(error)) from error


def bind(server: grpc.Server, listen: str, credentials: grpc.ServerCredentials | None) -> int:
    """Binds the server; returns the port.

    Raises:
        TaktlineError: CONFIG_INVALID where the port cannot be had.
    """
    try:
        if credentials is not None:
            return int(server.add_secure_port(listen, credentials))
        return int(server.add_insecure_port(listen))
    except RuntimeError as error:
        raise address_error(listen, "the port was taken meanwhile") from error


def address_error(address: str, reason: str) -> TaktlineError:
    """CONFIG_INVALID for an address that cannot be listened on."""
    return TaktlineError(
        ErrorCode.CONFIG_INVALID, f"cannot listen on {address}: {reason}", "choose a free HOST:PORT of this machine"
    )


def spare_what_is_loaded() -> None:
    """What exists by now lives as long as the process: the collector need not walk it in the middle of a batch.

    With PyTorch and a policy that is a quarter of a second, now and then, in which no thread gets on.
    """
    gc.collect()
    gc.freeze()


def keep_freed_memory() -> None:
    """Lets this process keep what frames of cameras are decoded into, instead of mapping its pages anew each time.

    glibc gives blocks above 128 KiB back to the system; the page faults of the next frame cost as long as decoding it.
    Call it once the checkpoint is loaded: that memory is to be given back. Without glibc it does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK_BYTES)
