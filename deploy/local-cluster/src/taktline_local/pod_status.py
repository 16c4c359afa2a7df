"""A Pod's status, computed from the states of its containers. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Object = dict[str, Any]

NODE_CONDITION = "taktline.dev/ProcessNode"
"""Condition that says what the process node refuses or does not enforce in this Pod."""


class ContainerView(Protocol):
    """What the status needs to know about one container."""

    name: str
    spec: Object
    state: Object
    last_state: Object
    ready: bool
    started: bool
    restarts: int


@dataclass
class PodView:
    """What the status needs to know about one Pod.

    Attributes:
        refused: why the Pod cannot run here; empty where it can.
        initialized: whether all init containers have succeeded.
        ended: whether the Pod was stopped on request; its phase is then final.
    """

    pod: Object
    pod_ip: str
    host_ip: str
    init: Sequence[ContainerView]
    main: Sequence[ContainerView]
    started_at: str
    refused: list[str] = field(default_factory=list)
    not_enforced: list[str] = field(default_factory=list)
    initialized: bool = False
    ended: bool = False


def pod_status(view: PodView, now: str) -> Object:
    """The whole status that a node reports; transition times move only when a condition's status does."""
    ready_containers = bool(view.main) and all(container.ready for container in view.main)
    gates = _readiness_gates(view.pod)
    phase = pod_phase(view)
    done = phase in ("Succeeded", "Failed")
    conditions = [
        _condition("PodReadyToStartContainers", not done and not view.refused),
        _condition("Initialized", view.initialized, "" if view.initialized else "ContainersNotInitialized"),
        _condition("ContainersReady", ready_containers, _unready_reason(view, ready_containers, done)),
        _condition("Ready", ready_containers and gates, _unready_reason(view, ready_containers and gates, done)),
    ]
    if view.refused:
        conditions.append(_condition(NODE_CONDITION, False, "UnsupportedPod", "; ".join(view.refused)))
    elif view.not_enforced:
        conditions.append(_condition(NODE_CONDITION, True, "NotEnforced", "ignored: " + ", ".join(view.not_enforced)))
    status: Object = {
        "phase": phase,
        "hostIP": view.host_ip,
        "hostIPs": [{"ip": view.host_ip}],
        "podIP": view.pod_ip,
        "podIPs": [{"ip": view.pod_ip}],
        "startTime": view.started_at,
        "conditions": _with_transition_times(conditions, view.pod, now),
        "containerStatuses": [_container_status(container, view) for container in view.main],
    }
    if view.init:
        status["initContainerStatuses"] = [_container_status(container, view) for container in view.init]
    if generation := view.pod["metadata"].get("generation"):
        status["observedGeneration"] = generation
        for condition in status["conditions"]:
            condition["observedGeneration"] = generation
    return status


def pod_phase(view: PodView) -> str:
    """Pending, Running, Succeeded or Failed, by the rules of the Pod life cycle."""
    policy = view.pod["spec"].get("restartPolicy", "Always")
    codes = [container.state.get("terminated", {}).get("exitCode") for container in view.main]
    all_ended = bool(codes) and all(code is not None for code in codes)
    if not view.initialized:
        failed = any(container.state.get("terminated", {}).get("exitCode") for container in view.init)
        return "Failed" if (failed and policy == "Never") or view.ended else "Pending"
    if view.ended:
        return "Succeeded" if all_ended and not any(codes) else "Failed"
    if all_ended and policy != "Always":
        if not any(codes):
            return "Succeeded"
        if policy == "Never":
            return "Failed"
    never_started = any(
        "waiting" in container.state and not container.last_state and not container.restarts for container in view.main
    )
    return "Pending" if never_started else "Running"


def _readiness_gates(pod: Object) -> bool:
    reported = {item["type"]: item["status"] for item in pod.get("status", {}).get("conditions", [])}
    return all(reported.get(gate["conditionType"]) == "True" for gate in pod["spec"].get("readinessGates", []))


def _unready_reason(view: PodView, ready: bool, done: bool) -> str:
    if ready:
        return ""
    if done:
        return "PodCompleted" if not view.ended else "PodTerminated"
    return "ContainersNotReady"


def _condition(kind: str, status: bool, reason: str = "", message: str = "") -> Object:
    condition: Object = {"type": kind, "status": "True" if status else "False"}
    if reason:
        condition["reason"] = reason
    if message:
        condition["message"] = message[:32768]
    return condition


def _with_transition_times(conditions: list[Object], pod: Object, now: str) -> list[Object]:
    before = {item["type"]: item for item in pod.get("status", {}).get("conditions", [])}
    for condition in conditions:
        previous = before.get(condition["type"], {})
        same = previous.get("status") == condition["status"]
        condition["lastTransitionTime"] = previous.get("lastTransitionTime") or now if same else now
    return conditions


def _container_status(container: ContainerView, view: PodView) -> Object:
    state = container.state
    if view.refused:
        state = {"waiting": {"reason": "UnsupportedPod", "message": "; ".join(view.refused)}}
    return {
        "name": container.name,
        "image": container.spec.get("image", ""),
        "imageID": "",
        "containerID": f"process://{view.pod['metadata']['uid']}/{container.name}/{container.restarts}",
        "state": state,
        "lastState": container.last_state,
        "ready": container.ready,
        "started": container.started,
        "restartCount": container.restarts,
    }
