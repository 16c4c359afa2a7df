"""Pods that do not come back by themselves, and nodes whose accelerator fails."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_cluster import Cluster
from taktline_operator import healing
from taktline_operator.healing import NodeFault

Json = dict[str, Any]


def node(name: str = "n1", *, conditions: Any = (), taints: Any = ()) -> Json:
    return {
        "kind": "Node",
        "metadata": {"name": name, "namespace": ""},
        "spec": {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]},
        "status": {
            "conditions": [{"type": kind, "status": status, "message": "said so"} for kind, status in conditions]
        },
    }


@pytest.mark.parametrize(
    ("conditions", "faulty"),
    [
        ([("Ready", "True"), ("MemoryPressure", "False")], False),
        ([("GpuXid79", "True")], True),
        ([("GPUEccError", "True")], True),
        ([("GPUEccError", "False")], False),
        ([("NVLinkFailure", "True")], True),
        ([("GpuHealthy", "False")], True),
        ([("GpuHealthy", "True")], False),
        ([("AcceleratorReady", "False")], True),
        ([("RowRemapFailure", "True")], True),
        ([("KernelDeadlock", "True")], False),  # not ours to judge: the kubelet and the cluster's own tools are
    ],
)
def test_conditions_that_speak_of_a_failing_accelerator(conditions: Any, faulty: bool) -> None:
    found = healing.node_fault(node(conditions=conditions))
    assert (found is not None) is faulty
    if found is not None:
        assert not found.doomed
        assert "node n1 says" in found.message
        assert "said so" in found.message


@pytest.mark.parametrize("taint", ["aws-node-termination-handler/spot-itn", "karpenter.sh/disrupted"])
def test_a_spot_node_that_is_taken_back_is_doomed(taint: str) -> None:
    found = healing.node_fault(node(taints=[taint]))
    assert found is not None
    assert found.doomed


def test_ordinary_taints_are_no_fault() -> None:
    assert healing.node_fault(node(taints=["nvidia.com/gpu", "dedicated"])) is None


def on(make: Any, name: str, where: str, *, ready: bool = True, **more: Any) -> Json:
    found: Json = make.pod(name, ready=ready, **more)
    found["spec"]["nodeName"] = where
    return found


FAULT = {"n1": NodeFault("n1", False, "node n1 says GpuXid79=True")}
DOOM = {"n1": NodeFault("n1", True, "node n1 is about to go")}


def removed(pods: list[Json], nodes: Any) -> list[str]:
    return [removal.pod for removal in healing.removals(pods, nodes)]


def test_workers_leave_a_faulty_node_one_at_a_time_while_all_others_serve(make: Any) -> None:
    pods = [on(make, "a", "n1"), on(make, "b", "n1"), on(make, "c", "n2")]
    assert removed(pods, FAULT) == ["a"]
    replaced = [on(make, "d", "n2", ready=False), on(make, "b", "n1"), on(make, "c", "n2")]
    assert removed(replaced, FAULT) == []
    replaced[0] = on(make, "d", "n2")
    assert removed(replaced, FAULT) == ["b"]


def test_the_only_worker_is_not_taken_from_a_node_that_may_still_serve(make: Any) -> None:
    assert removed([on(make, "a", "n1")], FAULT) == []
    assert removed([on(make, "a", "n1", ready=False)], FAULT) == ["a"]


def test_all_leave_a_node_that_is_about_to_go(make: Any) -> None:
    assert removed([on(make, "a", "n1"), on(make, "b", "n1")], DOOM) == ["a", "b"]


def test_pods_that_a_node_refuses_do_not_pile_up(make: Any) -> None:
    pods = [on(make, "ok", "n1")]
    for number in range(40):
        ended = on(make, f"x{number:02d}", "n1", ready=False, phase="Failed", reason="UnexpectedAdmissionError")
        ended["metadata"]["creationTimestamp"] = f"2026-03-01T08:{number:02d}:00Z"
        pods.append(ended)
    found = removed(pods, {})
    assert len(found) == 37
    assert {"x37", "x38", "x39", "ok"}.isdisjoint(found)  # the newest stay for reading


async def test_a_node_fault_moves_the_worker_and_tells_people(make: Any) -> None:
    cluster = Cluster(make, make.body(pools=[{"name": "cpu", "accelerator": "cpu", "minReplicas": 2}]))
    await cluster.run(60)
    first, second = cluster.pods()
    first["spec"]["nodeName"], second["spec"]["nodeName"] = "n1", "n2"
    cluster.api.objects["Node", "", "n1"] = node(conditions=[("GpuXid79", "True")])
    await cluster.controller.look_at_nodes()
    await cluster.reconcile()
    assert [pod["metadata"]["name"] for pod in cluster.pods()] == [second["metadata"]["name"]]
    assert "NodeUnhealthy" in cluster.events()
    await cluster.run(60)
    assert len(cluster.pods()) == 2
    writes = len(cluster.api.writes)
    await cluster.controller.look_at_nodes()
    await cluster.reconcile(3)
    assert len(cluster.api.writes) == writes
