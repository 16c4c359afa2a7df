"""A running stack: a real gateway before a real worker on a real checkpoint, as processes on loopback."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig
from taktline_protocol.messages import PolicyInfo

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
DEMO = ROOT / "demo" / "checkpoint"
TINY = ROOT / "tests" / "golden" / "pi05_tiny" / "lerobot_folder"
READY_TIMEOUT_S = 180.0


@dataclasses.dataclass
class RunningStack:
    """What a test needs of a running stack, however it was started."""

    url: str
    policy: str
    checkpoint: Path
    processes: dict[str, subprocess.Popen] = dataclasses.field(default_factory=dict)

    def info(self) -> PolicyInfo:
        answer = httpx.get(f"{self.url}/v1/policies/{self.policy}", timeout=30)
        return msgspec.json.decode(answer.content, type=PolicyInfo)

    def alive(self) -> dict[str, bool]:
        return {name: process.poll() is None for name, process in self.processes.items()}


def engine_config(policy: str, checkpoint: Path, revision: str = "e2e", family: str = "pi05") -> EngineConfig:
    """The demo checkpoint as it is; the golden one needs nothing else either."""
    return EngineConfig(
        policy=policy,
        model=ModelConfig(family=family, path=str(checkpoint), revision=revision),
        engine=EngineOptions(device="cpu", precision="fp32", buckets=(1, 2)),
    )


def start_worker(folder: Path, config: EngineConfig, address: str) -> subprocess.Popen:
    path = folder / "engine.json"
    path.write_bytes(msgspec.json.encode(config))
    return subprocess.Popen(
        [str(BIN / "taktline-worker"), "serve", "--config", str(path), "--listen", address],
        stderr=(folder / "worker.log").open("w"),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_until(condition, what: str, logs: list[Path], timeout_s: float = READY_TIMEOUT_S):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            if found := condition():
                return found
        except (httpx.HTTPError, msgspec.MsgspecError):
            pass
        time.sleep(0.1)
    tails = "\n".join(log.read_text()[-3000:] for log in logs if log.exists())
    raise AssertionError(f"{what} did not happen within {timeout_s} s\n{tails}")


@contextlib.contextmanager
def started(folder: Path, config: EngineConfig, **route: object) -> Iterator[RunningStack]:
    """A worker that serves `config`, and a gateway before it with more of its `route`, once both can be asked."""
    stack = RunningStack(f"http://127.0.0.1:{free_port()}", config.policy, Path(config.model.path))
    address = f"127.0.0.1:{free_port()}"
    routes = folder / "routes.json"
    routes.write_text(json.dumps({"routes": [{"policy": stack.policy, "targets": [{"address": address}], **route}]}))
    stack.processes["worker"] = start_worker(folder, config, address)
    stack.processes["gateway"] = subprocess.Popen(
        [
            str(BIN / "taktline-gateway"),
            "serve",
            "--routes",
            str(routes),
            "--listen",
            stack.url.removeprefix("http://"),
        ],
        stderr=(folder / "gateway.log").open("w"),
    )
    try:
        wait_until(
            lambda: all(stack.alive().values()) and stack.info().ready,
            "the policy becoming ready",
            [folder / "worker.log", folder / "gateway.log"],
        )
        yield stack
    finally:
        for process in stack.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="session")
def running_stack(tmp_path_factory):
    """Gateway and worker on the demo checkpoint where it is there, else on the golden folder."""
    checkpoint = DEMO if (DEMO / "model.safetensors").exists() else TINY
    with started(tmp_path_factory.mktemp("e2e"), engine_config("demo-reach", checkpoint)) as stack:
        yield stack
