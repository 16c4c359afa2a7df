"""Progressive rollouts on a real API server: two Deployments of a pool, history, command line, and the CRD check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from taktline_local.kubectl import wait_until
from taktline_operator import schema

from tests.cluster.operator.measured_gateway import measured_gateway

pytestmark = pytest.mark.usefixtures("node")

Json = dict[str, Any]
PLAN = {"strategy": "Progressive", "steps": [50, 100], "stepSeconds": 0}


def model(revision: str) -> Json:
    return {"family": "pi05", "source": {"path": f"/srv/policies/{revision}"}, "revision": revision}


def rollout(policies: Any, name: str, *words: str) -> str:
    """`taktline rollout` as a person types it."""
    command = [str(Path(sys.executable).with_name("taktline")), "rollout", *words, name, "-n", policies.namespace]
    command += ["--kubeconfig", str(policies.kubectl.kubeconfig)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def phase_is(policies: Any, name: str, phase: str) -> Json:
    def look() -> Json | None:
        status = (policies.get(name) or {}).get("status", {})
        return status if status.get("rollout", {}).get("phase") == phase else None

    found: Json = wait_until(look, f"the rollout of {name} is {phase}", timeout_s=120.0)
    return found


def deployments(policies: Any, name: str) -> dict[str, int]:
    found = policies.kubectl.list("deployments", policies.namespace, f"taktline.dev/policy={name}")
    return {item["metadata"]["name"]: item["status"].get("readyReplicas", 0) for item in found}


@pytest.mark.usefixtures("running_operator")
def test_a_candidate_runs_beside_the_serving_revision_and_is_promoted_by_hand(policies: Any, node: Any) -> None:
    name = "pick-roll"
    pools = [policies.body(name)["spec"]["pools"][0] | {"minReplicas": 2}]
    policies.kubectl.apply(policies.body(name, rollout=PLAN, model=model("a"), pools=pools))
    policies.wait(name, "Progressing", "False", "Complete")
    before = policies.routes()[name]
    policies.kubectl.apply(policies.body(name, rollout=PLAN, model=model("b"), pools=pools))
    # No gateway runs here, so nothing is mirrored and the candidate waits.
    status = phase_is(policies, name, "Shadow")
    assert (status["currentRevision"], status["candidateRevision"]) == ("a", "b")
    assert policies.routes()[name] == before
    assert sorted(deployments(policies, name).values()) == [1, 2]  # one candidate serves half of two
    budgets = policies.kubectl.list("poddisruptionbudgets", policies.namespace, f"taktline.dev/policy={name}")
    assert len(budgets) == 1  # a pod under two budgets could never be evicted
    told = rollout(policies, name, "status")
    assert "pick-roll: Shadow" in told
    assert "candidate  b" in told
    history = rollout(policies, name, "history").splitlines()
    assert [line.split()[1] for line in history[1:]] == ["b", "a"]
    assert "on trial" in history[1]
    assert "serves" in history[2]
    rollout(policies, name, "pause")
    wait_until(lambda: policies.get(name)["status"]["rollout"].get("paused"), "it is paused")
    # From now on one can be asked whether it has the new routes: without any the old workers stay a minute longer.
    with measured_gateway(policies.kubectl, node, name, rate=10.0):
        rollout(policies, name, "promote")
        status = phase_is(policies, name, "Finishing")
        moved = "robots have moved"
        wait_until(lambda: len(found := policies.routes()[name]) == 2 and set(found).isdisjoint(before), moved)
        status = phase_is(policies, name, "Complete")
    assert status["currentRevision"] == "b"
    wait_until(lambda: list(deployments(policies, name).values()) == [2], "the old Deployment is gone")


@pytest.mark.usefixtures("running_operator")
def test_a_candidate_that_crashes_is_taken_back_and_said(policies: Any, node: Any) -> None:
    name = "pick-bad"
    policies.kubectl.apply(policies.body(name, rollout=PLAN, model=model("a")))
    policies.wait(name, "Progressing", "False", "Complete")
    serving = policies.routes()[name]
    node.behave = lambda pod: (
        node.serving(pod) if pod["metadata"]["annotations"]["taktline.dev/revision"] == "a" else node.refusing(pod)
    )
    policies.kubectl.apply(policies.body(name, rollout=PLAN, model=model("b")))
    found = policies.wait(name, "Degraded", "True", "CandidateFails")
    assert "checkpoint_invalid: no statistics file" in found["message"]
    assert policies.wait(name, "Available", "True")
    assert policies.routes()[name] == serving

    def told() -> bool:
        events = policies.kubectl.list("events", policies.namespace)
        return any(event["reason"] == "CandidateFails" and event["type"] == "Warning" for event in events)

    wait_until(told, "an event tells of the candidate")


def test_an_operator_does_not_start_on_a_crd_that_would_lose_what_it_writes(
    policies: Any, start_operator: Any, kubectl: Any
) -> None:
    older = yaml.safe_load(schema.crd_text())
    fields = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    del fields["rollout"]
    kubectl("replace", "-f", "-", stdin=yaml.safe_dump(older))
    try:
        wait_until(
            lambda: (
                '"rollout":{"description":"The trial'
                not in kubectl("get", "--raw", "/openapi/v3/apis/taktline.dev/v1alpha1")
            ),
            "the older CRD is published",
        )
        operator = start_operator("old-crd")
        said = wait_until(
            lambda: [line for line in operator.lines() if "older than this operator" in line.get("message", "")],
            "the operator says so",
        )
        assert "status.rollout" in said[0]["cause"]
        assert "taktline-operator crd | kubectl apply" in said[0]["next_step"]
    finally:
        kubectl("replace", "-f", "-", stdin=schema.crd_text())
    wait_until(
        lambda: any(line.get("message") == "operator started" for line in operator.lines()),
        "it starts after the upgrade",
    )
