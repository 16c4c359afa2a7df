"""What the operator does about pods that will not come back by themselves, and about nodes whose accelerator fails.

Pure: pods and node faults in, pods to delete out; their Deployment makes new ones. Kubernetes does the rest: a crash
loop is its back-off, a node that is gone is left after the workers' short tolerations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from taktline_operator import group_pods, naming, routing

Json = dict[str, Any]

KEPT_FAILED = 3  # ended pods of a pool that are kept for reading

_BAD_WHEN_TRUE = re.compile(r"xid|ecc|nvlink|row.?remap|gpu.*(error|fault|fail|lost|unhealthy|problem)", re.IGNORECASE)
_BAD_WHEN_FALSE = re.compile(r"(gpu|accelerator).*(healthy|ready)", re.IGNORECASE)
_DOOMED_TAINTS = (
    "aws-node-termination-handler/spot-itn",
    "cloud.google.com/impending-node-termination",
    "kubernetes.azure.com/scheduled-event",
    "karpenter.sh/disrupted",
    "node.cloudprovider.kubernetes.io/shutdown",
    "ToBeDeletedByClusterAutoscaler",
)


class NodeFault(NamedTuple):
    """Why workers should leave a node; a doomed node goes whatever we do, a faulty one may still serve for a while."""

    node: str
    doomed: bool
    message: str


class Removal(NamedTuple):
    """A pod to delete, with a reason for programs and a sentence for people.

    Attributes:
        uid: of the pod that was seen: one of its name that was made since then stays.
        version: its resourceVersion where it goes for not being ready: what has changed since is looked at again.
    """

    pod: str
    reason: str
    message: str
    uid: str = ""
    version: str = ""


def removal(pod: Json, reason: str, message: str, *, unless_changed: bool) -> Removal:
    """The removal of this very pod, and, with `unless_changed`, only as it was seen."""
    metadata = pod["metadata"]
    version = metadata.get("resourceVersion", "") if unless_changed else ""
    return Removal(metadata["name"], reason, message, metadata.get("uid", ""), version)


def node_fault(node: Json) -> NodeFault | None:
    """What is wrong with a node: a condition about its accelerator, or a taint that announces its end.

    Conditions come from the node problem detector or a GPU health agent; types differ by installation, so their words
    decide.
    """
    name = node["metadata"]["name"]
    for taint in node.get("spec", {}).get("taints", []):
        if taint.get("key") in _DOOMED_TAINTS:
            return NodeFault(name, True, f"node {name} is about to go ({taint['key']})")
        if _BAD_WHEN_TRUE.search(taint.get("key", "")):
            return NodeFault(name, False, f"node {name} is tainted {taint['key']}={taint.get('value', '')}")
    for condition in node.get("status", {}).get("conditions", []):
        kind, status = condition["type"], condition["status"]
        if (status == "True" and _BAD_WHEN_TRUE.search(kind)) or (status == "False" and _BAD_WHEN_FALSE.search(kind)):
            words = " ".join(str(condition.get("message", "")).split())[:200]
            return NodeFault(name, False, f"node {name} says {kind}={status}" + (f": {words}" if words else ""))
    return None


def removals(pods: Sequence[Json], nodes: Mapping[str, NodeFault]) -> tuple[Removal, ...]:
    """Pods to delete now.

    From a faulty node one worker of a pool leaves at a time, and only while all others of the pool serve: its
    replacement must be ready before the next one goes. From a doomed node all leave at once, for they end anyway. A
    worker that is a group of pods leaves as a whole: what is left of it would serve nobody.
    """
    found = list(_ended(pods))
    pools = sorted({_pool(pod) for pod in pods})
    for pool in pools:
        alive = group_pods.units(pod for pod in pods if _pool(pod) == pool and _lives(pod))
        for name, members in sorted(alive.items()):
            faults = [nodes[node] for pod in members if (node := pod.get("spec", {}).get("nodeName")) in nodes]
            if not faults:
                continue
            fault = max(faults, key=lambda fault: fault.doomed)
            others = [other for key, other in alive.items() if key != name]
            ready = all(routing.is_ready(pod) for pod in members)
            if fault.doomed:
                found += _removed(members, "NodeLeaves", fault.message, unless_changed=False)
            elif not ready or (others and all(routing.is_ready(pod) for other in others for pod in other)):
                found += _removed(members, "NodeUnhealthy", fault.message, unless_changed=not ready)
                break
    return tuple(found)


def _removed(members: Sequence[Json], reason: str, message: str, *, unless_changed: bool) -> list[Removal]:
    return [removal(pod, reason, message, unless_changed=unless_changed) for pod in members]


def _ended(pods: Sequence[Json]) -> Iterable[Removal]:
    """Pods that ended for good and pile up: refused by their node, evicted, or lost with it."""
    by_pool: dict[str, list[Json]] = {}
    for pod in pods:
        if pod.get("status", {}).get("phase") == "Failed" and not pod["metadata"].get("deletionTimestamp"):
            by_pool.setdefault(_pool(pod), []).append(pod)
    for _, failed in sorted(by_pool.items()):
        failed.sort(key=lambda pod: (str(pod["metadata"].get("creationTimestamp", "")), str(pod["metadata"]["name"])))
        for pod in failed[: max(0, len(failed) - KEPT_FAILED)]:
            reason = pod["status"].get("reason") or "PodFailed"
            message = f"it ended ({reason}) and newer ones tell the same"
            yield removal(pod, "Tidied", message, unless_changed=False)


def _pool(pod: Json) -> str:
    pool: str = pod["metadata"].get("labels", {}).get(naming.LABEL_POOL, "")
    return pool


def _lives(pod: Json) -> bool:
    phase = pod.get("status", {}).get("phase")
    return phase not in ("Failed", "Succeeded") and not pod["metadata"].get("deletionTimestamp")
