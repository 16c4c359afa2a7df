"""Progressive rollouts in a simulated cluster: every way through, and every way back."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_cluster import Cluster, differing_trial, late_trial, trial_of
from taktline_operator import naming
from taktline_operator.rollout import Facts, State, advance
from taktline_operator.spec import Rollout
from taktline_protocol.measurements import Outcomes, Shadow

Json = dict[str, Any]
PLAN = {"strategy": "Progressive", "stepSeconds": 60, "shadow": {"percent": 50, "minObservations": 100}}
A = {"family": "pi05", "source": {"path": "/srv/policies/reach"}, "revision": "a"}
B = {"family": "pi05", "source": {"path": "/srv/policies/reach-b"}, "revision": "b"}
C = {"family": "pi05", "source": {"path": "/srv/policies/reach-c"}, "revision": "c"}
POOLS = [{"name": "cpu", "accelerator": "cpu", "minReplicas": 4}]


@pytest.fixture
async def cluster(make: Any) -> Cluster:
    """Revision a serves with four workers."""
    found = Cluster(make, make.body(rollout=PLAN, pools=POOLS, model=A))
    await found.run(60)
    assert found.rollout["phase"] == "Complete"
    assert found.deployments() == {"reach-cpu": 4}
    return found


def revisions_of(route: Any) -> set[str]:
    return {target.revision for target in route.targets}


async def test_a_good_candidate_goes_through_shadow_and_all_steps(cluster: Cluster) -> None:
    before = cluster.route()
    cluster.edit(model=B)
    await cluster.run(1500)
    assert cluster.rollout["phase"] == "Complete"
    assert cluster.live["status"]["currentRevision"] == "b"
    assert "candidateRevision" not in cluster.live["status"]
    assert cluster.condition("Progressing")[:2] == ("False", "Complete")
    assert cluster.condition("Degraded")[0] == "False"
    trials = [route.candidate for route in cluster.routes_seen if route.candidate]
    steps = list(dict.fromkeys((trial.weight, trial.mirror) for trial in trials))
    assert steps == [(0, 50), (0, 0), (5, 0), (25, 0), (50, 0), (100, 0)]
    # One worker for 5 % and 25 % of four, two for half, four at the end; and no route ever without a worker.
    assert sorted({len(trial.targets) for trial in trials}) == [1, 2, 4]
    assert all(route.targets for route in cluster.routes_seen[1:])
    assert revisions_of(before) == {"a"}
    assert revisions_of(cluster.route()) == {"b"}
    assert list(cluster.deployments().values()) == [4]
    told = cluster.events()
    assert {"RolloutStarting", "RolloutShadow", "RolloutShifting", "RolloutFinishing", "RolloutComplete"} <= set(told)


async def test_while_a_candidate_is_on_trial_the_serving_workers_are_not_touched(cluster: Cluster) -> None:
    before = cluster.api.objects["Deployment", "line-1", "reach-cpu"]["spec"]["template"]
    cluster.edit(model=B)
    await cluster.run(120)
    assert cluster.rollout["phase"] in ("Shadow", "Shifting")
    assert cluster.api.objects["Deployment", "line-1", "reach-cpu"]["spec"]["template"] == before
    assert revisions_of(cluster.route()) == {"a"}
    status = cluster.live["status"]
    assert (status["currentRevision"], status["candidateRevision"]) == ("a", "b")


async def test_a_candidate_gets_traffic_only_once_its_workers_are_ready(cluster: Cluster) -> None:
    cluster.start_s = 300
    cluster.edit(model=B)
    await cluster.run(250)
    assert cluster.rollout["phase"] == "Starting"
    assert all(route.candidate is None for route in cluster.routes_seen)
    await cluster.run(70)
    assert cluster.rollout["phase"] == "Shadow"
    assert all(route.candidate.targets for route in cluster.routes_seen if route.candidate and route.candidate.mirror)


async def test_a_candidate_that_acts_otherwise_is_taken_back(cluster: Cluster) -> None:
    cluster.trial = differing_trial
    cluster.edit(model=B)
    await cluster.run(300)
    assert cluster.rollout["phase"] == "RolledBack"
    assert cluster.rollout["reason"] == "ParityFailed"
    status, reason, message = cluster.condition("Degraded")
    assert (status, reason) == ("True", "ParityFailed")
    assert "revision b was taken back, revision a serves" in message
    assert "7.5 times" in message
    assert cluster.condition("Available")[0] == "True"
    assert cluster.deployments() == {"reach-cpu": 4}
    assert cluster.route().candidate is None
    assert all(not route.candidate or route.candidate.weight == 0 for route in cluster.routes_seen)
    warnings = [event for event in cluster.api.of_kind("Event") if event["type"] == "Warning"]
    assert any(event["reason"] == "ParityFailed" for event in warnings)
    writes = len(cluster.api.writes)
    await cluster.run(3600, step_s=60)
    assert len(cluster.api.writes) == writes  # it stays as it is, and costs nothing


async def test_another_chunk_shape_is_no_parity(cluster: Cluster) -> None:
    cluster.trial = lambda candidate, seconds: trial_of(candidate, seconds, shadow=Shadow(compared=1, reshaped=1))
    cluster.edit(model=B)
    await cluster.run(120)
    assert (cluster.rollout["phase"], cluster.rollout["reason"]) == ("RolledBack", "ParityFailed")


async def test_a_candidate_that_misses_deadlines_under_traffic_is_taken_back(cluster: Cluster) -> None:
    cluster.trial = late_trial
    cluster.edit(model=B)
    await cluster.run(900)
    assert (cluster.rollout["phase"], cluster.rollout["reason"]) == ("RolledBack", "DeadlineMissed")
    weights = [route.candidate.weight for route in cluster.routes_seen if route.candidate]
    assert max(weights) <= 25  # found out long before everybody was on it
    assert revisions_of(cluster.route()) == {"a"}


async def test_misses_that_both_revisions_have_are_not_the_candidates_fault(cluster: Cluster) -> None:
    def slow_network(candidate: Any, seconds: float) -> Any:
        seen = int(10 * seconds)
        moved = int(seen * candidate.weight / 100)
        rest = seen - moved
        return trial_of(
            candidate,
            seconds,
            stable=Outcomes(on_time=rest - rest // 20, late=rest // 20),
            candidate=Outcomes(on_time=moved - moved // 20, late=moved // 20),
        )

    cluster.trial = slow_network
    cluster.edit(model=B, rollout=PLAN | {"steps": [25, 50, 75, 100]})
    await cluster.run(400)
    assert cluster.rollout["phase"] == "Shifting", cluster.rollout


async def test_a_candidate_whose_workers_crash_is_taken_back_with_their_words(cluster: Cluster) -> None:
    words = "taktline-worker: checkpoint_invalid: no statistics file (name one)"

    def crash(pod: Json) -> Json | None:
        if pod["metadata"]["annotations"][naming.ANNOTATION_REVISION] != "b":
            return None
        ended = {"exitCode": 2, "reason": "Error", "message": words}
        state = {"waiting": {"reason": "CrashLoopBackOff"}}
        return {"containerStatuses": [
            {"name": "worker", "ready": False, "restartCount": 2, "state": state, "lastState": {"terminated": ended}}
        ]}  # fmt: skip

    cluster.fails = crash
    cluster.edit(model=B)
    await cluster.run(120)
    assert (cluster.rollout["phase"], cluster.rollout["reason"]) == ("RolledBack", "CandidateFails")
    assert words in cluster.condition("Degraded")[2]
    assert cluster.condition("Available")[0] == "True"


async def test_a_candidate_is_not_tried_twice_unless_somebody_says_so(cluster: Cluster) -> None:
    cluster.trial = differing_trial
    cluster.edit(model=B)
    await cluster.run(300)
    cluster.edit(slo={"controlBudgetMs": 90})  # another field: still the candidate that was taken back
    await cluster.run(120)
    assert cluster.rollout["phase"] == "RolledBack"
    cluster.trial = trial_of
    cluster.say("retry")
    await cluster.run(1500)
    assert cluster.live["status"]["currentRevision"] == "b"
    assert cluster.condition("Degraded")[0] == "False"


async def test_the_old_spec_ends_the_matter(cluster: Cluster) -> None:
    cluster.trial = differing_trial
    cluster.edit(model=B)
    await cluster.run(300)
    cluster.edit(model=A)
    await cluster.run(60)
    assert cluster.rollout["phase"] == "Complete"
    assert cluster.condition("Degraded")[0] == "False"
    assert cluster.deployments() == {"reach-cpu": 4}


async def test_an_edit_that_is_refused_during_a_trial_says_that_nobody_judges_the_candidate(cluster: Cluster) -> None:
    cluster.edit(model=B)
    await cluster.run(400)
    assert cluster.rollout["phase"] == "Shifting"
    route = cluster.route()
    cluster.edit(pools=[POOLS[0] | {"resources": {"requests": {"cpu": 2}, "limits": {"cpu": 1}}}])
    await cluster.run(60)
    assert cluster.route() == route, "robots stay where they are"
    assert cluster.condition("Available")[0] == "True"
    for kind, value in (("Progressing", "False"), ("Degraded", "True")):
        status, reason, message = cluster.condition(kind)
        assert (status, reason) == (value, "Stalled")
        assert "trial of revision b stands still" in message
    cluster.edit(pools=POOLS)
    await cluster.run(20)
    assert cluster.condition("Degraded")[0] == "False"
    await cluster.run(1500)
    assert cluster.live["status"]["currentRevision"] == "b"


async def test_an_edit_during_a_trial_replaces_the_candidate(cluster: Cluster) -> None:
    cluster.edit(model=B)
    await cluster.run(120)
    cluster.edit(model=C)
    await cluster.run(1800)
    assert cluster.live["status"]["currentRevision"] == "c"
    assert list(cluster.deployments().values()) == [4]


async def test_pause_holds_a_step_and_resume_goes_on(cluster: Cluster) -> None:
    cluster.edit(model=B)
    await cluster.run(150)
    assert cluster.rollout["phase"] == "Shifting"
    cluster.say("pause")
    await cluster.run(30)
    held = cluster.rollout["weight"]
    await cluster.run(3600, step_s=120)
    assert cluster.rollout["weight"] == held
    assert cluster.condition("Progressing")[:2] == ("True", "Paused")
    cluster.say("resume")
    await cluster.run(1200)
    assert cluster.rollout["phase"] == "Complete"


async def test_a_paused_candidate_that_turns_bad_is_still_taken_back(cluster: Cluster) -> None:
    cluster.edit(model=B)
    await cluster.run(150)
    cluster.say("pause")
    cluster.trial = late_trial
    await cluster.run(900)
    assert cluster.rollout["phase"] == "RolledBack"


async def test_promote_skips_the_gates_but_waits_for_workers(cluster: Cluster) -> None:
    cluster.trial = differing_trial
    cluster.start_s = 100
    cluster.edit(model=B)
    await cluster.run(20)
    cluster.say("promote b")
    await cluster.run(60)
    assert revisions_of(cluster.route()) == {"a"}
    await cluster.run(200)
    assert cluster.live["status"]["currentRevision"] == "b"
    assert all(route.targets for route in cluster.routes_seen[1:])


async def test_a_word_that_is_left_behind_does_not_hit_the_next_candidate(cluster: Cluster) -> None:
    cluster.edit(model=B)
    await cluster.run(30)
    cluster.say("promote")
    await cluster.run(300)
    assert cluster.live["status"]["currentRevision"] == "b"
    cluster.edit(model=C)
    await cluster.run(120)
    assert cluster.rollout["phase"] in ("Shadow", "Shifting")
    assert "promoted" not in cluster.rollout


async def test_a_word_for_another_revision_is_ignored(cluster: Cluster) -> None:
    cluster.edit(model=B)
    await cluster.run(60)
    cluster.say("abort c")
    await cluster.run(1500)
    assert cluster.live["status"]["currentRevision"] == "b"


async def test_abort_takes_a_candidate_back_without_alarm(cluster: Cluster) -> None:
    cluster.edit(model=B)
    await cluster.run(120)
    cluster.say("abort")
    await cluster.run(60)
    assert (cluster.rollout["phase"], cluster.rollout["reason"]) == ("RolledBack", "Aborted")
    assert cluster.condition("Degraded")[0] == "False"
    assert cluster.deployments() == {"reach-cpu": 4}


async def test_without_robots_a_candidate_waits(cluster: Cluster) -> None:
    cluster.trial = lambda candidate, seconds: trial_of(candidate, 0.0)
    cluster.edit(model=B)
    await cluster.run(7200, step_s=60)
    assert cluster.rollout["phase"] == "Shadow"
    assert "none of 100 so far: do robots ask?" in cluster.condition("Progressing")[2]
    writes = len(cluster.api.writes)
    await cluster.run(3600, step_s=60)
    assert len(cluster.api.writes) == writes


async def test_a_trial_that_never_ends_is_taken_back_after_its_time(cluster: Cluster) -> None:
    cluster.trial = lambda candidate, seconds: trial_of(candidate, 0.0)
    cluster.edit(model=B, rollout=PLAN | {"timeoutMinutes": 30})
    await cluster.run(2400, step_s=30)
    assert (cluster.rollout["phase"], cluster.rollout["reason"]) == ("RolledBack", "TimedOut")


async def test_shared_capacity_lets_old_workers_go_as_robots_move(cluster: Cluster) -> None:
    cluster.edit(model=B, rollout=PLAN | {"capacity": "Shared", "steps": [50, 100]})
    totals = []
    for _ in range(60):
        await cluster.run(10)
        totals.append(sum(cluster.deployments().values()))
    assert cluster.rollout["phase"] == "Complete"
    # 4 + 2, then 2 old ones leave and 4 new ones serve half; at the end one old worker is the net under all.
    assert max(totals) == 6


async def test_workers_of_the_old_revision_stay_until_every_gateway_has_left_them(cluster: Cluster) -> None:
    cluster.edit(model=B)
    while cluster.rollout["phase"] != "Finishing":
        await cluster.run(10)
    stuck = cluster.routes_seen[-2].candidate
    lagging = trial_of(stuck, 100.0)

    async def of_policy(policy: str) -> Any:
        from taktline_protocol.measurements import PolicyMeasurement

        return (PolicyMeasurement(policy=policy, trial=lagging),)

    cluster.controller._measurements = type("Lagging", (), {"of_policy": staticmethod(of_policy)})()
    await cluster.run(300)
    assert cluster.rollout["phase"] == "Finishing"
    assert len(cluster.deployments()) == 2
    cluster.controller._measurements = cluster
    await cluster.run(60)
    assert len(cluster.deployments()) == 1


def test_a_worker_that_finds_no_node_does_not_hold_up_the_end() -> None:
    """The old workers, which nobody uses any more, may be what it waits for; and a next revision must get its turn."""
    plan = Rollout()
    begun, later = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
    state = State(
        phase="Finishing",
        stable="a",
        candidate="b",
        step=len(plan.steps) - 1,
        weight=100,
        since=begun,
        started_at=begun,
    )
    facts = Facts(
        wanted="c",
        revision="r3",
        replicas={"gpu": 4},
        stable_ready=0,
        candidate_ready={"gpu": 3},
        trials=(),
        now=later,
    )
    state = advance(state, plan, 0.99, facts)
    assert (state.phase, state.stable, state.candidate) == ("Complete", "b", "")
    state = advance(state, plan, 0.99, facts)
    assert (state.phase, state.candidate) == ("Starting", "c")


async def test_with_no_gateway_to_ask_a_candidate_waits_but_a_take_back_ends(cluster: Cluster) -> None:
    cluster.edit(model=B)
    await cluster.run(40)
    cluster.gateways_answer = False
    await cluster.run(600)
    assert cluster.rollout["phase"] == "Shadow"
    cluster.say("abort")
    await cluster.run(120)
    assert cluster.rollout["phase"] == "RolledBack"


async def test_a_revision_nobody_is_served_by_is_replaced_without_trial(cluster: Cluster) -> None:
    cluster.fails = lambda pod: (
        {"containerStatuses": []} if pod["metadata"]["annotations"][naming.ANNOTATION_REVISION] == "a" else None
    )
    await cluster.run(30)
    assert cluster.condition("Available")[0] == "False"
    cluster.edit(model=B)
    await cluster.run(180)
    assert cluster.live["status"]["currentRevision"] == "b"
    assert cluster.condition("Available")[0] == "True"


async def test_a_change_of_the_strategy_lets_the_candidate_through(cluster: Cluster) -> None:
    cluster.edit(model=B)
    await cluster.run(120)
    assert len(cluster.deployments()) == 2
    cluster.edit(rollout={"strategy": "RollingUpdate"})
    await cluster.run(120)
    assert cluster.live["status"]["currentRevision"] == "b"
    assert len(cluster.deployments()) == 1
    assert revisions_of(cluster.route()) == {"b"}


async def test_two_rollouts_in_a_row_leave_one_deployment_and_a_history(cluster: Cluster) -> None:
    for model in (B, C, A):
        cluster.edit(model=model)
        await cluster.run(1500)
        assert cluster.live["status"]["currentRevision"] == model["revision"]
        assert list(cluster.deployments().values()) == [4]
    history = {
        r["metadata"]["annotations"][naming.ANNOTATION_REVISION] for r in cluster.api.of_kind("ControllerRevision")
    }
    assert history == {"a", "b", "c"}


async def test_scaling_during_a_trial_scales_both(cluster: Cluster) -> None:
    cluster.edit(model=B)
    await cluster.run(150)
    cluster.edit(pools=[{"name": "cpu", "accelerator": "cpu", "minReplicas": 8}])
    await cluster.run(60)
    counts = cluster.deployments()
    assert counts["reach-cpu"] == 8
    await cluster.run(1200)
    assert list(cluster.deployments().values()) == [8]


async def test_a_lost_status_does_not_move_robots(cluster: Cluster) -> None:
    cluster.edit(model=B)
    await cluster.run(1500)
    del cluster.live["status"]
    await cluster.run(30)
    assert cluster.rollout["phase"] == "Complete"
    assert list(cluster.deployments().values()) == [4]
    assert revisions_of(cluster.route()) == {"b"}


async def test_a_lost_status_in_the_middle_of_a_trial_keeps_the_serving_revision(cluster: Cluster) -> None:
    cluster.edit(model=B)
    await cluster.run(150)
    del cluster.live["status"]
    await cluster.run(20)
    assert revisions_of(cluster.route()) == {"a"}
