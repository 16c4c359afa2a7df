"""Kubernetes Events for changes of conditions: one per change, named by it, so that posting again adds none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taktline_operator import naming
from taktline_operator.healing import Removal

Json = dict[str, Any]

# What a new PolicyDeployment is assumed to be: reaching this state is no news.
_BASELINE = {
    "Accepted": "True",
    "Available": "False",
    "Progressing": "False",
    "Degraded": "False",
    "Cautioned": "False",
    "ModelDelivery": "Unknown",
}
_GOOD = {  # Progressing is neither
    "Accepted": "True",
    "Available": "True",
    "Degraded": "False",
    "Cautioned": "False",
    "ModelDelivery": "True",
}


def of_changes(live: Json, previous: Sequence[Json], current: Sequence[Json], now: str) -> list[Json]:
    """One Event for each condition whose status flipped, and for a new reason to be degraded or cautioned.

    Args:
        live: the PolicyDeployment the Events are about.
        now: RFC 3339 time of this reconciliation.
    """
    before = {condition["type"]: condition for condition in previous}
    found = []
    for condition in current:
        kind, status, reason = condition["type"], condition["status"], condition["reason"]
        old = before.get(kind)
        flipped = status != (old["status"] if old else _BASELINE.get(kind, status))
        worse = kind in ("Degraded", "Cautioned") and status == "True" and old is not None and old["reason"] != reason
        if flipped or worse:
            since = old["lastTransitionTime"] if old else ""
            identity = [kind, status, reason, since, old["reason"] if old else ""]
            healthy = status in (_GOOD.get(kind, status), "Unknown")
            message = f"{kind}={status}: {condition['message']}"
            found.append(_event(live, identity, reason, message, now, healthy=healthy))
    return found


def of_rollout(live: Json, previous: Json, current: Json, now: str) -> list[Json]:
    """One Event for each step of a rollout.

    Args:
        previous: status.rollout as it was, and `current` as it is to be.
    """
    step = [current.get(name) for name in ("phase", "step", "weight", "promoted")]
    if not previous or step == [previous.get(name) for name in ("phase", "step", "weight", "promoted")]:
        return []
    phase = current["phase"]
    identity = ["rollout", *step, current.get("candidate", ""), current.get("rejected", ""), previous.get("since", "")]
    healthy = phase not in ("RollingBack", "RolledBack") or current.get("reason") in ("Superseded", "Aborted")
    what = current.get("candidate") or current.get("rejected") or current.get("stable")
    reason = f": {current['reason']}" if current.get("reason") else ""
    message = f"rollout of {what}: {phase}{reason}; {current.get('message') or 'done'}"
    return [_event(live, identity, f"Rollout{phase}", message, now, healthy=healthy)]


def of_removal(live: Json, removal: Removal, now: str) -> Json:
    """The Event of a pod that the operator takes away."""
    message = f"pod {removal.pod} makes room for another: {removal.message}"
    # A StatefulSet gives its pods the same names again.
    return _event(live, ["removal", removal.pod, removal.uid], removal.reason, message, now, healthy=False)


def _event(live: Json, identity: list[Any], reason: str, message: str, now: str, *, healthy: bool) -> Json:
    """An Event named by what it tells and by the state before it: told again after a crash it is the same one."""
    metadata = live["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata['name']}.{naming.content_hash([metadata['uid'], *identity])}",
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
        "reason": reason,
        "message": message[:1024],
        "source": {"component": naming.MANAGER},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
