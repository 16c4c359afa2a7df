"""How a pool's rolling update proceeds: a new worker first, or an old one first where there is no spare accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taktline_operator import kueue
from taktline_operator.rollout import seconds_between
from taktline_operator.status import PoolCount

Json = dict[str, Any]

SURGE: Json = {"maxSurge": 1, "maxUnavailable": 0}  # a new worker is ready before an old one leaves
YIELD: Json = {"maxSurge": 0, "maxUnavailable": 1}  # one old worker makes room for each new one
HELD_S = 20.0
"""After so long in its queue a pod is not merely about to be admitted: every pod begins there."""


def is_starved(pod: Json, now: str) -> bool:
    """Whether a pod would run if others of its policy made room: nodes have too little left, or its queue's quota."""
    return is_without_room(pod) or (kueue.is_waiting(pod) and _held_s(pod, now) >= HELD_S)


def is_without_room(pod: Json) -> bool:
    """Whether the scheduler finds no node with enough free resources; any other reason would not be cured by room."""
    conditions = pod.get("status", {}).get("conditions", [])
    return any(
        c["type"] == "PodScheduled" and c["status"] == "False" and "Insufficient" in c.get("message", "")
        for c in conditions
    )


def look_again_s(pods: Sequence[Json], now: str) -> float | None:
    """When it shows whether a pod that has just entered its queue stays there; None where none has."""
    waits = [HELD_S - _held_s(pod, now) for pod in pods if kueue.is_waiting(pod)]
    return min((left for left in waits if left > 0.0), default=None)


def _held_s(pod: Json, now: str) -> float:
    return seconds_between(pod["metadata"].get("creationTimestamp", ""), now)


def strategy(count: PoolCount, live: Json | None, now: str) -> Json:
    """The rolling-update parameters of a pool.

    With two workers or more, a rollout whose new pod finds no room takes one old worker away at a time; it keeps doing
    so until it is through, though a pod that has found room is no longer starved. A single worker is never taken away:
    robots would have none while the new one loads.
    """
    if count.desired < 2 or not count.old:
        return SURGE
    yielding = (live or {}).get("spec", {}).get("strategy", {}).get("rollingUpdate", {}).get("maxUnavailable") == 1
    return YIELD if yielding or any(is_starved(pod, now) for pod in count.current_pods) else SURGE


def note(counts: Sequence[PoolCount], strategies: Sequence[Json], now: str) -> str:
    """What the Progressing condition adds about room; empty when there is enough."""
    for count, chosen in zip(counts, strategies, strict=True):
        if chosen == YIELD:
            return f"; pool {count.name} has no spare accelerator, so an old worker leaves before each new one"
        if count.old and any(is_starved(pod, now) for pod in count.current_pods):
            return f"; pool {count.name} has no room for a second worker beside the one that serves: free some"
    return ""
