"""The pure planner: one PolicyDeployment and what is observed of it in, objects, deletions, status and route out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from taktline_protocol.deployment import Route

from taktline_operator import diff, naming, rollout, routing, status, workload
from taktline_operator.spec import PolicyDeployment

Json = dict[str, Any]


class Ref(NamedTuple):
    """Kind and name of an object in the PolicyDeployment's namespace."""

    kind: str
    name: str


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator's installation decides, not the PolicyDeployment.

    Attributes:
        image: worker image of pools that name none.
        gateway_namespace: where the gateways run and read their routes.
    """

    image: str = "taktline/worker:0.1.0"
    gateway_namespace: str = "taktline-system"

    @property
    def gateway_url(self) -> str:
        """Base URL of the gateway inside the cluster."""
        return f"http://taktline-gateway.{self.gateway_namespace}"


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What was read from the API.

    Attributes:
        live: the PolicyDeployment itself, with its last status.
        children: objects of the names and labels this PolicyDeployment uses, whoever made them.
        pods: its worker pods.
        name_owner: the (namespace, name) that owns this policy name at the gateway; None when it is this one.
        now: RFC 3339 time.
    """

    live: Json
    now: str
    children: Mapping[Ref, Json] = {}
    pods: Sequence[Json] = ()
    name_owner: tuple[str, str] | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done.

    Attributes:
        desired: every object that must exist, in the order to create them.
        writes: those of `desired` that differ from what is live.
        deletions: children that are wanted no longer.
        status: the whole status.
        status_changed: whether `status` differs from the live one.
        route: this policy's part of the routing table; None when it must not be served.
    """

    desired: tuple[Json, ...] = ()
    writes: tuple[Json, ...] = ()
    deletions: tuple[Ref, ...] = ()
    status: Json
    status_changed: bool
    route: Route | None = None


def desired_objects(
    policy: PolicyDeployment, settings: Settings, strategies: Mapping[str, Json] | None = None
) -> tuple[Json, ...]:
    """Every object of a policy, stamped, in the order to create them: configuration before what mounts it.

    Args:
        strategies: rolling-update parameters by pool, where they are not the usual ones.
    """
    wanted = policy.spec.desired_replicas()
    objects = [workload.service(policy)]
    for pool in policy.spec.pools:
        objects += [
            workload.config_map(policy, pool),
            workload.disruption_budget(policy, pool),
            workload.deployment(
                policy, pool, wanted[pool.name], settings.image, (strategies or {}).get(pool.name, rollout.SURGE)
            ),
        ]
    return tuple(diff.stamped(found) for found in objects)


def plan(policy: PolicyDeployment, observed: Observed, settings: Settings) -> Plan:
    """Decide what brings the cluster to `policy`. Equal input gives equal output; nothing is read or written."""
    if policy.deleting:  # owner references collect the children; the route ends with this plan
        return Plan(status=observed.live.get("status", {}), status_changed=False)
    if observed.name_owner is not None:
        other = "/".join(observed.name_owner)
        message = f"policy name {policy.name!r} is taken by the older PolicyDeployment {other}; choose another name"
        return _refusal(policy, observed, "PolicyNameTaken", message)
    pools = _count(policy, observed, settings)
    strategies = {
        pool.name: rollout.strategy(
            pool, observed.children.get(Ref("Deployment", naming.workload_name(policy.name, pool.name)))
        )
        for pool in pools
    }
    desired = desired_objects(policy, settings, strategies)
    ownership = {ref_of(found): _ownership(policy, observed.children.get(ref_of(found))) for found in desired}
    foreign = [ref for ref, owned in ownership.items() if owned == "foreign"]
    if foreign:
        names = ", ".join(f"{ref.kind} {ref.name}" for ref in foreign)
        message = f"{names} exists and is not this PolicyDeployment's; rename or delete one of the two"
        return _refusal(policy, observed, "ObjectConflict", message)

    deployments = [child for ref, child in observed.children.items() if ref.kind == "Deployment"]
    new_status = status.observed(
        policy,
        observed.live,
        pools,
        observed.pods,
        deployments,
        settings.gateway_url,
        observed.now,
        rollout.note(pools, list(strategies.values())),
    )
    return Plan(
        desired=desired,
        writes=tuple(
            found
            for found in desired
            if ownership[ref_of(found)] != "stale" and diff.needs_apply(found, observed.children.get(ref_of(found)))
        ),
        deletions=_deletions(policy, observed, desired, settled=all(pool.settled for pool in pools)),
        status=new_status,
        status_changed=new_status != observed.live.get("status"),
        route=routing.route(policy, observed.pods),
    )


def _count(policy: PolicyDeployment, observed: Observed, settings: Settings) -> list[status.PoolCount]:
    wanted = policy.spec.desired_replicas()
    return [
        status.PoolCount(
            pool.name,
            pool.accelerator,
            wanted[pool.name],
            workload.template_hash(workload.pod_template(policy, pool, settings.image)),
            observed.pods,
        )
        for pool in policy.spec.pools
    ]


def refuse(live: Json, reason: str, message: str, now: str) -> Plan:
    """The plan for a PolicyDeployment that cannot be served: say so, and touch nothing that runs."""
    new_status = status.refused(live, live["metadata"].get("generation", 1), reason, message, now)
    return Plan(status=new_status, status_changed=new_status != live.get("status"))


def _refusal(policy: PolicyDeployment, observed: Observed, reason: str, message: str) -> Plan:
    return refuse(observed.live, reason, message, observed.now)


def ref_of(found: Json) -> Ref:
    """Kind and name of an object."""
    return Ref(found["kind"], found["metadata"]["name"])


def _ownership(policy: PolicyDeployment, live: Json | None) -> str:
    """`ours`, `foreign`, or `stale`: left by an earlier PolicyDeployment of this name and about to be collected."""
    if live is None or not policy.uid:
        return "ours"
    metadata = live["metadata"]
    controllers = [owner for owner in metadata.get("ownerReferences", []) if owner.get("controller")]
    if controllers:
        owner = controllers[0]
        if owner["uid"] == policy.uid:
            return "ours"
        same_name = owner["kind"] == "PolicyDeployment" and owner["name"] == policy.name
        return "stale" if same_name else "foreign"
    # Without an owner our labels decide: a removed owner reference is drift, a hand-made object is not ours.
    labels = metadata.get("labels", {})
    ours = labels.get(naming.LABEL_MANAGED_BY) == naming.MANAGER and labels.get(naming.LABEL_POLICY) == policy.name
    return "ours" if ours else "foreign"


def _deletions(
    policy: PolicyDeployment, observed: Observed, desired: Sequence[Json], *, settled: bool
) -> tuple[Ref, ...]:
    """Children that are wanted no longer: only once what replaces them serves, and nothing running refers to them."""
    if not settled:
        return ()
    kept = {ref_of(found) for found in desired}
    mounted = {
        volume.get("configMap", {}).get("name")
        for pod in observed.pods
        for volume in pod.get("spec", {}).get("volumes", [])
    }
    obsolete = [
        ref
        for ref, live in observed.children.items()
        if ref not in kept
        and _ownership(policy, live) == "ours"
        and not live["metadata"].get("deletionTimestamp")
        and not (ref.kind == "ConfigMap" and ref.name in mounted)
    ]
    return tuple(sorted(obsolete))
