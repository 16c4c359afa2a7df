"""Kueue: workers wait in a queue until its quota has room for them, and the status says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taktline_operator.spec import PolicyDeployment

Json = dict[str, Any]

KIND = "LocalQueue"
API_VERSIONS = ("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1")
CONDITION = "Queued"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
_GATE = "kueue.x-k8s.io/"
_WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet", "RayService")


def labelled(found: Json, policy: PolicyDeployment) -> Json:
    """The object with the labels by which Kueue takes it into the policy's queue; others than workloads as they are.

    Kueue holds pods back by scheduling gates, and a RayService by `suspend`, which the operator never sets.
    """
    queue = policy.spec.queue
    if queue is None or found["kind"] not in _WORKLOADS:
        return found
    labels = {QUEUE_LABEL: queue.name} | ({PRIORITY_LABEL: queue.priority_class} if queue.priority_class else {})
    metadata = found["metadata"]
    return found | {"metadata": metadata | {"labels": metadata["labels"] | labels}}


def is_waiting(pod: Json) -> bool:
    """Whether Kueue holds a pod back: it is neither broken nor without a node to run on."""
    return any(gate.get("name", "").startswith(_GATE) for gate in pod.get("spec", {}).get("schedulingGates", []))


def condition(policy: PolicyDeployment, pods: Sequence[Json], children: Sequence[Json]) -> tuple[str, str, str] | None:
    """Status, reason and message of the condition `Queued`; None where the policy asks for no queue."""
    queue = policy.spec.queue
    if queue is None:
        return None
    waiting = [pod for pod in pods if is_waiting(pod)]
    held = [
        child["metadata"]["name"]
        for child in children
        if child["kind"] == "RayService" and child.get("spec", {}).get("rayClusterConfig", {}).get("suspend")
    ]
    if waiting or held:
        what = f"{len(waiting)} of {len(pods)} pods" if waiting else f"{len(held)} Ray clusters"
        return "True", "WaitingForQuota", f"{what} wait until Kueue admits them to queue {queue.name}"
    return "False", "Admitted", f"no worker waits in queue {queue.name}"
