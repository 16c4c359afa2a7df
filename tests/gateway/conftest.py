"""A real gateway process before scripted workers (real gRPC, fixed times, faults on command)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest
from taktline_protocol import Image, Observation
from taktline_protocol.codecs import MediaType, decode_chunk, decode_error, encode
from taktline_protocol.metrics import WORKERS_BY_BATCH_PORT

from tests.ports import free_port
from tests.waiting import until

HERE = Path(__file__).parent
FRAME = Image("raw", bytes(3 * 8 * 8), (8, 8, 3))


class Stack:
    """One gateway and its scripted workers, all real processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.routes = folder / "routes.json"
        self.record = folder / "record.jsonl"
        self.workers: dict[str, subprocess.Popen] = {}
        self.gateway: subprocess.Popen | None = None
        self.log = folder / "gateway.log"
        self.url = ""
        self._seq = 0
        # One client for all: building its TLS context takes longer than a request.
        self.http = httpx.Client(timeout=60, verify=False)

    def start_worker(self, address: str | None = None, **options) -> str:
        address = address or f"127.0.0.1:{free_port()}"
        flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, str(HERE / "scripted_worker.py"), "--listen", address, "--record", str(self.record)]
        self.workers[address] = subprocess.Popen(
            [*command, *flags], stderr=(self.folder / f"worker-{address}.log").open("w")
        )
        return address

    def write_routes(self, *addresses, **options) -> None:
        route = {
            "policy": "scripted",
            "targets": [{"address": address} for address in addresses],
            "max_batch": 8,
            "max_wait_ms": 0,
            **options,
        }
        temporary = self.routes.with_suffix(".new")
        temporary.write_text(json.dumps({"routes": [route]}))
        temporary.replace(self.routes)

    def start_gateway(self, *flags: str, port: int | None = None) -> None:
        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.gateway = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "taktline-gateway"),
                "serve",
                "--routes",
                str(self.routes),
                "--listen",
                f"127.0.0.1:{port}",
                *flags,
            ],
            stderr=self.log.open("w"),
        )

        def healthy():
            assert self.gateway.poll() is None, self.log.read_text()
            try:
                return self.http.get(f"{self.url}/healthz").status_code == 200
            except httpx.HTTPError:
                return False

        until(healthy, "the gateway answering /healthz")

    def wait_workers(self, count: int, policy: str = "scripted") -> None:
        until(lambda: self.policy(policy).get("workers", 0) == count, f"{count} workers of {policy} up")

    def wait_batch_ports(self, count: int, policy: str = "scripted") -> None:
        """Until batches go to the batch ports of so many workers."""
        until(
            lambda: self.metric(WORKERS_BY_BATCH_PORT, policy=policy, state="open") == count,
            f"{count} batch ports of {policy} being open",
        )

    def policy(self, name: str = "scripted") -> dict:
        return self.http.get(f"{self.url}/v1/policies/{name}").json()

    def metric(self, name: str, **labels) -> float:
        """Sum of the samples of a metric whose labels include `labels`."""
        total = 0.0
        for line in self.http.get(f"{self.url}/metrics").text.splitlines():
            if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def batches(self) -> list[dict]:
        return [json.loads(line) for line in self.record.read_text().splitlines()] if self.record.exists() else []

    def observation(self, robot: str = "arm", **changes) -> Observation:
        self._seq += 1
        base = Observation(
            robot_id=robot,
            session_id=f"session of {robot}",
            seq=self._seq,
            captured_at=100.0,
            sent_at=100.002,
            budget_ms=20_000.0,
            images={"front": FRAME, "wrist": FRAME},
            state=[0.0] * 6,
            instruction="go",
        )
        return msgspec.structs.replace(base, **changes)

    def act(self, observation: Observation | None = None, **changes):
        """Sends one observation; returns (status, ActionChunk or ErrorBody)."""
        sent = observation if observation is not None else self.observation(**changes)
        return self.post(encode(sent, MediaType.MSGPACK))

    def post(self, body: bytes, media: str = "application/msgpack", policy: str = "scripted"):
        answer = self.http.post(f"{self.url}/v1/policies/{policy}/act", content=body, headers={"content-type": media})
        return parse(answer)

    def stop(self) -> None:
        self.http.close()
        for process in [self.gateway, *self.workers.values()]:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def parse(answer: httpx.Response):
    media = MediaType(answer.headers["content-type"])
    decode = decode_chunk if answer.status_code == 200 else decode_error
    return answer.status_code, decode(answer.content, media)


@pytest.fixture
def bare_stack(tmp_path):
    """A stack with nothing started."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    made = Stack(tmp_path)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def shared_stack(tmp_path_factory):
    """One gateway and one worker for tests that leave no trace."""
    made = Stack(tmp_path_factory.mktemp("stack"))
    made.write_routes(made.start_worker())
    made.start_gateway()
    made.wait_workers(1)
    yield made
    made.stop()
