"""A worker is ready only when it is done: nothing answers a probe while it loads, captures or measures itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from taktline_worker import engine, server

from tests.ports import free_port

SERVING = health_pb2.HealthCheckResponse.SERVING


def health(port: int) -> str:
    """What a kubelet's gRPC probe gets."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


class Gate:
    """Holds a function at its end until it is opened."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        found = self.inner(*arguments)
        self.reached.set()
        assert self.opened.wait(120)
        return found


def test_no_probe_succeeds_before_the_last_bucket_is_measured(
    folders: Any, config_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Graphs are captured while a policy is loaded.
    loading, measuring = Gate(server.load_adapter), Gate(engine._calibrate_bucket)
    monkeypatch.setattr(engine, "_calibrate_bucket", measuring)
    config = config_of(folders.lerobot(tmp_path / "policy", "pi05"), solver_steps=1, buckets=(1,))
    port, made = free_port(), []
    options = server.ServeOptions(f"127.0.0.1:{port}", linger_s=0.0)
    starting = threading.Thread(target=lambda: made.append(server.Worker(config, options, loading)))
    starting.start()
    try:
        for gate in (loading, measuring):
            assert gate.reached.wait(120)
            assert health(port) == "UNAVAILABLE", "nobody listens yet, so neither startup nor readiness probe passes"
            gate.opened.set()
        starting.join(120)
        (worker,) = made
        worker.start()
        assert health(port) == "SERVING"
        worker.drain()
    finally:
        for gate in (loading, measuring):
            gate.opened.set()
        starting.join(120)
