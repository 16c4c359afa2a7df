"""Status: conditions that move only when the cluster does, and faults that name pod, reason and last words."""

from __future__ import annotations

from typing import Any

import pytest
from taktline_operator import events, faults, routing, status

Json = dict[str, Any]


def waiting(reason: str, message: str = "", ended: Json | None = None) -> Json:
    """Status of a pod whose one container waits."""
    last = {"lastState": {"terminated": ended}} if ended else {}
    container = {"name": "worker", "ready": False, "state": {"waiting": {"reason": reason, "message": message}}} | last
    return {"phase": "Running", "containerStatuses": [container]}


def running(ended: Json | None) -> Json:
    """Status of a pod whose one container runs and is not ready."""
    last = {"lastState": {"terminated": ended}} if ended else {}
    return {
        "phase": "Running",
        "containerStatuses": [{"name": "worker", "ready": False, "state": {"running": {}}} | last],
    }


REFUSAL = {
    "exitCode": 2,
    "reason": "Error",
    "message": '{"level": "error", "message": "no statistics"}\ntaktline-worker: checkpoint_invalid: no statistics\n',
}
CRASH = "pod/p: container worker ended with exit code 2: taktline-worker: checkpoint_invalid: no statistics"


@pytest.mark.parametrize(
    ("pod_status", "reason", "message"),
    [
        (waiting("CrashLoopBackOff", "back-off 10s", REFUSAL), "CrashLoopBackOff", CRASH),
        (running(REFUSAL), "CrashLoopBackOff", CRASH),
        (
            running({"exitCode": 137, "reason": "OOMKilled"}),
            "CrashLoopBackOff",
            "pod/p: container worker ended with exit code 137 (OOMKilled)",
        ),
        (
            waiting("ErrImagePull", "pull access denied"),
            "ImagePullBackOff",
            "pod/p: container worker: pull access denied",
        ),
        (waiting("ImagePullBackOff", "back-off"), "ImagePullBackOff", "pod/p: container worker: back-off"),
        (
            waiting("CreateContainerConfigError", "no claim"),
            "CreateContainerConfigError",
            "pod/p: container worker: no claim",
        ),
        (
            {"phase": "Pending", "conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes\n fit"}
            ]},
            "Unschedulable",
            "pod/p: 0/3 nodes fit",
        ),
        (
            {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no healthy devices"},
            "UnexpectedAdmissionError",
            "pod/p: no healthy devices",
        ),
        (
            {"phase": "Pending", "initContainerStatuses": [{"name": "fetch", "ready": False, "state": {
                "terminated": {"exitCode": 1, "reason": "Error", "message": "no space left"}}}]},
            "CrashLoopBackOff",
            "pod/p: container fetch ended with exit code 1: no space left",
        ),
    ],
)  # fmt: skip
def test_fault_names_what_failed(pod_status: Json, reason: str, message: str) -> None:
    assert faults.of_pod({"metadata": {"name": "p"}, "status": pod_status}) == (reason, message)


@pytest.mark.parametrize(
    "pod",
    [
        {"metadata": {"name": "p"}, "status": running(None)},
        {"metadata": {"name": "p"}, "status": waiting("ContainerCreating")},
        {"metadata": {"name": "p", "deletionTimestamp": "x"}, "status": running(REFUSAL)},
        {"metadata": {"name": "p"}, "status": {"containerStatuses": [
            {"name": "w", "ready": True, "state": {"running": {}}, "lastState": {"terminated": REFUSAL}}]}},
    ],
    ids=["starting", "creating", "being deleted", "recovered"],
)  # fmt: skip
def test_what_is_no_fault(pod: Json) -> None:
    assert faults.of_pod(pod) is None


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ('{"message": "started"}\nworker: it broke\n', "worker: it broke"),
        ('{"message": "started"}\n{"message": "it broke"}', "it broke"),
        ('{"message": "cut of', ""),
        ("", ""),
        ("x" * 2000, "x" * 599 + "…"),
    ],
)
def test_last_words(output: str, words: str) -> None:
    assert faults.last_words(output) == words


def test_what_the_api_server_refuses_surfaces() -> None:
    condition = {
        "type": "ReplicaFailure",
        "status": "True",
        "reason": "FailedCreate",
        "message": "violates PodSecurity",
    }
    workload = {"metadata": {"name": "reach-cpu"}, "status": {"conditions": [condition]}}
    assert faults.find([], [workload]) == [("FailedCreate", "deployment/reach-cpu: violates PodSecurity")]


def test_a_quota_is_quoted_without_the_name_that_changes_at_each_attempt() -> None:
    def told(pod: str) -> list[Any]:
        text = f'pods "{pod}" is forbidden: exceeded quota: team, requested: requests.nvidia.com/gpu=1, used:'
        text += " requests.nvidia.com/gpu=4, limited: requests.nvidia.com/gpu=4"
        condition = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": text}
        return faults.find([], [{"metadata": {"name": "reach-cpu"}, "status": {"conditions": [condition]}}])

    assert told("reach-cpu-1-x") == told("reach-cpu-1-y")
    assert told("a")[0].reason == "QuotaExceeded"
    assert (
        "team, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=4, limited:" in told("a")[0].message
    )


def conditions_of(make: Any, live: Json, pods: list[Json], now: str, **more: Any) -> dict[str, Json]:
    found = make.policy()
    result = make.plan(found, make.Observed(live=live, now=now, pods=pods, **more), make.settings)
    return {condition["type"]: condition for condition in result.status["conditions"]}


def brief(conditions: dict[str, Json]) -> dict[str, tuple[str, str]]:
    return {kind: (condition["status"], condition["reason"]) for kind, condition in conditions.items()}


def test_a_new_policy_is_accepted_and_progressing(make: Any) -> None:
    assert brief(conditions_of(make, make.body(), [], make.now)) == {
        "Accepted": ("True", "Valid"),
        "Available": ("False", "NoReadyWorker"),
        "Progressing": ("True", "RollingOut"),
        "Degraded": ("False", "AsExpected"),
        "Cautioned": ("False", "AsExpected"),
    }


def test_a_serving_policy_is_available_and_complete(make: Any) -> None:
    assert brief(conditions_of(make, make.body(), [make.pod("p")], make.now)) == {
        "Accepted": ("True", "Valid"),
        "Available": ("True", "WorkersReady"),
        "Progressing": ("False", "Complete"),
        "Degraded": ("False", "AsExpected"),
        "Cautioned": ("False", "AsExpected"),
    }


def test_an_old_worker_keeps_it_available_while_a_broken_change_degrades_it(make: Any) -> None:
    old = make.pod("old", template="before")
    broken = make.pod("new", "10.0.0.2", ready=False, **waiting("CrashLoopBackOff", "", REFUSAL))
    found = brief(conditions_of(make, make.body(), [old, broken], make.now))
    assert found["Available"] == ("True", "WorkersReady")
    assert found["Progressing"] == ("True", "RollingOut")
    assert found["Degraded"] == ("True", "CrashLoopBackOff")


def test_a_rollout_that_stands_still_is_degraded_and_not_progressing(make: Any) -> None:
    from taktline_operator.plan import Ref

    child = make.applied(make.policy())[Ref("Deployment", "reach-cpu")]
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    children = {Ref("Deployment", "reach-cpu"): child | {"status": {"conditions": [late]}}}
    found = brief(conditions_of(make, make.body(), [make.pod("p", ready=False)], make.now, children=children))
    assert found["Progressing"] == ("False", "Stalled")
    assert found["Degraded"] == ("True", "Stalled")


def test_a_failed_pod_that_was_replaced_degrades_nothing(make: Any) -> None:
    evicted = make.pod("gone", "", ready=False, phase="Failed", reason="Evicted", message="node low on memory")
    found = brief(conditions_of(make, make.body(), [make.pod("p"), evicted], make.now))
    assert found["Degraded"] == ("False", "AsExpected")
    assert found["Progressing"] == ("False", "Complete")


def test_scaled_to_zero_says_so(make: Any) -> None:
    live = make.body(pools=[{"name": "cpu", "accelerator": "cpu", "minReplicas": 0}])
    found = make.policy(pools=[{"name": "cpu", "accelerator": "cpu", "minReplicas": 0}])
    result = make.plan(found, make.Observed(live=live, now=make.now), make.settings)
    assert result.status["conditions"][1]["reason"] == "ScaledToZero"


def test_transition_time_moves_only_on_a_flip(make: Any) -> None:
    first = conditions_of(make, make.body(), [], make.now)
    live = make.body() | {"status": {"conditions": list(first.values())}}
    second = conditions_of(make, live, [make.pod("p")], make.later)
    moved = {kind for kind in first if first[kind]["lastTransitionTime"] != second[kind]["lastTransitionTime"]}
    assert moved == {"Available", "Progressing"}


def test_every_condition_and_the_status_name_the_generation(make: Any) -> None:
    live = make.body()
    live["metadata"]["generation"] = 7
    from taktline_operator import spec

    result = make.plan(spec.parse(live), make.Observed(live=live, now=make.now), make.settings)
    assert result.status["observedGeneration"] == 7
    assert {condition["observedGeneration"] for condition in result.status["conditions"]} == {7}


def test_current_revision_changes_when_the_new_one_serves_alone(make: Any) -> None:
    found = make.policy(model={"family": "pi05", "source": {"path": "/srv/b"}, "revision": "b"})
    live = make.body() | {"status": {"currentRevision": "a"}}
    old, new = make.pod("old", owner=make.policy()), make.pod("new", "10.0.0.2", owner=found)
    rolling = make.plan(found, make.Observed(live=live, now=make.now, pods=[old, new]), make.settings).status
    assert (rolling["currentRevision"], rolling["candidateRevision"]) == ("a", "b")
    done = make.plan(found, make.Observed(live=live, now=make.now, pods=[new]), make.settings).status
    assert done["currentRevision"] == "b"
    assert "candidateRevision" not in done


def test_a_refusal_keeps_the_rest_of_the_status(make: Any) -> None:
    before = {
        "currentRevision": "a",
        "conditions": list(conditions_of(make, make.body(), [make.pod("p")], make.now).values()),
    }
    pods = [make.pod("p")]
    route = routing.route(make.policy(), pods)
    after = status.refused(make.body() | {"status": before}, 3, "InvalidSpec", "why", make.later, pods, route)
    assert after["currentRevision"] == "a"
    assert [(c["type"], c["status"]) for c in after["conditions"]][:2] == [("Accepted", "False"), ("Available", "True")]


def test_status_fits_its_closed_schema(make: Any) -> None:
    from taktline_operator import schema

    result = make.plan(
        make.policy(), make.Observed(live=make.body(), now=make.now, pods=[make.pod("p")]), make.settings
    )
    schema.validated(make.body() | {"status": result.status})


def test_one_event_for_each_flip_and_none_for_a_repetition(make: Any) -> None:
    first = list(conditions_of(make, make.body(), [], make.now).values())
    second = list(conditions_of(make, make.body(), [make.pod("p")], make.later).values())
    assert [event["reason"] for event in events.of_changes(make.body(), [], first, make.now)] == ["RollingOut"]
    posted = events.of_changes(make.body(), first, second, make.later)
    assert [(event["type"], event["reason"]) for event in posted] == [
        ("Normal", "WorkersReady"),
        ("Normal", "Complete"),
    ]
    assert events.of_changes(make.body(), second, second, make.later) == []
    again = events.of_changes(make.body(), first, second, make.later)
    assert [event["metadata"]["name"] for event in again] == [event["metadata"]["name"] for event in posted]
