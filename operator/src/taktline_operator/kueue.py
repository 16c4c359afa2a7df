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
_MOVABLE = ("Deployment", "StatefulSet")
"""Kinds that Kueue lets into another queue while none of their pods is ready; of all others it lets none."""
_WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet")
"""Kinds whose pods Kueue takes by a label of the object."""
_GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
_GROUP_SIZE = "kueue.x-k8s.io/pod-group-total-count"
_GROUP_SERVES = "kueue.x-k8s.io/pod-group-serving"
_MANAGED_LABEL = "kueue.x-k8s.io/managed"
_PARENT = "kueue.x-k8s.io/pod-suspending-parent"


def labelled(found: Json, policy: PolicyDeployment, live: Json | None = None) -> Json:
    """The object with the labels by which Kueue takes it into the policy's queue; others than workloads as they are.

    Kueue holds pods back by scheduling gates. It refuses whatever would take workers that serve out of their queue, or
    into one: their labels stay, so that everything else of the policy goes on.

    Args:
        live: the object as it is, where Kueue has a say in what becomes of it.
    """
    if found["kind"] not in _WORKLOADS:
        return found
    labels = _wanted(policy) if live is None else _allowed(_wanted(policy), live)
    metadata = found["metadata"]
    return found | {"metadata": metadata | {"labels": metadata["labels"] | labels}} if labels else found


def pod_labels(policy: PolicyDeployment) -> dict[str, str]:
    """Labels by which Kueue takes pods whose owner it does not take, those of Ray clusters; empty without a queue.

    Kueue would take a RayService too, and suspend it: but KubeRay (1.6) waits for the head pod of the suspended cluster
    before it looks at the RayService again, so that one which was suspended never runs.
    """
    return _wanted(policy)


def as_group(template: Json, policy: PolicyDeployment, name: str, pods: int) -> None:
    """Make the pods of a template members of a group that is admitted as a whole; nothing without a queue.

    Args:
        name: of the group: another one for pods of another template.
        pods: of the whole group, whatever their templates.
    """
    if policy.spec.queue is not None:
        template["metadata"]["labels"] |= {_GROUP_LABEL: name, _MANAGED_LABEL: "true"}
        # With a parent named, as Kueue does it itself for Deployments, pods get no finalizer: what serves never
        # finishes, and pods that are deleted would stay for ever.
        parent = {_PARENT: "taktline"}
        template["metadata"]["annotations"] |= {_GROUP_SIZE: str(pods), _GROUP_SERVES: "true"} | parent


def _wanted(policy: PolicyDeployment) -> dict[str, str]:
    queue = policy.spec.queue
    if queue is None:
        return {}
    return {QUEUE_LABEL: queue.name} | ({PRIORITY_LABEL: queue.priority_class} if queue.priority_class else {})


def _of(live: Json) -> dict[str, str]:
    labels: dict[str, str] = live["metadata"].get("labels", {})
    return {name: labels[name] for name in (QUEUE_LABEL, PRIORITY_LABEL) if name in labels}


def _allowed(wanted: dict[str, str], live: Json) -> dict[str, str]:
    """What Kueue lets the labels of a live object become."""
    before = _of(live)
    idle = live["kind"] in _MOVABLE and not live.get("status", {}).get("readyReplicas")
    result = dict(wanted) if idle and QUEUE_LABEL in wanted else dict(before)
    if PRIORITY_LABEL in before:  # it may become another, never none
        result[PRIORITY_LABEL] = wanted.get(PRIORITY_LABEL, before[PRIORITY_LABEL])
    return result


def is_waiting(pod: Json) -> bool:
    """Whether Kueue holds a pod back: it is neither broken nor without a node to run on."""
    return any(gate.get("name", "").startswith(_GATE) for gate in pod.get("spec", {}).get("schedulingGates", []))


def condition(policy: PolicyDeployment, pods: Sequence[Json], children: Sequence[Json]) -> tuple[str, str, str] | None:
    """Status, reason and message of the condition `Queued`; None where the policy asks for no queue."""
    stays = sorted({name for child in children if (name := _stays_in(child, policy)) is not None})
    queue = policy.spec.queue
    if queue is None and not stays:
        return None
    waiting = [pod for pod in pods if is_waiting(pod)]
    rays = [child for child in children if child["kind"] == "RayService"]
    held = [ray for ray in rays if ray.get("spec", {}).get("rayClusterConfig", {}).get("suspend")]
    where = f"queue {queue.name}" if queue is not None else f"queue {stays[0]}"
    if waiting or held:
        what = f"{len(waiting)} of {len(pods)} pods" if waiting else f"{len(held)} of {len(rays)} Ray clusters"
        return "True", "WaitingForQuota", f"{what} wait until Kueue admits them to {where}"
    if stays:
        names = " and ".join(f"queue {name}" if name else "no queue" for name in stays)
        return (
            "False",
            "QueueKept",
            (
                f"workers serve in {names}, and Kueue moves none that serve; those that are made anew as other objects,"
                f" or from 0 replicas, go to {where if queue is not None else 'none'}"
            ),
        )
    return "False", "Admitted", f"no worker waits in {where}"


def _stays_in(child: Json, policy: PolicyDeployment) -> str | None:
    """The queue of a live workload that is not the one asked for; empty where it is in none, None where all is well."""
    if child["kind"] not in _WORKLOADS or child["metadata"].get("deletionTimestamp"):
        return None
    now, wanted = _of(child).get(QUEUE_LABEL, ""), _wanted(policy).get(QUEUE_LABEL, "")
    return now if now != wanted and _allowed(_wanted(policy), child).get(QUEUE_LABEL, "") == now else None
