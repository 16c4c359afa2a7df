"""The routing table: ready workers only, equal content in equal bytes, one owner of a policy name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from taktline_operator import routing
from taktline_protocol.deployment import Route, RoutingTable

Json = dict[str, Any]


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"deletionTimestamp": "2026-03-01T08:00:00Z"}},
        {"status": {"podIP": ""}},
        {"status": {"podIP": None}},
        {"status": {"conditions": [{"type": "Ready", "status": "False"}]}},
        {"status": {"conditions": []}},
        {"status": {"phase": "Failed"}},
    ],
    ids=["being deleted", "empty address", "no address", "not ready", "no conditions", "failed but still marked ready"],
)
def test_a_pod_that_cannot_answer_is_not_routed(make: Any, change: Json) -> None:
    pod = make.pod("p")
    assert len(routing.targets([pod])) == 1
    for part, fields in change.items():
        pod[part] |= fields
    assert routing.targets([pod]) == ()


def test_targets_carry_pool_and_revision_in_address_order(make: Any) -> None:
    pods = [make.pod("b", "10.0.0.2"), make.pod("a", "10.0.0.1"), make.pod("c", "fd00::1")]
    found = routing.targets(pods)
    assert [target.address for target in found] == ["10.0.0.1:50051", "10.0.0.2:50051", "[fd00::1]:50051"]
    assert {(target.pool, target.revision) for target in found} == {("cpu", "a")}


def test_a_route_carries_the_slo_and_batching(make: Any) -> None:
    found = routing.route(make.policy(engine={"buckets": [1, 2]}, batching={"maxWaitMs": 3}), [make.pod("p")])
    assert (found.family, found.revision, found.control_budget_ms) == ("pi05", "a", 100.0)
    assert (found.max_batch, found.max_wait_ms) == (2, 3.0)


def test_a_route_carries_what_may_be_made_cheaper(make: Any) -> None:
    assert (
        "degrade"
        not in routing.config_map(routing.table([routing.route(make.policy(), [])]), "n")["data"]["routes.json"]
    )
    found = make.policy(
        engine={"solverSteps": 10, "cheaperSteps": [5], "shorterHorizons": [25]},
        degrade={"minSolverSteps": 5, "minActionHorizon": 25, "fallbackPolicy": "reach-small"},
    )
    written = routing.config_map(routing.table([routing.route(found, [])]), "taktline-system")
    degrade = routing.read_table(written)["reach"].degrade
    assert (degrade.min_solver_steps, degrade.min_action_horizon, degrade.fallback_policy) == (5, 25, "reach-small")


def test_a_route_carries_how_robots_share_workers(make: Any) -> None:
    assert (
        "robot_weights"
        not in routing.config_map(routing.table([routing.route(make.policy(), [])]), "n")["data"]["routes.json"]
    )
    access = {"robotWeights": {"b": 3, "a": 0.5}, "priorityCeilings": {"*": "background", "plant-a": "safety"}}
    written = routing.config_map(routing.table([routing.route(make.policy(access=access), [])]), "n")
    found = routing.read_table(written)["reach"]
    assert found.robot_weights == {"a": 0.5, "b": 3.0}
    assert found.priority_ceilings == {"*": "background", "plant-a": "safety"}


def test_a_share_of_workers_is_no_new_revision(make: Any) -> None:
    access = {"robotWeights": {"arm": 2}, "priorityCeilings": {"*": "production"}}
    assert make.applied(make.policy(access=access)) == make.applied(make.policy())


def test_a_route_carries_the_class_of_its_policy(make: Any) -> None:
    slo = {"controlBudgetMs": 100, "priority": "background"}
    written = routing.config_map(routing.table([routing.route(make.policy(slo=slo), [])]), "n")
    assert routing.read_table(written)["reach"].priority == "background"
    usual = routing.config_map(routing.table([routing.route(make.policy(), [])]), "n")
    assert "priority" not in usual["data"]["routes.json"], "an older gateway need not know the field"
    assert make.applied(make.policy(slo=slo)) == make.applied(make.policy())


def test_a_route_carries_how_clients_of_other_protocols_are_read(make: Any) -> None:
    client = {
        "protocol": "groot",
        "images": {"video.front": "scene"},
        "state": ["state.arm", "state.hand"],
        "controlHz": 20,
        "actions": [{"name": "hand", "width": 1}, {"name": "arm", "width": 6}],
        "metadata": {"reset_pose": [0, 0.5], "send_wrist_image": True, "control_freq": 20, "name": "cell 7"},
    }
    table = routing.table([routing.route(make.policy(clients=[client]), [])])
    written = routing.config_map(table, "taktline-system")
    mapping = routing.read_table(written)["reach"].clients["groot"]
    assert (mapping.images, mapping.state, mapping.control_hz) == (
        {"video.front": "scene"},
        ("state.arm", "state.hand"),
        20,
    )
    assert mapping.metadata == {
        "reset_pose": [0, 0.5],
        "send_wrist_image": True,
        "control_freq": 20,
        "name": "cell 7",
    }
    assert mapping.metadata["send_wrist_image"] is True
    assert list(mapping.actions.items()) == [("hand", 1), ("arm", 6)], "the order cuts the row"


def test_the_gateway_reads_what_is_written(make: Any) -> None:
    table = routing.table([routing.route(make.policy(), [make.pod("p")])])
    config = routing.config_map(table, "taktline-system")
    assert msgspec.json.decode(config["data"]["routes.json"], type=RoutingTable) == table
    assert routing.read_table(config) == {"reach": table.routes[0]}


@given(names=st.lists(st.sampled_from("abcdef"), unique=True), data=st.data())
def test_order_of_policies_does_not_change_the_bytes(names: list[str], data: st.DataObject) -> None:
    routes = [Route(policy=name) for name in names]
    shuffled = data.draw(st.permutations(routes))
    assert routing.config_map(routing.table(routes), "n") == routing.config_map(routing.table(shuffled), "n")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"routes": [{"unknown": 1}]}', None])
def test_a_table_that_is_none_reads_as_empty(text: str | None) -> None:
    config = None if text is None else {"data": {"routes.json": text}}
    assert routing.read_table(config) == {}


def test_the_oldest_policy_owns_a_contested_name() -> None:
    created = {("b", "reach"): "2026-01-02", ("a", "reach"): "2026-01-03", ("c", "pick"): "2026-01-04"}
    assert routing.owners(created) == {"reach": ("b", "reach"), "pick": ("c", "pick")}
    assert routing.owners({("b", "x"): "", ("a", "x"): ""}) == {"x": ("a", "x")}
