"""Faults that other operators have had: for each the tests that hold it off, and those that stand nowhere else.

Sources are public issue threads, named in the comments; the numbers are ours and keep the list in order.
"""

from __future__ import annotations

import gc
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from taktline_operator import faults
from taktline_operator.reconcile import ROUTES, Controller
from test_operator_chart import find, helm, render

__all__ = ["helm", "render"]  # fixtures
TESTS = Path(__file__).resolve().parents[1]
Json = dict[str, Any]

# fault -> tests that would fail with it
PITFALLS: dict[str, tuple[str, ...]] = {
    "1 a watch falls silent and the process looks alive": (
        "test_changes_during_a_silent_watch_are_not_lost",
        "test_a_version_that_two_lists_show_and_the_watch_never_brought_means_a_dead_watch",
    ),
    "2 after a new token a watcher stays dead": ("test_a_rotated_token_reaches_the_next_request",),
    "3 memory grows with repeated patches": (
        "test_memory_does_not_grow_with_reconciliations_that_change_nothing",
        "test_policies_that_are_gone_leave_nothing_in_memory",
    ),
    "4 an annotation that remembers the object overflows": ("test_kopf_is_given_no_handler_that_writes_to_objects",),
    "5 a finalizer outlives the operator": (
        "test_a_namespace_goes_at_once_with_policies_in_it",
        "test_no_object_ever_carries_a_finalizer",
    ),
    "6 a deletion is handled twice": ("test_deletion_takes_the_route_away_and_may_be_handled_twice",),
    "7 after a restart old objects are not really handled": (
        "test_a_policy_deleted_while_the_operator_is_dead_loses_its_route",
        "test_a_killed_operator_ends_where_a_living_one_does",
    ),
    "8 a ghost of an earlier process keeps the operator paused": (
        "test_a_leader_that_cannot_renew_stops_before_its_lease_ends",
        "test_a_standby_takes_over_from_a_dead_leader_and_then_from_one_that_stops",
    ),
    "9 writing to an object that vanished repeats for ever": (
        "test_a_policy_deleted_while_its_status_is_written_is_no_error",
        "test_a_namespace_that_is_being_deleted_is_no_failure",
    ),
    "10 progress is written to a field that is pruned": ("test_status_fits_its_closed_schema",),
    "11 a router keeps a pod that is gone": (
        "test_a_pod_that_cannot_answer_is_not_routed",
        "test_a_deletion_that_the_watch_missed_is_found_by_the_next_list",
    ),
    "12 an optional kind is absent and every reconciliation fails": (
        "test_a_kind_without_rights_counts_as_absent",
        "test_a_kind_that_is_installed_later_is_used_without_a_restart",
    ),
    "13 a candidate gets traffic before it is ready, and leaks routes": (
        "test_a_canary_gets_no_traffic_before_it_is_ready_and_the_stable_ones_are_not_scaled_down_early",
        "test_consecutive_canaries_leave_no_route_and_no_object_behind",
    ),
    "14 ready while pods crash": ("test_a_status_of_crash_looping_pods_is_never_available",),
    "15 traffic goes to what only looks ready": ("test_traffic_is_not_switched_to_a_revision_that_only_looks_ready",),
    "16 a rollout without a spare accelerator deadlocks": (
        "test_a_rolling_update_without_a_spare_accelerator_does_not_deadlock",
        "test_a_busy_looking_crash_loop_never_holds_a_take_back",
    ),
    "17 one worker is replaced with a gap, or a broken one never": (
        "test_one_worker_is_replaced_without_a_gap",
        "test_a_revision_nobody_is_served_by_is_replaced_without_trial",
    ),
    "18 a restarted controller rebuilds old workers with new fields": (
        "test_a_controller_that_restarts_rebuilds_nothing_with_new_fields",
        "test_a_field_that_a_later_operator_adds_is_no_new_revision",
        "test_a_derived_revision_is_golden",
    ),
    "19 parts of a group hold accelerators and wait for each other": (
        "test_groups_are_put_together_one_at_a_time_where_room_is_short",
        "test_a_group_that_is_half_placed_lets_go_of_the_accelerators_it_holds",
        "test_a_rolling_update_without_spare_quota_does_not_deadlock",
        "test_a_rollout_ends_where_the_quota_admits_fewer_than_are_wanted",
        "test_a_group_counts_once_and_is_ready_only_as_a_whole",
    ),
    "20 a pod that can never bind starves others": (
        "test_a_pod_that_can_never_bind_starves_no_other_policy_and_is_told_in_the_schedulers_words",
    ),
    "21 a lost accelerator piles up failed pods": (
        "test_one_lost_gpu_does_not_pile_up_failed_pods",
        "test_a_group_leaves_a_failing_node_as_a_whole",
    ),
    "22 two autoscalers fight": (
        "test_the_operator_never_writes_the_spec_so_that_one_autoscaler_owns_it",
        "test_a_second_autoscaler_is_refused_and_told_so",
    ),
    "23 an old CRD prunes new fields": ("test_crd_fields_that_the_cluster_would_prune_are_found_at_the_start",),
    "24 a webhook that fails closed blocks deletion and uninstall": (
        "test_the_webhook_is_never_asked_about_a_deletion_a_status_or_any_other_kind",
        "test_while_nobody_answers_ignore_lets_through_and_fail_refuses_but_never_a_deletion",
    ),
    "25 a transition time is rewritten in each pass": (
        "test_transition_time_moves_only_on_a_flip",
        "test_a_steady_cluster_costs_no_write",
    ),
    "26 owner references cross namespaces": ("test_no_owner_reference_crosses_a_namespace",),
}


def test_every_fault_of_the_list_has_a_test_that_exists() -> None:
    assert [int(fault.split()[0]) for fault in PITFALLS] == list(range(1, 27))
    text = "\n".join(path.read_text() for path in TESTS.rglob("test_operator_*.py"))
    text += "\n".join(path.read_text() for path in (TESTS / "cluster" / "operator").glob("test_*.py"))
    there = set(re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE))
    assert [name for names in PITFALLS.values() for name in names if name not in there] == []


async def begun(make: Any, *bodies: Json) -> tuple[Any, Controller]:
    api = make.Api(*bodies)
    controller = Controller(api, make.settings, clock=lambda: make.now)
    await controller.resync(everything=True)
    return api, controller


async def test_memory_does_not_grow_with_reconciliations_that_change_nothing(make: Any) -> None:
    """nolar/kopf#1172."""
    api, controller = await begun(make, make.body(), make.pod("p"))

    async def passes(count: int) -> None:
        for _ in range(count):
            await controller.handle(("line-1", "reach"))
            await controller.handle(ROUTES)

    await passes(30)
    writes = len(api.writes)
    tracemalloc.start()
    try:
        await passes(5)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        await passes(100)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(api.writes) == writes
    assert after - before < 50_000, "more than 500 bytes stay behind each pass"


async def test_policies_that_are_gone_leave_nothing_in_memory(make: Any) -> None:
    names = [f"reach-{number}" for number in range(20)]
    api, controller = await begun(make, *(make.body(name=name, uid=f"uid-{name}") for name in names))
    for name in names:
        await controller.handle(("line-1", name))
    for name in names:
        del api.objects["PolicyDeployment", "line-1", name]
        await controller.handle(("line-1", name))
    held = {
        name: value
        for name, value in vars(controller).items()
        if isinstance(value, dict) and any("reach-" in str(key) for key in value)
    }
    held.pop("_table", None)  # the table as last read, which the next write replaces
    assert held == {}


async def test_no_object_ever_carries_a_finalizer(make: Any) -> None:
    """nolar/kopf#75 and those after it: what has no finalizer waits for no operator."""
    api, controller = await begun(make, make.body(), make.pod("p"))
    await controller.handle(("line-1", "reach"))
    await controller.handle(ROUTES)
    assert len(api.objects) > 5
    for found in api.objects.values():
        assert "finalizers" not in found["metadata"]


async def test_a_pod_that_can_never_bind_starves_no_other_policy_and_is_told_in_the_schedulers_words(
    make: Any,
) -> None:
    """kai-scheduler/KAI-Scheduler#2075."""
    words = "0/4 nodes are available: 4 node(s) didn't match Pod's node affinity."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    stuck, fine = make.body(name="stuck", uid="uid-s"), make.body(name="fine", uid="uid-f")
    owner = make.policy(name="stuck", uid="uid-s")
    pod = make.pod("p", owner=owner, ready=False, phase="Pending", podIP="", conditions=[condition])
    other = make.pod("q", owner=make.policy(name="fine", uid="uid-f"))
    api, controller = await begun(make, stuck, fine, pod, other)
    for _ in range(3):
        for name in ("stuck", "fine"):
            await controller.handle(("line-1", name))

    def told(name: str, kind: str) -> Json:
        conditions = api.objects["PolicyDeployment", "line-1", name]["status"]["conditions"]
        return next(found for found in conditions if found["type"] == kind)

    assert told("stuck", "Degraded")["reason"] == "Unschedulable"
    assert words in told("stuck", "Degraded")["message"]
    assert told("fine", "Available")["status"] == "True"
    writes = len(api.writes)
    for _ in range(5):  # nothing is tried again and again: no pod, no write, no new appointment of its own
        await controller.handle(("line-1", "stuck"))
    assert len(api.writes) == writes
    assert faults.of_pod(pod) is not None


def test_the_webhook_is_never_asked_about_a_deletion_a_status_or_any_other_kind(render: Any) -> None:
    """open-telemetry/opentelemetry-operator#56, VictoriaMetrics/helm-charts#2726."""
    objects = render("--set", "webhook.enabled=true,webhook.failurePolicy=Fail")
    (hook,) = find(objects, "ValidatingWebhookConfiguration", "factory-taktline-policydeployments")["webhooks"]
    (rule,) = hook["rules"]
    assert set(rule["operations"]) == {"CREATE", "UPDATE"}
    assert rule["resources"] == ["policydeployments"]  # no subresource: neither status nor scale nor finalizers
    assert rule["apiGroups"] == ["taktline.dev"]
    conditions = {found["name"]: found["expression"] for found in hook["matchConditions"]}
    assert "object.spec != oldObject.spec" in conditions["spec-changes"]  # labels and finalizers go by
    assert "deletionTimestamp" in conditions["not-being-deleted"]
    # Our own pods, Services and Secrets are of other kinds, so the operator can always start again.
    assert hook["clientConfig"]["service"]["name"] == find(objects, "Service", "taktline-webhook")["metadata"]["name"]


def test_no_owner_reference_crosses_a_namespace(make: Any) -> None:
    """kubernetes/kubernetes#65200, nolar/kopf#903."""
    for child in make.applied(make.policy(namespace="line-7")).values():
        assert child["metadata"]["namespace"] == "line-7"
        assert [owner["kind"] for owner in child["metadata"]["ownerReferences"]] == ["PolicyDeployment"]


@pytest.mark.parametrize("name", ["webhook.failurePolicy=Open", "webhook.timeoutSeconds=60", "webhook.certs=x"])
def test_wrong_webhook_values_are_refused_by_name(helm: Any, name: str) -> None:
    reply = helm("template", "--set", name)
    assert reply.returncode != 0
    assert name.split("=")[0].rpartition(".")[2] in reply.stderr
