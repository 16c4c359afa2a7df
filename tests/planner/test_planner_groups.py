"""A planner in two pods: they serve together, give the plan of one process, end together, and start again together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from taktline_protocol import ErrorCode, TaktlineError, worker_pb2, worker_pb2_grpc
from taktline_protocol.deployment import ParallelOptions
from taktline_protocol.messages import Image, Observation
from taktline_protocol.rpc import from_tensor, to_item
from taktline_worker import group
from taktline_worker.models.vjepa2_ac.adapter import load

from tests.ports import free_port

LIMIT_S = 240.0
COMMAND = [sys.executable, "-c", "import sys; from taktline_worker.cli import main; sys.exit(main())", "serve"]


class Pods:
    """The two containers of a group, as a kubelet would run them; each has its own log."""

    def __init__(self, folder: Path, config: Path) -> None:
        self._folder, self._config = folder, config
        self.ports = [free_port(), free_port()]
        self.store_port = free_port()
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        place = {
            "NNODES": "2",
            "NODE_RANK": str(node),
            "LOCAL_WORLD_SIZE": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(self.store_port),
            "POD_IP": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        with (self._folder / f"{node}.log").open("ab") as log:
            self.running[node] = subprocess.Popen(
                [
                    *COMMAND,
                    "--config",
                    str(self._config),
                    "--listen",
                    f"127.0.0.1:{self.ports[node]}",
                    "--linger-s",
                    "0",
                ],
                env=os.environ | place,
                stderr=log,
            )

    def is_ready(self, node: int) -> bool:
        with grpc.insecure_channel(f"127.0.0.1:{self.ports[node]}") as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def rank_pids(self, node: int) -> list[int]:
        parent = self.running[node].pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return [int(pid) for pid in children]

    def log(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in sorted(self._folder.glob("*.log")))

    def wait_for(self, holds: Callable[[], bool], what: str) -> None:
        ends = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < ends, f"{what} did not come\n{self.log()}"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def folder(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.folder(tmp_path_factory.mktemp("groups") / "planner")


@pytest.fixture
def pods(kit: Any, folder: Path, tmp_path: Path) -> Iterator[Pods]:
    config = kit.config(folder, buckets=(1,), parallel=ParallelOptions(search=2))
    path = tmp_path / "engine.json"
    path.write_bytes(msgspec.json.encode(config))
    made = Pods(tmp_path, path)
    yield made
    for process in made.running.values():
        process.kill()
        process.wait()


def plan_of(kit: Any, port: int) -> Any:
    good = kit.observe()
    asked = Observation(
        robot_id="arm",
        seq=1,
        captured_at=0.0,
        budget_ms=120_000.0,
        images={name: Image("raw", image.data, (128, 128, 3)) for name, image in good.images.items()},
        state=good.state.tolist(),
        instruction="reach the goal image",
        seed=30,
    )
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = worker_pb2.InferRequest(policy="planner", items=[to_item("0", asked, asked.budget_ms)])
        (result,) = worker_pb2_grpc.WorkerStub(channel).Infer(request, timeout=LIMIT_S).results
    assert not result.HasField("error"), result.error
    return from_tensor("actions", result.actions).to_numpy()


def test_a_group_serves_together_ends_together_and_starts_again(kit: Any, folder: Path, pool: Any, pods: Pods) -> None:
    alone = load(kit.config(folder, buckets=(1,)))
    row = alone.begin(kit.observe(seed=30), pool).result()
    (expected,) = alone.finish([row], alone.run([row], 1))

    pods.start(1)  # the pods of a group start in any order
    pods.wait_for(lambda: bool(pods.rank_pids(1)), "a rank in pod 1")
    assert not pods.is_ready(1)
    pods.start(0)
    pods.wait_for(lambda: pods.is_ready(0) and pods.is_ready(1), "a ready group")
    np.testing.assert_array_equal(plan_of(kit, pods.ports[0]), expected.actions)

    os.kill(pods.rank_pids(1)[0], signal.SIGKILL)
    pods.wait_for(lambda: all(one.poll() is not None for one in pods.running.values()), "the end of both pods")
    assert [pods.running[node].returncode for node in (0, 1)] == [group.EXIT_LOST, group.EXIT_LOST], pods.log()

    for node in (0, 1):
        pods.start(node)
    pods.wait_for(lambda: pods.is_ready(0) and pods.is_ready(1), "the group again")
    np.testing.assert_array_equal(plan_of(kit, pods.ports[0]), expected.actions)

    # A leader that is told to leave lets the others go, which then wait for the next one.
    pods.running[0].send_signal(signal.SIGTERM)
    pods.wait_for(lambda: all(one.poll() is not None for one in pods.running.values()), "the end of both pods")
    assert pods.running[0].returncode == 0, pods.log()


def test_a_group_of_another_size_than_the_engine_asks_for_is_refused(pods: Pods) -> None:
    environment = {"NNODES": "3", "NODE_RANK": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "29400"}
    found = subprocess.run(
        [*COMMAND, "--config", str(pods._config)], env=os.environ | environment, capture_output=True, text=True
    )
    assert found.returncode == 2
    assert "3 pods of 1 ranks each, and engine.parallel asks for 2 ranks" in found.stderr


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"NODE_RANK": "2"}, "NODE_RANK is '2', not a number from 0 to 1"),
        ({"NNODES": "many"}, "NNODES is 'many'"),
        ({"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE is ''"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ],
)
def test_a_wrong_place_is_refused_by_its_variable(changed: dict[str, str], words: str) -> None:
    whole = {
        "NNODES": "2",
        "NODE_RANK": "0",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "planner-0.ranks",
        "MASTER_PORT": "29400",
    }
    with pytest.raises(TaktlineError, match=words) as caught:
        group.from_environment(whole | changed)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_a_place_counts_ranks_as_torchrun_does() -> None:
    variables = {"NNODES": "3", "NODE_RANK": "2", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    place = group.from_environment(variables)
    assert place is not None
    assert (place.size, list(place.ranks), place.leads) == (12, [8, 9, 10, 11], False)
    assert group.from_environment({}) is None
    assert group.from_environment({"NNODES": "1"}) is None
