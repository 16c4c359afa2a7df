"""The pure planner: one PolicyDeployment and what is observed of it in, objects, deletions, status and route out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from taktline_protocol.delivery import DeliveryProgress
from taktline_protocol.deployment import Route
from taktline_protocol.measurements import Trial as Measured
from taktline_protocol.messages import BucketTime

from taktline_operator import (
    advice,
    delivery_status,
    diff,
    group_pods,
    grouping,
    groups,
    healing,
    integrations,
    keda,
    kueue,
    leftovers,
    lineup,
    meshes,
    monitors,
    ray_services,
    revisions,
    rollout,
    routing,
    sizing,
    slo_rules,
    status,
    stuck,
    surge,
    trials,
    unattended,
    workload,
)
from taktline_operator.gangs import Gang
from taktline_operator.healing import NodeFault, Removal
from taktline_operator.lineup import Line, Lineup
from taktline_operator.naming import Ref as Ref
from taktline_operator.naming import ref_of as ref_of
from taktline_operator.ownership import ownership_of
from taktline_operator.scaling import Demand
from taktline_operator.spec import PolicyDeployment, Pool, WorkerTls

Json = dict[str, Any]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator's installation decides, not the PolicyDeployment.

    Attributes:
        image: worker image of pools that name none.
        images: the same by accelerator class, for classes that need another one.
        gateway_namespace: where the gateways run and read their routes.
        gateway_scheme: http, or https where they serve TLS.
        runbooks: base URL of the pages that alerts link to.
        worker_tls: certificates of all workers; None where they speak plain text.
        model_cache: folder of each node that keeps fetched checkpoints of policies that name no cache; empty: none.
        kernel_cache: folder of each node that keeps the kernels that workers compile, by namespace; empty: none.
    """

    image: str = "taktline/worker:0.1.0"
    images: Mapping[str, str] = {}
    gateway_namespace: str = "taktline-system"
    gateway_scheme: str = "http"
    runbooks: str = slo_rules.RUNBOOKS
    worker_tls: WorkerTls | None = None
    model_cache: str = ""
    kernel_cache: str = ""

    def image_for(self, pool: Pool) -> str:
        """Worker image of a pool that names none."""
        return self.images.get(pool.accelerator, self.image)

    @property
    def gateway_url(self) -> str:
        """Base URL of the gateway inside the cluster."""
        return f"{self.gateway_scheme}://taktline-gateway.{self.gateway_namespace}"


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What was read from the API.

    Attributes:
        live: the PolicyDeployment itself, with its last status.
        children: objects of the names and labels this PolicyDeployment uses, whoever made them.
        pods: its worker pods.
        trials: what each gateway that answered measures of a candidate; None where none answered, or none was asked.
        nodes: what is wrong with nodes, by name; those that are well are left out.
        demand: what robots ask for; None where it is not known, or nothing scales by it.
        tables: T_sync by pool, as the gateways measure it.
        name_owner: the (namespace, name) that owns this policy name at the gateway; None when it is this one.
        routed: the route that it has now; None where it has none.
        absent: objects that the spec names and that do not exist.
        node_labels: labels of every node; None where they are not known.
        node_gpus: nodes that have GPUs.
        kinds: optional kinds that the cluster has and the operator may use; None where nobody looked.
        monitoring: kinds of the Prometheus operator that the cluster has; None where nobody looked.
        deliveries: how far pods are that fetch their checkpoint, by name.
        version: of the cluster, as (major, minor); None where nobody looked.
        queue: what became of the queue that the policy names; None where nobody looked.
        now: RFC 3339 time.
    """

    live: Json
    now: str
    children: Mapping[Ref, Json] = {}
    pods: Sequence[Json] = ()
    trials: Sequence[Measured] | None = None
    nodes: Mapping[str, NodeFault] = {}
    demand: Demand | None = None
    tables: Mapping[str, Sequence[BucketTime]] = {}
    name_owner: tuple[str, str] | None = None
    routed: Route | None = None
    absent: frozenset[advice.Referred] = frozenset()
    node_labels: Sequence[Mapping[str, str]] | None = None
    node_gpus: Sequence[meshes.NodeGpus] = ()
    kinds: frozenset[str] | None = None
    monitoring: frozenset[str] | None = None
    deliveries: Mapping[str, DeliveryProgress] = {}
    version: tuple[int, int] | None = None
    queue: kueue.Seen | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done.

    Attributes:
        desired: every object that must exist, in the order to create them.
        writes: those of `desired` that differ from what is live.
        deletions: children that are wanted no longer.
        seen: uid of each of `deletions`, so that none that was made anew since then goes in its place.
        removals: pods that do not come back by themselves, or must leave their node.
        status: the whole status.
        status_changed: whether `status` differs from the live one.
        again_s: when to look again though nothing happens in the cluster; None for never.
        route: this policy's part of the routing table; None when it must not be served.
    """

    desired: tuple[Json, ...] = ()
    writes: tuple[Json, ...] = ()
    deletions: tuple[Ref, ...] = ()
    seen: Mapping[Ref, str] = {}
    removals: tuple[Removal, ...] = ()
    status: Json
    status_changed: bool
    route: Route | None = None
    again_s: float | None = None


def desired_objects(
    policy: PolicyDeployment,
    settings: Settings,
    strategies: Mapping[str, Json] | None = None,
    lines: Lineup | None = None,
    numbers: Mapping[str, int] | None = None,
    gang_of: Mapping[str, Gang] | None = None,
    queued: Mapping[Ref, Json] | None = None,
) -> tuple[Json, ...]:
    """Every object of a policy, stamped, in the order to create them: configuration before what mounts it.

    Args:
        strategies: rolling-update parameters by Deployment, where they are not the usual ones.
        lines: its Deployments; None is those of a policy that is applied for the first time.
        numbers: history number by revision hash.
        gang_of: by line, the groups of those whose workers are several pods; None is those of the spec alone.
        queued: live objects, where Kueue has a say in what becomes of them.
    """
    if lines is None:
        lines = lineup.of(policy, rollout.State(), "", {}, policy.spec.desired_replicas(), ())
    if gang_of is None:
        gang_of = grouping.of(lines, grouping.per_node(policy, {}, ()), settings.image_for)
    meet = any(gang.kind == "StatefulSet" for gang in gang_of.values())
    objects = [workload.service(policy)] + ([groups.ranks_service(policy)] if meet else [])
    objects += [
        revisions.controller_revision(
            policy, revision, (numbers or {}).get(revision.hash, 1), workload.owned_metadata(policy, "", None)
        )
        for revision in lines.revisions
    ]
    objects += [grouping.budget(policy, pool, lines, gang_of) for pool in policy.spec.pools]
    for line in (*lines.stable, *lines.candidate):
        objects.append(workload.config_map(line.policy, line.pool))
        if line.name in gang_of:
            objects += gang_of[line.name].objects
            continue
        update = (strategies or {}).get(line.name, surge.SURGE)
        objects.append(
            workload.deployment(
                line.policy, line.pool, line.replicas, settings.image_for(line.pool), update, line.track
            )
        )
    unique = {ref_of(found): kueue.labelled(found, policy, (queued or {}).get(ref_of(found))) for found in objects}
    return tuple(diff.stamped(found) for found in unique.values())


def plan(policy: PolicyDeployment, observed: Observed, settings: Settings) -> Plan:
    """Decide what brings the cluster to `policy`. Equal input gives equal output; nothing is read or written."""
    if policy.deleting:  # owner references collect the children; the route ends with this plan
        return Plan(status=observed.live.get("status", {}), status_changed=False)
    children = list(observed.children.values())
    around = advice.Surroundings(
        name_owner=observed.name_owner,
        absent=observed.absent,
        nodes=observed.node_labels,
        tables=sizing.known_times(observed.live.get("status", {}), observed.tables),
        gpus_per_node=grouping.per_node(policy, observed.live.get("status", {}), observed.node_gpus),
    )
    said = advice.review(policy, around)
    if said.refusals:
        message = "; ".join(refusal.message for refusal in said.refusals)
        return refuse(observed, said.refusals[0].reason, message)
    unfit = integrations.refusal(policy, observed.kinds, observed.pods)
    if unfit is not None:
        return refuse(observed, *unfit)
    unmountable = delivery_status.image_volumes_refusal(policy, observed.version)
    if unmountable is not None:
        return refuse(observed, *unmountable)
    unclaimable = meshes.claims_refusal(policy, observed.version)
    if unclaimable is not None:
        return refuse(observed, *unclaimable)
    policy = msgspec.structs.replace(policy, tls=settings.worker_tls, kernel_cache=settings.kernel_cache)
    if settings.model_cache and not policy.spec.delivery.cache.shared:
        policy = policy.with_cache(settings.model_cache)
    size = sized(policy, observed)
    workers = group_pods.leaders(observed.pods, ray_services.serving_clusters(children))
    trial = trials.of(policy, observed.live, children, workers, observed.trials, size.replicas, observed.now)
    lines = trial.lines
    admits = kueue.admits(observed.queue)
    gang_of = grouping.of(
        lines,
        around.gpus_per_node,
        settings.image_for,
        children,
        observed.pods,
        observed.kinds or (),
        observed.now,
        admits=admits,
    )
    counts = [_count(line, workers, settings, gang_of.get(line.name)) for line in lines.serving]
    strategies = {
        line.name: surge.strategy(
            count, observed.children.get(Ref("Deployment", line.name)), observed.now, admits=admits
        )
        for line, count in zip(lines.serving, counts, strict=True)
    }
    makers = [gang_of[line.name].kind if line.name in gang_of else "Deployment" for line in lines.serving]
    told = [grouping.told(gang_of.get(name), chosen) for name, chosen in strategies.items()]
    queued = observed.children if kueue.KIND in (observed.kinds or ()) else None
    desired = desired_objects(policy, settings, strategies, lines, trial.numbers, gang_of, queued)
    desired += tuple(
        diff.stamped(found) for found in monitors.objects(policy, observed.monitoring or frozenset(), settings.runbooks)
    )
    scaled = keda.scaled_object(policy) if keda.KIND in (observed.kinds or ()) else None
    desired += (diff.stamped(scaled),) if scaled is not None else ()
    ownership = {ref_of(found): ownership_of(policy, observed.children.get(ref_of(found))) for found in desired}
    foreign = [ref for ref, owned in ownership.items() if owned == "foreign"]
    if foreign:
        names = ", ".join(f"{ref.kind} {ref.name}" for ref in foreign)
        message = f"{names} exists and is not this PolicyDeployment's; rename or delete one of the two"
        return refuse(observed, "ObjectConflict", message)

    leaving = {line.name for line in lines.candidate if not lines.finishing}
    deployments = [c for ref, c in observed.children.items() if ref.kind == "Deployment" and ref.name not in leaving]
    new_status = status.observed(
        policy,
        observed.live,
        counts,
        trial.serving_pods,
        deployments,
        settings.gateway_url,
        observed.now,
        surge.note(counts, told, observed.now, makers, admits=admits)
        + stuck.creating_note(observed.pods, observed.now),
        trial,
        size,
        group_pods.with_followers(trial.serving_pods, observed.pods),
    )
    grouping.tell(new_status, policy, lines, gang_of, around.gpus_per_node, children)
    hung = stuck.look(
        observed.pods,
        policy.spec.pools,
        observed.live.get("status", {}),
        _wanted(desired, lines, gang_of),
        observed.now,
        {ref.name for ref in observed.children if ref.kind in grouping.KINDS},
    )
    stuck.tell(new_status, hung)
    if hung.fault is not None and not status.is_true(new_status, "Degraded"):
        new_status = status.degraded_by(new_status, observed.live, hung.fault, observed.now)
    elsewhere = ray_services.fault(children) or unattended.fault(children, observed.now)
    if elsewhere is not None and not status.is_true(new_status, "Degraded"):
        new_status = status.degraded_by(new_status, observed.live, elsewhere, observed.now)
    further = {advice.CONDITION: advice.condition(said.cautions)}
    if policy.spec.model.source.fetched:
        further[delivery_status.CONDITION], new_status["delivery"] = delivery_status.condition(
            policy, observed.pods, observed.deliveries
        )
    if observed.monitoring is not None:
        further[monitors.CONDITION] = monitors.condition(observed.monitoring)
    further |= integrations.conditions(policy, observed.kinds, gang_of, observed.pods, children, observed.queue)
    previous = observed.live.get("status", {}).get("conditions", [])
    new_status["conditions"] += status.conditions(previous, further, policy.generation, observed.now)
    deletions = leftovers.of(policy, observed.children, observed.pods, desired, trial, counts, gang_of)
    return Plan(
        desired=desired,
        writes=tuple(
            found
            for found in desired
            if ownership[ref_of(found)] != "stale" and diff.needs_apply(found, observed.children.get(ref_of(found)))
        ),
        deletions=deletions,
        seen={ref: observed.children[ref]["metadata"].get("uid", "") for ref in deletions},
        removals=_removals(observed, hung.removals),
        status=new_status,
        status_changed=new_status != observed.live.get("status"),
        route=routing.route(policy, trial.serving_pods, trial.serving_name, trial.candidate_route()),
        again_s=0.0
        if size.moved
        else _earliest(
            policy,
            observed,
            any(count.old for count in counts),
            trial.again_s,
            hung.again_s,
            *(gang.again_s for gang in gang_of.values()),
        ),
    )


def sized(policy: PolicyDeployment, observed: Observed) -> sizing.Sizing:
    """Workers by pool."""
    workloads = group_pods.workloads(observed.children)
    workers = group_pods.leaders(observed.pods, ray_services.serving_clusters(observed.children.values()))
    return sizing.of(policy, observed.live, workers, workloads, observed.demand, observed.tables, observed.now)


def _count(line: Line, workers: Sequence[Json], settings: Settings, gang: Gang | None) -> status.PoolCount:
    template = (
        gang.template
        if gang
        else workload.pod_template(line.policy, line.pool, settings.image_for(line.pool), line.track)
    )
    return status.PoolCount(
        line.pool.name,
        line.pool.accelerator,
        line.replicas,
        workload.template_hash(template),
        [pod for pod in workers if line.has(pod)],
    )


def refuse(observed: Observed, reason: str, message: str) -> Plan:
    """The plan for what cannot be served as it is written: say so, touch nothing that runs, keep its route."""
    live, pods = observed.live, observed.pods
    workers = group_pods.leaders(pods, ray_services.serving_clusters(observed.children.values()))
    route = routing.kept(observed.routed, workers)
    generation = live["metadata"].get("generation", 1)
    new_status = status.refused(live, generation, reason, message, observed.now, pods, route)
    return Plan(status=new_status, status_changed=new_status != live.get("status"), route=route)


def _removals(observed: Observed, hung: Sequence[Removal]) -> tuple[Removal, ...]:
    found = healing.removals(observed.pods, observed.nodes)
    gone = {removal.pod for removal in found}
    return (*found, *(removal for removal in hung if removal.pod not in gone))


def _wanted(desired: Sequence[Json], lines: Lineup, gang_of: Mapping[str, Gang]) -> dict[str, int]:
    """Workers wanted by hash of their pod template."""
    found = {
        workload.template_hash(made["spec"]["template"]): int(made["spec"]["replicas"])
        for made in desired
        if made["kind"] == "Deployment"
    }
    grouped = [line for line in (*lines.stable, *lines.candidate) if line.name in gang_of]
    return found | {workload.template_hash(gang_of[line.name].template): line.replicas for line in grouped}


def _earliest(policy: PolicyDeployment, observed: Observed, rolling: bool, *others: float | None) -> float | None:
    """When to look again: while a checkpoint is on its way, or a worker starts, whose progress no event tells."""
    fetching = delivery_status.LOOK_S if delivery_status.is_under_way(observed.pods) else None
    children = observed.children.values()
    looks = (
        fetching,
        ray_services.look_again_s(policy, children),
        unattended.look_again_s(children, observed.now),
        surge.look_again_s(observed.pods, observed.now, rolling=rolling),
        stuck.creating_again_s(observed.pods, observed.now),
        kueue.LOOK_S if observed.queue is not None and observed.queue.state == "unknown" else None,
    )
    return min((found for found in (*looks, *others) if found is not None), default=None)
