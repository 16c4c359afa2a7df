"""Other products that a policy asks for: what is missing of them in the cluster, and how workers run without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from taktline_operator import groups, keda, kueue, monitors, ray_services
from taktline_operator.gangs import Gang
from taktline_operator.spec import PolicyDeployment

Json = dict[str, Any]

CONDITION = "Integrated"
CHILD_KINDS = ("Deployment", "Service", "ConfigMap", "PodDisruptionBudget", "ControllerRevision")
OWNED_KINDS = (groups.LWS_KIND, ray_services.KIND, keda.KIND)
"""Optional kinds of which a policy may have children, beside those of the Prometheus operator."""


def asks(policy: PolicyDeployment) -> bool:
    """Whether the policy can make use of any of them."""
    spec = policy.spec
    with_keda = spec.scaling is not None and spec.scaling.keda is not None
    return spec.engine.gpus > 1 or spec.engine.runtime != "worker" or spec.queue is not None or with_keda


def child_kinds(policy: PolicyDeployment, status: Json, kinds: frozenset[str]) -> list[str]:
    """Kinds of which the policy may have children; those of other products only where it asks for any, or did.

    Args:
        kinds: optional kinds that the cluster has.
    """
    found = [*CHILD_KINDS, *(kind for kind in monitors.KINDS if kind in kinds)]
    if concerned(policy, status):
        found += ["StatefulSet", *(kind for kind in OWNED_KINDS if kind in kinds)]
    return found


def concerned(policy: PolicyDeployment, status: Json) -> bool:
    """Whether the policy asks for any, or may still have objects from when it did."""
    if not status or asks(policy):
        return True
    conditions = status.get("conditions", [])
    return any(condition["type"] == CONDITION for condition in conditions) or any(
        "podsPerWorker" in entry for entry in status.get("pools", [])
    )


def refusal(policy: PolicyDeployment, kinds: frozenset[str] | None) -> tuple[str, str] | None:
    """Reason and message where the policy cannot be served for want of a kind; None where it can."""
    if policy.spec.engine.runtime == "ray" and kinds is not None and ray_services.KIND not in kinds:
        return "KindsAbsent", (
            "engine.runtime is ray, and the cluster has no RayService (KubeRay), or the operator may not use it;"
            " install KubeRay, or leave engine.runtime out"
        )
    return None


def condition(
    policy: PolicyDeployment, kinds: frozenset[str], gang_of: Mapping[str, Gang], children: Sequence[Json]
) -> tuple[str, str, str] | None:
    """Status, reason and message of the condition `Integrated`; None where nothing is asked for, nor left over."""
    missing = []
    if policy.spec.queue is not None and kueue.KIND not in kinds:
        missing.append("no LocalQueue (Kueue), so workers wait in no queue")
    if policy.spec.scaling is not None and policy.spec.scaling.keda is not None and keda.KIND not in kinds:
        missing.append("no ScaledObject (KEDA), so nobody sets spec.replicas")
    if missing:
        return "False", "KindsAbsent", f"the cluster has {' and '.join(missing)}; installed later, it is made use of"
    makers = {gang.kind for gang in gang_of.values()}
    if "StatefulSet" in makers and groups.LWS_KIND not in kinds:
        return "True", "Fallback", "the cluster has no LeaderWorkerSet, so groups of pods are StatefulSets"
    left = any(child["kind"] in ("StatefulSet", *OWNED_KINDS) for child in children)
    with_keda = policy.spec.scaling is not None and policy.spec.scaling.keda is not None
    if makers or left or policy.spec.queue is not None or with_keda:
        return "True", "Present", "everything that is asked for is in the cluster"
    return None


def conditions(
    policy: PolicyDeployment,
    kinds: frozenset[str] | None,
    gang_of: Mapping[str, Gang],
    pods: Sequence[Json],
    children: Sequence[Json],
) -> dict[str, tuple[str, str, str]]:
    """All conditions about other products that are to be told, by type."""
    found = {
        CONDITION: None if kinds is None else condition(policy, kinds, gang_of, children),
        kueue.CONDITION: kueue.condition(policy, pods, children),
    }
    return {kind: said for kind, said in found.items() if said is not None}
