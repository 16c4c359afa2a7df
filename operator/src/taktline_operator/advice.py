"""What the CRD's rules cannot check: a PolicyDeployment and what is known around it in, refusals and cautions out.

Pure, and the only place of these checks: the admission webhook answers `kubectl apply` with them, and reconciliation
writes the same words as conditions where there is no webhook. A refusal cannot work whatever happens around it; a
caution may still come right (a claim that is made later, a node that joins).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from taktline_protocol.families import FAMILIES, loaded
from taktline_protocol.messages import BucketTime

from taktline_operator import accelerators, meshes
from taktline_operator.capacity import meets
from taktline_operator.diff import quantity
from taktline_operator.engine_spec import Parallel
from taktline_operator.placement import OVERHEAD_SHARE
from taktline_operator.spec import PolicyDeployment, Pool

CONDITION = "Cautioned"
INVALID = "InvalidSpec"
NAME_TAKEN = "PolicyNameTaken"


class Referred(NamedTuple):
    """An object in the PolicyDeployment's namespace that its spec names, and the field that does."""

    kind: str
    name: str
    field: str


class Finding(NamedTuple):
    """One thing that is wrong: a word for programs and a sentence for people, with what to do."""

    reason: str
    message: str


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What is known around a PolicyDeployment; nothing is said of what is not known.

    Attributes:
        name_owner: the (namespace, name) that owns the policy name at the gateway; None when this one does.
        absent: objects that the spec names and that do not exist.
        nodes: labels of every node; None where they cannot be read.
        tables: measured batch times by pool.
        gpus_per_node: GPUs of a node by pool; None, or no entry, where that is not known.
    """

    name_owner: tuple[str, str] | None = None
    absent: frozenset[Referred] = frozenset()
    nodes: Sequence[Mapping[str, str]] | None = None
    tables: Mapping[str, Sequence[BucketTime]] = {}
    gpus_per_node: Mapping[str, int | None] = {}


class Advice(NamedTuple):
    """Refusals, for which the PolicyDeployment cannot be served, and cautions."""

    refusals: tuple[Finding, ...]
    cautions: tuple[Finding, ...]


def references(policy: PolicyDeployment) -> tuple[Referred, ...]:
    """Objects of the policy's namespace that its spec names."""
    source, fallback = policy.spec.model.source, policy.spec.degrade.fallback_policy
    found = []
    if source.pvc is not None:
        found.append(Referred("PersistentVolumeClaim", source.pvc.claim_name, "model.source.pvc"))
    cache = policy.spec.delivery.cache
    if source.fetched and cache.claim_name is not None:
        found.append(Referred("PersistentVolumeClaim", cache.claim_name, "delivery.cache"))
    secrets = {
        "http.tokenSecret": source.http and source.http.token_secret,
        "s3.credentialsSecret": source.s3 and source.s3.credentials_secret,
        "oci.pullSecret": source.oci and source.oci.pull_secret,
        "hub.tokenSecret": source.hub and source.hub.token_secret,
    }
    found += [Referred("Secret", named.name, f"model.source.{field}") for field, named in secrets.items() if named]
    if source.fetched and policy.spec.delivery.proxy_secret is not None:
        found.append(Referred("Secret", policy.spec.delivery.proxy_secret.name, "delivery.proxySecret"))
    if fallback:
        found.append(Referred("PolicyDeployment", fallback, "degrade.fallbackPolicy"))
    return tuple(found)


def review(policy: PolicyDeployment, around: Surroundings) -> Advice:
    """Everything that is to be said of `policy`."""
    return Advice(tuple(_refusals(policy, around)), tuple(_cautions(policy, around)))


def condition(cautions: Sequence[Finding]) -> tuple[str, str, str]:
    """(status, reason, message) of the condition `Cautioned`."""
    if not cautions:
        return "False", "AsExpected", "nothing about the spec looks wrong"
    return "True", cautions[0].reason, "; ".join(caution.message for caution in cautions)[:4096]


def _refusals(policy: PolicyDeployment, around: Surroundings) -> list[Finding]:
    spec, found = policy.spec, []
    family, spread = FAMILIES[spec.model.family], spec.engine.parallel or Parallel()
    asked = spec.engine.world_action
    whole = asked is not None and asked.split == "sequence"  # the tokens are shared, the heads are not
    if not whole and any(heads % spread.tp for heads in family.heads):
        heads = " and ".join(map(str, family.heads))
        message = f"engine.parallel.tp {spread.tp} does not divide the {heads} attention heads of {spec.model.family}"
        found.append(Finding(INVALID, f"{message}; each GPU must get as many of them"))
    if spread.cfg > 1 and not family.guided:
        message = f"engine.parallel.cfg {spread.cfg} splits classifier-free guidance, and {spec.model.family} has none"
        found.append(Finding(INVALID, f"{message}; use engine.parallel.dp"))
    if around.name_owner is not None:
        other = "/".join(around.name_owner)
        message = f"policy name {policy.name!r} is taken by the older PolicyDeployment {other}; choose another name"
        found.append(Finding(NAME_TAKEN, message))
    unfit = meshes.refusal(policy, around.gpus_per_node)
    if unfit is not None:
        found.append(Finding(*unfit))
    for pool in spec.pools:
        found += [Finding(INVALID, f"pool {pool.name}: {message}") for message in _inverted(pool)]
    if spec.scaling is not None and not _is_zone(spec.scaling.time_zone):
        message = f"scaling.timeZone {spec.scaling.time_zone!r} is no time zone; write one as Europe/Berlin, or UTC"
        found.append(Finding(INVALID, message))
    if spec.degrade.fallback_policy == policy.name:
        found.append(Finding(INVALID, "degrade.fallbackPolicy names the policy itself; name a smaller one, or none"))
    return found


def _cautions(policy: PolicyDeployment, around: Surroundings) -> list[Finding]:
    spec, found = policy.spec, []
    family = spec.model.family
    if not FAMILIES[family].loaded:
        message = (
            f"this release's worker image has no loader for family {family}; its pods will end with config_invalid"
            f" unless pools[].image names one that has (loaded: {', '.join(loaded())})"
        )
        found.append(Finding("FamilyNotLoaded", message))
    for pool in spec.pools:
        found += _slow(policy, pool, around.tables.get(pool.name, ()))
        gpus = _named_gpus(pool)
        if gpus is not None and gpus > spec.engine.gpus:
            message = f"pool {pool.name}: a pod gets {gpus} GPUs and its worker uses {spec.engine.gpus}"
            found.append(Finding("IdleGpus", f"{message}; set engine.parallel.dp or ask for fewer"))
        if around.nodes is not None and not any(_fits(pool, labels) for labels in around.nodes):
            what = "its nodeSelector" if pool.node_selector else f"accelerator class {pool.accelerator}"
            message = f"pool {pool.name}: no node of this cluster has the labels of {what}; label nodes, or add some"
            found.append(Finding("NoNodeForPool", message))
    for lost in sorted(around.absent):
        message = f"{lost.field}: {lost.kind} {lost.name} does not exist in namespace {policy.namespace}"
        until = "robots have no fallback" if lost.kind == "PolicyDeployment" else "workers wait"
        found.append(Finding(f"{lost.kind}Missing", f"{message}; {until} until it does"))
    return found


def _slow(policy: PolicyDeployment, pool: Pool, measured: Sequence[BucketTime]) -> list[Finding]:
    """A caution where not even one observation alone keeps the control budget in this pool."""
    times = measured or [BucketTime(batch=t.batch, median_ms=t.median_ms, p99_ms=t.p99_ms) for t in pool.profile]
    budget_ms = policy.spec.slo.control_budget_ms
    overhead_ms = OVERHEAD_SHARE * budget_ms
    if not times or meets(times, budget_ms, overhead_ms):
        return []
    alone_ms = min(times, key=lambda time: time.batch).p99_ms
    source = "measured" if measured else "declared in profile"
    message = (
        f"pool {pool.name}: slo.controlBudgetMs {budget_ms:g} is below its floor of {alone_ms + overhead_ms:.3g} ms"
        f" (one observation alone takes {alone_ms:.3g} ms, p99, {source}; {overhead_ms:.3g} ms on the way)"
    )
    return [Finding("BudgetBelowFloor", f"{message}; raise the budget or choose a faster pool")]


def _named_gpus(pool: Pool) -> int | None:
    """GPUs that the pool's resources ask for by themselves; None where the accelerator class decides."""
    asked = {str(name): amount for name, amount in (pool.resources.requests | pool.resources.limits).items()}
    named = [quantity(amount) for name, amount in asked.items() if name.startswith("nvidia.com/")]
    return int(sum(named, Decimal(0))) if named and accelerators.CLASSES[pool.accelerator].device == "cuda" else None


def _inverted(pool: Pool) -> list[str]:
    limits = pool.resources.limits
    return [
        f"resources.requests.{name} {amount} is more than its limit {limits[name]}; such pods are refused"
        for name, amount in pool.resources.requests.items()
        if name in limits and quantity(amount) > quantity(limits[name])
    ]


def _fits(pool: Pool, labels: Mapping[str, str]) -> bool:
    if pool.node_selector:
        return all(labels.get(name) == value for name, value in pool.node_selector.items())
    return accelerators.matches(pool.accelerator, labels)


def _is_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True
