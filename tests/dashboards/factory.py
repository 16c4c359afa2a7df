"""The factory of the incident run: a real gateway, workers, a real worker with a model, and robots."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import numpy as np
from taktline import Robot
from taktline_protocol import Image, Observation, TaktlineError
from taktline_protocol.codecs import MediaType, encode
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig

from .conftest import ROOT
from .prometheus_run import free_port

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
FRAME = Image("raw", bytes(3 * 8 * 8), (8, 8, 3))
MODEL = ROOT / "demo/checkpoint"
MODEL_POLICY = "reach"


@dataclass
class Fleet:
    """Robots of one policy: how many, how often each asks, and the budget they give."""

    policy: str
    robots: int
    period_s: float
    budget_ms: float
    observation: Observation
    seen: list[int] = field(default_factory=list)  # status codes


class Robots:
    """Sends observations from a thread of its own; a fleet may be changed while it runs."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.fleets: dict[str, Fleet] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def set(self, fleet: Fleet) -> None:
        self.fleets[fleet.policy] = fleet

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)

    async def _run(self) -> None:
        running: dict[tuple[str, int], asyncio.Task] = {}
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=self.url, timeout=30, verify=False, limits=limits) as http:
            while not self._stop.is_set():
                wanted = {(f.policy, number) for f in self.fleets.values() for number in range(f.robots)}
                for key in wanted - running.keys():
                    running[key] = asyncio.create_task(self._robot(http, *key))
                for key in running.keys() - wanted:
                    running.pop(key).cancel()
                await asyncio.sleep(0.1)
            for task in running.values():
                task.cancel()

    async def _robot(self, http: httpx.AsyncClient, policy: str, number: int) -> None:
        await asyncio.sleep(self.fleets[policy].period_s * (number % 7) / 7)
        seq = 0
        while True:
            fleet = self.fleets[policy]
            seq += 1
            now = time.monotonic()
            sent = msgspec.structs.replace(
                fleet.observation,
                robot_id=f"{policy}-{number}",
                session_id=f"{policy}-{number}",
                seq=seq,
                captured_at=now - 0.004,
                sent_at=now,
                budget_ms=fleet.budget_ms,
            )
            try:
                answer = await http.post(
                    f"/v1/policies/{policy}/act",
                    content=encode(sent, MediaType.MSGPACK),
                    headers={"content-type": MediaType.MSGPACK.value},
                )
                fleet.seen.append(answer.status_code)
            except httpx.HTTPError:
                fleet.seen.append(0)
            await asyncio.sleep(max(0.0, now + fleet.period_s - time.monotonic()))


class StreamingRobot:
    """One more robot of a policy, which keeps a stream open as the client library does; from a thread of its own."""

    def __init__(self, url: str, policy: str, period_s: float, budget_ms: float) -> None:
        self.answers = 0
        self._stop = threading.Event()
        self._arguments = (url, policy, period_s, budget_ms)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        url, policy, period_s, budget_ms = self._arguments
        frames = {"front": np.zeros((8, 8, 3), np.uint8)}
        with Robot(url, policy, "streaming", transport="stream") as robot:
            while not self._stop.wait(period_s):
                with contextlib.suppress(TaktlineError):  # the gateway is killed at last
                    robot.act(frames, [0.0, 0.0], "go", budget_ms)
                    self.answers += 1


class Factory:
    """All processes but Prometheus; `stop` ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen] = {}
        self.addresses: dict[str, str] = {}
        self.routes: dict[str, dict] = {}
        self._carried: list[dict] = []  # by an operator
        self._writing = threading.Lock()
        self.gateway = f"127.0.0.1:{free_port()}"
        self.worker_metrics = f"127.0.0.1:{free_port()}"

    def worker(self, name: str, policy: str, **options: float | str) -> str:
        """Starts a scripted worker, again on its old address where it had one; returns the address."""
        address = self.addresses.setdefault(name, f"127.0.0.1:{free_port()}")
        flags = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]
        command = [sys.executable, str(HERE / "incident_worker.py"), "--listen", address, "--policy", policy]
        self._start(name, [*command, "--speed-file", str(self.folder / f"{name}.speed"), *flags])
        return address

    def speed(self, name: str, factor: float) -> None:
        """From now on the worker takes `factor` times as long as it says."""
        file = self.folder / f"{name}.speed"
        part = file.with_suffix(".part")
        part.write_text(str(factor))
        part.replace(file)

    def model_worker(self) -> str:
        """Starts a real worker with the demo policy on the CPU; returns its address."""
        config = EngineConfig(
            policy=MODEL_POLICY,
            model=ModelConfig(family="pi05", path=str(MODEL), revision="demo"),
            engine=EngineOptions(device="cpu", precision="fp32", buckets=(1, 2)),
        )
        file = self.folder / "engine.json"
        file.write_bytes(msgspec.json.encode(config))
        address = f"127.0.0.1:{free_port()}"
        command = [BIN / "taktline-worker", "serve", "--config", file, "--listen", address]
        self._start("model", [*command, "--metrics-listen", self.worker_metrics])
        return address

    def route(self, policy: str, *targets: dict, **options: float) -> None:
        self.routes[policy] = {"policy": policy, "targets": list(targets), "max_wait_ms": 0, **options}
        self._write_routes()

    def carry(self, routes: list[dict]) -> None:
        """Routes of other policies, as an operator wrote them; they replace those carried before."""
        self._carried = routes
        self._write_routes()

    def _write_routes(self) -> None:
        with self._writing:
            part = self.folder / "routes.part"
            part.write_text(json.dumps({"routes": [*self.routes.values(), *self._carried]}))
            part.replace(self.folder / "routes.json")

    def start_gateway(self) -> None:
        command = [BIN / "taktline-gateway", "serve", "--routes", self.folder / "routes.json", "--listen", self.gateway]
        self._start("gateway", command)

    def policy(self, name: str) -> dict:
        return httpx.get(f"http://{self.gateway}/v1/policies/{name}", timeout=10).json()

    def ready(self, policies: Sequence[str]) -> bool:
        """Whether every policy has its workers; fails where a process has ended by itself."""
        for name, process in list(self.processes.items()):
            assert process.poll() is None, f"{name}: {(self.folder / f'{name}.log').read_text()[-2000:]}"
        try:
            return all(self.policy(name).get("workers", 0) == len(self.routes[name]["targets"]) for name in policies)
        except httpx.HTTPError:
            return False

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes.pop(name).wait()

    def stop(self) -> None:
        for name in list(self.processes):
            self.kill(name)

    def _start(self, name: str, command: list) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRPC_ENABLE_FORK_SUPPORT": "false"}
        log = (self.folder / f"{name}.log").open("a")
        self.processes[name] = subprocess.Popen([str(part) for part in command], stderr=log, env=environment)


def scripted_observation() -> Observation:
    """What the scripted workers take."""
    return Observation(
        robot_id="",
        session_id="",
        seq=0,
        captured_at=0.0,
        sent_at=0.0,
        budget_ms=0.0,
        images={"front": FRAME},
        state=[0.0, 0.0],
        instruction="go",
    )


def model_observation(info: dict) -> Observation:
    """What the real policy takes."""
    frame = Image("raw", bytes(3 * 84 * 84), (84, 84, 3))
    base = scripted_observation()
    images = dict.fromkeys(info["cameras"], frame)
    return msgspec.structs.replace(
        base, images=images, state=[0.0] * info["state_dim"], instruction="reach the red block"
    )
