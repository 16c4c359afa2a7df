"""How many pods one worker is: one, or a group of them where its GPUs are more than those of one node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from taktline_operator import accelerators, diff
from taktline_operator.engine_spec import Engine
from taktline_operator.spec import PolicyDeployment, Pool

Json = dict[str, Any]

OLDEST_CLAIMS = (1, 34)
SPANNING_FAMILIES = ("vjepa2-ac",)
"""Families whose ranks meet over the network; those of the others share the memory of one node."""


class Shape(NamedTuple):
    """One worker: its pods, and the ranks in each, one a GPU."""

    pods: int
    ranks: int


class NodeGpus(NamedTuple):
    """What is known of a node that has GPUs."""

    labels: Mapping[str, str]
    gpus: int


def of_nodes(nodes: Iterable[Json]) -> tuple[NodeGpus, ...]:
    """The nodes that have whole GPUs to give."""
    found = []
    for node in nodes:
        count = node.get("status", {}).get("allocatable", {}).get(accelerators.GPU_RESOURCE, 0)
        if str(count).isdecimal() and int(count):
            found.append(NodeGpus(node["metadata"].get("labels", {}), int(count)))
    return tuple(found)


def gpus_per_node(pool: Pool, status: Json, nodes: Sequence[NodeGpus]) -> int | None:
    """GPUs of a node of `pool`: as the spec says, else as once found and kept in `status`, else of the largest node.

    What was found is kept, for a node that comes or goes must not reshape workers that serve. None where nothing is
    known: then a worker is one pod.
    """
    if pool.gpus_per_node is not None:
        return pool.gpus_per_node
    kept = next((entry.get("gpusPerNode") for entry in status.get("pools", []) if entry.get("name") == pool.name), None)
    if kept or accelerators.CLASSES[pool.accelerator].device == "cpu":
        return kept
    fitting = [node.gpus for node in nodes if _is_of(pool, node.labels)]
    return max(fitting, default=None)


def _is_of(pool: Pool, labels: Mapping[str, str]) -> bool:
    if pool.node_selector:
        return all(labels.get(key) == value for key, value in pool.node_selector.items())
    return accelerators.matches(pool.accelerator, labels)


def shape(engine: Engine, per_node: int | None) -> Shape:
    """The fewest pods, all of one size, that hold the ranks of one worker."""
    needed = engine.gpus
    pods = next(
        count for count in range(1, needed + 1) if needed % count == 0 and needed // count <= (per_node or needed)
    )
    return Shape(pods, needed // pods)


def refusal(policy: PolicyDeployment, per_node: Mapping[str, int | None]) -> tuple[str, str] | None:
    """Reason and message where a pool cannot hold the mesh that `engine.parallel` asks for; None where all can.

    Args:
        per_node: GPUs of a node by pool.
    """
    spec = policy.spec
    engine = spec.engine
    if engine.runtime == "ray":  # each rank is a pod of its own
        return None
    for pool in spec.pools:
        found = shape(engine, per_node.get(pool.name))
        if found.pods > 1 and (spec.model.family not in SPANNING_FAMILIES or engine.lanes > 1):
            return "MeshTooLarge", (
                f"engine.parallel needs {engine.gpus} GPUs in one pod, and a node of pool {pool.name} has"
                f" {per_node.get(pool.name)}; {_instead(engine, spec.model.family)}"
            )
        given = _given(pool)
        if given is not None and given < found.ranks:
            hint = "" if found.pods > 1 else ", or set gpusPerNode where the mesh is to span nodes"
            return "TooFewGpus", (
                f"pool {pool.name} gives each pod {given:g} of NVIDIA's resources, and engine.parallel puts"
                f" {found.ranks} ranks in it; raise pools[].resources or leave them out{hint}"
            )
    return None


def claims_refusal(policy: PolicyDeployment, version: tuple[int, int] | None) -> tuple[str, str] | None:
    """Reason and message where the cluster cannot give pods their GPUs by claims; None where it may, or none is wanted.

    An API server that does not know them drops them from a pod without a word: it would get no GPU.
    """
    wanted = [pool.name for pool in policy.spec.pools if pool.claim_template]
    if not wanted or version is None or version >= OLDEST_CLAIMS:
        return None
    found, oldest = (".".join(map(str, pair)) for pair in (version, OLDEST_CLAIMS))
    return (
        "ClaimsUnsupported",
        f"pool {wanted[0]}: claimTemplate needs dynamic resource allocation, which Kubernetes has on by default since"
        f" {oldest}, and this cluster is {found}; leave it out to have GPUs of the device plugin, or upgrade",
    )


def uses_claims(policy: PolicyDeployment) -> bool:
    """Whether any pool's GPUs come by resource claims."""
    return any(pool.claim_template for pool in policy.spec.pools)


def _instead(engine: Engine, family: str) -> str:
    if engine.lanes > 1:
        return "replicas need no common pod: lower engine.parallel.dp and raise the number of workers"
    return f"the ranks of family {family} share one node: lower engine.parallel"


def _given(pool: Pool) -> float | None:
    """Whole GPUs, MIG slices and the like that the pool's resources give a pod; None where they say nothing of them."""
    amounts = pool.resources.requests | pool.limits
    found = [diff.quantity(amount) for name, amount in amounts.items() if name.startswith("nvidia.com/")]
    return float(sum(found)) if found else None
