"""MiniCPM-Robot behind the platform: a real worker process and a real gateway, over REST and over the timed stream."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from taktline import ErrorCode, Robot, TaktlineError
from taktline_operator.spec import parse
from taktline_operator.workload import engine_json
from taktline_protocol.deployment import EngineConfig, Route, RoutingTable, Target
from taktline_worker.engine import Engine, Item
from taktline_worker.models.minicpm_robot.adapter import load

from tests.ports import free_port

READY_TIMEOUT_S = 240


@contextlib.contextmanager
def program(log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("w") as stream:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / command[0]), *command[1:]], stderr=stream, stdout=stream, env=environment
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.fixture(scope="module")
def served(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """URL of the gateway, and the checkpoint folder."""
    folder = tmp_path_factory.mktemp("served")
    checkpoint = kit.served(folder / "checkpoint")
    (folder / "engine.json").write_bytes(msgspec.json.encode(kit.config(checkpoint)))
    rpc, http = free_port(), free_port()
    target = Target(address=f"127.0.0.1:{rpc}", revision="r1")
    route = Route(policy="manip", family="minicpm-robot", revision="r1", targets=(target,))
    (folder / "routes.json").write_bytes(msgspec.json.encode(RoutingTable(routes=(route,))))
    worker = ("taktline-worker", "serve", "--config", str(folder / "engine.json"), "--listen", f"127.0.0.1:{rpc}")
    gateway = ("taktline-gateway", "serve", "--routes", str(folder / "routes.json"), "--listen", f"127.0.0.1:{http}")
    with program(folder / "worker.log", *worker) as first, program(folder / "gateway.log", *gateway) as second:
        url, end = f"http://127.0.0.1:{http}", time.monotonic() + READY_TIMEOUT_S
        while not ready(url):
            logs = (folder / "worker.log").read_text()[-2000:] + (folder / "gateway.log").read_text()[-2000:]
            assert first.poll() is None, logs
            assert second.poll() is None, logs
            assert time.monotonic() < end, logs
            time.sleep(0.2)
        yield url, checkpoint


def ready(url: str) -> bool:
    with contextlib.suppress(TaktlineError), Robot(url, "manip", "probe") as robot:
        return bool(robot.info().ready)
    return False


@pytest.mark.parametrize("transport", ["http", "stream"])
def test_a_robot_gets_what_the_engine_answers(kit: Any, served: tuple[str, Path], pool: Any, transport: Any) -> None:
    url, checkpoint = served
    adapter = load(kit.config(checkpoint))
    given = kit.observe()
    row = adapter.begin(given, pool).result()
    (expected,) = adapter.finish([row], adapter.run([row], 1))
    images = {name: np.frombuffer(image.data, np.uint8).reshape(image.shape) for name, image in given.images.items()}
    with Robot(url, "manip", f"arm-{transport}", transport=transport) as robot:
        chunk = robot.act(images, given.state, given.instruction, budget_ms=60_000, seed=given.seed)
        assert chunk.actions == pytest.approx(expected, abs=1e-5)
        assert chunk.actions.shape == (6, 5)
        assert chunk.dt_s == 0.05
        again = robot.act(images, given.state, given.instruction, budget_ms=60_000, seed=given.seed)
        assert np.array_equal(again.actions, chunk.actions)
        assert robot.metrics.transport == transport


def test_over_the_stream_unchanged_images_count_and_a_changed_one_does_too(
    kit: Any, served: tuple[str, Path], pool: Any
) -> None:
    """The second observation travels with references to frames that the gateway holds, the third with one new frame."""
    url, checkpoint = served
    adapter = load(kit.config(checkpoint))
    given = kit.observe()
    images = {name: np.frombuffer(image.data, np.uint8).reshape(image.shape) for name, image in given.images.items()}
    changed = images | {"wrist": 255 - images["wrist"]}
    raw = replace(given.images["wrist"], data=changed["wrist"].tobytes())
    other = kit.observe(images=dict(given.images) | {"wrist": raw})
    rows = [adapter.begin(one, pool).result() for one in (given, other)]
    first, last = (adapter.finish([row], adapter.run([row], 1))[0] for row in rows)
    with Robot(url, "manip", "arm-frames", transport="stream") as robot:
        for seen, expected in ((images, first), (images, first), (changed, last)):
            chunk = robot.act(seen, given.state, given.instruction, budget_ms=60_000, seed=given.seed)
            assert chunk.actions == pytest.approx(expected, abs=1e-5)
    assert np.abs(first - last).max() > 1e-3


@pytest.mark.parametrize("transport", ["http", "stream"])
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"images": {"wrist": np.zeros((112, 112, 3), np.uint8)}}, ErrorCode.CAMERA_MISSING),
        (
            {"images": dict.fromkeys(("agentview", "wrist", "third"), np.zeros((112, 112, 3), np.uint8))},
            ErrorCode.CAMERA_UNKNOWN,
        ),
        ({"state": [0.0] * 80}, ErrorCode.STATE_INVALID),
        ({"instruction": "word " * 300}, ErrorCode.INSTRUCTION_INVALID),
    ],
)
def test_refusals_reach_the_robot_whole(
    served: tuple[str, Path], changes: dict[str, Any], code: ErrorCode, transport: Any
) -> None:
    values: dict[str, Any] = {
        "images": dict.fromkeys(("agentview", "wrist"), np.zeros((112, 112, 3), np.uint8)),
        "state": [0.0] * 4,
        "instruction": "pick it up",
        "budget_ms": 60_000,
    }
    name = f"arm-{transport}-{code.value}"
    with Robot(served[0], "manip", name, transport=transport) as robot, pytest.raises(TaktlineError) as caught:
        robot.act(**(values | changes))
    assert caught.value.code is code
    assert caught.value.next_step


def test_a_bad_row_harms_no_neighbour(kit: Any, served: tuple[str, Path]) -> None:
    """Mixed lengths and one row that is refused, through the engine as the service calls it."""
    engine = Engine(load(kit.config(served[1])), (1, 2, 4))
    try:
        good, long = kit.observe(), kit.observe(instruction="Put the red block into the box. " * 6)
        bad = kit.observe(images={"agentview": replace(kit.raw(), data=b"x"), "wrist": kit.raw()})
        alone = [engine.infer([Item(one)]).outcomes[0] for one in (good, long)]
        first, second, third = engine.infer([Item(good), Item(bad), Item(long)]).outcomes
    finally:
        engine.close()
    assert isinstance(second, TaktlineError)
    assert second.code is ErrorCode.IMAGE_CORRUPT
    assert first == pytest.approx(alone[0], abs=1e-5)
    assert third == pytest.approx(alone[1], abs=1e-5)


def test_the_examples_deployment_is_one_that_a_worker_loads(served: tuple[str, Path]) -> None:
    """deploy/examples/minicpm-rtx5090.yaml on a CPU, with this folder."""
    body = yaml.safe_load((Path(__file__).parents[2] / "deploy/examples/minicpm-rtx5090.yaml").read_text())
    body["spec"]["model"]["source"] = {"path": str(served[1])}
    policy = parse(body | {"metadata": body["metadata"] | {"namespace": "line"}})
    config = msgspec.json.decode(engine_json(policy, policy.spec.pools[0]), type=EngineConfig)
    engine = msgspec.structs.replace(config.engine, device="cpu", precision="fp32")
    adapter = load(msgspec.structs.replace(config, engine=engine))
    assert (adapter.description.family, adapter.description.cameras) == ("minicpm-robot", ("scene", "hand"))
    assert adapter.processor.embodiment == 0
