"""Each alert has its page, each page its alert, and a page has what somebody needs at three in the morning."""

from __future__ import annotations

import re

import pytest
from taktline_operator import platform_rules, slo_rules
from taktline_protocol import metrics, slo

from .conftest import ROOT
from .rule_run import policy
from .test_dashboards_committed import base, known, names_in

FOLDER = ROOT / "docs/runbooks"
ALERTS = {
    rule["alert"]: rule
    for group in [*slo_rules.policy_groups(policy()), *platform_rules.platform_groups()]
    for rule in group["rules"]
    if "alert" in rule
}
PAGES = {path.stem: path.read_text() for path in FOLDER.glob("Taktline*.md")}
SECTIONS = ["Symptom", "Which term of the control budget", "First commands", "Fixes"]


def test_each_alert_has_its_page_and_each_page_its_alert():
    assert set(ALERTS) == set(PAGES) == {*slo.POLICY_ALERTS, *slo.PLATFORM_ALERTS}


def test_the_list_of_pages_is_complete():
    listed = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\)", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert listed == [(name, name) for name in (*slo.POLICY_ALERTS, *slo.PLATFORM_ALERTS)]


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_says_who_feels_it_and_links_to_its_page_and_dashboard(name):
    annotations = ALERTS[name]["annotations"]
    assert annotations["runbook_url"] == f"{slo_rules.RUNBOOKS}/{name}.md"
    assert annotations["summary"]
    assert annotations["impact"].endswith(".")
    dashboard = re.match(r"/d/([\w-]+)", annotations["dashboard"])
    assert dashboard
    uids = {slo.DASHBOARD_POLICY, slo.DASHBOARD_POOL, slo.DASHBOARD_ROLLOUT, slo.DASHBOARD_OPERATOR}
    assert dashboard[1] in uids
    assert ALERTS[name]["labels"]["severity"] in ("page", "ticket", "info")


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_has_its_sections_in_order_and_links_that_lead_somewhere(name):
    text = PAGES[name]
    assert text.startswith(f"# {name}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (FOLDER / link).exists(), link
    severity = ALERTS[name]["labels"]["severity"]
    assert text.split("Severity: ")[1].startswith(severity)


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_names_only_series_that_exist(name):
    for found in names_in(PAGES[name]):
        assert known(found), found
        if base(found) in metrics.BY_NAME:
            for selector in re.findall(rf"{re.escape(found)}\{{([^}}]*)\}}", PAGES[name]):
                labels = set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", selector))
                assert labels <= set(metrics.BY_NAME[base(found)].labels), (found, labels)


CLUSTER_SCOPED = ("node", "nodes", "validatingwebhookconfiguration", "--raw", "debug node/", "crd")


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_command_of_a_page_finds_its_objects_whatever_namespace_the_shell_is_in(name):
    for command in re.findall(r"kubectl [^`|#\n]+", PAGES[name]):
        if not any(
            re.search(rf"\b(get|describe|top|cordon|drain|label) {word}|{word}", command) for word in CLUSTER_SCOPED
        ):
            assert re.search(r" (-n|--namespace) \S+| (-A|--all-namespaces)\b", command), command


GUIDES = {path.name: path.read_text() for path in (ROOT / "docs").rglob("*.md")}


@pytest.mark.parametrize("name", sorted(GUIDES))
def test_a_log_command_reads_every_pod_and_every_line_that_it_is_about(name):
    """kubectl reads one pod of a Deployment, the last ten lines where a label chooses, and with --previous up to a pod
    that has not restarted."""
    for command in re.findall(r"kubectl [^`|#\n]*\blogs\b[^`|#\n]*", GUIDES[name]):
        assert not re.search(r"\bdeploy(ment)?/", command), command
        if " -l " in command:
            assert "--tail=" in command, command
            assert "--previous" not in command, command


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_asks_for_no_pool_that_its_alert_does_not_name(name):
    commands = re.findall(r"```\n(.*?)```", PAGES[name], re.DOTALL)
    if any("POOL" in found for found in commands):
        assert "pool" in ALERTS[name]["labels"] or re.search(r"by \([^)]*\bpool\b", ALERTS[name]["expr"])


@pytest.mark.parametrize("name", sorted(GUIDES))
def test_a_command_shows_what_it_is_run_for(name):
    for line in re.findall(r"kubectl [^`\n]+", GUIDES[name]):
        assert " get events" not in line, f"sorted by name: the last lines are not the latest; {line}"
        assert not re.search(r"get pods.*\| grep", line), f"workers are named after their policy, not after us; {line}"
        if "debug node/" in line:
            assert "--profile=sysadmin" in line, f"any other pod may open no GPU, nor the kernel's log; {line}"
