"""The chart's share of monitoring: off by default; what it ships is what the code makes."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml
from taktline_dashboards import pages
from taktline_operator import platform_rules, rulefile, slo_rules
from taktline_operator.slo_windows import DEFAULT_PERIOD_DAYS

from tests.operator.test_operator_chart import find_helm

from .conftest import ROOT, committed

CHART = ROOT / "charts/taktline"


def render(*values: str) -> list[dict]:
    program = find_helm()
    if program is None:
        pytest.skip("there is no helm here: run tools/install-helm")
    command = [program, "template", "factory", CHART, "--namespace=taktline-system"]
    command += [f"--set={value}" for value in values]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [found for found in yaml.safe_load_all(printed) if found]


def test_the_shipped_rules_are_those_of_the_code():
    text = rulefile.text(None, platform=True, period_days=DEFAULT_PERIOD_DAYS, runbooks=slo_rules.RUNBOOKS)
    wrong = "run: taktline-operator rules --platform > charts/taktline/files/platform.rules.yaml"
    assert (CHART / "files/platform.rules.yaml").read_text() == text, wrong


def test_the_shipped_dashboards_are_the_committed_ones():
    wrong = "run: taktline-dashboards write charts/taktline/files/dashboards"
    assert pages.stale(CHART / "files/dashboards") == [], wrong


def test_without_a_switch_nothing_needs_the_prometheus_operator():
    assert {found["kind"] for found in render()} & {"PodMonitor", "PrometheusRule"} == set()
    assert not [found for found in render() if "grafana_dashboard" in found["metadata"].get("labels", {})]


def test_the_switch_makes_monitors_of_pods_that_exist_and_the_platforms_rules():
    objects = render("monitoring.enabled=true", "monitoring.labels.release=stack")
    [rule] = [found for found in objects if found["kind"] == "PrometheusRule"]
    assert rule["spec"] == {"groups": platform_rules.platform_groups()}
    deployments = {found["metadata"]["name"]: found for found in objects if found["kind"] == "Deployment"}
    monitors = [found for found in objects if found["kind"] == "PodMonitor"]
    assert {found["metadata"]["name"] for found in monitors} == {"taktline-gateway", "taktline-operator"}
    for monitor in monitors:
        template = deployments[monitor["metadata"]["name"]]["spec"]["template"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        ports = {port["name"] for container in template["spec"]["containers"] for port in container["ports"]}
        assert monitor["spec"]["podMetricsEndpoints"][0]["port"] in ports
    assert {found["metadata"]["labels"]["release"] for found in [rule, *monitors]} == {"stack"}


def test_the_dashboards_reach_grafanas_sidecar_whole():
    objects = render("monitoring.dashboards=true")
    shipped = {
        name: json.loads(text)
        for found in objects
        if found["metadata"].get("labels", {}).get("grafana_dashboard") == "1"
        for name, text in found["data"].items()
    }
    assert shipped == {f"taktline-{name}": found for name, found in committed().items()}
