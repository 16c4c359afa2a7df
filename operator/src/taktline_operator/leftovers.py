"""Which children of a policy are wanted no longer, and may go now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from taktline_operator import gangs, grouping, keda, naming, status, trials
from taktline_operator.gangs import Gang
from taktline_operator.naming import Ref, ref_of
from taktline_operator.ownership import ownership_of
from taktline_operator.spec import PolicyDeployment

Json = dict[str, Any]


def of(
    policy: PolicyDeployment,
    children: Mapping[Ref, Json],
    pods: Sequence[Json],
    desired: Sequence[Json],
    trial: trials.Trial,
    counts: Sequence[status.PoolCount],
    gang_of: Mapping[str, Gang],
) -> tuple[Ref, ...]:
    """Children to delete: only once what replaces them serves, and nothing running refers to them.

    A candidate that was taken back goes at once: nothing waits for it. Groups go as their line decides, and what sets
    the number of workers as soon as nobody asks for it: people may want to set it because nothing settles.
    """
    settled = all(count.settled for count in counts)
    live_children = list(children.values())
    kept = {ref_of(found) for found in desired}
    kept |= {Ref(*found) for found in grouping.left_alone(policy, trial.lines, live_children)}
    replaced: set[Ref] = set()
    for line in (*trial.lines.stable, *trial.lines.candidate):
        gang = gang_of.get(line.name)
        if gang is not None:
            kept |= {Ref(*found) for found in gang.kept}
            replaced |= {Ref(*found) for found in gang.removed}
    for line, count in zip(trial.lines.serving, counts, strict=True):
        if line.name not in gang_of:
            replaced |= {Ref(*found) for found in gangs.superseded(line, live_children, count.updated_ready)}
    pools = {pool.name for pool in policy.spec.pools}
    mounted = {
        volume.get("configMap", {}).get("name") for pod in pods for volume in pod.get("spec", {}).get("volumes", [])
    }
    obsolete = [
        ref
        for ref, live in children.items()
        if ref not in kept
        and ownership_of(policy, live) == "ours"
        and not live["metadata"].get("deletionTimestamp")
        and (settled or ref in replaced or ref.kind == keda.KIND or (trial.progressive and _was_tried(live, pools)))
        and (ref.kind != "ControllerRevision" or ref.name in trial.obsolete)
        and not (ref.kind == "ConfigMap" and ref.name in mounted)
    ]
    return tuple(sorted(obsolete))


def _was_tried(live: Json, pools: set[str]) -> bool:
    """Whether these are workers of a candidate, in a pool that goes on without it."""
    metadata = live["metadata"]
    here = metadata.get("labels", {}).get(naming.LABEL_POOL) in pools
    return bool(
        live["kind"] in ("Deployment", *grouping.KINDS)
        and here
        and metadata.get("annotations", {}).get(naming.ANNOTATION_REVISION_HASH)
    )
