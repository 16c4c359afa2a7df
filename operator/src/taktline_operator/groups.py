"""Builds a worker that is a group of pods: a LeaderWorkerSet or, where there is none, a StatefulSet for each group.

The pods of a group differ only in their index. Pod 0 leads: robots are routed to it, and the others meet it by the
variables that torchrun uses. A group's pod template never changes: another revision is another group. So a
LeaderWorkerSet has one group: rolling through its own would leave a pool of one without a worker, or never begin.
"""

from __future__ import annotations

import copy
from typing import Any

from taktline_operator import naming, revisions, workload
from taktline_operator.lineup import Line
from taktline_operator.meshes import Shape
from taktline_operator.spec import PolicyDeployment, Pool

Json = dict[str, Any]

LWS_VERSION = "leaderworkerset.x-k8s.io/v1"
LWS_KIND = "LeaderWorkerSet"
LWS_NAME_LABEL = "leaderworkerset.sigs.k8s.io/name"
LWS_GROUP_LABEL = "leaderworkerset.sigs.k8s.io/group-index"
LWS_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
LWS_LEADER = "$(LWS_LEADER_ADDRESS)"
INDEX_LABEL = "apps.kubernetes.io/pod-index"

GROUP_VARIABLE = "TAKTLINE_GROUP"
NAME_LIMIT = 35  # leaves room for hash and number: a pod's name and its labels have 63 characters at most


def template(line: Line, image: str, shape: Shape, *, lws: bool) -> Json:
    """The pod template of a line's groups, with the hash of its own content; the same for every group.

    Args:
        image: the operator's default, where the pool names none.
        lws: whether pods are those of a LeaderWorkerSet.
    """
    policy, pool = line.policy, line.pool
    made = workload.pod_template(policy, pool, image, line.track)
    del made["metadata"]["annotations"][naming.ANNOTATION_TEMPLATE]
    made["metadata"]["annotations"][naming.ANNOTATION_GROUP_SIZE] = str(shape.pods)
    spec = made["spec"]
    # Pods of one group belong close together; what spreads is the groups, and each of their pods fills a node.
    spec["topologySpreadConstraints"] = spec["topologySpreadConstraints"][:1]
    container = spec["containers"][0]
    container["env"] += _rendezvous(policy, pool, shape, lws=lws)
    container["ports"].append({"name": "mesh", "containerPort": pool.mesh.port, "protocol": "TCP"})
    container["resources"] = workload.resources(pool, shape.ranks)
    if pool.mesh.topology_key:  # `_pods_of` names the group; here already, so that another key is another group
        spec["affinity"]["podAffinity"] = _close(pool, policy)
    made["metadata"]["annotations"][naming.ANNOTATION_TEMPLATE] = naming.content_hash(made)
    return made


def _rendezvous(policy: PolicyDeployment, pool: Pool, shape: Shape, *, lws: bool) -> list[Json]:
    """How a rank finds its place and its peers, in the words of torchrun."""
    index = LWS_INDEX_LABEL if lws else INDEX_LABEL
    leader = LWS_LEADER if lws else f"$({GROUP_VARIABLE})-0.{naming.ranks_name(policy.name)}.{policy.namespace}.svc"
    variables = [] if lws else [_field(GROUP_VARIABLE, f"metadata.labels['{naming.LABEL_GROUP}']")]
    variables += [
        {"name": "MASTER_ADDR", "value": leader},
        {"name": "MASTER_PORT", "value": str(pool.mesh.port)},
        {"name": "NNODES", "value": str(shape.pods)},
        _field("NODE_RANK", f"metadata.labels['{index}']"),
        {"name": "LOCAL_WORLD_SIZE", "value": str(shape.ranks)},
        {"name": "WORLD_SIZE", "value": str(shape.pods * shape.ranks)},
        _field("POD_IP", "status.podIP"),
    ]
    if shape.ranks == 1:  # else each pod has several, and its worker counts them from NODE_RANK
        variables.append({"name": "RANK", "value": "$(NODE_RANK)"})
    if pool.mesh.interface:
        names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        variables += [{"name": name, "value": pool.mesh.interface} for name in names]
    return variables


def _field(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _close(pool: Pool, policy: PolicyDeployment) -> Json:
    term = {
        "labelSelector": {"matchLabels": naming.worker_selector(policy.name, pool.name)},
        "topologyKey": pool.mesh.topology_key,
    }
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}


def base_name(line: Line) -> str:
    """What the names of a line's groups begin with."""
    if len(line.name) <= NAME_LIMIT:
        return line.name
    return f"{line.name[: NAME_LIMIT - 7].rstrip('-')}-{naming.content_hash(line.name)[:6]}"


def group_name(line: Line, template_hash: str, number: int) -> str:
    """Name of one group, which says what it runs: a group is never changed, only replaced."""
    return f"{base_name(line)}-{template_hash}-{number}"


def stateful_set(line: Line, made: Json, number: int, shape: Shape) -> Json:
    """One group as a StatefulSet. All its pods start at once, since none is ready before all are.

    Args:
        made: its pod template, from `template`.
        number: tells it from the line's other groups of this template.
    """
    name = group_name(line, workload.template_hash(made), number)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _about(line, made, name),
        "spec": {
            "replicas": shape.pods,
            "serviceName": naming.ranks_name(line.policy.name),
            "podManagementPolicy": "Parallel",
            # Pods of a group are never updated one by one: half a group of each revision would never be ready.
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": {naming.LABEL_GROUP: name}},
            "revisionHistoryLimit": 2,
            "template": _pods_of(line, made, name),
        },
    }


def leader_worker_set(line: Line, made: Json, number: int, shape: Shape) -> Json:
    """One group as a LeaderWorkerSet, whose controller makes the whole group anew when one of its pods restarts.

    Args:
        made: its pod template, from `template`.
        number: tells it from the line's other groups of this template.
    """
    name = group_name(line, workload.template_hash(made), number)
    return {
        "apiVersion": LWS_VERSION,
        "kind": LWS_KIND,
        "metadata": _about(line, made, name),
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {
                "size": shape.pods,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": _pods_of(line, made, name),
            },
        },
    }


def _about(line: Line, made: Json, name: str) -> Json:
    about = metadata(line, name)
    about["labels"] |= {naming.LABEL_GROUP: name}
    about["annotations"] |= {naming.ANNOTATION_TEMPLATE: workload.template_hash(made)}
    return about


def _pods_of(line: Line, made: Json, name: str) -> Json:
    """The pod template of one group: its pods carry its name, and belong close to each other."""
    pods = copy.deepcopy(made)
    pods["metadata"]["labels"] |= {naming.LABEL_GROUP: name}
    if line.pool.mesh.topology_key:
        (close,) = pods["spec"]["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        close["podAffinityTerm"]["labelSelector"]["matchLabels"] = {naming.LABEL_GROUP: name}
    return pods


def ranks_service(policy: PolicyDeployment) -> Json:
    """The headless Service by which the pods of a group find pod 0 before any of them is ready."""
    ports = sorted({pool.mesh.port for pool in policy.spec.pools})
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": workload.owned_metadata(policy, naming.ranks_name(policy.name), None),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": naming.worker_selector(policy.name),
            "ports": [{"name": f"mesh-{port}", "port": port, "protocol": "TCP", "targetPort": port} for port in ports],
        },
    }


def disruption_budget(policy: PolicyDeployment, pool: Pool) -> Json:
    """The PodDisruptionBudget of a pool of groups: a drain breaks one group at a time.

    The other pods of a broken group are not ready and serve nobody, so they may be evicted as well.
    """
    made = workload.disruption_budget(policy, pool)
    made["spec"]["unhealthyPodEvictionPolicy"] = "AlwaysAllow"
    return made


def metadata(line: Line, name: str) -> Json:
    """Metadata of an object that runs workers of a line."""
    made = workload.owned_metadata(line.policy, name, line.pool.name)
    if line.track:
        made["labels"] |= {naming.LABEL_TRACK: line.track}
    made["annotations"] = {naming.ANNOTATION_REVISION_HASH: revisions.of_spec(line.policy.spec).hash}
    return made
