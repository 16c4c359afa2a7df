"""Faults that other operators have had, each as a test named by the fault."""

from __future__ import annotations

import copy
from datetime import datetime, timedelta
from typing import Any

import pytest
from kubernetes import client
from simulated_cluster import Cluster, trial_of
from taktline_operator import healing, kube, revisions, schema, served_crd, surge
from taktline_operator.plan import Ref
from taktline_protocol.errors import TaktlineError

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


def held_back(make: Any, owner: Any, created: str) -> Json:
    pod: Json = make.pod("n", owner=owner, ready=False, phase="Pending", podIP="")
    pod["metadata"]["creationTimestamp"] = created
    pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    return pod


def test_a_rolling_update_without_spare_quota_does_not_deadlock(make: Any) -> None:
    """A surge pod stays gated while the old workers hold the whole quota of its queue."""
    owner = make.policy(pools=TWO)
    old = [make.pod(f"o{n}", f"10.0.0.{n}", owner=owner, template="before") for n in (1, 2)]
    entered = rolling(make, [*old, held_back(make, owner, "2026-03-01T07:59:55Z")])
    assert update_of(entered) == surge.SURGE  # every pod begins in the queue: it may be admitted the next moment
    assert entered.again_s == pytest.approx(surge.HELD_S - 5.0)
    held = rolling(make, [*old, held_back(make, owner, "2026-03-01T07:59:35Z")])
    assert update_of(held) == surge.YIELD
    single = rolling(
        make, [old[0], held_back(make, owner, "2026-03-01T07:00:00Z")], pools=[{"name": "cpu", "accelerator": "cpu"}]
    )
    assert update_of(single) == surge.SURGE
    assert "no room for a second worker" in progressing(single)


def test_waiting_for_quota_past_the_progress_deadline_is_no_stall(make: Any) -> None:
    owner = make.policy(pools=TWO)
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "late"}
    live = make.applied(owner)[DEPLOYMENT] | {"status": {"conditions": [late]}}
    result = rolling(make, [held_back(make, owner, "2026-03-01T07:00:00Z")], live=live)
    said = {found["type"]: (found["status"], found["reason"]) for found in result.status["conditions"]}
    assert said["Progressing"] == ("True", "RollingOut")
    assert said["Degraded"] == ("False", "AsExpected")
    starting = rolling(make, [make.pod("n", owner=owner, ready=False)], live=live)
    said = {found["type"]: (found["status"], found["reason"]) for found in starting.status["conditions"]}
    assert said["Progressing"] == ("False", "Stalled")


@pytest.mark.parametrize(
    ("started", "since", "reason"),
    [
        ("2026-03-01T07:58:00Z", "2026-03-01T07:30:00Z", "RollingOut"),  # let in after the deadline had passed
        ("2026-03-01T07:10:00Z", "2026-03-01T07:30:00Z", "Stalled"),  # it had started when the deadline passed
        ("2026-03-01T06:58:00Z", "2026-03-01T06:30:00Z", "Stalled"),  # let in late, and had as long again
    ],
    ids=["just let in", "started before", "had its time"],
)
def test_the_end_of_a_wait_for_quota_is_no_stall(make: Any, started: str, since: str, reason: str) -> None:
    """Kubernetes counted the wait, and its condition stands until the pod serves."""
    owner = make.policy(pools=TWO)
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "lastTransitionTime": since}
    live = make.applied(owner)[DEPLOYMENT] | {"status": {"conditions": [late]}}
    assert live["spec"]["progressDeadlineSeconds"] < 3600
    starting = make.pod("n", owner=owner, ready=False, startTime=started)
    said = {c["type"]: (c["status"], c["reason"]) for c in rolling(make, [starting], live=live).status["conditions"]}
    assert said["Progressing"][1] == reason
    assert said["Degraded"] == (("True", "Stalled") if reason == "Stalled" else ("False", "AsExpected"))


def test_one_pool_that_waits_for_quota_hides_no_stall_of_another(make: Any) -> None:
    pools = [{"name": "cpu", "accelerator": "cpu"}, {"name": "other", "accelerator": "cpu"}]
    owner = make.policy(pools=pools)
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "late"}
    live = make.applied(owner)[DEPLOYMENT] | {"status": {"conditions": [late]}}
    waits = held_back(make, owner, "2026-03-01T07:00:00Z")
    waits["metadata"]["labels"]["taktline.dev/pool"] = "other"
    hangs = make.pod("h", owner=owner, ready=False)
    said = {c["type"]: c for c in rolling(make, [waits, hangs], live=live, pools=pools).status["conditions"]}
    assert (said["Degraded"]["status"], said["Degraded"]["reason"]) == ("True", "Stalled")
    assert "deployment/reach-cpu" in said["Degraded"]["message"]


def test_an_old_worker_that_waits_for_quota_hides_no_stall_of_a_new_one(make: Any) -> None:
    owner = make.policy(pools=TWO)
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "late"}
    live = make.applied(owner)[DEPLOYMENT] | {"status": {"conditions": [late]}}
    waits = held_back(make, owner, "2026-03-01T07:00:00Z")
    waits["metadata"]["annotations"]["taktline.dev/template-hash"] = "before"
    hangs = make.pod("h", owner=owner, ready=False)
    said = {c["type"]: c["reason"] for c in rolling(make, [waits, hangs], live=live).status["conditions"]}
    assert said["Progressing"] == "Stalled"


@pytest.mark.parametrize(
    ("hung_s", "status", "reason"),
    [(7200, "False", "Stalled"), (120, "False", "RollingOut"), (7200, "True", "RollingOut")],
    ids=["hangs", "starts anew", "serves"],
)
def test_a_worker_that_waits_for_quota_hides_no_other_that_hangs(
    make: Any, hung_s: int, status: str, reason: str
) -> None:
    """The quota admits one of two, which was let in before the deadline: the wait of the other is no excuse for it."""
    owner = make.policy(pools=TWO)
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "late"}
    late["lastTransitionTime"] = "2026-03-01T07:00:00Z"
    live = make.applied(owner)[DEPLOYMENT] | {"status": {"conditions": [late]}}
    waits = held_back(make, owner, "2026-03-01T05:59:00Z")
    other = make.pod("h", owner=owner, startTime="2026-03-01T06:00:00Z")
    since = datetime.fromisoformat(make.now) - timedelta(seconds=hung_s)
    ready = {"type": "Ready", "status": status, "lastTransitionTime": since.strftime("%Y-%m-%dT%H:%M:%SZ")}
    other["status"]["conditions"] = [ready]
    assert live["spec"]["progressDeadlineSeconds"] < 7200
    found = rolling(make, [waits, other], live=live)
    said = {c["type"]: c["reason"] for c in found.status["conditions"]}
    assert said["Progressing"] == reason
    assert said["Degraded"] == ("Stalled" if reason == "Stalled" else "AsExpected")


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


# ----- the faults that rollouts, scaling and healing could bring; each names the fault


async def cluster_of(make: Any, **parts: Any) -> Cluster:
    found = Cluster(make, make.body(pools=TWO, rollout=PROGRESSIVE, model=model("a"), **parts))
    await found.run(60)
    return found


def model(revision: str) -> Json:
    return {"family": "pi05", "source": {"path": f"/srv/{revision}"}, "revision": revision}


PROGRESSIVE = {"strategy": "Progressive", "steps": [50, 100], "stepSeconds": 20}


async def test_a_canary_gets_no_traffic_before_it_is_ready_and_the_stable_ones_are_not_scaled_down_early(
    make: Any,
) -> None:
    cluster = await cluster_of(make)
    cluster.start_s = 200
    cluster.edit(model=model("b"))
    for _ in range(15):
        await cluster.run(10)
        assert cluster.deployments()["reach-cpu"] == 2
        assert cluster.route().candidate is None
        assert len(cluster.route().targets) == 2


async def test_consecutive_canaries_leave_no_route_and_no_object_behind(make: Any) -> None:
    cluster = await cluster_of(make)
    for revision in ("b", "c", "d", "e"):
        cluster.edit(model=model(revision))
        await cluster.run(50)  # each is replaced before it is through
    cluster.edit(model=model("a"))
    await cluster.run(120)
    assert cluster.deployments() == {"reach-cpu": 2}
    assert cluster.route().candidate is None
    assert {target.revision for target in cluster.route().targets} == {"a"}
    assert len(cluster.api.of_kind("ConfigMap")) == 2  # engine.json and the routes


async def test_traffic_is_not_switched_to_a_revision_that_only_looks_ready(make: Any) -> None:
    cluster = await cluster_of(make)
    cluster.trial = lambda candidate, seconds: trial_of(candidate, 0.0)  # ready pods, but not one answer
    cluster.edit(model=model("b"))
    await cluster.run(600, step_s=30)
    assert cluster.rollout["phase"] == "Shadow"
    assert {target.revision for target in cluster.route().targets} == {"a"}


async def test_a_controller_that_restarts_rebuilds_nothing_with_new_fields(make: Any) -> None:
    cluster = await cluster_of(make)
    cluster.edit(model=model("b"))
    await cluster.run(60)
    before = {key: found["spec"]["template"] for key, found in cluster.api.objects.items() if key[0] == "Deployment"}
    cluster.boot()
    await cluster.reconcile(3)
    after = {key: found["spec"]["template"] for key, found in cluster.api.objects.items() if key[0] == "Deployment"}
    assert before == after


def test_a_field_that_a_later_operator_adds_is_no_new_revision(make: Any) -> None:
    spec = make.policy().spec
    stored = revisions.of_spec(spec)
    assert set(stored.data()["model"]) == {"family", "source", "revision"}  # what equals a default is not in the hash
    spelled_out = make.policy(engine={"precision": "bf16", "buckets": [1, 2, 4, 8]}).spec
    assert revisions.of_spec(spelled_out).hash == stored.hash


async def test_a_busy_looking_crash_loop_never_holds_a_take_back(make: Any) -> None:
    cluster = await cluster_of(make)
    ended = {"exitCode": 1, "reason": "Error", "message": "boom"}
    crash = {"containerStatuses": [
        {"name": "worker", "ready": False, "restartCount": 5, "state": {"waiting": {"reason": "CrashLoopBackOff"}},
         "lastState": {"terminated": ended}}
    ]}  # fmt: skip
    cluster.fails = lambda pod: crash if pod["metadata"]["annotations"]["taktline.dev/revision"] == "b" else None
    cluster.edit(model=model("b"))
    await cluster.run(120)
    assert cluster.rollout["phase"] == "RolledBack"
    assert cluster.deployments() == {"reach-cpu": 2}


def test_one_lost_gpu_does_not_pile_up_failed_pods(make: Any) -> None:
    owner = make.policy()  # parsed once: a thousand times would take minutes on a busy machine
    refused = [
        make.pod(f"p{n:04d}", owner=owner, ready=False, phase="Failed", reason="UnexpectedAdmissionError")
        for n in range(1000)
    ]
    found = healing.removals(refused, {})
    assert len(found) == 1000 - healing.KEPT_FAILED


def test_a_second_autoscaler_is_refused_and_told_so(make: Any) -> None:
    with pytest.raises(TaktlineError, match="let no other autoscaler set them"):
        make.policy(scaling={}, replicas=3, pools=[{"name": "cpu", "accelerator": "cpu", "maxReplicas": 4}])


def test_crd_fields_that_the_cluster_would_prune_are_found_at_the_start() -> None:
    older = copy.deepcopy(schema.object_schema())
    del older["properties"]["status"]["properties"]["scaling"]
    kind = [{"kind": "PolicyDeployment"}]
    document = {"components": {"schemas": {"x": {"x-kubernetes-group-version-kind": kind, **older}}}}
    assert served_crd.missing(document) == ["status.scaling"]


async def test_an_event_that_was_told_before_a_crash_is_told_once(make: Any) -> None:
    cluster = await cluster_of(make)
    cluster.edit(model=model("b"))
    # Seldom enough that one reconciliation, of now more than 17 calls, comes to its end in between.
    cluster.door.calls, cluster.door.kill_every, cluster.door.after = 0, 31, True
    cluster.door.kill_at = 5
    await cluster.run(60)
    cluster.door.kill_at = None
    told = cluster.events()
    assert told.count("RolloutStarting") == 1
    assert told.count("RolloutShadow") == 1


def test_a_status_in_the_middle_of_a_trial_fits_its_closed_schema(make: Any) -> None:
    body = make.body(rollout=PROGRESSIVE, scaling={}, pools=[{"name": "cpu", "accelerator": "cpu", "maxReplicas": 4}])
    state = {"phase": "Shifting", "stable": "x", "candidate": "y", "step": 1, "weight": 25, "baseline": 0.01,
             "since": "2026-03-01T08:00:00Z", "startedAt": "2026-03-01T07:00:00Z", "message": "m"}  # fmt: skip
    body["status"] = {"rollout": state}
    policy = make.policy(**body["spec"])
    result = make.plan(policy, make.Observed(live=body, now=make.now), make.settings)
    schema.validated(body | {"status": result.status})
