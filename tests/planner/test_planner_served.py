"""The tiny planner behind the real worker server and a real gateway: plans, reports and typed errors end to end."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from safetensors.torch import load_file
from taktline import Robot
from taktline_protocol import ErrorCode, TaktlineError, worker_pb2, worker_pb2_grpc
from taktline_protocol.messages import Array, Image, Observation, Search
from taktline_protocol.rpc import from_plan, from_tensor, to_item
from taktline_worker.server import ServeOptions, Worker


@pytest.fixture(scope="module")
def worker(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = kit.folder(tmp_path_factory.mktemp("served") / "planner")
    made = Worker(kit.config(folder, buckets=(1,)), ServeOptions("127.0.0.1:0", linger_s=0.0))
    made.start()
    yield made
    made.drain()


def observation(kit: Any, **changes: Any) -> Observation:
    good = kit.observe()
    values: dict[str, Any] = {
        "robot_id": "arm",
        "seq": 1,
        "captured_at": 0.0,
        "budget_ms": 60_000.0,
        "images": {name: Image("raw", image.data, (128, 128, 3)) for name, image in good.images.items()},
        "state": good.state.tolist(),
        "instruction": "reach the goal image",
        "seed": 30,
    }
    return Observation(**(values | changes))


def infer(worker: Worker, *sent: Observation) -> list[worker_pb2.InferResult]:
    items = [to_item(str(index), one, one.budget_ms) for index, one in enumerate(sent)]
    with grpc.insecure_channel(f"127.0.0.1:{worker.port}") as channel:
        request = worker_pb2.InferRequest(policy="planner", items=items)
        return list(worker_pb2_grpc.WorkerStub(channel).Infer(request, timeout=120).results)


def test_the_worker_answers_with_the_official_plan(golden: Path, kit: Any, worker: Worker) -> None:
    case = load_file(golden / "full" / "cem_main.safetensors")
    (result,) = infer(worker, observation(kit))
    actions = from_tensor("actions", result.actions).to_numpy()
    np.testing.assert_allclose(actions, case["returned_action"].numpy(), atol=1e-6)
    report = from_plan(result.plan)
    assert report.stopped == "rounds"
    assert report.energies.shape == (4, 2)
    assert report.predicted_states.shape == (2, 7)


def test_search_settings_travel(kit: Any, worker: Worker) -> None:
    plans = [
        infer(worker, observation(kit, search=Search(rounds=1, candidates=20, elites=5, horizon=1, previous=previous)))
        for previous in (None, Array.from_numpy(np.full((2, 7), 0.02)))
    ]
    actions = [from_tensor("actions", results[0].actions).to_numpy() for results in plans]
    assert actions[0].shape == actions[1].shape == (1, 7)
    assert not np.array_equal(*actions)
    assert from_plan(plans[0][0].plan).energies.shape == (1, 2)
    pending = Array.from_numpy(np.array([[0.03, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]))
    (ahead,) = infer(worker, observation(kit, search=Search(rounds=1, candidates=20, elites=5, pending=pending)))
    (now,) = infer(worker, observation(kit, search=Search(rounds=1, candidates=20, elites=5)))
    landings, moves = (
        [read(result)[0, 0] for result in (ahead, now)]
        for read in (
            lambda result: from_plan(result.plan).predicted_states.to_numpy(),
            lambda result: from_tensor("actions", result.actions).to_numpy(),
        )
    )
    assert landings[0] - moves[0] == pytest.approx(landings[1] - moves[1] + 0.03, abs=1e-6)


def test_a_bad_robot_does_not_harm_its_neighbour(kit: Any, worker: Worker) -> None:
    bad = observation(kit, robot_id="other", search=Search(rounds=1000))
    refused, served = infer(worker, bad, observation(kit, search=Search(rounds=1)))
    assert refused.error.code == ErrorCode.SEARCH_INVALID.value
    assert "rounds is 1000" in refused.error.message
    assert served.WhichOneof("outcome") == "actions"


@pytest.fixture(scope="module")
def gateway(kit: Any, worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with kit.gateway(worker.port, tmp_path_factory.mktemp("gateway")) as url:
        yield url


@pytest.mark.parametrize("transport", ["stream", "http"])
def test_a_robot_plans(golden: Path, kit: Any, gateway: str, transport: str) -> None:
    """The SDK, the gateway, the worker: the plan, its report, and the next plan warm-started from it."""
    case = load_file(golden / "full" / "cem_main.safetensors")
    given = kit.inputs("full")
    images = {"camera": given["frame"].numpy(), "goal": given["goal"].numpy()}
    with Robot(gateway, "planner", f"arm-{transport}", transport=transport) as robot:
        chunk = robot.act(images, given["pose"].numpy(), "reach the goal image", budget_ms=60_000, seed=30)
        np.testing.assert_allclose(chunk.actions, case["returned_action"].numpy(), atol=1e-6)
        assert chunk.plan is not None
        assert chunk.plan.stopped == "rounds"
        energies = chunk.plan.energies.to_numpy()
        assert energies.shape == (4, 2)
        assert (energies[:, 0] <= energies[:, 1]).all()
        landing = chunk.plan.predicted_states.to_numpy()[0]
        search = Search(rounds=1, previous=Array.from_numpy(chunk.actions))
        again = robot.act(images, landing, "reach the goal image", budget_ms=60_000, seed=31, search=search)
        assert again.plan is not None
        assert again.plan.energies.shape == (1, 2)


def test_a_robot_that_asks_for_room_may_say_what_its_searches_are(gateway: str) -> None:
    """All were reckoned as the deployment's whole search, and told no where they were then served."""
    url, asked = f"{gateway}/v1/policies/planner/admission", {"rate_hz": 0.01, "budget_ms": 600_000.0}
    whole, cut, short = (
        httpx.post(url, json={"robot_id": "asks", **asked, **more}).raise_for_status().json()
        for more in ({}, {"search": {"anytime": True}}, {"search": {"rounds": 1}})
    )
    assert whole["admissible"]
    for part in (cut, short):
        assert part["admissible"]
        assert part["worst_ms"] < whole["worst_ms"]
        assert part["utilisation"] < whole["utilisation"]
        assert part["spare"] > whole["spare"]
    wrong = httpx.post(url, json={"robot_id": "asks", **asked, "search": {"rounds": 0}})
    assert (wrong.status_code, wrong.json()["code"]) == (400, "invalid_body")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"images": {"camera": np.zeros((128, 128, 3), np.uint8)}}, ErrorCode.CAMERA_MISSING),
        (
            {
                "images": {
                    "camera": np.zeros((128, 128, 3), np.uint8),
                    "goal": np.zeros((64, 128, 3), np.uint8),
                }
            },
            ErrorCode.GOAL_INVALID,
        ),
        ({"state": [0.0] * 6}, ErrorCode.STATE_INVALID),
        ({"state": [float("nan")] * 7}, ErrorCode.STATE_INVALID),
        ({"state": [1e39] + [0.0] * 6}, ErrorCode.STATE_INVALID),
        ({"search": Search(pending=Array.from_numpy(np.full((1, 7), 1e300)))}, ErrorCode.SEARCH_INVALID),
        ({"search": Search(horizon=9)}, ErrorCode.SEARCH_INVALID),
        ({"search": Search(previous=Array("float32", (2, 7), b"\0"))}, ErrorCode.SEARCH_INVALID),
        ({"search": Search(budget_ms=1e-3)}, ErrorCode.DEADLINE_UNREACHABLE),
        ({"search": Search(budget_ms=-1.0)}, ErrorCode.BUDGET_INVALID),
    ],
)
def test_refusals_reach_the_robot_whole(kit: Any, gateway: str, changes: dict[str, Any], code: ErrorCode) -> None:
    given = kit.inputs("full")
    values: dict[str, Any] = {
        "images": {"camera": given["frame"].numpy(), "goal": given["goal"].numpy()},
        "state": given["pose"].numpy(),
        "instruction": "reach the goal image",
        "budget_ms": 60_000,
    }
    robot_id = f"arm-{uuid.uuid4().hex}"  # a robot of one name may have one session at a time
    with Robot(gateway, "planner", robot_id) as robot, pytest.raises(TaktlineError) as caught:
        robot.act(**(values | changes))
    assert caught.value.code is code
    assert caught.value.next_step
