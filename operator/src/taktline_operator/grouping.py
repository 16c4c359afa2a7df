"""Which lines of a policy have workers of several pods, and what its objects and its status say of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from taktline_operator import gangs, group_pods, groups, meshes, naming, ray_services, surge, workload
from taktline_operator.gangs import Gang
from taktline_operator.lineup import Line, Lineup
from taktline_operator.spec import PolicyDeployment, Pool

Json = dict[str, Any]

KINDS = ("StatefulSet", groups.LWS_KIND, ray_services.KIND)
"""What makes workers of several pods."""
NO_TIME = "1970-01-01T00:00:00Z"


def per_node(policy: PolicyDeployment, status: Json, nodes: Sequence[meshes.NodeGpus]) -> dict[str, int | None]:
    """GPUs of a node by pool; empty where no worker needs more than one, nor did."""
    if policy.spec.engine.gpus == 1 and not any("podsPerWorker" in entry for entry in status.get("pools", [])):
        return {}
    return {pool.name: meshes.gpus_per_node(pool, status, nodes) for pool in policy.spec.pools}


def of(
    lines: Lineup,
    gpus: Mapping[str, int | None],
    image: Callable[[Pool], str],
    children: Sequence[Json] = (),
    pods: Sequence[Json] = (),
    kinds: Collection[str] = (),
    now: str = NO_TIME,
    *,
    admits: bool = True,
) -> dict[str, Gang]:
    """By name, the groups of those lines whose workers are several pods.

    Args:
        gpus: GPUs of a node by pool.
        image: worker image of a pool that names none.
        children: live objects of the policy.
        pods: its pods, all members of groups.
        kinds: optional kinds that the cluster has.
        now: RFC 3339 time; of no account where there are no pods.
        admits: whether the policy's queue admits anybody.
    """
    found = {}
    for line in (*lines.stable, *lines.candidate):
        shape = meshes.shape(line.policy.spec.engine, gpus.get(line.pool.name))
        if line.policy.spec.engine.runtime == "ray":
            found[line.name] = ray_services.of(line, image(line.pool), children)
        elif shape.pods > 1:
            lws = groups.LWS_KIND in kinds
            found[line.name] = gangs.of(
                line, image(line.pool), shape, children, pods, now, lws_installed=lws, admits=admits
            )
    return found


def told(gang: Gang | None, strategy: Json) -> Json:
    """How a line's workers replace each other, as `surge.note` tells it: a Deployment's strategy, or what groups do."""
    if gang is None:
        return strategy
    return surge.YIELD if gang.yields else surge.SURGE | {surge.BEGAN: gang.began}


def budget(policy: PolicyDeployment, pool: Pool, lines: Lineup, gang_of: Mapping[str, Gang]) -> Json:
    """The PodDisruptionBudget of a pool, as what makes its workers needs it."""
    here = [line for line in (*lines.stable, *lines.candidate) if line.pool.name == pool.name]
    gangs_here = [gang_of[line.name] for line in here if line.name in gang_of]
    if any(gang.kind == ray_services.KIND for gang in gangs_here):
        pods = sum(_protected_pods(line, gang_of.get(line.name), serving=line in lines.serving) for line in here)
        return ray_services.disruption_budget(policy, pool, pods)
    grouped = any(line.name in gang_of for line in lines.serving if line.pool.name == pool.name)
    return groups.disruption_budget(policy, pool) if grouped else workload.disruption_budget(policy, pool)


def _protected_pods(line: Line, gang: Gang | None, *, serving: bool) -> int:
    """Pods of a line that a drain takes one at a time.

    Of a line beside the one that serves only those that run: one that never starts must not hold a drain up for ever.
    """
    if serving:
        return line.replicas * (gang.shape.pods if gang else 1)
    return min(gang.serving, line.replicas) * gang.shape.pods if gang else 0


def left_alone(policy: PolicyDeployment, lines: Lineup, children: Sequence[Json]) -> set[tuple[str, str]]:
    """(kind, name) of what runs workers of lines that stay as they are, and of the Service by which groups meet."""
    found = {("Deployment", name) for name in lines.left_alone}
    for child in children:
        labels = child["metadata"].get("labels", {})
        line = naming.workload_name(policy.name, labels.get(naming.LABEL_POOL, ""), labels.get(naming.LABEL_TRACK, ""))
        if child["kind"] in KINDS and line in lines.left_alone:
            found |= {(child["kind"], child["metadata"]["name"]), ("Service", naming.ranks_name(policy.name))}
    return found


def tell(
    status: Json,
    policy: PolicyDeployment,
    lines: Lineup,
    gang_of: Mapping[str, Gang],
    gpus: Mapping[str, int | None],
    children: Sequence[Json],
) -> None:
    """Add to a new status what groups are like, for readers and for the next time."""
    pods = {line.pool.name: gang_of[line.name].shape.pods for line in lines.serving if line.name in gang_of}
    for child in children:
        if child["kind"] in KINDS:  # as long as there are any, they must be looked for
            pods.setdefault(child["metadata"].get("labels", {}).get(naming.LABEL_POOL, ""), 1)
    found_by_nodes = {pool.name for pool in policy.spec.pools if pool.gpus_per_node is None}
    for entry in status["pools"]:
        if entry["name"] in pods:
            entry["podsPerWorker"] = pods[entry["name"]]
            if entry["name"] in found_by_nodes and gpus.get(entry["name"]):
                entry["gpusPerNode"] = gpus[entry["name"]]
    kinds = {gang.kind for gang in gang_of.values()}
    status["selector"] = group_pods.selector(policy.name, max(pods.values(), default=1), kinds)
