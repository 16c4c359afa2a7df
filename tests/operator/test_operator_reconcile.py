"""The reconciliation against an API double: no write without a change, and the same end whatever is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
from taktline_operator import naming, routing
from taktline_operator.kube import ApiError
from taktline_operator.reconcile import ROUTES, Controller

Json = dict[str, Any]
Clock = Callable[[], str]


def controller_of(make: Any, api: Any, **more: Any) -> Controller:
    return Controller(api, make.settings, clock=lambda: make.now, **more)


async def settle(controller: Controller, *keys: tuple[str, str]) -> None:
    """What the process does after its start: list, reconcile the given keys, write the table."""
    await controller.resync(everything=True)
    for key in keys:
        await controller.handle(key)
    await controller.handle(ROUTES)


KEY = ("line-1", "reach")


def table(api: Any) -> dict[str, list[str]]:
    found = routing.read_table(api.objects.get(("ConfigMap", "taktline-system", "taktline-routes")))
    return {policy: [target.address for target in route.targets] for policy, route in found.items()}


async def test_a_new_policy_gets_its_objects_status_and_route(make: Any) -> None:
    api = make.Api(make.body(), make.pod("p"))
    await settle(controller_of(make, api), KEY)
    kinds = sorted(key[0] for key in api.objects if key[1] == "line-1")
    assert kinds == [
        "ConfigMap", "ControllerRevision", "Deployment", "Event", "Pod", "PodDisruptionBudget", "PolicyDeployment",
        "Service",
    ]  # fmt: skip
    assert table(api) == {"reach": ["10.0.0.1:50051"]}
    status = api.objects["PolicyDeployment", "line-1", "reach"]["status"]
    assert status["endpoints"] == ["10.0.0.1:50051"]


async def test_a_steady_cluster_costs_no_write(make: Any) -> None:
    api = make.Api(make.body(), make.pod("p"))
    controller = controller_of(make, api)
    await settle(controller, KEY)
    api.writes.clear()
    for _ in range(5):
        await settle(controller, KEY)
    await settle(controller_of(make, api), KEY)  # nor does a restarted operator write
    assert api.writes == []


async def test_drift_is_corrected_and_foreign_fields_are_kept(make: Any) -> None:
    api = make.Api(make.body(), make.pod("p"))
    controller = controller_of(make, api)
    await settle(controller, KEY)
    live = api.objects["Deployment", "line-1", "reach-cpu"]
    live["spec"]["replicas"] = 7
    live["metadata"]["annotations"]["mine"] = "kept"
    api.writes.clear()
    await settle(controller, KEY)
    assert api.writes == [("apply", "Deployment/line-1/reach-cpu")]
    live = api.objects["Deployment", "line-1", "reach-cpu"]
    assert live["spec"]["replicas"] == 1
    assert live["metadata"]["annotations"]["mine"] == "kept"


async def test_a_child_deleted_by_hand_comes_back(make: Any) -> None:
    api = make.Api(make.body(), make.pod("p"))
    controller = controller_of(make, api)
    await settle(controller, KEY)
    del api.objects["Service", "line-1", "reach-workers"]
    await controller.handle(KEY)
    assert ("Service", "line-1", "reach-workers") in api.objects


async def test_deletion_takes_the_route_away_and_may_be_handled_twice(make: Any) -> None:
    api = make.Api(make.body(), make.pod("p"))
    controller = controller_of(make, api)
    await settle(controller, KEY)
    del api.objects["PolicyDeployment", "line-1", "reach"]
    for _ in range(2):
        await controller.handle(KEY)
        await controller.handle(ROUTES)
        assert table(api) == {}


async def test_a_deletion_that_the_watch_missed_is_found_by_the_next_list(make: Any) -> None:
    api = make.Api(make.body(), make.pod("p"))
    controller = controller_of(make, api)
    await settle(controller, KEY)
    del api.objects["PolicyDeployment", "line-1", "reach"]
    await settle(controller)
    assert table(api) == {}


async def test_a_policy_that_waits_for_its_deletion_is_not_routed(make: Any) -> None:
    api = make.Api(make.body(), make.pod("p"))
    controller = controller_of(make, api)
    await settle(controller, KEY)
    api.objects["PolicyDeployment", "line-1", "reach"]["metadata"]["deletionTimestamp"] = make.now
    del api.objects["Deployment", "line-1", "reach-cpu"]
    await controller.handle(KEY)
    await controller.handle(ROUTES)
    assert table(api) == {}
    assert ("Deployment", "line-1", "reach-cpu") not in api.objects


async def test_a_pod_that_leaves_is_out_of_the_table(make: Any) -> None:
    leaving = make.pod("a")
    api = make.Api(make.body(), leaving, make.pod("b", "10.0.0.2"))
    controller = controller_of(make, api)
    await settle(controller, KEY)
    api.objects["Pod", "line-1", "a"]["metadata"]["deletionTimestamp"] = make.now
    await controller.handle(KEY)
    await controller.handle(ROUTES)
    assert table(api) == {"reach": ["10.0.0.2:50051"]}


async def test_a_restart_keeps_the_routes_of_policies_it_has_not_reached_yet(make: Any) -> None:
    other = make.body(name="pick", uid="uid-2")
    api = make.Api(make.body(), other, make.pod("p"))
    await settle(controller_of(make, api), KEY, ("line-1", "pick"))
    before = copy.deepcopy(table(api))
    restarted = controller_of(make, api)
    await restarted.resync(everything=True)
    await restarted.handle(ROUTES)
    assert table(api) == before
    assert before.keys() == {"reach", "pick"}


async def test_nothing_is_routed_before_all_policies_are_known(make: Any) -> None:
    api = make.Api(make.body(), make.pod("p"))
    controller = controller_of(make, api)
    await controller.handle(KEY)
    await controller.handle(ROUTES)
    assert ("ConfigMap", "taktline-system", "taktline-routes") not in api.objects


def told(api: Any) -> dict[str, tuple[str, str, str]]:
    """The conditions of the policy, by type."""
    conditions = api.objects["PolicyDeployment", "line-1", "reach"]["status"]["conditions"]
    return {found["type"]: (found["status"], found["reason"], found["message"]) for found in conditions}


async def test_a_stored_spec_that_no_longer_fits_keeps_serving_and_says_so(make: Any) -> None:
    api = make.Api(make.body(), make.pod("p"))
    await settle(controller_of(make, api), KEY)
    stored = api.objects["PolicyDeployment", "line-1", "reach"]
    stored["spec"]["slo"]["controlBudgetMs"] = 0
    stored["metadata"]["generation"] = 2
    restarted = controller_of(make, api)
    await settle(restarted, KEY)
    accepted = api.objects["PolicyDeployment", "line-1", "reach"]["status"]["conditions"][0]
    assert (accepted["status"], accepted["reason"], accepted["observedGeneration"]) == ("False", "InvalidSpec", 2)
    assert "controlBudgetMs" in accepted["message"]
    assert table(api) == {"reach": ["10.0.0.1:50051"]}
    api.objects["Pod", "line-1", "p"]["metadata"]["deletionTimestamp"] = make.now
    await settle(restarted, KEY)
    assert table(api) == {"reach": []}


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_edit_that_is_refused_takes_no_robot_its_policy(make: Any, restarted: bool) -> None:
    api = make.Api(make.body(), make.pod("p"))
    controller = controller_of(make, api)
    await settle(controller, KEY)
    stored = api.objects["PolicyDeployment", "line-1", "reach"]
    stored["spec"]["pools"][0]["resources"] = {"requests": {"cpu": 2}, "limits": {"cpu": 1}}  # the CRD takes it
    stored["metadata"]["generation"] = 2
    if restarted:
        controller = controller_of(make, api)
    await settle(controller, KEY)
    accepted = api.objects["PolicyDeployment", "line-1", "reach"]["status"]["conditions"][0]
    assert (accepted["status"], accepted["reason"], accepted["observedGeneration"]) == ("False", "InvalidSpec", 2)
    assert table(api) == {"reach": ["10.0.0.1:50051"]}
    assert told(api)["Available"][:2] == ("True", "WorkersReady")
    api.objects["Pod", "line-1", "p"]["metadata"]["deletionTimestamp"] = make.now
    await settle(controller, KEY)
    assert table(api) == {"reach": []}
    status = api.objects["PolicyDeployment", "line-1", "reach"]["status"]
    available = told(api)["Available"]
    assert available == (
        "False", "NoReadyWorker", "0 of 1 workers serve; the Accepted condition says what to correct first"
    )  # fmt: skip
    assert (status["readyReplicas"], status["endpoints"], status["pools"][0]["ready"]) == (0, [], 0)
    ended = {"exitCode": 2, "reason": "Error", "message": "taktline-worker: no model.safetensors"}
    container = {"name": "worker", "ready": False, "state": {"terminated": ended}}
    api.objects["Pod", "line-1", "q"] = make.pod("q", ready=False, containerStatuses=[container])
    await settle(controller, KEY)
    assert told(api)["Degraded"][:2] == ("True", "CrashLoopBackOff")
    assert "no model.safetensors" in told(api)["Degraded"][2]
    api.objects["Pod", "line-1", "q"] = make.pod("q")
    await settle(controller, KEY)
    assert told(api)["Available"][:2] == ("True", "WorkersReady")
    assert told(api)["Degraded"][:2] == ("False", "AsExpected")
    del api.objects["PolicyDeployment", "line-1", "reach"]
    await settle(controller, KEY)
    assert table(api) == {}


async def test_a_mesh_is_looked_at_again_once_nodes_that_hold_it_are_there(make: Any) -> None:
    model = {"family": "vjepa2-ac", "source": {"path": "/srv/policies/planner"}, "revision": "a"}
    pool = {"name": "line", "accelerator": "h100", "resources": {"limits": {"nvidia.com/gpu": 4}}}
    api = make.Api(make.body(model=model, pools=[pool], engine={"parallel": {"search": 8}}))
    controller = controller_of(make, api)
    await settle(controller, KEY)
    while controller.queue._timers or controller.queue.depth:
        controller.queue.done(await controller.queue.get())

    def accepted() -> str:
        return str(api.objects["PolicyDeployment", "line-1", "reach"]["status"]["conditions"][0]["status"])

    assert accepted() == "False", "no node is known, and one pod has too few GPUs"
    labels = {"taktline.dev/accelerator": "h100"}
    api.objects["Node", "", "n1"] = {
        "kind": "Node",
        "metadata": {"name": "n1", "namespace": "", "labels": labels},
        "status": {"allocatable": {"nvidia.com/gpu": "4"}},
    }
    await controller.look_at_nodes()
    assert await asyncio.wait_for(controller.queue.get(), timeout=30) == KEY
    await controller.handle(KEY)
    controller.queue.done(KEY)
    assert accepted() == "True"
    while controller.queue._timers or controller.queue.depth:
        controller.queue.done(await controller.queue.get())
    await controller.look_at_nodes()
    assert not controller.queue._timers, "the same nodes are no news"


async def test_of_two_policies_with_one_name_the_older_is_served_until_it_goes(make: Any) -> None:
    younger = make.body(namespace="line-2", uid="uid-2")
    younger["metadata"]["creationTimestamp"] = "2026-02-02T00:00:00Z"
    api = make.Api(make.body(), younger, make.pod("p"))
    controller = controller_of(make, api)
    await settle(controller, KEY, ("line-2", "reach"))
    refused, available = api.objects["PolicyDeployment", "line-2", "reach"]["status"]["conditions"]
    assert refused["reason"] == "PolicyNameTaken"
    assert (available["type"], available["status"]) == ("Available", "False"), "the alert on it asks for this series"
    assert ("Deployment", "line-2", "reach-cpu") not in api.objects
    del api.objects["PolicyDeployment", "line-1", "reach"]
    await controller.handle(KEY)
    await controller.handle(("line-2", "reach"))
    assert ("Deployment", "line-2", "reach-cpu") in api.objects


async def test_other_namespaces_are_left_alone(make: Any) -> None:
    api = make.Api(make.body(), make.body(namespace="line-2", uid="uid-2"))
    controller = controller_of(make, api, namespaces=["line-1"])
    assert not controller.serves("line-2")
    listed = await controller.resync(everything=True)
    assert [live["metadata"]["namespace"] for live in listed] == ["line-1"]


async def test_gateway_pods_are_touched_when_the_table_changes_and_only_then(make: Any) -> None:
    labels = {naming.LABEL_NAME: "taktline-gateway"}
    gateway = {"kind": "Pod", "metadata": {"name": "g", "namespace": "taktline-system", "labels": labels}}
    api = make.Api(make.body(), make.pod("p"), gateway)
    controller = controller_of(make, api)
    await settle(controller, KEY)
    assert api.writes.count(("annotate", "Pod/taktline-system/g")) == 1
    await settle(controller, KEY)
    assert api.writes.count(("annotate", "Pod/taktline-system/g")) == 1


async def end_state(make: Any, fail_at: int | None) -> tuple[dict[Any, Json], int]:
    """Objects after an edit that met one API failure (which also restarts the operator), and the calls it took."""
    api = make.Api(make.body(), make.pod("p"))
    await settle(controller_of(make, api), KEY)
    stored = api.objects["PolicyDeployment", "line-1", "reach"]
    stored["spec"]["engine"] = {"solverSteps": 4}
    stored["metadata"]["generation"] = 2
    api.calls, api.fail_at = 0, fail_at
    try:
        await settle(controller_of(make, api), KEY)
    except ApiError:
        api.fail_at = None
        await settle(controller_of(make, api), KEY)
    calls = api.calls
    return {key: found for key, found in api.objects.items() if key[0] != "Event"}, calls


async def test_an_operator_that_dies_between_any_two_api_calls_ends_in_the_same_state(make: Any) -> None:
    expected, calls = await end_state(make, None)
    assert calls > 10
    for fail_at in range(1, calls + 1):
        found, _ = await end_state(make, fail_at)
        assert found == expected, f"died at call {fail_at} of {calls}"


async def test_a_policy_deleted_while_its_status_is_written_is_no_error(make: Any) -> None:
    api = make.Api(make.body())
    controller = controller_of(make, api)

    async def vanishing(desired: Json, subresource: str = "") -> Json:
        if subresource == "status":
            raise ApiError(404, "NotFound", "gone")
        return desired

    api.apply = vanishing
    await controller.handle(KEY)


async def test_an_event_that_cannot_be_posted_repeats_no_work(make: Any) -> None:
    api = make.Api(make.body())
    controller = controller_of(make, api)

    async def forbidden(found: Json) -> bool:
        raise ApiError(403, "Forbidden", "no events here")

    api.create = forbidden
    await controller.handle(KEY)
    assert "status" in api.objects["PolicyDeployment", "line-1", "reach"]


async def test_a_namespace_that_is_being_deleted_is_no_failure(make: Any) -> None:
    api = make.Api(make.body())

    async def terminating(desired: Json, subresource: str = "") -> Json:
        raise ApiError(403, "Forbidden", "being terminated", causes=frozenset({"NamespaceTerminating"}))

    api.apply = terminating
    await controller_of(make, api).handle(KEY)


@pytest.mark.parametrize("status", [409, 429, 500, 0])
async def test_an_api_failure_reaches_the_queue(make: Any, status: int) -> None:
    api = make.Api(make.body())

    async def failing(desired: Json, subresource: str = "") -> Json:
        raise ApiError(status, "Nope", "try again")

    api.apply = failing
    with pytest.raises(ApiError):
        await controller_of(make, api).handle(KEY)


async def test_changes_queue_the_table_once(make: Any) -> None:
    api = make.Api(make.body(), make.pod("p"))
    controller = controller_of(make, api)
    await controller.resync(everything=False)
    for _ in range(3):
        await controller.handle(KEY)
    await asyncio.sleep(0.1)
    keys = [await controller.queue.get() for _ in range(controller.queue.depth)]
    assert sorted(keys) == [ROUTES, KEY]


@pytest.mark.parametrize(
    ("status", "causes", "told"),
    [
        (403, frozenset(), True),
        (400, frozenset(), True),
        (422, frozenset(), True),
        (409, frozenset(), False),
        (503, frozenset(), False),
        (403, frozenset({"NamespaceTerminating"}), False),
    ],
)
async def test_an_object_that_the_api_server_refuses_is_a_condition_written_once(
    make: Any, status: int, causes: frozenset[str], told: bool
) -> None:
    api = make.Api(make.body())
    applied, stored = api.apply, []

    async def refused(desired: Json, subresource: str = "") -> Json:
        if desired["kind"] == "Deployment":
            raise ApiError(status, "", 'admission webhook "policy.example" denied the request: no', causes=causes)
        stored.extend([subresource] if subresource else [])
        found: Json = await applied(desired, subresource)
        return found

    api.apply = refused
    controller = Controller(api, make.settings, clock=lambda: make.now)
    await controller.resync(everything=True)
    for _ in range(2):
        with contextlib.suppress(ApiError):
            await controller.handle(KEY)
    assert stored == (["status"] if told else [])
    conditions = api.objects["PolicyDeployment", "line-1", "reach"].get("status", {}).get("conditions", [])
    words = [
        (found["status"], found["reason"], found["message"]) for found in conditions if found["type"] == "Degraded"
    ]
    assert [found[:2] for found in words] == ([("True", "ApplyRefused")] if told else [])
    assert all("Deployment/reach-cpu" in found[2] and "policy.example" in found[2] for found in words)


async def test_an_object_that_a_quota_refuses_is_a_condition_and_is_tried_again(make: Any) -> None:
    api = make.Api(make.body())
    full = ApiError(
        403, "Forbidden", 'configmaps "x" is forbidden: exceeded quota: team, requested: count/configmaps=1'
    )
    applied = api.apply

    async def refused(desired: Json, subresource: str = "") -> Json:
        if desired["kind"] == "ConfigMap":
            raise full
        found: Json = await applied(desired, subresource)
        return found

    api.apply = refused
    controller = Controller(api, make.settings, clock=lambda: make.now)
    await controller.resync(everything=True)
    for _ in range(2):
        with pytest.raises(ApiError, match="exceeded quota"):
            await controller.handle(("line-1", "reach"))
    conditions = api.objects["PolicyDeployment", "line-1", "reach"]["status"]["conditions"]
    degraded = next(found for found in conditions if found["type"] == "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "QuotaExceeded")
    assert "team, requested: count/configmaps=1" in degraded["message"]
    assert len([write for write in api.writes if write[0] == "apply status"]) == 1  # said once
    api.apply = applied
    await controller.handle(("line-1", "reach"))
    conditions = api.objects["PolicyDeployment", "line-1", "reach"]["status"]["conditions"]
    assert next(found for found in conditions if found["type"] == "Degraded")["status"] == "False"
