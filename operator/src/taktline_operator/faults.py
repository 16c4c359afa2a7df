"""Finds why workers of a policy do not serve, in words that name pod, container reason, exit code and last output."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from taktline_operator import kueue

if TYPE_CHECKING:
    from taktline_operator.kube import ApiError

Json = dict[str, Any]

MESSAGE_LIMIT = 600  # characters of a worker's last words that a condition carries


class Fault(NamedTuple):
    """One failing pod or workload: a reason for programs, a sentence for people."""

    reason: str
    message: str


_REFUSALS = (400, 403, 422)

# Kubernetes alternates between the attempt and its back-off; one name for both keeps the condition still.
_WAITING = {
    "CrashLoopBackOff": "CrashLoopBackOff",
    "ErrImagePull": "ImagePullBackOff",
    "ImagePullBackOff": "ImagePullBackOff",
    "ImageInspectError": "ImagePullBackOff",
    "InvalidImageName": "InvalidImageName",
    "ErrImageNeverPull": "ImagePullBackOff",
    "CreateContainerConfigError": "CreateContainerConfigError",
    "CreateContainerError": "CreateContainerError",
    "RunContainerError": "RunContainerError",
}


def find(pods: Iterable[Json], deployments: Iterable[Json]) -> list[Fault]:
    """Every fault, ordered by pod name, then by workload.

    Text that changes by itself (restart counts, clock times) is left out, so that an unchanged fault is an unchanged
    condition.
    """
    faults = [fault for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])) if (fault := of_pod(pod))]
    for workload in sorted(deployments, key=lambda found: str(found["metadata"]["name"])):
        for condition in workload.get("status", {}).get("conditions", []):
            if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
                text = condition.get("message", "")
                name = workload["metadata"]["name"]
                faults.append(
                    of_quota(text, f"deployment/{name}")
                    or Fault(condition.get("reason", "FailedCreate"), f"deployment/{name}: {trimmed(text)}")
                )
    return faults


def of_quota(refusal: str, what: str) -> Fault | None:
    """The fault behind what the API server said where a quota of the namespace is used up; None where it is another.

    It is told in the quota's own words, without the name of the pod, which is another one at each attempt.
    """
    _, found, said = refusal.partition("exceeded quota: ")
    if not found:
        return None
    step = "ask for a larger ResourceQuota, or for fewer workers"
    return Fault("QuotaExceeded", f"{what}: exceeded quota: {trimmed(said)} ({step})")


def of_refusal(error: ApiError, what: str) -> Fault | None:
    """The fault behind an object that the API server takes no better when it is sent again.

    A quota, a missing right, an admission policy, a value that it refuses; None where trying again may help, and where
    the namespace is going.
    """
    found = of_quota(error.message, what)
    if found is not None or error.status not in _REFUSALS or "NamespaceTerminating" in error.causes:
        return found
    return Fault("ApplyRefused", f"{what}: the API server refuses it: {trimmed(error.message)}")


def of_pod(pod: Json) -> Fault | None:
    """Why this pod does not serve; None when it does, is still starting, or is being deleted."""
    metadata, status = pod["metadata"], pod.get("status", {})
    if metadata.get("deletionTimestamp") or kueue.is_waiting(pod):
        return None
    name = f"pod/{metadata['name']}"
    if status.get("phase") == "Failed":
        reason = status.get("reason") or "PodFailed"
        return Fault(reason, f"{name}: {trimmed(status.get('message') or 'the pod failed')}")
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        fault = _of_container(name, container)
        if fault:
            return fault
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return Fault(condition.get("reason", "Unschedulable"), f"{name}: {trimmed(condition.get('message', ''))}")
    return None


def _of_container(pod: str, container: Json) -> Fault | None:
    state = container.get("state", {})
    if container.get("ready") or state.get("terminated", {}).get("exitCode") == 0:
        return None
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated")
    waiting = state.get("waiting", {})
    where = f"{pod}: container {container['name']}"
    reason = _WAITING.get(waiting.get("reason", ""))
    if reason and not ended:
        return Fault(reason, f"{where}: {trimmed(waiting.get('message') or reason)}")
    if ended is None:
        return None
    # It has failed before and is not ready again: waiting, running or ended, it is in a crash loop.
    cause = ended.get("reason", "Error")
    described = "" if cause in ("Error", "Completed") else f" ({cause})"
    text = last_words(ended.get("message", ""))
    return Fault(
        reason or "CrashLoopBackOff",
        f"{where} ended with exit code {ended.get('exitCode')}{described}" + (f": {text}" if text else ""),
    )


def last_words(output: str) -> str:
    """The last line of a process's output that a person can read: plain text, else the message of a JSON log line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in reversed(lines):
        if not line.startswith("{"):
            return trimmed(line)
    for line in reversed(lines):
        try:
            message = json.loads(line).get("message")
        except json.JSONDecodeError:
            continue  # a line cut by the size limit of termination messages
        if message:
            return trimmed(str(message))
    return ""


def trimmed(text: str) -> str:
    """Somebody's words on one line, and no more of them than a condition carries."""
    text = " ".join(text.split())
    return text if len(text) <= MESSAGE_LIMIT else text[: MESSAGE_LIMIT - 1] + "…"
