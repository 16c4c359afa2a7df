"""The one reconciliation: read what is, plan, write the difference. Events, retries and restarts all end here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
from taktline_protocol.delivery import DeliveryProgress
from taktline_protocol.deployment import Route
from taktline_protocol.errors import TaktlineError
from taktline_protocol.measurements import GatewayMeasurements, PolicyMeasurement, Trial

from taktline_operator import (
    carrying_out,
    diff,
    discovery,
    healing,
    integrations,
    kueue,
    meshes,
    monitors,
    naming,
    ray_services,
    revisions,
    routing,
    sizing,
    spec,
)
from taktline_operator.demand import TIMES_S, UNKNOWN_S, DemandTracker, unmeasured
from taktline_operator.kube import ApiError
from taktline_operator.plan import Observed, Ref, Settings, desired_objects, plan, ref_of, refuse, sized
from taktline_operator.surveying import Existence
from taktline_operator.workqueue import WorkQueue

logger = logging.getLogger(__name__)

Json = dict[str, Any]
Key = tuple[str, str]  # namespace and name of a PolicyDeployment

ROUTES: Key = ("", "")  # the routing table has its own turn in the queue, so that a burst costs one write


class Api(Protocol):
    """The part of `kube.KubeApi` that reconciliation uses."""

    async def get(self, kind: str, namespace: str, name: str) -> Json | None: ...  # noqa: D102

    async def exists(self, kind: str, namespace: str, name: str) -> bool: ...  # noqa: D102

    async def list(  # noqa: D102
        self, kind: str, namespace: str | None, selector: str = "", *, metadata_only: bool = False, name: str = ""
    ) -> list[Json]: ...

    async def group_versions(self) -> frozenset[str]: ...  # noqa: D102

    async def kinds(self, group_version: str) -> frozenset[str]: ...  # noqa: D102

    async def raw(self, path: str) -> Json | None: ...  # noqa: D102

    async def apply(self, desired: Json, subresource: str = "") -> Json: ...  # noqa: D102

    async def annotate(self, kind: str, namespace: str, name: str, annotations: dict[str, str]) -> None: ...  # noqa: D102

    async def create(self, body: Json) -> bool: ...  # noqa: D102

    async def delete(  # noqa: D102
        self, kind: str, namespace: str, name: str, uid: str, version: str = ""
    ) -> None: ...


class Measurements(Protocol):
    """The part of `measuring.Gateways` that reconciliation uses."""

    async def of_policy(self, policy: str) -> tuple[PolicyMeasurement, ...] | None: ...  # noqa: D102

    async def all(self) -> tuple[GatewayMeasurements, ...]: ...  # noqa: D102


class Deliveries(Protocol):
    """The part of `delivery_polling.DeliveryPoller` that reconciliation uses."""

    async def of(self, pods: Sequence[Json]) -> dict[str, DeliveryProgress]: ...  # noqa: D102


def utc_now() -> str:
    """The wall clock in RFC 3339, to the second as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Controller:
    """Brings every PolicyDeployment, and the routing table of all of them, to what it should be.

    Its memory is only a cache: routes by policy, which a restart computes anew. Until a policy has been reconciled
    once, the table keeps the route that it has there.
    """

    def __init__(
        self,
        api: Api,
        settings: Settings,
        namespaces: Sequence[str] = (),
        clock: Callable[[], str] = utc_now,
        measurements: Measurements | None = None,
        deliveries: Deliveries | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to reconcile.

        Args:
            namespaces: those served; empty means all.
            measurements: where to ask the gateways; None asks nobody.
            deliveries: where to ask pods that fetch a checkpoint; None asks nobody.
        """
        self.queue: WorkQueue[Key] = WorkQueue()
        self.listed = False  # whether all PolicyDeployments are known, so that the table may be written
        self.kinds: frozenset[str] | None = None  # optional kinds that the cluster has and we may use
        self.statuses: dict[Key, Json] = {}  # metadata and status of each PolicyDeployment as last seen, for metrics
        self._api = api
        self._settings = settings
        self._namespaces = tuple(namespaces)
        self._clock = clock
        self._measurements = measurements
        self._deliveries = deliveries
        self._monotonic = monotonic
        self._created: dict[Key, str] = {}
        self._routes: dict[Key, Route | None] = {}
        self._table: dict[str, Route] = {}  # the table as last read
        self._parsed: dict[Key, tuple[tuple[str, int], spec.PolicyDeployment]] = {}
        self._nodes: dict[str, healing.NodeFault] = {}
        self._node_labels: list[dict[str, str]] | None = None
        self._node_gpus: tuple[meshes.NodeGpus, ...] = ()
        self._existence = Existence(api, monotonic)
        self._concerned = integrations.Concerned()
        self._withdrawn = discovery.Withdrawn(monotonic)
        self._demand, self._asked_at = DemandTracker(), -TIMES_S
        self._patience = sizing.Patience()
        self._sized: dict[Key, tuple[spec.PolicyDeployment, Observed]] = {}  # what scales by demand, as last seen

    def serves(self, namespace: str) -> bool:
        """Whether PolicyDeployments of this namespace are ours."""
        return not self._namespaces or namespace in self._namespaces

    @property
    def scopes(self) -> list[str | None]:
        """Namespaces to list, None for all at once."""
        return list(self._namespaces) or [None]

    async def resync(self, *, everything: bool) -> list[Json]:
        """List every PolicyDeployment we serve: forget what vanished unseen, queue what is new, or all of it.

        Raises:
            ApiError: the list could not be read; 404 when the CRD is not installed.
        """
        policies = [live for scope in self.scopes for live in await self._api.list("PolicyDeployment", scope)]
        if not self.listed:
            namespace = self._settings.gateway_namespace
            self._table = routing.read_table(await self._api.get("ConfigMap", namespace, naming.ROUTES_NAME))
        kinds = await discovery.usable(self._api, (*self._namespaces, self._settings.gateway_namespace)[0])
        everything = everything or kinds != self.kinds
        if everything:
            await self._concerned.look(self._api, self.scopes, kinds)
        self.kinds = kinds
        found = {_key(live): str(live["metadata"].get("creationTimestamp", "")) for live in policies}
        for key in self._created.keys() - found.keys():
            self._forget(key)
        for key in found:
            if everything or key not in self._created:
                self.queue.add(key)
        self._created = found
        self.statuses = {_key(live): {"metadata": live["metadata"], "status": live.get("status")} for live in policies}
        self.listed = True
        self.queue.add(ROUTES)
        return policies

    def _kinds_in(self, namespace: str) -> frozenset[str] | None:
        """Optional kinds that the cluster has and we may use in a namespace; None where nobody looked."""
        return None if self.kinds is None else self._withdrawn.left(self.kinds, namespace)

    async def handle(self, key: Key) -> None:
        """Reconcile one key of the queue. Safe to repeat and to interrupt anywhere.

        Raises:
            ApiError: the API refused or failed; the key should come back.
        """
        if key == ROUTES:
            await self._write_routes()
            return
        try:
            await self._reconcile(*key)
        except ApiError as error:
            if self._withdrawn.note(error, key[0]):
                self.queue.add(key, 0.0)  # without that kind; healing and routes must not wait for an alert rule
                return
            if "NamespaceTerminating" not in error.causes:
                raise
            # The namespace goes and takes everything with it; the deletion's own event brings the rest.
            logger.info("namespace is being deleted", extra={"namespace": key[0], "policy": key[1]})

    async def _reconcile(self, namespace: str, name: str) -> None:
        key = (namespace, name)
        live = await self._api.get("PolicyDeployment", namespace, name)
        if live is None:
            self._forget(key)
            return
        self._created[key] = str(live["metadata"].get("creationTimestamp", ""))
        try:
            policy = self._parse(live)
        except TaktlineError as error:
            pods = await self._api.list("Pod", namespace, naming.selector_text(naming.worker_selector(name)))
            ray = ray_services.KIND in (self._kinds_in(namespace) or ())
            services = await self._api.list(ray_services.KIND, namespace, naming.own_selector(name)) if ray else []
            observed = Observed(
                live=live,
                now=self._clock(),
                children={ref_of(service): service for service in services},
                pods=pods,
                routed=self._routed(key),
            )
            result = refuse(observed, "InvalidSpec", f"{error.message} ({error.next_step})")
        else:
            observed = await self._observe(policy, live)
            result = plan(policy, observed, self._settings)
            self._sized.pop(key, None)
            if policy.spec.scaling is not None or policy.spec.placement.mode != "Ordered":
                self._sized[key] = (policy, observed)
        # The route first: a pod that leaves should leave the table before anything else takes time.
        if key not in self._routes or self._routes[key] != result.route:
            self._routes[key] = result.route
            self.queue.add(ROUTES, 0.0)
        self._asked_at -= TIMES_S * sizing.is_other_revision(live, result.status)  # others have other times
        self.statuses[key] = {"metadata": live["metadata"], "status": result.status}
        await carrying_out.carry_out(self._api, live, result, self._clock)
        if result.again_s is not None:
            self.queue.add(key, result.again_s)

    def _routed(self, key: Key) -> Route | None:
        """The route that a policy has now."""
        return self._routes.get(key) or self._table.get(key[1])

    def _parse(self, live: Json) -> spec.PolicyDeployment:
        """Parse once per generation: the CEL rules are the slow part."""
        metadata = live["metadata"]
        version = (metadata["uid"], metadata["generation"])
        cached = self._parsed.get(_key(live))
        if cached is None or cached[0] != version:
            cached = (version, spec.parse(live))
            self._parsed[_key(live)] = cached
        return msgspec.structs.replace(cached[1], deleting=bool(metadata.get("deletionTimestamp")))

    async def _observe(self, policy: spec.PolicyDeployment, live: Json) -> Observed:
        usable = self._kinds_in(policy.namespace)
        monitoring = None if usable is None else usable & frozenset(monitors.KINDS)
        concerned = self._concerned.is_one(policy) or not self.listed or not live.get("status")
        kinds = integrations.child_kinds(usable or frozenset(), concerned=concerned)
        selector = naming.own_selector(policy.name)
        worker_pods = naming.selector_text(naming.worker_selector(policy.name))
        pods, *lists = await asyncio.gather(
            self._api.list("Pod", policy.namespace, worker_pods),
            *(self._api.list(kind, policy.namespace, selector) for kind in kinds),
        )
        children: dict[Ref, Json] = {ref_of(child): child for found in lists for child in found}
        if concerned:
            self._concerned.looked(policy, children.values())
        # A name we want but do not see by label may be taken by a stranger; look before applying over it.
        wanted = revisions.of_spec(policy.spec).hash
        names = [ref_of(found) for found in desired_objects(policy, self._settings)]
        names += [
            Ref("Deployment", naming.workload_name(policy.name, pool.name, wanted))
            for pool in policy.spec.pools
            if policy.spec.rollout.strategy == "Progressive"
        ]
        names += [ref_of(found) for found in monitors.objects(policy, monitoring or frozenset())]
        missing = [ref for ref in names if ref not in children]
        strangers = await asyncio.gather(*(self._api.get(ref.kind, policy.namespace, ref.name) for ref in missing))
        children |= {ref: stranger for ref, stranger in zip(missing, strangers, strict=True) if stranger is not None}
        owner = routing.owners(self._created).get(policy.name, policy.key)
        versioned = policy.spec.model.source.oci or meshes.uses_claims(policy)
        return Observed(
            live=live,
            now=self._clock(),
            children=children,
            pods=pods,
            trials=await self._trials(policy, live),
            nodes=self._nodes,
            demand=self._demand.of(policy.name, self._monotonic()),
            tables=self._demand.times(policy.name),
            name_owner=None if owner == policy.key else owner,
            routed=self._routed(policy.key) if owner == policy.key else None,
            absent=await self._existence.absent(policy),
            node_labels=self._node_labels,
            monitoring=monitoring,
            kinds=usable,
            node_gpus=self._node_gpus,
            deliveries=await self._deliveries.of(pods) if self._deliveries and policy.spec.model.source.fetched else {},
            version=await discovery.version(self._api) if versioned else None,
            queue=await kueue.look(self._api, policy, pods, usable or ()),
        )

    async def look_at_demand(self) -> None:
        """Ask the gateways, and queue every policy for which what they measure would change something.

        Raises:
            ApiError: the gateways could not be found.
        """
        now, unknown = self._monotonic(), unmeasured(self.statuses)
        rest_s = 0.0 if self._sized else UNKNOWN_S if unknown else TIMES_S
        if self._measurements is None or not self.statuses or now - self._asked_at < rest_s:
            return
        self._asked_at = now
        self._demand.take(await self._measurements.all(), now)
        for key in sizing.remeasured(self.statuses, self._demand.times):
            self.queue.add(key, 0.0)
        for key, (policy, seen) in self._sized.items():
            demand, tables = self._demand.of(policy.name, now), self._demand.times(policy.name)
            fresh = msgspec.structs.replace(seen, now=self._clock(), demand=demand, tables=tables)
            cooldown_s = policy.spec.scaling.down_cooldown_seconds if policy.spec.scaling else 0
            patience_s = sizing.WAITING_SHARE * cooldown_s
            if self._patience.is_due(key, sized(policy, fresh), seen.live.get("status", {}), patience_s, now):
                self.queue.add(key, 0.0)

    async def _trials(self, policy: spec.PolicyDeployment, live: Json) -> tuple[Trial, ...] | None:
        """What the gateways measure of a candidate, asked only while there is one."""
        phase = live.get("status", {}).get("rollout", {}).get("phase", "Complete")
        if self._measurements is None or phase in ("Complete", "RolledBack", "Starting"):
            return None
        answers = await self._measurements.of_policy(policy.name)
        return None if answers is None else tuple(found.trial for found in answers if found.trial is not None)

    async def look_at_nodes(self) -> None:
        """List the nodes; queue each policy with a worker on one that is not well, or whose mesh other nodes may hold.

        Raises:
            ApiError: nodes could not be listed; 403 where the operator has no rights on them.
        """
        nodes = await self._api.list("Node", None)
        before_gpus, self._node_gpus = self._node_gpus, meshes.of_nodes(nodes)
        if self._node_gpus != before_gpus:  # what was refused for want of them, or seen before they were, fits now
            for key, (_, policy) in self._parsed.items():
                if policy.spec.engine.gpus > 1:
                    self.queue.add(key)
        self._node_labels = [node["metadata"].get("labels", {}) for node in nodes]
        found = [fault for node in nodes if (fault := healing.node_fault(node))]
        before, self._nodes = self._nodes, {fault.node: fault for fault in found}
        for fault in found:
            if fault.node not in before:
                logger.warning("a node is not well", extra={"object": f"Node/{fault.node}", "cause": fault.message})
        if self._nodes:
            for scope in self.scopes:
                for pod in await self._api.list("Pod", scope, naming.CHILD_SELECTOR):
                    if pod.get("spec", {}).get("nodeName") in self._nodes:
                        labels = pod["metadata"]["labels"]
                        self.queue.add((pod["metadata"]["namespace"], labels[naming.LABEL_POLICY]))

    async def _write_routes(self) -> None:
        if not self.listed:
            return
        namespace = self._settings.gateway_namespace
        live = await self._api.get("ConfigMap", namespace, naming.ROUTES_NAME)
        self._table = routing.read_table(live)
        wanted: list[Route] = []
        for policy, key in routing.owners(self._created).items():
            route = self._routes[key] if key in self._routes else self._table.get(policy)
            wanted += [route] if route else []
        desired = diff.stamped(routing.config_map(routing.table(wanted), namespace))
        if not diff.needs_apply(desired, live):
            return
        await self._api.apply(desired)
        logger.info("routes written", extra={"policies": len(wanted)})
        # The kubelet looks at a mounted ConfigMap about once a minute, but at once when its pod changes.
        fresh = {naming.ANNOTATION_ROUTES: desired["metadata"]["annotations"][naming.ANNOTATION_APPLIED]}
        for pod in await self._api.list("Pod", namespace, naming.GATEWAY_SELECTOR):
            await self._api.annotate("Pod", namespace, pod["metadata"]["name"], fresh)

    def _forget(self, key: Key) -> None:
        self._created.pop(key, None)
        self._parsed.pop(key, None)
        self._sized.pop(key, None)
        self._patience.forget(key)
        self.statuses.pop(key, None)
        if self._routes.pop(key, None) is not None or self.listed:
            self.queue.add(ROUTES, 0.0)
        for other in self._created:  # one of its name elsewhere may be served now
            if other[1] == key[1]:
                self.queue.add(other)


def _key(live: Json) -> Key:
    return live["metadata"]["namespace"], live["metadata"]["name"]
