"""Kueue: workers wait in a queue until its quota has room for them, and the status says so."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from taktline_operator.api_errors import ApiError, is_without_rights
from taktline_operator.spec import PolicyDeployment

logger = logging.getLogger(__name__)

Json = dict[str, Any]

LOOK_S = 30.0
"""A queue that could not be looked at is looked at again after so long, while somebody waits in it."""
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
_DEFAULT_QUEUE = "default"
"""Where a namespace has a queue of this name, Kueue puts into it whatever names none."""


class Seen(NamedTuple):
    """What became of the queue that a policy names.

    Attributes:
        state: whether it admits, was stopped, does not exist, or could not be looked at this time.
        message: what Kueue says of a stopped one.
    """

    state: Literal["open", "stopped", "absent", "unknown"]
    message: str = ""


class Api(Protocol):
    """The part of `kube.KubeApi` that is asked."""

    async def raw(self, path: str) -> Json | None: ...  # noqa: D102


async def look(api: Api, policy: PolicyDeployment, pods: Sequence[Json], kinds: Collection[str]) -> Seen | None:
    """What became of the policy's queue, asked only while a pod waits in it; None where nobody may look.

    It is advice: where the API server cannot tell, everything else of the policy goes on.

    Args:
        kinds: optional kinds that the cluster has.
    """
    queue = policy.spec.queue
    if queue is None or KIND not in kinds or not any(map(is_waiting, pods)):
        return None
    for version in API_VERSIONS:
        try:
            found = await api.raw(f"/apis/{version}/namespaces/{policy.namespace}/localqueues/{queue.name}")
        except ApiError as error:
            if is_without_rights(error):
                return None
            where = {"policy": policy.name, "namespace": policy.namespace, "object": f"{KIND}/{queue.name}"}
            logger.warning("a queue could not be looked at", extra=where | {"cause": str(error)})
            return Seen("unknown")
        if found is not None:
            told = [c for c in found.get("status", {}).get("conditions", []) if c["type"] == "Active"]
            closed = next((c for c in told if c["status"] == "False"), None)
            return Seen("open") if closed is None else Seen("stopped", closed.get("message", ""))
    return Seen("absent")


def admits(seen: Seen | None) -> bool:
    """Whether room in the quota lets anybody in, as far as is known; not where that could not be told this time."""
    return seen is None or seen.state == "open"


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


def queue_of(found: Json) -> str:
    """The queue that an object or a pod is in; empty for none."""
    return _of(found).get(QUEUE_LABEL, "")


def is_from_before(service: Json, policy: PolicyDeployment) -> bool:
    """Whether a RayService waits in the policy's queue as a whole, as the operator had it once: it would never run."""
    if policy.spec.queue is None or not is_suspended(service) or queue_of(service) != policy.spec.queue.name:
        return False
    # Where a site's default queue takes RayServices, one whose pods are a group already is left to it.
    head = service["spec"]["rayClusterConfig"].get("headGroupSpec", {}).get("template", {})
    return _GROUP_LABEL not in head.get("metadata", {}).get("labels", {})


def is_suspended(service: Json) -> bool:
    """Whether Kueue holds a whole RayService back."""
    return bool(service.get("spec", {}).get("rayClusterConfig", {}).get("suspend"))


def condition(
    policy: PolicyDeployment, pods: Sequence[Json], children: Sequence[Json], seen: Seen | None = None
) -> tuple[str, str, str] | None:
    """Status, reason and message of the condition `Queued`; None where the policy asks for no queue and waits in none.

    Args:
        seen: what became of the queue that it names.
    """
    stays = sorted({name for child in children if (name := _stays_in(child, policy)) is not None})
    queue = policy.spec.queue
    waiting = [pod for pod in pods if is_waiting(pod)]
    rays = [child for child in children if child["kind"] == "RayService"]
    held = [ray for ray in rays if is_suspended(ray)]
    if queue is None and not (stays or waiting or held):
        return None
    if waiting or held:
        what = f"{len(waiting)} of {len(pods)} pods" if waiting else f"{len(held)} of {len(rays)} Ray clusters"
        names = sorted({name for found in (waiting or held) if (name := queue_of(found))})
        if len(names) != 1:
            names = [queue.name] if queue is not None else ["of the cluster's default"]
        return _waiting(what, names[0], policy, seen)
    where = f"queue {queue.name}" if queue is not None else f"queue {stays[0]}"
    classes = sorted({name for child in children if (name := _class_kept(child, policy)) is not None})
    kept = (
        f"workers keep priority class {' and '.join(classes)}, for Kueue lets none go without one: name another in"
        " spec.queue.priorityClass; objects that are made anew have none"
        if classes
        else ""
    )
    if stays:
        names = [f"queue {name}" if name else "no queue" for name in stays]
        return (
            "False",
            "QueueKept",
            (
                f"workers serve in {' and '.join(names)}, and Kueue moves none that serve; those that are made anew as"
                f" other objects, or from 0 replicas, go to {where if queue is not None else 'none'}"
                f"{'; ' if kept else ''}{kept}"
            ),
        )
    if kept:
        return "False", "PriorityKept", f"no worker waits in {where}; {kept}"
    return "False", "Admitted", f"no worker waits in {where}"


def _waiting(what: str, name: str, policy: PolicyDeployment, seen: Seen | None) -> tuple[str, str, str]:
    queue = policy.spec.queue
    if seen is not None and queue is not None and name == queue.name:
        if seen.state == "absent":
            return "True", "QueueAbsent", f"{what} wait, and namespace {policy.namespace} has no LocalQueue {name}"
        if seen.state == "stopped":
            return "True", "QueueStopped", f"{what} wait in queue {name}, which admits nobody now: {seen.message}"
    unknown = "; whether that admits anybody could not be read" if seen is not None and seen.state == "unknown" else ""
    return "True", "WaitingForQuota", f"{what} wait until Kueue admits them to queue {name}{unknown}"


def _stays_in(child: Json, policy: PolicyDeployment) -> str | None:
    """The queue of a live workload that is not the one asked for; empty where it is in none, None where all is well."""
    if not _is_taken(child):
        return None
    now, wanted = queue_of(child), _wanted(policy).get(QUEUE_LABEL, "")
    if now == wanted or (not wanted and now == _DEFAULT_QUEUE):
        return None
    return now if _allowed(_wanted(policy), child).get(QUEUE_LABEL, "") == now else None


def _class_kept(child: Json, policy: PolicyDeployment) -> str | None:
    """The priority class of a live workload whose policy names none any more."""
    if not _is_taken(child) or policy.spec.queue is None or policy.spec.queue.priority_class:
        return None
    return _of(child).get(PRIORITY_LABEL)


def _is_taken(child: Json) -> bool:
    return child["kind"] in _WORKLOADS and not child["metadata"].get("deletionTimestamp")
