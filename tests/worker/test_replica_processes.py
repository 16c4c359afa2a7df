"""Two replicas of a policy behind one port, as processes: shared work, a death, a restart, refusals, and leaving."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from taktline_protocol import worker_pb2, worker_pb2_grpc
from taktline_protocol.deployment import ParallelOptions

from tests.waiting import until

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-c", "import sys; from taktline_worker.cli import main; sys.exit(main())"]


def gone(pid: int) -> bool:
    """Whether a process has ended; one that only waits to be collected has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


class Pod:
    """A worker with replicas, its log as it comes."""

    def __init__(self, config: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--config", str(config), "--listen", "127.0.0.1:0", "--linger-s", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def events(self, message: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in list(self.lines) if line.startswith("{")]
        return [entry for entry in found if entry["message"] == message]

    def serving(self) -> int:
        def own() -> list[dict[str, Any]]:
            return [entry for entry in self.events("serving") if "replicas" in entry]

        until(lambda: own() or self.process.poll() is not None, "serving", 120.0)
        assert self.process.poll() is None, self.lines
        return int(own()[0]["port"])

    def pids(self) -> dict[int, int]:
        return {entry["replica"]: entry["pid"] for entry in self.events("replica serves")}

    def wait(self, timeout_s: float = 60.0) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code


@pytest.fixture(scope="module")
def config_file(folders: Any, config_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replicas")
    config = config_of(
        folders.lerobot(folder / "policy", "pi05"), solver_steps=1, buckets=(1, 2), parallel=ParallelOptions(dp=2)
    )
    path = folder / "engine.json"
    path.write_bytes(msgspec.json.encode(config))
    return path


@pytest.fixture
def start(config_file: Path) -> Iterator[Callable[..., Pod]]:
    pods: list[Pod] = []

    def made(config: Path = config_file, *options: str) -> Pod:
        pods.append(Pod(config, *options))
        return pods[-1]

    yield made
    for pod in pods:
        if pod.process.poll() is None:
            pod.process.kill()
        pod.process.wait()
        for entry in pod.events("replica starts"):
            until(lambda pid=entry["pid"]: gone(pid), "the end of every replica", 30.0)  # type: ignore[misc]


@pytest.fixture
def batch(observations: Any) -> Callable[..., worker_pb2.InferRequest]:
    def made(*request_ids: str, policy: str = "tiny") -> worker_pb2.InferRequest:
        observation = observations.make()
        images = {n: worker_pb2.Image(encoding=i.encoding, data=i.data) for n, i in observation.images.items()}
        state = worker_pb2.Tensor(dtype="float32", shape=[8], data=observation.state.astype("<f4").tobytes())
        items = [
            worker_pb2.InferItem(request_id=name, images=images, state=state, instruction="go", seed=1)
            for name in request_ids
        ]
        return worker_pb2.InferRequest(policy=policy, items=items)

    return made


def test_a_death_costs_its_own_batch_only(start: Any, batch: Any, config_file: Path) -> None:
    pod = start(config_file, "--metrics-listen", "127.0.0.1:0")
    port = pod.serving()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub, health = worker_pb2_grpc.WorkerStub(channel), health_pb2_grpc.HealthStub(channel)
        info = stub.Info(worker_pb2.InfoRequest(), timeout=20)
        assert (info.policy, info.replicas, [t.batch for t in info.t_sync]) == ("tiny", 2, [1, 2])
        slowest = {t.batch: 0.0 for t in info.t_sync}
        for entry in pod.events("calibrated"):
            assert entry["replica"] in (0, 1)
            slowest[entry["bucket"]] = max(slowest[entry["bucket"]], entry["median_ms"])
        assert {t.batch: round(t.median_ms, 3) for t in info.t_sync} == slowest

        alone = stub.Infer(batch("x"), timeout=30).results[0]
        assert np.isfinite(np.frombuffer(alone.actions.data, "<f4")).all()
        assert stub.Infer(batch("x", policy="other"), timeout=30).results[0].error.code == "unknown_policy"

        # One replica stands still with what it has; the other one serves. Their shares follow the times that they
        # measured at start, which on a busy machine may be several times apart.
        pids = pod.pids()
        os.kill(pids[0], signal.SIGSTOP)
        calls = [stub.Infer.future(batch("a", "b"), timeout=60) for _ in range(8)]
        served = until(lambda: [call for call in calls if call.done()], "the answer of the other replica")
        assert [result.actions.data for result in served[0].result().results] == [alone.actions.data] * 2

        answers = [call.result().results for call in calls]  # the pod ends a replica that is stuck for ten seconds
        assert [entry["replica"] for entry in pod.events("a replica is stuck in a batch")] == [0]
        assert all([result.request_id for result in results] == ["a", "b"] for results in answers)
        lost = [result for results in answers for result in results if result.HasField("error")]
        assert lost
        assert {result.error.code for result in lost} == {"worker_failed"}
        assert all("replica 0" in result.error.message and result.error.next_step for result in lost)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=20).status == 1, "the other one serves"
        assert stub.Infer(batch("d"), timeout=30).results[0].actions.data == alone.actions.data

        until(lambda: pod.pids()[0] != pids[0], "the restart")
        ended = pod.events("a replica ended")
        assert [(entry["replica"], entry["exit_code"], entry["served"]) for entry in ended] == [(0, -9, True)]
        assert pod.pids()[1] == pids[1], "the other one was left alone"
        calls = [stub.Infer.future(batch(str(number)), timeout=60) for number in range(4)]
        assert {call.result().results[0].actions.data for call in calls} == {alone.actions.data}

        address = pod.events("metrics")[-1]["address"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
            page = answer.read().decode()
        assert 'taktline_worker_replicas{policy="tiny"} 2.0' in page
        assert 'taktline_worker_replica_restarts_total{policy="tiny"} 1.0' in page
        assert all(_sample(page, "taktline_worker_items_total", f'replica="{r}"', 'code="ok"') >= 1 for r in (0, 1))

    running = list(pod.pids().values())
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == 0
    assert all(gone(pid) for pid in running)
    assert json.loads(pod.lines[-1])["message"] == "stopped"


def test_health_without_any_replica_and_no_replica_without_its_pod(start: Any) -> None:
    pod = start()
    port = pod.serving()
    pids = pod.pids()
    assert len(pids) == 2
    status: list[int] = []

    def watch() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                for answer in stub.Watch(health_pb2.HealthCheckRequest(), timeout=120):
                    status.append(answer.status)
            except grpc.RpcError:
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    until(lambda: status == [1], "serving")
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: pod.events("a replica ended"), "the end of one")
    assert status == [1]
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: status == [1, 2], "not serving")
    pod.process.kill()
    pod.process.wait()
    watcher.join(20)


def _sample(text: str, name: str, *labels: str) -> float:
    found = [line for line in text.splitlines() if line.startswith(name) and all(label in line for label in labels)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def test_a_refused_policy_ends_with_two_and_the_reason(start: Any, config_file: Path, tmp_path: Path) -> None:
    content = json.loads(config_file.read_text())
    content["model"]["path"] = str(tmp_path / "nowhere")
    config = tmp_path / "engine.json"
    config.write_text(json.dumps(content))
    pod = start(config)
    assert pod.wait() == 2
    plain = [line for line in pod.lines if not line.startswith("{")]
    assert len(plain) == 1, "once, whatever the number of replicas"
    assert plain[0].startswith("taktline-worker: config_invalid: model.path")
    refusal = next(entry for entry in map(json.loads, pod.lines[:-1]) if entry.get("code") == "config_invalid")
    assert refusal["replica"] in (0, 1)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "steps"), [("fp32", 200), ("bf16", 1000)])
def test_two_gpus_run_two_batches_at_a_time(
    start: Any, batch: Any, config_file: Path, tmp_path: Path, precision: str, steps: int
) -> None:
    """Eager, and from captured graphs, of which each replica has its own."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    content = json.loads(config_file.read_text())
    content["engine"] |= {"device": "cuda", "precision": precision, "solver_steps": steps}
    config = tmp_path / "engine.json"
    config.write_text(json.dumps(content))
    pod = start(config, "--metrics-listen", "127.0.0.1:0")
    port = pod.serving()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        assert stub.Info(worker_pb2.InfoRequest(), timeout=20).replicas == 2
        one = stub.Infer(batch("a"), timeout=60)

        def measured(count: int) -> float:
            began = time.monotonic()
            calls = [stub.Infer.future(batch("a"), timeout=60) for _ in range(count)]
            for call in calls:
                assert call.result().results[0].actions.data == one.results[0].actions.data
            return time.monotonic() - began

        single = min(measured(1) for _ in range(5))
        pair = min(measured(2) for _ in range(5))
        address = pod.events("metrics")[-1]["address"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
            page = answer.read().decode()
    graphs = [_sample(page, "taktline_worker_graphs{", f'replica="{replica}"') for replica in (0, 1)]
    assert graphs[0] == graphs[1]
    assert (graphs[0] > 0) is (precision == "bf16")
    assert pair < 1.6 * single, "side by side, not one after the other"
