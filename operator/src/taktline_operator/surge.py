"""How a pool's rolling update proceeds: a new worker first, or an old one first where there is no spare accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taktline_operator.status import PoolCount

Json = dict[str, Any]

SURGE: Json = {"maxSurge": 1, "maxUnavailable": 0}  # a new worker is ready before an old one leaves
YIELD: Json = {"maxSurge": 0, "maxUnavailable": 1}  # one old worker makes room for each new one


def is_starved(pod: Json) -> bool:
    """Whether the scheduler finds no node with enough free resources; any other reason would not be cured by room."""
    conditions = pod.get("status", {}).get("conditions", [])
    return any(
        c["type"] == "PodScheduled" and c["status"] == "False" and "Insufficient" in c.get("message", "")
        for c in conditions
    )


def strategy(count: PoolCount, live: Json | None) -> Json:
    """The rolling-update parameters of a pool.

    With two workers or more, a rollout whose new pod finds no room takes one old worker away at a time; it keeps doing
    so until it is through, though a pod that has found room is no longer starved. A single worker is never taken away:
    robots would have none while the new one loads.
    """
    if count.desired < 2 or not count.old:
        return SURGE
    yielding = (live or {}).get("spec", {}).get("strategy", {}).get("rollingUpdate", {}).get("maxUnavailable") == 1
    return YIELD if yielding or any(is_starved(pod) for pod in count.current_pods) else SURGE


def note(counts: Sequence[PoolCount], strategies: Sequence[Json]) -> str:
    """What the Progressing condition adds about room; empty when there is enough."""
    for count, chosen in zip(counts, strategies, strict=True):
        if chosen == YIELD:
            return f"; pool {count.name} has no spare accelerator, so an old worker leaves before each new one"
        if count.old and any(is_starved(pod) for pod in count.current_pods):
            return f"; pool {count.name} has no room for a second worker beside the one that serves: free some"
    return ""
