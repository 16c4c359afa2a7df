"""Computes PolicyDeployment.status from what is observed: conditions, counts, revisions, endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from taktline_protocol.deployment import Route

from taktline_operator import faults, kueue, naming, routing
from taktline_operator.rollout import seconds_between
from taktline_operator.sizing import Sizing, profile_rows
from taktline_operator.spec import PolicyDeployment
from taktline_operator.trials import Trial

Json = dict[str, Any]


def conditions(
    previous: Sequence[Json], wanted: Mapping[str, tuple[str, str, str]], generation: int, now: str
) -> list[Json]:
    """Conditions in metav1 shape. `lastTransitionTime` moves only where the status flips.

    Args:
        previous: the conditions in the live status.
        wanted: type -> (status, reason, message).
        now: RFC 3339 time of this reconciliation.
    """
    before = {condition["type"]: condition for condition in previous}
    result = []
    for kind, (status, reason, message) in wanted.items():
        old = before.get(kind)
        kept = old["lastTransitionTime"] if old and old["status"] == status else now
        result.append(
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "observedGeneration": generation,
                "lastTransitionTime": kept,
            }
        )
    return result


def refused(
    live: Json,
    generation: int,
    reason: str,
    message: str,
    now: str,
    pods: Sequence[Json],
    route: Route | None,
) -> Json:
    """Status of a PolicyDeployment that cannot be served as it is written, but of its workers as they are now.

    Args:
        pods: its worker pods, with all those of groups.
        route: the route that it keeps; None where robots reach no worker of it.
    """
    previous = live.get("status", {})
    wanted = {"Accepted": ("False", reason, message)}
    wanted |= {
        c["type"]: (c["status"], c["reason"], c["message"])
        for c in previous.get("conditions", [])
        if c["type"] != "Accepted"
    }
    serving = route.targets if route is not None else ()
    desired = previous.get("replicas", 0)
    counts = f"{len(serving)} of {desired} workers serve"
    if serving:
        wanted["Available"] = ("True", "WorkersReady", counts)
    elif wanted.get("Available", ("", "", ""))[1] != "ScaledToZero":
        wanted["Available"] = ("False", "NoReadyWorker", f"{counts}; the Accepted condition says what to correct first")
    found = faults.find(pods, ()) if len(serving) < desired else []
    rollout = previous.get("rollout", {})
    taken_back = rollout.get("phase") in ("RollingBack", "RolledBack")
    if rollout.get("candidate"):
        name = previous.get("candidateRevision") or f"with hash {rollout['candidate']}"
        still = f"the trial of revision {name} stands still, and nobody judges it, until the spec is accepted"
        wanted["Progressing"] = ("False", "Stalled", f"{still}: correct it, or apply the one before")
    if found:
        wanted["Degraded"] = _degraded(found)
    elif rollout.get("candidate") and not taken_back:
        wanted["Degraded"] = ("True", *wanted["Progressing"][1:])
    elif len(serving) >= desired > 0 and not taken_back:
        wanted["Degraded"] = ("False", "AsExpected", "no worker fails")
    pools = [
        pool | {"ready": sum(target.pool == pool["name"] for target in serving)} for pool in previous.get("pools", [])
    ]
    return dict(previous) | {
        "observedGeneration": generation,
        "conditions": conditions(previous.get("conditions", []), wanted, generation, now),
        "readyReplicas": len(serving),
        "endpoints": [target.address for target in serving],
        "pools": pools,
    }


def _degraded(found: Sequence[faults.Fault]) -> tuple[str, str, str]:
    """The condition of workers that fail: the first fault, and how many more there are."""
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return "True", found[0].reason, found[0].message + more


def is_true(wanted: Json, kind: str) -> bool:
    """Whether a status has this condition as True."""
    return any(condition["type"] == kind and condition["status"] == "True" for condition in wanted["conditions"])


def degraded_by(wanted: Json, live: Json, fault: faults.Fault, now: str) -> Json:
    """`wanted` where what it speaks of could not be written because of `fault`."""
    found = {c["type"]: (c["status"], c["reason"], c["message"]) for c in wanted["conditions"]}
    found |= {"Degraded": ("True", fault.reason, fault.message)}
    previous = live.get("status", {}).get("conditions", [])
    return wanted | {"conditions": conditions(previous, found, wanted["observedGeneration"], now)}


def has_ended(pod: Json) -> bool:
    """Whether a pod will never run again: evicted, refused by its node, or completed. Such pods linger for reading."""
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def _label(pod: Json, name: str) -> str | None:
    value: str | None = pod["metadata"].get("labels", {}).get(name)
    return value


def _annotation(pod: Json, name: str) -> str | None:
    value: str | None = pod["metadata"].get("annotations", {}).get(name)
    return value


class PoolCount:
    """Workers of one pool: wanted, built from the current spec, serving, and left over from older specs."""

    def __init__(self, name: str, accelerator: str, desired: int, template: str, pods: Sequence[Json]) -> None:
        alive = [pod for pod in pods if _label(pod, naming.LABEL_POOL) == name and not has_ended(pod)]
        current = [pod for pod in alive if _annotation(pod, naming.ANNOTATION_TEMPLATE) == template]
        self.name = name
        self.accelerator = accelerator
        self.desired = desired
        self.current_pods = current
        self.old_pods = [pod for pod in alive if _annotation(pod, naming.ANNOTATION_TEMPLATE) != template]
        self.updated = len([pod for pod in current if not pod["metadata"].get("deletionTimestamp")])
        self.ready = len([pod for pod in alive if routing.is_ready(pod)])
        self.updated_ready = len([pod for pod in current if routing.is_ready(pod)])
        self.old = len(self.old_pods)

    @property
    def settled(self) -> bool:
        """Whether exactly the wanted workers serve, all built from the current spec."""
        return self.updated == self.updated_ready == self.ready == self.desired and self.old == 0

    def to_status(self) -> Json:
        """The pool's entry in status.pools."""
        return {
            "name": self.name,
            "accelerator": self.accelerator,
            "desired": self.desired,
            "updated": self.updated,
            "ready": self.ready,
        }


def observed(
    policy: PolicyDeployment,
    live: Json,
    pools: Sequence[PoolCount],
    pods: Sequence[Json],
    deployments: Sequence[Json],
    gateway_url: str,
    now: str,
    rollout_note: str,
    trial: Trial,
    size: Sizing,
    members: Sequence[Json] | None = None,
) -> Json:
    """Status of an accepted PolicyDeployment.

    Args:
        live: the PolicyDeployment as read, with its previous status.
        pods: its worker pods that may get observations.
        deployments: its live Deployments, without those of a candidate on trial.
        gateway_url: base URL of the gateway inside the cluster.
        rollout_note: what the Progressing condition says besides counts.
        trial: the rollout as it is.
        size: the decisions on how many workers, and where.
        members: the same pods with all others of their groups; None where there are none.
    """
    previous = live.get("status", {})
    settled = all(pool.settled for pool in pools)
    found = (
        [] if settled else faults.find(pods if members is None else members, deployments)
    )  # ended pods linger after their replacement serves
    endpoints = [target.address for target in routing.targets(pods)]
    desired, ready = sum(pool.desired for pool in pools), len(endpoints)
    counts = f"{ready} of {desired} workers serve"
    revision = trial.serving_name
    current = revision if settled and ready else previous.get("currentRevision", "")

    if desired == 0:
        why = size.scaling.message if size.scaling is not None else "every pool's replicas are 0"
        available = ("False", "ScaledToZero", f"no workers are wanted: {why}")
    elif ready:
        available = ("True", "WorkersReady", counts)
    else:
        available = ("False", "NoReadyWorker", f"{counts}; the Degraded and Progressing conditions say why")

    stalled = _stalled(deployments, members or pods, now)
    if settled:
        progressing = ("False", "Complete", f"revision {revision} runs everywhere")
    elif stalled:
        progressing = ("False", "Stalled", stalled)
    else:
        updated = sum(pool.updated_ready for pool in pools)
        message = f"revision {revision}: {updated} of {desired} workers serve it{rollout_note}"
        progressing = ("True", "RollingOut", message)

    if found:
        degraded = _degraded(found)
    elif stalled:
        degraded = ("True", "Stalled", stalled)
    else:
        degraded = ("False", "AsExpected", "no worker fails")
    if trial.progressive:
        progressing, degraded = _of_trial(trial, progressing, degraded)

    status: Json = {
        "observedGeneration": policy.generation,
        "conditions": conditions(
            previous.get("conditions", []),
            {
                "Accepted": ("True", "Valid", "the spec can be served"),
                "Available": available,
                "Progressing": progressing,
                "Degraded": degraded,
            },
            policy.generation,
            now,
        ),
        "currentRevision": current,
        "replicas": desired,
        "readyReplicas": ready,
        "selector": naming.selector_text(naming.worker_selector(policy.name)),
        "url": f"{gateway_url}/v1/policies/{policy.name}/act",
        "endpoints": endpoints,
        "pools": [pool.to_status() | _profile(size, pool.name) for pool in pools],
    }
    if policy.search is not None:
        status["search"] = msgspec.to_builtins(policy.search)
    if size.scaling is not None:
        status["scaling"] = {"desired": size.scaling.desired, **msgspec.to_builtins(size.scaling)}
    if size.placement is not None:
        status["placement"] = msgspec.to_builtins(size.placement)
    status["rollout"] = {"phase": trial.after.phase, **msgspec.to_builtins(trial.after)}
    coming = _candidate(trial) if trial.progressive else ""
    if coming or current != revision:
        status["candidateRevision"] = coming or revision
    return status


def _profile(size: Sizing, pool: str) -> Json:
    rows = profile_rows(size.profiles.get(pool, ()))
    return {"tSync": rows} if rows else {}


def _candidate(trial: Trial) -> str:
    """Name of the revision on trial; empty when none is."""
    return trial.candidate_name if trial.before.candidate and trial.after.candidate else ""


def _of_trial(
    trial: Trial, progressing: tuple[str, str, str], degraded: tuple[str, str, str]
) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
    """Progressing and Degraded of a policy with a candidate, or with one that was taken back."""
    state = trial.after
    if state.candidate:
        name = trial.candidate_name or f"with hash {state.candidate}"
        reason = "Paused" if state.paused else state.phase
        step = "taken back: " if state.phase == "RollingBack" else ""
        progressing = ("True", reason, f"revision {name}: {step}{state.message}")
    elif state.phase == "RolledBack" and progressing[1] == "Complete":
        progressing = ("False", "RolledBack", f"revision {trial.stable_name} serves; the candidate was taken back")
    if state.phase in ("RollingBack", "RolledBack") and state.reason not in ("Superseded", "Aborted"):
        name = trial.candidate_name or f"with hash {state.rejected or state.candidate}"
        degraded = (
            "True",
            state.reason,
            f"revision {name} was taken back, revision {trial.stable_name} serves: {state.message}"
            " (correct the spec, or `taktline rollout retry`)",
        )
    return progressing, degraded


def _stalled(deployments: Sequence[Json], pods: Sequence[Json], now: str) -> str:
    """The first Deployment that is past its progress deadline by a fault; empty where there is none.

    What waits for its turn in a queue makes no progress either, and Kubernetes counts that time: a pod that was let in
    after the deadline has as long again to come up, for the condition stands until it serves. One that has had its time
    is told of, whoever waits beside it.
    """
    for workload in sorted(deployments, key=lambda found: str(found["metadata"]["name"])):
        own = [pod for pod in pods if _made_by(workload, pod)]
        for condition in workload.get("status", {}).get("conditions", []):
            if condition["type"] != "Progressing" or condition.get("reason") != "ProgressDeadlineExceeded":
                continue
            deadline_s = float(workload.get("spec", {}).get("progressDeadlineSeconds", 600))
            waits = any(_is_let_in(pod, condition.get("lastTransitionTime", ""), deadline_s, now) for pod in own)
            if not waits or any(_has_had(pod, deadline_s, now) for pod in own):
                return f"deployment/{workload['metadata']['name']} made no progress before its deadline"
    return ""


def _made_by(workload: Json, pod: Json) -> bool:
    """Whether a pod is one of a Deployment's template of now."""
    labels, own = pod["metadata"].get("labels", {}), workload["metadata"].get("labels", {})
    now: Json = workload.get("spec", {}).get("template", {"metadata": {}})
    return all(labels.get(name, "") == own.get(name, "") for name in (naming.LABEL_POOL, naming.LABEL_TRACK)) and (
        _annotation(pod, naming.ANNOTATION_TEMPLATE) == _annotation(now, naming.ANNOTATION_TEMPLATE)
    )


def _is_let_in(pod: Json, late: str, deadline_s: float, now: str) -> bool:
    """Whether a pod waits in its queue, or was let in after the deadline and is still given its time.

    Args:
        late: RFC 3339 time at which the deadline had passed.
    """
    if kueue.is_waiting(pod):
        return True
    scheduled: Json = next((c for c in pod.get("status", {}).get("conditions", []) if c["type"] == "PodScheduled"), {})
    if scheduled.get("reason") == "SchedulingGated":  # let in, and the scheduler has not looked at it yet
        return True
    started = pod.get("status", {}).get("startTime", "")
    after = bool(started and late and datetime.fromisoformat(started) >= datetime.fromisoformat(late))
    return after and not routing.is_ready(pod) and seconds_between(started, now) < deadline_s


def _has_had(pod: Json, seconds: float, now: str) -> bool:
    """Whether a pod has its room, and has not been ready for so long."""
    if pod["metadata"].get("deletionTimestamp") or has_ended(pod):
        return False
    ready: Json = next((c for c in pod.get("status", {}).get("conditions", []) if c["type"] == "Ready"), {})
    since = ready.get("lastTransitionTime", "")
    return bool(since) and ready["status"] != "True" and seconds_between(since, now) >= seconds
