"""Pods of groups, seen as workers: one group counts once, by its first pod, and is ready when all of its pods are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from taktline_operator import groups, naming, routing, workload

Json = dict[str, Any]

FALTER_S = 60.0
"""An old group that was ready is given so long to be so again before it goes for good."""
RAY_NODE_LABEL = "ray.io/node-type"
RAY_CLUSTER_LABEL = "ray.io/cluster"


def index_of(pod: Json) -> int | None:
    """The pod's place in its group, 0 for the one that leads; None for a worker of one pod."""
    labels = pod["metadata"].get("labels", {})
    if RAY_NODE_LABEL in labels:
        return 0 if labels[RAY_NODE_LABEL] == "head" else 1
    text = labels.get(groups.LWS_INDEX_LABEL)
    if text is None and naming.LABEL_GROUP in labels:
        text = labels.get(groups.INDEX_LABEL, pod["metadata"]["name"].rpartition("-")[2])
    return int(text) if text is not None and text.isdecimal() else None


def group_of(pod: Json) -> str:
    """What identifies the pod's group; for a worker of one pod, the pod's own name."""
    labels = pod["metadata"].get("labels", {})
    if RAY_CLUSTER_LABEL in labels:
        return f"ray/{labels[RAY_CLUSTER_LABEL]}"
    if naming.LABEL_GROUP not in labels and groups.LWS_INDEX_LABEL in labels:  # one of several of one LeaderWorkerSet
        return f"{labels.get(groups.LWS_NAME_LABEL, '')}/{labels.get(groups.LWS_GROUP_LABEL, '')}"
    found: str = labels.get(naming.LABEL_GROUP) or pod["metadata"]["name"]
    return found


def units(pods: Iterable[Json]) -> dict[str, list[Json]]:
    """Pods by group, first pods first; a worker of one pod is a unit by itself."""
    found: dict[str, list[Json]] = {}
    for pod in sorted(pods, key=lambda pod: (index_of(pod) or 0, str(pod["metadata"]["name"]))):
        found.setdefault(group_of(pod), []).append(pod)
    return found


def is_whole(members: Sequence[Json]) -> bool:
    """Whether all pods that a group is to have are there and ready."""
    sizes = {member["metadata"].get("annotations", {}).get(naming.ANNOTATION_GROUP_SIZE, "1") for member in members}
    return sizes == {str(len(members))} and all(routing.is_ready(member) for member in members)


def settles_s(members: Sequence[Json], now: str) -> float:
    """Time until a whole group has been so for `MIN_READY_S`, as a Deployment's pods have to; 0 where it has.

    The gateways have to hear of it before another group goes. Node clocks may be off: a time that lies further ahead
    than that tells nothing.
    """
    at = datetime.fromisoformat(now)
    changes = [
        datetime.fromisoformat(condition["lastTransitionTime"])
        for member in members
        for condition in member.get("status", {}).get("conditions", [])
        if condition["type"] == "Ready" and condition.get("lastTransitionTime")
    ]
    lasted_s = min(((at - change).total_seconds() for change in changes), default=workload.MIN_READY_S)
    return max(0.0, workload.MIN_READY_S - lasted_s) if lasted_s > -workload.MIN_READY_S else 0.0


def falters_s(members: Sequence[Json], now: str) -> float:
    """How long a group that is complete, and has only just ceased to be ready, is still waited for; 0 where it is not.

    Its node was not heard of for a moment. What never was ready, or has told of it for longer, is not waited for.
    """
    sizes = {member["metadata"].get("annotations", {}).get(naming.ANNOTATION_GROUP_SIZE, "1") for member in members}
    if sizes != {str(len(members))} or any(member["metadata"].get("deletionTimestamp") for member in members):
        return 0.0
    at, lasting = datetime.fromisoformat(now), []
    for member in members:
        told = {c["type"]: c for c in member.get("status", {}).get("conditions", [])}
        ready = told.get("Ready", {})
        if ready.get("status") == "True":
            continue
        began, since = (told.get(kind, {}).get("lastTransitionTime") for kind in ("Initialized", "Ready"))
        if not began or not since or datetime.fromisoformat(since) <= datetime.fromisoformat(began):
            return 0.0  # it never was ready
        lasting.append((at - datetime.fromisoformat(since)).total_seconds())
    return min(FALTER_S, max(0.0, FALTER_S - max(lasting))) if lasting else 0.0


def leaders(pods: Sequence[Json], ray_clusters: Collection[str] = ()) -> list[Json]:
    """Pods that stand for workers, in the order given: those of one pod, and the first of each group.

    A first pod whose group is not whole is shown as not ready: nobody may be sent there. Where one of the group is on
    no node, it is shown as on none, in words that begin with that one's name.

    Args:
        ray_clusters: Ray clusters whose application runs; the head of another one is ready for KubeRay, not for robots.
    """
    members = units(pods)
    found = []
    for pod in pods:
        index = index_of(pod)
        cluster = pod["metadata"].get("labels", {}).get(RAY_CLUSTER_LABEL)
        serves = cluster in ray_clusters if cluster is not None else is_whole(members[group_of(pod)])
        if index is None or (index == 0 and serves):
            found.append(pod)
        elif index == 0:
            found.append(_not_ready(pod, members[group_of(pod)]))
    return found


def with_followers(workers: Iterable[Json], pods: Sequence[Json]) -> list[Json]:
    """The pods of these workers, all members of their groups included."""
    wanted = {group_of(worker) for worker in workers}
    return [pod for pod in pods if group_of(pod) in wanted]


def _not_ready(pod: Json, members: Sequence[Json]) -> Json:
    status = pod.get("status", {})
    waits = [
        found if member is pod else found | {"message": f"{member['metadata']['name']}: {found.get('message', '')}"}
        for member in members
        for found in member.get("status", {}).get("conditions", [])
        if found["type"] == "PodScheduled" and found["status"] == "False"
    ][:1]
    conditions = [
        condition | {"status": "False"} if condition["type"] == "Ready" else condition
        for condition in status.get("conditions", [])
        if not (waits and condition["type"] == "PodScheduled")
    ]
    return pod | {"status": status | {"conditions": [*conditions, *waits]}}


def selector(policy: str, pods_per_worker: int, kinds: Collection[str]) -> str:
    """A label selector of the pods that stand for workers, as the scale subresource states it.

    Pods without an index are admitted by `notin`, so that pools of workers of one pod count as well.

    Args:
        kinds: what makes the groups.
    """
    plain = naming.selector_text(naming.worker_selector(policy))
    if pods_per_worker <= 1:
        return plain
    if "RayService" in kinds:
        return f"{plain},{RAY_NODE_LABEL} notin (worker)"
    others = ",".join(str(index) for index in range(1, pods_per_worker))
    label = groups.LWS_INDEX_LABEL if groups.LWS_KIND in kinds else groups.INDEX_LABEL
    return f"{plain},{label} notin ({others})"


def workloads(children: Mapping[Any, Json]) -> list[Json]:
    """Deployments as they are; what makes a line's groups as one object, with the number of groups."""
    found = [child for child in children.values() if child["kind"] == "Deployment"]
    makers: dict[tuple[str, str], list[Json]] = {}
    for child in children.values():
        if child["kind"] in ("StatefulSet", groups.LWS_KIND, "RayService"):
            labels = child["metadata"].get("labels", {})
            key = (labels.get(naming.LABEL_POOL, ""), labels.get(naming.LABEL_TRACK, ""))
            makers.setdefault(key, []).append(child)
    found += [
        {**members[0], "spec": members[0]["spec"] | {"replicas": sum(map(_groups_of, members))}}
        for members in makers.values()
    ]
    return found


def _groups_of(maker: Json) -> int:
    """Groups that an object makes: a LeaderWorkerSet may have several."""
    return int(maker["spec"].get("replicas", 1)) if maker["kind"] == groups.LWS_KIND else 1
