"""Phase, conditions and transition times, computed from container states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from taktline_local.pod_status import NODE_CONDITION, PodView, pod_phase, pod_status

Object = dict[str, Any]

RUNNING = {"running": {"startedAt": "t"}}
WAITING = {"waiting": {"reason": "ContainerCreating"}}


def ended(code: int) -> Object:
    return {"terminated": {"exitCode": code}}


@dataclass
class Container:
    state: Object
    name: str = "main"
    spec: Object = field(default_factory=dict)
    last_state: Object = field(default_factory=dict)
    ready: bool = False
    started: bool = False
    restarts: int = 0


def view(*main: Container, policy: str = "Always", **fields: Any) -> PodView:
    pod = {"metadata": {"uid": "u"}, "spec": {"restartPolicy": policy}}
    values: dict[str, Any] = {"init": [], "initialized": True, **fields}
    return PodView(pod, "127.0.0.2", "127.0.0.1", main=list(main), started_at="t", **values)


@pytest.mark.parametrize(
    ("seen", "phase"),
    [
        (view(Container(WAITING)), "Pending"),
        (view(Container(RUNNING)), "Running"),
        (view(Container(RUNNING), Container(WAITING)), "Pending"),
        (view(Container(WAITING, last_state=ended(1), restarts=1)), "Running"),
        (view(Container(ended(0))), "Running"),
        (view(Container(ended(0)), policy="OnFailure"), "Succeeded"),
        (view(Container(ended(1)), policy="OnFailure"), "Running"),
        (view(Container(ended(0)), Container(ended(3)), policy="Never"), "Failed"),
        (view(Container(ended(0)), Container(RUNNING), policy="Never"), "Running"),
        (view(Container(WAITING), initialized=False, init=[Container(RUNNING)]), "Pending"),
        (view(Container(WAITING), initialized=False, init=[Container(ended(1))], policy="Never"), "Failed"),
        (view(Container(WAITING), initialized=False, init=[Container(ended(1))]), "Pending"),
        (view(Container(ended(0)), ended=True), "Succeeded"),
        (view(Container(ended(143)), ended=True), "Failed"),
    ],
)
def test_phase(seen: PodView, phase: str) -> None:
    assert pod_phase(seen) == phase


def conditions(status: Object) -> dict[str, Object]:
    return {item["type"]: item for item in status["conditions"]}


def test_ready_needs_every_container_and_every_gate() -> None:
    both = view(Container(RUNNING, ready=True), Container(RUNNING, name="b"))
    assert conditions(pod_status(both, "now"))["Ready"]["status"] == "False"
    both.main[1].ready = True
    assert conditions(pod_status(both, "now"))["Ready"]["status"] == "True"
    both.pod["spec"]["readinessGates"] = [{"conditionType": "x/y"}]
    assert conditions(pod_status(both, "now"))["Ready"]["status"] == "False"
    both.pod["status"] = {"conditions": [{"type": "x/y", "status": "True"}]}
    assert conditions(pod_status(both, "now"))["Ready"]["status"] == "True"


def test_transition_times_move_only_with_the_status() -> None:
    seen = view(Container(RUNNING))
    seen.pod["status"] = pod_status(seen, "first")
    assert pod_status(seen, "second") == seen.pod["status"]
    seen.main[0].ready = True
    later = conditions(pod_status(seen, "third"))
    assert later["Ready"]["lastTransitionTime"] == "third"
    assert later["Initialized"]["lastTransitionTime"] == "first"


def test_refusal_is_told_at_the_container_and_the_pod() -> None:
    status = pod_status(view(Container(WAITING), refused=["a", "b"], initialized=False), "now")
    assert status["containerStatuses"][0]["state"]["waiting"] == {"reason": "UnsupportedPod", "message": "a; b"}
    assert conditions(status)[NODE_CONDITION]["status"] == "False"
