"""Kubernetes Events for changes of conditions: one per change, named by it, so that posting again adds none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taktline_operator import naming

Json = dict[str, Any]

# What a new PolicyDeployment is assumed to be: reaching this state is no news.
_BASELINE = {"Accepted": "True", "Available": "False", "Progressing": "False", "Degraded": "False"}
_GOOD = {"Accepted": "True", "Available": "True", "Degraded": "False"}  # Progressing is neither


def of_changes(live: Json, previous: Sequence[Json], current: Sequence[Json], now: str) -> list[Json]:
    """One Event for each condition whose status flipped, and for a new reason to be degraded.

    Args:
        live: the PolicyDeployment the Events are about.
        now: RFC 3339 time of this reconciliation.
    """
    before = {condition["type"]: condition for condition in previous}
    found = []
    for condition in current:
        kind, status, reason = condition["type"], condition["status"], condition["reason"]
        old = before.get(kind)
        flipped = status != (old["status"] if old else _BASELINE[kind])
        worse = kind == "Degraded" and status == "True" and old is not None and old["reason"] != reason
        if flipped or worse:
            found.append(_event(live, condition, now))
    return found


def _event(live: Json, condition: Json, now: str) -> Json:
    metadata = live["metadata"]
    identity = [metadata["uid"], condition["type"], condition["status"], condition["reason"], now]
    healthy = _GOOD.get(condition["type"], condition["status"]) == condition["status"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata['name']}.{naming.content_hash(identity)}",
            "namespace": metadata["namespace"],
        },
        "involvedObject": {
            "apiVersion": live["apiVersion"],
            "kind": live["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "type": "Normal" if healthy else "Warning",
        "reason": condition["reason"],
        "message": f"{condition['type']}={condition['status']}: {condition['message']}"[:1024],
        "source": {"component": naming.MANAGER},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
