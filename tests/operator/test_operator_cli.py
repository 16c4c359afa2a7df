"""The command: plan and crd print what they promise, and errors are one line with the next step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from taktline_operator import cli

POLICY = """
apiVersion: taktline.dev/v1alpha1
kind: PolicyDeployment
metadata: {name: reach}
spec:
  model: {family: pi05, source: {path: checkpoint}, revision: a}
  pools: [{name: cpu, accelerator: cpu}]
  slo: {controlBudgetMs: 100}
"""


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    path = tmp_path / "reach.yaml"
    path.write_text(POLICY)
    return path


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert cli.main(["plan", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "List"
    items: list[dict[str, Any]] = found["items"]
    return items


def of_kind(items: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in items if item["kind"] == kind]


def test_plan_prints_objects_routes_and_status(policy_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = planned(capsys, "-f", str(policy_file), "--image", "x/y:1", "--gateway-namespace", "edge")
    kinds = [item["kind"] for item in items]
    assert kinds == [
        "Service", "ControllerRevision", "PodDisruptionBudget", "ConfigMap", "Deployment", "ConfigMap",
        "PolicyDeployment",
    ]  # fmt: skip
    container = of_kind(items, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "x/y:1"
    routes = of_kind(items, "ConfigMap")[1]
    assert (routes["metadata"]["name"], routes["metadata"]["namespace"]) == ("taktline-routes", "edge")
    assert items[-1]["status"]["conditions"][0]["type"] == "Accepted"


def test_a_relative_model_folder_counts_from_the_file(policy_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = planned(capsys, "-f", str(policy_file))
    engine = json.loads(of_kind(items, "ConfigMap")[0]["data"]["engine.json"])
    assert engine["model"]["path"] == str(policy_file.parent / "checkpoint")


def test_observed_pods_become_targets(policy_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = of_kind(planned(capsys, "-f", str(policy_file)), "Deployment")[0]["spec"]["template"]
    status = {"phase": "Running", "podIP": "127.0.0.9", "conditions": [{"type": "Ready", "status": "True"}]}
    pod = {"kind": "Pod", "metadata": template["metadata"] | {"name": "p"}, "spec": template["spec"], "status": status}
    stranger = {"kind": "Pod", "metadata": {"name": "q", "labels": {}}, "status": status}
    (tmp_path / "observed.json").write_text(json.dumps({"items": [pod, stranger]}))
    items = planned(capsys, "-f", str(policy_file), "--observed", str(tmp_path / "observed.json"))
    routes = json.loads(of_kind(items, "ConfigMap")[1]["data"]["routes.json"])
    assert [target["address"] for target in routes["routes"][0]["targets"]] == ["127.0.0.9:50051"]
    conditions = {c["type"]: c["status"] for c in items[-1]["status"]["conditions"]}
    healthy = {"Accepted": "True", "Available": "True", "Progressing": "False", "Degraded": "False"}
    assert conditions == healthy | {"Cautioned": "False"}


def test_crd_prints_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["crd"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["kind"] == "CustomResourceDefinition"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read"),
        ("a: [", "cannot read"),
        ("", "holds no PolicyDeployment"),
        ("just text", "holds no PolicyDeployment"),
        ("kind: Pod", "not a taktline.dev/v1alpha1 PolicyDeployment"),
        (POLICY.replace("controlBudgetMs: 100", "controlBudgetMs: 0"), "controlBudgetMs must be greater than 0"),
        (POLICY.replace("metadata: {name: reach}", "metadata: null"), "metadata.name: required"),
        (POLICY.replace("source: {path: checkpoint}", "source: null"), "spec.model.source: required"),
    ],
)
def test_a_wrong_file_is_one_line_with_the_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, says: str
) -> None:
    path = tmp_path / "wrong.yaml"
    if content is not None:
        path.write_text(content)
    assert cli.main(["plan", "-f", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert says in captured.err
    assert "(" in captured.err


@pytest.mark.parametrize("content", ["", "[]", '{"items": 1}', '{"items": [{}]}'])
def test_a_wrong_observation_is_one_line(policy_file: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    observed = policy_file.parent / "observed.json"
    observed.write_text(content)
    assert cli.main(["plan", "-f", str(policy_file), "--observed", str(observed)]) == 2
    assert "kubectl get pods -o json" in capsys.readouterr().err


def test_without_credentials_run_says_what_to_set(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "taktline_operator.cli", "run", "--kubeconfig", str(tmp_path / "none")]
    reply = subprocess.run(command, capture_output=True, text=True, check=False)
    assert reply.returncode == 2
    assert "KUBECONFIG" in reply.stderr.splitlines()[-1]
    assert "Traceback" not in reply.stderr


def test_plan_starts_without_the_watch_libraries() -> None:
    code = "import sys; from taktline_operator import cli; print({'kopf', 'kubernetes'} & sys.modules.keys())"
    reply = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert reply.stdout.strip() == "set()"


def test_the_reference_page_is_what_the_crd_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "policydeployment.md").read_text()
    assert cli.main(["crd", "--markdown"]) == 0
    assert page.endswith(capsys.readouterr().out), "run: taktline-operator crd --markdown, and paste it into the page"


@pytest.mark.parametrize("seconds", ["0.5", "61", "nan", "soon"])
def test_a_resync_that_would_get_the_operator_restarted_is_refused(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process counts as dead after four minutes without a list, whatever was asked for."""
    with pytest.raises(SystemExit):
        cli.main(["run", "--resync-seconds", seconds])
    assert "a number of seconds from 1 to 60" in capsys.readouterr().err
