"""Which workers the gateway may send to: ready pods of a policy, and the table of all policies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from taktline_protocol.deployment import Candidate, Route, RoutingTable, Target

from taktline_operator import naming
from taktline_operator.spec import Degrade, PolicyDeployment

Json = dict[str, Any]


def is_ready(pod: Json) -> bool:
    """Whether a pod may be sent to: it has an address, is not being deleted, and reports Ready."""
    status = pod.get("status", {})
    if pod["metadata"].get("deletionTimestamp") or not status.get("podIP") or status.get("phase") != "Running":
        return False
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", []))


def targets(pods: Iterable[Json]) -> tuple[Target, ...]:
    """The routable workers among `pods`, ordered by address."""
    found = []
    for pod in filter(is_ready, pods):
        address = pod["status"]["podIP"]
        host = f"[{address}]" if ":" in address else address
        metadata = pod["metadata"]
        found.append(
            Target(
                address=f"{host}:{naming.WORKER_PORT}",
                pool=metadata.get("labels", {}).get(naming.LABEL_POOL, "default"),
                revision=metadata.get("annotations", {}).get(naming.ANNOTATION_REVISION, ""),
            )
        )
    return tuple(sorted(found, key=lambda target: target.address))


def route(
    policy: PolicyDeployment, pods: Iterable[Json], revision: str = "", candidate: Candidate | None = None
) -> Route:
    """What the gateway needs to serve one policy.

    Args:
        pods: its workers.
        revision: what they run, where it is not what the spec asks for.
        candidate: the revision on trial.
    """
    spec = policy.spec
    found = Route(
        policy=policy.name,
        family=spec.model.family,
        revision=revision or spec.revision(),
        targets=targets(pods),
        control_budget_ms=spec.slo.control_budget_ms,
        max_batch=spec.batching.max_batch or spec.engine.buckets[-1],
        max_wait_ms=spec.batching.max_wait_ms,
        clients={client.protocol: client.mapping() for client in spec.clients},
        candidate=candidate,
    )
    if spec.degrade != Degrade():
        found = msgspec.structs.replace(found, degrade=spec.degrade.options())
    return msgspec.structs.replace(
        found,
        priority=spec.slo.priority,
        robot_weights=dict(sorted(spec.access.robot_weights.items())),
        priority_ceilings=dict(sorted(spec.access.priority_ceilings.items())),
    )


def kept(known: Route | None, workers: Iterable[Json]) -> Route | None:
    """What a refused policy keeps: the route that it had, to those of its workers that serve now.

    Args:
        known: the route that it had; None where it had none.
    """
    if known is None:
        return None
    found = targets(workers)
    trying = known.candidate
    if trying is None:
        return msgspec.structs.replace(known, targets=found)
    candidate = msgspec.structs.replace(trying, targets=tuple(one for one in trying.targets if one in found))
    serving = tuple(one for one in found if one not in trying.targets)
    return msgspec.structs.replace(known, targets=serving, candidate=candidate)


def table(routes: Iterable[Route]) -> RoutingTable:
    """The routing table, ordered by policy so that equal content has equal bytes."""
    return RoutingTable(routes=tuple(sorted(routes, key=lambda found: found.policy)))


def config_map(routing: RoutingTable, namespace: str) -> Json:
    """The ConfigMap that carries the table to the gateways of `namespace`."""
    text = msgspec.json.format(msgspec.json.encode(routing), indent=1).decode()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": naming.ROUTES_NAME,
            "namespace": namespace,
            "labels": {naming.LABEL_PART_OF: "taktline", naming.LABEL_MANAGED_BY: naming.MANAGER},
        },
        "data": {naming.ROUTES_FILE: text},
    }


def read_table(config: Json | None) -> dict[str, Route]:
    """Routes by policy in a live ConfigMap; empty where it is absent or not ours to read."""
    text = (config or {}).get("data", {}).get(naming.ROUTES_FILE, "")
    try:
        routing = msgspec.json.decode(text or "{}", type=RoutingTable)
    except msgspec.DecodeError:
        return {}  # somebody else's text: the next write replaces it
    return {found.policy: found for found in routing.routes}


def owners(created: Mapping[tuple[str, str], str]) -> dict[str, tuple[str, str]]:
    """Who owns each policy name: of PolicyDeployments with one name in several namespaces, the oldest.

    Args:
        created: (namespace, name) -> creationTimestamp.
    """
    result: dict[str, tuple[str, str]] = {}
    for key in sorted(created, key=lambda key: (created[key], key)):
        result.setdefault(key[1], key)
    return result
