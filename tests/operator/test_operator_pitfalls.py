"""Faults that other operators have had, each as a test named by the fault."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from kubernetes import client
from taktline_operator import kube, surge
from taktline_operator.plan import Ref

Json = dict[str, Any]
DEPLOYMENT = Ref("Deployment", "reach-cpu")
TWO = [{"name": "cpu", "accelerator": "cpu", "minReplicas": 2}]
STARVED = {
    "phase": "Pending",
    "podIP": "",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
        }
    ],
}


def rolling(make: Any, pods: list[Json], *, live: Json | None = None, pools: list[Json] = TWO) -> Any:
    found = make.policy(pools=pools)
    children = make.applied(found) | ({DEPLOYMENT: live} if live else {})
    return make.plan(found, make.Observed(live=make.body(), now=make.now, children=children, pods=pods), make.settings)


def update_of(result: Any) -> Json:
    found = next(child for child in result.desired if child["kind"] == "Deployment")
    update: Json = found["spec"]["strategy"]["rollingUpdate"]
    return update


def progressing(result: Any) -> str:
    message: str = next(c["message"] for c in result.status["conditions"] if c["type"] == "Progressing")
    return message


def test_a_rolling_update_without_a_spare_accelerator_does_not_deadlock(make: Any) -> None:
    owner = make.policy(pools=TWO)
    old = [make.pod(f"o{n}", f"10.0.0.{n}", owner=owner, template="before") for n in (1, 2)]
    new = make.pod("n", owner=owner, ready=False, **STARVED)
    result = rolling(make, [*old, new])
    assert update_of(result) == surge.YIELD
    assert "no spare accelerator" in progressing(result)
    assert [child["kind"] for child in result.writes] == ["Deployment"]
    # The pod that got the room is no longer starved; the rollout goes on in the same way until no old pod is left.
    yielding = next(child for child in result.desired if child["kind"] == "Deployment")
    starting = make.pod("n", owner=owner, ready=False)
    assert update_of(rolling(make, [old[0], starting], live=yielding)) == surge.YIELD
    done = [make.pod(f"n{n}", f"10.0.1.{n}", owner=owner) for n in (1, 2)]
    assert update_of(rolling(make, done, live=yielding)) == surge.SURGE


def test_a_single_worker_is_not_taken_away_to_make_room(make: Any) -> None:
    old, new = make.pod("o", template="before"), make.pod("n", "10.0.0.2", ready=False, **STARVED)
    result = rolling(make, [old, new], pools=[{"name": "cpu", "accelerator": "cpu"}])
    assert update_of(result) == surge.SURGE
    assert "no room for a second worker" in progressing(result)


def test_an_edit_that_fits_no_node_costs_no_old_worker(make: Any) -> None:
    owner = make.policy(pools=TWO)
    misplaced = copy.deepcopy(STARVED)
    misplaced["conditions"][0]["message"] = "0/4 nodes are available: 4 node(s) didn't match Pod's node affinity."
    old = [make.pod(f"o{n}", f"10.0.0.{n}", owner=owner, template="before") for n in (1, 2)]
    assert update_of(rolling(make, [*old, make.pod("n", owner=owner, ready=False, **misplaced)])) == surge.SURGE


def test_a_pod_is_built_whole_from_its_own_revision(make: Any) -> None:
    """A shared, mutable ConfigMap would hand a restarted old pod the new revision's engine."""
    maps = [
        {ref.name for ref in make.applied(make.policy(engine={"solverSteps": steps})) if ref.kind == "ConfigMap"}
        for steps in (5, 6)
    ]
    assert not maps[0] & maps[1]
    for child in make.applied(make.policy()).values():
        if child["kind"] == "ConfigMap":
            assert child["immutable"] is True


def test_a_status_of_crash_looping_pods_is_never_available(make: Any) -> None:
    container = {"name": "worker", "ready": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    ended = {"exitCode": 1, "reason": "Error", "message": "boom"}
    pod = make.pod("p", ready=False, containerStatuses=[container | {"lastState": {"terminated": ended}}])
    found = make.policy()
    result = make.plan(found, make.Observed(live=make.body(), now=make.now, pods=[pod]), make.settings)
    status = {c["type"]: c["status"] for c in result.status["conditions"]}
    assert (status["Available"], status["Degraded"]) == ("False", "True")
    assert result.route.targets == ()


def test_a_restart_count_that_grows_does_not_rewrite_the_status(make: Any) -> None:
    def result(count: int, state: Json) -> Json:
        ended = {"exitCode": 1, "reason": "Error", "message": "boom"}
        container = {"name": "worker", "ready": False, "restartCount": count, "lastState": {"terminated": ended}}
        pod = make.pod("p", ready=False, containerStatuses=[container | {"state": state}])
        observed = make.Observed(live=make.body(), now=make.now, pods=[pod])
        status: Json = make.plan(make.policy(), observed, make.settings).status
        return status

    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    ended_again = {"terminated": {"exitCode": 1, "reason": "Error", "message": "boom"}}
    assert result(1, waiting) == result(9, {"running": {}}) == result(9, ended_again)


def test_a_rotated_token_reaches_the_next_request() -> None:
    settings = client.Configuration()
    settings.api_key["BearerToken"] = "bearer first"
    assert kube.bearer_token(settings) == "bearer first"

    def rotate(found: client.Configuration) -> None:
        found.api_key["BearerToken"] = "bearer second"

    settings.refresh_api_key_hook = rotate
    assert kube.bearer_token(settings) == "bearer second"


def test_the_operator_never_writes_the_spec_so_that_one_autoscaler_owns_it(make: Any) -> None:
    found = make.policy(replicas=3, pools=[{"name": "cpu", "accelerator": "cpu", "maxReplicas": 5}])
    result = make.plan(found, make.Observed(live=make.body(), now=make.now), make.settings)
    assert all(child["kind"] != "PolicyDeployment" for child in result.writes)


@pytest.mark.parametrize("side", ["requests", "limits"])
def test_the_api_servers_spelling_of_a_quantity_is_no_drift(make: Any, side: str) -> None:
    pools = [{"name": "cpu", "accelerator": "cpu", "resources": {side: {"cpu": "2000m", "memory": "1024Mi"}}}]
    children = make.applied(make.policy(pools=pools))
    children[DEPLOYMENT] = copy.deepcopy(children[DEPLOYMENT])
    container = children[DEPLOYMENT]["spec"]["template"]["spec"]["containers"][0]
    container["resources"][side] |= {"cpu": "2", "memory": "1Gi"}
    observed = make.Observed(live=make.body(), now=make.now, children=children)
    assert make.plan(make.policy(pools=pools), observed, make.settings).writes == ()
