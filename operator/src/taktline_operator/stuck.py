"""Workers that run but never become ready: loading or capturing hangs, and no probe of their own would end it for long.

The kubelet's startup probe gives up a minute later by itself, so that workers are restarted without an operator too; it
cannot say why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from taktline_operator import group_pods, healing, naming
from taktline_operator.healing import Removal
from taktline_operator.rollout import seconds_between
from taktline_operator.spec import Pool

Json = dict[str, Any]

STARTUP_S = 1740
"""How long a worker may take from the start of its process to being ready, where the pool says nothing."""
REASON = "StuckStart"
_CONTAINER = "worker"


def budget_s(pool: Pool) -> int:
    """How long a worker of this pool may load, capture and calibrate."""
    return pool.startup_seconds or STARTUP_S


def removals(pods: Sequence[Json], pools: Iterable[Pool], now: str) -> tuple[Removal, ...]:
    """Workers to restart: their process has run for longer than its budget and was never ready.

    A group goes as a whole.
    """
    budgets = {pool.name: budget_s(pool) for pool in pools}
    found = []
    for members in group_pods.units(pods).values():
        for pod in members:
            spent = _spent_s(pod, now)
            budget = _budget_of(pod, budgets)
            if spent is not None and spent > budget:
                message = (
                    f"pod {pod['metadata']['name']} has run for longer than the {budget} s in which its worker should"
                    " have loaded and captured (pools[].startupSeconds), and is not ready"
                )
                found += [healing.removal(member, REASON, message, unless_changed=True) for member in members]
                break
    return tuple(found)


def look_again_s(pods: Sequence[Json], pools: Iterable[Pool], now: str) -> float | None:
    """When the next worker would have used its budget up, in seconds; None while none is starting."""
    budgets = {pool.name: budget_s(pool) for pool in pools}
    left = [_budget_of(pod, budgets) - spent for pod in pods if (spent := _spent_s(pod, now)) is not None]
    return max(1.0, min(left) + 1.0) if left else None


def _spent_s(pod: Json, now: str) -> float | None:
    """How long a pod's worker has been starting; None where it is ready, was, or does not run."""
    if pod["metadata"].get("deletionTimestamp"):
        return None
    for status in pod.get("status", {}).get("containerStatuses", []):
        since = status.get("state", {}).get("running", {}).get("startedAt")
        if status.get("name") == _CONTAINER and since and not status.get("started") and not status.get("ready"):
            return seconds_between(since, now)
    return None


def _budget_of(pod: Json, budgets: Mapping[str, int]) -> int:
    return budgets.get(pod["metadata"].get("labels", {}).get(naming.LABEL_POOL, ""), STARTUP_S)
