"""GR00T behind the platform: a real worker and a real gateway, over REST, the timed stream and GR00T's own protocol."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
import zmq
from taktline import ErrorCode, Robot, TaktlineError
from taktline_gateway.compat.groot_arrays import Generation, decode_groot, encode_groot
from taktline_operator.spec import parse
from taktline_operator.workload import engine_json
from taktline_protocol.deployment import ClientMapping, EngineConfig, Route, RoutingTable, Target
from taktline_protocol.limits import Limits
from taktline_worker.models.groot.adapter import load

from tests.ports import free_port

READY_TIMEOUT_S = 120
FRAME = np.zeros((64, 64, 3), np.uint8)
MAPPING = ClientMapping(
    images={"video/image": "image", "video/wrist_image": "wrist_image"},
    state=("state/arm", "state/gripper"),
    actions={"arm": 3, "gripper": 1},
)


@contextlib.contextmanager
def program(log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("w") as stream:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / command[0]), *command[1:]],
            stderr=stream,
            stdout=stream,
            env=environment,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.fixture(scope="module")
def served(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int, Path]]:
    """URL of the gateway, its GR00T port, and the checkpoint folder."""
    folder = tmp_path_factory.mktemp("served")
    checkpoint = kit.folder(folder / "checkpoint")
    (folder / "engine.json").write_bytes(msgspec.json.encode(kit.config(checkpoint)))
    rpc, http, groot = free_port(), free_port(), free_port()
    target = Target(address=f"127.0.0.1:{rpc}", revision="r1")
    route = Route(policy="groot", family="gr00t-n1.7", revision="r1", targets=(target,), clients={"groot": MAPPING})
    route = msgspec.structs.replace(route, control_budget_ms=20_000.0)
    (folder / "routes.json").write_bytes(msgspec.json.encode(RoutingTable(routes=(route,))))
    worker = ("taktline-worker", "serve", "--config", str(folder / "engine.json"), "--listen", f"127.0.0.1:{rpc}")
    gateway = ("taktline-gateway", "serve", "--routes", str(folder / "routes.json"), "--listen", f"127.0.0.1:{http}")
    with (
        program(folder / "worker.log", *worker) as first,
        program(folder / "gateway.log", *gateway, "--groot-listen", f"groot=127.0.0.1:{groot}") as second,
    ):
        url, end = f"http://127.0.0.1:{http}", time.monotonic() + READY_TIMEOUT_S
        while not ready(url):
            logs = (folder / "worker.log").read_text()[-2000:] + (folder / "gateway.log").read_text()[-2000:]
            assert first.poll() is None, logs
            assert second.poll() is None, logs
            assert time.monotonic() < end, logs
            time.sleep(0.2)
        yield url, groot, checkpoint


def ready(url: str) -> bool:
    with contextlib.suppress(TaktlineError), Robot(url, "groot", "probe") as robot:
        return bool(robot.info().ready)
    return False


@pytest.mark.parametrize("transport", ["http", "stream"])
def test_a_robot_gets_what_the_engine_answers(
    kit: Any, served: tuple[str, int, Path], pool: Any, transport: Any
) -> None:
    url, _, checkpoint = served
    adapter = load(kit.config(checkpoint))
    given = kit.observe()
    row = adapter.begin(given, pool).result()
    (expected,) = adapter.finish([row], adapter.run([row], 1))
    images = {name: np.frombuffer(image.data, np.uint8).reshape(image.shape) for name, image in given.images.items()}
    with Robot(url, "groot", f"arm-{transport}", transport=transport) as robot:
        for _ in range(2):  # over the stream the second one's frames are references to the first one's
            chunk = robot.act(images, given.state, given.instruction, budget_ms=60_000, seed=given.seed)
            assert chunk.actions == pytest.approx(expected, abs=1e-5)
            assert chunk.dt_s == 0.05
        assert robot.metrics.transport == transport


@pytest.mark.parametrize("transport", ["http", "stream"])
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"images": {"image": FRAME}}, ErrorCode.CAMERA_MISSING),
        ({"images": dict.fromkeys(("image", "wrist_image", "third"), FRAME)}, ErrorCode.CAMERA_UNKNOWN),
        ({"state": [0.0] * 7}, ErrorCode.STATE_INVALID),
        ({"instruction": "grasp it " * 110}, ErrorCode.INSTRUCTION_INVALID),
    ],
)
def test_refusals_reach_the_robot_whole(
    served: tuple[str, int, Path], changes: dict[str, Any], code: ErrorCode, transport: Any
) -> None:
    values: dict[str, Any] = {
        "images": dict.fromkeys(("image", "wrist_image"), FRAME),
        "state": [0.0] * 4,
        "instruction": "pick it up",
        "budget_ms": 60_000,
    }
    name = f"arm-{transport}-{code.value}"
    with Robot(served[0], "groot", name, transport=transport) as robot, pytest.raises(TaktlineError) as caught:
        robot.act(**(values | changes))
    assert caught.value.code is code


def test_the_examples_deployment_is_one_that_a_worker_loads(kit: Any, served: tuple[str, int, Path]) -> None:
    """deploy/examples/gr00t-a100.yaml on a CPU, with this folder and its embodiment."""
    body = yaml.safe_load((Path(__file__).parents[2] / "deploy/examples/gr00t-a100.yaml").read_text())
    body["spec"]["model"] |= {"source": {"path": str(served[2])}, "statistics": "libero_sim"}
    policy = parse(body | {"metadata": body["metadata"] | {"namespace": "line"}})
    config = msgspec.json.decode(engine_json(policy, policy.spec.pools[0]), type=EngineConfig)
    engine = msgspec.structs.replace(config.engine, device="cpu", precision="fp32")
    adapter = load(msgspec.structs.replace(config, engine=engine))
    assert (adapter.description.family, adapter.description.cameras) == ("gr00t-n1.7", ("image", "wrist_image"))


def test_a_groot_client_gets_its_named_actions(kit: Any, served: tuple[str, int, Path]) -> None:
    _, port, _ = served
    images = {
        name: np.frombuffer(image.data, np.uint8).reshape(1, 1, *image.shape)
        for name, image in kit.observe().images.items()
    }
    observation = {
        "video": images,
        "state": {
            "arm": np.array([[[0.5, 0.25, 2.0]]], np.float32),
            "gripper": np.array([[[0.04]]], np.float32),
        },
        "language": {"annotation.human.action.task_description": [["pick up the red block"]]},
    }
    with zmq.Context() as context, context.socket(zmq.REQ) as client:
        client.RCVTIMEO = client.SNDTIMEO = 30_000
        client.connect(f"tcp://127.0.0.1:{port}")

        def ask(endpoint: str, **data: Any) -> Any:
            request = {"endpoint": endpoint, "data": data} if data else {"endpoint": endpoint}
            client.send(encode_groot(request, Generation.MSGPACK_NUMPY))
            return decode_groot(client.recv(), Limits())[0]

        assert ask("ping")["status"] == "ok"
        action, info = ask("get_action", observation=observation, options=None)
        assert {name: part.shape for name, part in action.items()} == {"arm": (1, 6, 3), "gripper": (1, 6, 1)}
        assert all(np.isfinite(part).all() and part.dtype == np.float32 for part in action.values())
        assert (np.abs(action["arm"][0, :, 0]) <= 0.2).all()
        assert info["revision"] == ["r1"]
        wrong = observation | {"state": {"arm": observation["state"]["arm"]}}
        assert "state" in ask("get_action", observation=wrong, options=None)["error"]
