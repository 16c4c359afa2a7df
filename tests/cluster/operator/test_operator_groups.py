"""A worker that is a group of pods, on a real API: a StatefulSet of two that serve, end and start again together."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from taktline_local.kubectl import Kubectl, wait_until
from taktline_protocol import worker_pb2, worker_pb2_grpc
from taktline_protocol.messages import Image, Observation
from taktline_protocol.rpc import from_tensor, to_item

from tests.planner.conftest import make_folder, observe
from tests.ports import free_port

LIMIT_S = 300.0
NODE = {"taktline.dev/pool": "cpu"}
Json = dict[str, Any]


def plan_at(address: str) -> Any:
    good = observe()
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
    with grpc.insecure_channel(address) as channel:
        request = worker_pb2.InferRequest(policy="group", items=[to_item("0", asked, asked.budget_ms)])
        stub = worker_pb2_grpc.WorkerStub(channel)
        (result,) = stub.Infer(request, timeout=LIMIT_S, wait_for_ready=True).results
    assert not result.HasField("error"), result.error
    return from_tensor("actions", result.actions).to_numpy()


def ranks_of(port: int) -> list[int]:
    """Processes of the follower ranks whose group meets at `port`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it has just ended
            if b"rank" in words and b"--store-port" in words and str(port).encode() in words:
                found.append(int(folder.name))
    return found


def group_pods(kubectl: Kubectl, namespace: str) -> list[Json]:
    return kubectl.list("pods", namespace, "taktline.dev/policy=group")


def restarts(pods: list[Json]) -> list[int]:
    return [status["restartCount"] for pod in pods for status in pod["status"].get("containerStatuses", [])]


@pytest.mark.usefixtures("running_operator")
def test_two_pods_are_one_worker(
    kubectl: Kubectl, policies: Any, namespace: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = make_folder(tmp_path_factory.mktemp("group") / "planner")
    port = free_port()
    pool = {
        "name": "mesh",
        "accelerator": "cpu",
        "gpusPerNode": 1,
        "mesh": {"port": port, "interface": "lo"},
        "nodeSelector": NODE,
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}},
    }
    search = {"candidates": 64, "rounds": 2, "elites": 8, "horizon": 2, "microBatch": 16}
    body = policies.body(
        "group",
        model={"family": "vjepa2-ac", "source": {"path": str(folder)}, "revision": "a"},
        engine={"precision": "fp32", "buckets": [1], "parallel": {"search": 2}, "search": search},
        pools=[pool],
        slo={"controlBudgetMs": 60_000},
    )
    kubectl.apply(body, namespace=namespace)
    try:
        wait_until(lambda: len(group_pods(kubectl, namespace)) == 2, "two pods", timeout_s=LIMIT_S)
        # One worker, whatever the number of pods; and none before both are ready.
        wait_until(
            lambda: (policies.get("group") or {}).get("status", {}).get("readyReplicas") == 1,
            "served",
            timeout_s=LIMIT_S,
        )
        status = policies.get("group")["status"]
        assert (status["replicas"], status["pools"][0]["podsPerWorker"]) == (1, 2)
        (address,) = status["endpoints"]
        selected = kubectl.list("pods", namespace, status["selector"])
        assert [pod["status"]["podIP"] for pod in selected] == [address.rpartition(":")[0]]
        first = plan_at(address)

        before = restarts(group_pods(kubectl, namespace))
        (victim,) = ranks_of(port)
        os.kill(victim, signal.SIGKILL)
        wait_until(
            lambda: all(now > then for now, then in zip(restarts(group_pods(kubectl, namespace)), before, strict=True)),
            "both pods start again",
            timeout_s=LIMIT_S,
        )

        def served_again() -> list[str]:
            """Its address, once the pods are ready and not only the status still says so."""
            pods = [pod["status"].get("conditions", []) for pod in group_pods(kubectl, namespace)]
            ready = [one["status"] == "True" for conditions in pods for one in conditions if one["type"] == "Ready"]
            now = policies.get("group")["status"]
            return now.get("endpoints", []) if ready == [True, True] and now.get("readyReplicas") == 1 else []

        (address,) = wait_until(served_again, "served again", timeout_s=LIMIT_S)
        np.testing.assert_array_equal(plan_at(address), first)

        # A pod that is taken away takes the group down, and comes back with it.
        follower = max(pod["metadata"]["name"] for pod in group_pods(kubectl, namespace))
        uid = kubectl.get("pod", follower, namespace)["metadata"]["uid"]
        kubectl("-n", namespace, "delete", "pod", follower, "--wait=false")
        wait_until(
            lambda: (kubectl.get("pod", follower, namespace) or {}).get("metadata", {}).get("uid") not in (None, uid),
            "a new second pod",
            timeout_s=LIMIT_S,
        )
        wait_until(
            lambda: (
                all(
                    condition["status"] == "True"
                    for pod in group_pods(kubectl, namespace)
                    for condition in pod["status"].get("conditions", [])
                    if condition["type"] == "Ready"
                )
                and policies.get("group")["status"].get("readyReplicas") == 1
            ),
            "the group again",
            timeout_s=LIMIT_S,
        )
    finally:
        kubectl("-n", namespace, "delete", "pd", "group", "--wait=true", "--timeout=60s")
