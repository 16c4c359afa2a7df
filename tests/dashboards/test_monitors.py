"""PrometheusRule and PodMonitor: there where their kinds are, said to be missing where they are not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import yaml
from taktline_operator import monitors, slo_rules, workload
from taktline_operator.kube import ApiError
from taktline_operator.reconcile import ROUTES, Controller

from tests.operator import conftest as doubles

KEY = ("line-1", "reach")
BOTH = frozenset(monitors.KINDS)
MAKE = SimpleNamespace(settings=doubles.SETTINGS, now=doubles.NOW)


async def settled(api: doubles.ApiDouble, controller: Controller | None = None) -> Controller:
    found = controller or Controller(api, MAKE.settings, clock=lambda: MAKE.now)
    await found.resync(everything=True)
    await found.handle(KEY)
    await found.handle(ROUTES)
    return found


def cluster(kinds: frozenset[str]) -> doubles.ApiDouble:
    api = doubles.ApiDouble(doubles.body(), doubles.pod("p"))
    api.monitoring = kinds
    return api


def condition(api: doubles.ApiDouble) -> dict:
    status = api.objects["PolicyDeployment", *KEY]["status"]
    return next(found for found in status["conditions"] if found["type"] == monitors.CONDITION)


async def test_with_the_kinds_a_policy_gets_its_rules_and_its_monitor():
    api = cluster(BOTH)
    await settled(api)
    [rule], [monitor] = api.of_kind("PrometheusRule"), api.of_kind("PodMonitor")
    assert rule["spec"] == {"groups": slo_rules.policy_groups(doubles.policy())}
    assert rule["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    assert (condition(api)["status"], condition(api)["reason"]) == ("True", "Applied")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= doubles.pod("p")["metadata"]["labels"].items()


@pytest.mark.parametrize("kinds", [frozenset(), frozenset({"PodMonitor"})])
async def test_without_a_kind_the_condition_says_so_and_names_the_other_way(kinds):
    api = cluster(kinds)
    await settled(api)
    assert {kind for kind in monitors.KINDS if api.of_kind(kind)} == set(kinds)
    found = condition(api)
    assert (found["status"], found["reason"]) == ("False", "KindsAbsent")
    assert "PrometheusRule" in found["message"]
    assert "taktline-operator rules" in found["message"]


async def test_a_steady_cluster_costs_no_write():
    api = cluster(BOTH)
    controller = await settled(api)
    api.writes.clear()
    for _ in range(3):
        await settled(api, controller)
    await settled(api)
    assert api.writes == []


async def test_kinds_that_come_later_are_noticed_at_the_next_look():
    api = cluster(frozenset())
    controller = await settled(api)
    api.monitoring = BOTH
    await controller.resync(everything=False)
    await controller.handle(KEY)
    assert api.of_kind("PrometheusRule")
    assert condition(api)["status"] == "True"


async def test_a_kind_that_the_operator_may_not_use_is_left_alone_and_all_else_goes_on():
    class Forbidding(doubles.ApiDouble):
        async def get(self, kind: str, namespace: str, name: str) -> dict | None:
            if kind == "PrometheusRule":
                raise ApiError(403, "Forbidden", "an older role")
            return await super().get(kind, namespace, name)

    api = Forbidding(doubles.body(), doubles.pod("p"))
    api.monitoring = BOTH
    await settled(api)
    assert api.of_kind("Deployment")
    assert not api.of_kind("PrometheusRule")
    assert condition(api)["status"] == "False"


async def test_a_strangers_rule_of_that_name_is_not_overwritten():
    stranger = {
        "apiVersion": monitors.API_VERSION,
        "kind": "PrometheusRule",
        "metadata": {"name": "reach-slo", "namespace": "line-1"},
        "spec": {"groups": []},
    }
    api = doubles.ApiDouble(doubles.body(), doubles.pod("p"), stranger)
    api.monitoring = BOTH
    await settled(api)
    assert api.objects["PrometheusRule", "line-1", "reach-slo"] == stranger
    accepted = api.objects["PolicyDeployment", *KEY]["status"]["conditions"][0]
    assert accepted["reason"] == "ObjectConflict"
    assert "PrometheusRule reach-slo" in accepted["message"]


def test_a_monitor_scrapes_a_port_that_the_worker_has():
    policy = doubles.policy()
    container = workload.pod_template(policy, policy.spec.pools[0], "image:1")["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    endpoint = monitors.pod_monitor(policy)["spec"]["podMetricsEndpoints"][0]
    assert endpoint["port"] in ports
    listens = container["command"][container["command"].index("--metrics-listen") + 1]
    assert listens == f"0.0.0.0:{ports[endpoint['port']]}"


def test_the_rules_count_over_the_days_that_the_slo_names() -> None:
    def period(**slo_parts) -> str:
        policy = doubles.policy(slo={"controlBudgetMs": 100, **slo_parts})
        return yaml.safe_dump(monitors.prometheus_rule(policy)["spec"], width=100_000)

    assert "error budget of 28 days" in period()
    assert "error budget of 7 days" in period(windowDays=7)
    assert "28d" not in period(windowDays=7)
