"""Other products that a policy asks for: what is missing of them in the cluster, and how workers run without it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from taktline_operator import groups, keda, kueue, monitors, naming, ray_services
from taktline_operator.api_errors import ApiError, is_without_rights
from taktline_operator.gangs import Gang
from taktline_operator.spec import PolicyDeployment

logger = logging.getLogger(__name__)

Json = dict[str, Any]

CONDITION = "Integrated"
CHILD_KINDS = ("Deployment", "Service", "ConfigMap", "PodDisruptionBudget", "ControllerRevision")
OWNED_KINDS = (groups.LWS_KIND, ray_services.KIND, keda.KIND)
"""Optional kinds of which a policy may have children, beside those of the Prometheus operator."""


class Api(Protocol):
    """The part of `kube.KubeApi` that is asked."""

    async def list(  # noqa: D102
        self, kind: str, namespace: str | None, selector: str = "", *, metadata_only: bool = False, name: str = ""
    ) -> list[Json]: ...


def asks(policy: PolicyDeployment) -> bool:
    """Whether the policy can make use of any of them."""
    spec = policy.spec
    with_keda = spec.scaling is not None and spec.scaling.keda is not None
    return spec.engine.gpus > 1 or spec.engine.runtime != "worker" or spec.queue is not None or with_keda


def child_kinds(kinds: frozenset[str], *, concerned: bool) -> list[str]:
    """Kinds of which a policy may have children; those of other products only where it is `concerned`.

    Args:
        kinds: optional kinds that the cluster has.
    """
    found = [*CHILD_KINDS, *(kind for kind in monitors.KINDS if kind in kinds)]
    return found + (owned_kinds(kinds) if concerned else [])


def owned_kinds(kinds: frozenset[str]) -> list[str]:
    """Kinds of objects that only some policies have: few, so that not every policy is asked about each."""
    return ["StatefulSet", *(kind for kind in OWNED_KINDS if kind in kinds)]


class Concerned:
    """Remembers which policies may have objects of such kinds, whatever their spec and their status say by now.

    A field may be taken back, or the operator may end, before any status speaks of what was made. So a list of all such
    objects is the beginning, and whoever asks for one stays known until a look of its own finds none.
    """

    def __init__(self) -> None:
        self._keys: set[tuple[str, str]] = set()

    async def look(self, api: Api, scopes: Iterable[str | None], kinds: frozenset[str]) -> None:
        """Find all objects of these kinds that there are.

        Raises:
            ApiError: the API server gave no answer, or refused for another reason than missing rights.
        """
        for scope, kind in itertools.product(scopes, owned_kinds(kinds)):
            try:
                owned = await api.list(kind, scope, naming.CHILD_SELECTOR, metadata_only=True)
            except ApiError as error:
                if not is_without_rights(error):
                    raise
                logger.info("not looked for: no rights", extra={"object": kind, "cause": error.message})
                continue
            for found in owned:
                metadata = found["metadata"]
                self._keys.add((metadata["namespace"], metadata["labels"][naming.LABEL_POLICY]))

    def is_one(self, policy: PolicyDeployment) -> bool:
        """Whether the policy is to be asked about."""
        if asks(policy):
            self._keys.add(policy.key)
        return policy.key in self._keys

    def looked(self, policy: PolicyDeployment, children: Iterable[Json]) -> None:
        """A look of its own found these children."""
        if not asks(policy) and not any(child["kind"] in ("StatefulSet", *OWNED_KINDS) for child in children):
            self._keys.discard(policy.key)


def refusal(
    policy: PolicyDeployment, kinds: frozenset[str] | None, pods: Sequence[Json] = ()
) -> tuple[str, str] | None:
    """Reason and message where the policy cannot be served for want of a kind; None where it can.

    Args:
        pods: its worker pods.
    """
    if kinds is not None and groups.LWS_KIND not in kinds and any(_is_of_lws(pod) for pod in pods):
        return "KindsAbsent", (
            "its workers are LeaderWorkerSets, which the operator may no longer read or write; they serve on as they"
            " are: give the operator its rights back, or delete the LeaderWorkerSets to have StatefulSets"
        )
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


def _is_of_lws(pod: Json) -> bool:
    metadata = pod["metadata"]
    return groups.LWS_NAME_LABEL in metadata.get("labels", {}) and not metadata.get("deletionTimestamp")


def conditions(
    policy: PolicyDeployment,
    kinds: frozenset[str] | None,
    gang_of: Mapping[str, Gang],
    pods: Sequence[Json],
    children: Sequence[Json],
    queue: kueue.Seen | None = None,
) -> dict[str, tuple[str, str, str]]:
    """All conditions about other products that are to be told, by type."""
    found = {
        CONDITION: None if kinds is None else condition(policy, kinds, gang_of, children),
        kueue.CONDITION: kueue.condition(policy, pods, children, queue),
    }
    return {kind: said for kind, said in found.items() if said is not None}
