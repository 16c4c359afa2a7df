"""The operator against a real control plane, with its own service account: from apply to nothing left behind."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from taktline_local.kubectl import wait_until

pytestmark = pytest.mark.usefixtures("running_operator", "node")

Json = dict[str, Any]
WRITES = re.compile(r'^apiserver_request_total\{.*verb="(?:POST|PUT|PATCH|APPLY|DELETE)".*\} (\d+)', re.MULTILINE)
OURS = {"policydeployments", "deployments", "services", "configmaps", "poddisruptionbudgets", "pods"}


def writes(kubectl: Any) -> int:
    """Write requests the API server has had for the kinds that the operator touches, from anybody."""
    text = kubectl("get", "--raw", "/metrics")
    lines = [match for match in WRITES.finditer(text) if any(f'resource="{kind}"' in match.group(0) for kind in OURS)]
    return sum(int(match.group(1)) for match in lines)


def versions(policies: Any, name: str) -> dict[str, str]:
    """resourceVersion of everything that belongs to a policy, and of the routing table."""
    found = [policies.get(name), *policies.children(name)]
    found.append(policies.kubectl.get("configmap", "taktline-routes", "taktline-system"))
    return {f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"] for item in found}


def settled_versions(policies: Any, name: str) -> dict[str, str]:
    """The same, once the last writes of the rollout, and of earlier tests' namespaces, are done."""

    def alone() -> bool:
        names = {item["metadata"]["name"] for item in policies.kubectl.list("namespaces")}
        return {found for found in names if found.startswith("test-")} == {policies.namespace}

    wait_until(alone, "the namespaces of earlier tests are gone")

    def available() -> bool:  # minReadySeconds after the workers are ready
        found = [child for child in policies.children(name) if child["kind"] == "Deployment"]
        return all(child["status"].get("availableReplicas", 0) == child["spec"]["replicas"] for child in found)

    wait_until(available, "its Deployments call the workers available")
    seen: list[dict[str, str]] = []

    def unchanged() -> bool:
        time.sleep(1)
        seen.append(versions(policies, name))
        return len(seen) > 1 and seen[-1] == seen[-2]

    wait_until(unchanged, "the rollout's last writes are done")
    return seen[-1]


def apply_and_wait(policies: Any, name: str, **parts: Any) -> None:
    policies.kubectl.apply(policies.body(name, **parts))
    policies.wait(name, "Available", "True")
    policies.wait(name, "Progressing", "False", "Complete")


def test_an_applied_policy_becomes_available_and_routed(policies: Any) -> None:
    apply_and_wait(policies, "pick-apply")
    live = policies.get("pick-apply")
    status = live["status"]
    assert status["observedGeneration"] == live["metadata"]["generation"]
    assert (status["replicas"], status["readyReplicas"], status["currentRevision"]) == (1, 1, "a")
    assert status["pools"] == [{"name": "line", "accelerator": "h100", "desired": 1, "updated": 1, "ready": 1}]
    assert {c["type"]: c["status"] for c in status["conditions"]} == {
        "Accepted": "True", "Available": "True", "Progressing": "False", "Degraded": "False",
        "Cautioned": "False", "Monitored": "False",
    }  # fmt: skip
    kinds = sorted(child["kind"] for child in policies.children("pick-apply"))
    assert kinds == ["ConfigMap", "Deployment", "Pod", "PodDisruptionBudget", "ReplicaSet", "Service"]
    assert policies.routes()["pick-apply"] == status["endpoints"]
    # What people type:
    policies.kubectl("-n", policies.namespace, "wait", "--for=condition=Available", "pd/pick-apply", "--timeout=30s")
    described = policies.kubectl("-n", policies.namespace, "describe", "pd", "pick-apply")
    assert "WorkersReady" in described


def test_an_edit_rolls_through_without_a_moment_without_workers(policies: Any, node: Any) -> None:
    apply_and_wait(policies, "pick-edit")
    before = policies.routes()["pick-edit"]
    node.behave = lambda pod: node.serving(pod) if node.address(pod) + ":50051" in before else node.starting(pod)
    policies.kubectl.apply(
        policies.body("pick-edit", model={"family": "pi05", "source": {"path": "/srv/b"}, "revision": "b"})
    )
    policies.wait("pick-edit", "Progressing", "True", "RollingOut")
    status = policies.get("pick-edit")["status"]
    assert (status["currentRevision"], status["candidateRevision"]) == ("a", "b")
    assert policies.routes()["pick-edit"] == before
    node.behave = node.serving
    policies.wait("pick-edit", "Progressing", "False", "Complete")
    status = policies.get("pick-edit")["status"]
    assert status["currentRevision"] == "b"
    after = wait_until(
        lambda: (found := policies.routes()["pick-edit"]) != before and len(found) == 1 and found, "the route moved"
    )
    assert set(after).isdisjoint(before)
    wait_until(
        lambda: [c["kind"] for c in policies.children("pick-edit")].count("ConfigMap") == 1, "the old config is gone"
    )


def test_deletion_leaves_nothing_behind(policies: Any) -> None:
    apply_and_wait(policies, "pick-delete")
    policies.kubectl("-n", policies.namespace, "delete", "pd", "pick-delete", "--timeout=30s")
    wait_until(lambda: policies.children("pick-delete") == [], "its objects are gone")
    wait_until(lambda: "pick-delete" not in policies.routes(), "its route is gone")


def test_drift_is_corrected_and_foreign_fields_are_kept(policies: Any) -> None:
    apply_and_wait(policies, "pick-drift")
    kubectl, here = policies.kubectl, ("-n", policies.namespace)
    kubectl(*here, "annotate", "deployment/pick-drift-line", "team=cell-7")
    kubectl(*here, "scale", "deployment/pick-drift-line", "--replicas=3")
    kubectl(*here, "delete", "service/pick-drift-workers")

    def healed() -> bool:
        deployment = kubectl.get("deployment", "pick-drift-line", policies.namespace)
        service = kubectl.get("service", "pick-drift-workers", policies.namespace)
        return deployment["spec"]["replicas"] == 1 and service is not None

    wait_until(healed, "the operator took its fields back")
    live = kubectl.get("deployment", "pick-drift-line", policies.namespace)
    assert live["metadata"]["annotations"]["team"] == "cell-7"


def test_a_steady_cluster_sees_no_write_at_all_and_none_from_a_restarted_operator(
    policies: Any, running_operator: Any
) -> None:
    apply_and_wait(policies, "pick-steady")
    before = settled_versions(policies, "pick-steady")
    count = writes(policies.kubectl)
    time.sleep(6)
    assert versions(policies, "pick-steady") == before
    assert writes(policies.kubectl) == count
    starts = sum(line["message"] == "operator started" for line in running_operator.lines())
    assert running_operator.stop() == 0
    running_operator.start()
    wait_until(
        lambda: sum(line["message"] == "operator started" for line in running_operator.lines()) > starts,
        "the operator is back",
    )
    time.sleep(5)
    assert versions(policies, "pick-steady") == before


def test_a_policy_deleted_while_the_operator_is_dead_loses_its_route(policies: Any, running_operator: Any) -> None:
    apply_and_wait(policies, "pick-dead")
    running_operator.stop(kill=True)
    policies.kubectl("-n", policies.namespace, "delete", "pd", "pick-dead", "--timeout=30s")
    running_operator.start()
    wait_until(lambda: "pick-dead" not in policies.routes(), "its route is gone")


def test_a_worker_that_refuses_to_start_is_quoted(policies: Any, node: Any) -> None:
    node.behave = node.refusing
    policies.kubectl.apply(policies.body("pick-refused"))
    condition = policies.wait("pick-refused", "Degraded", "True", "CrashLoopBackOff")
    assert "exit code 2" in condition["message"]
    assert "checkpoint_invalid: no statistics file (name one)" in condition["message"]
    assert policies.routes()["pick-refused"] == []
    node.behave = node.serving
    policies.wait("pick-refused", "Degraded", "False", "AsExpected")


def test_a_pod_that_fits_no_node_says_why(policies: Any) -> None:
    pool = {"name": "line", "accelerator": "h100", "nodeSelector": {"no-such": "label"}}
    policies.kubectl.apply(policies.body("pick-nowhere", pools=[pool]))
    condition = policies.wait("pick-nowhere", "Degraded", "True", "Unschedulable")
    assert "nodes are available" in condition["message"]


def test_a_namespace_that_forbids_node_folders_says_so(policies: Any) -> None:
    policies.kubectl("label", "namespace", policies.namespace, "pod-security.kubernetes.io/enforce=restricted")
    policies.kubectl.apply(policies.body("pick-secure"))
    condition = policies.wait("pick-secure", "Degraded", "True", "FailedCreate")
    assert "PodSecurity" in condition["message"]
    # With a claim instead of a node folder the very same pod is allowed.
    source = {"pvc": {"claimName": "checkpoints"}}
    policies.kubectl.apply(policies.body("pick-secure", model={"family": "pi05", "source": source, "revision": "b"}))
    wait_until(lambda: any(child["kind"] == "Pod" for child in policies.children("pick-secure")), "the pod is admitted")


def test_kubectl_scale_sets_the_workers(policies: Any) -> None:
    pool = {"name": "line", "accelerator": "h100", "maxReplicas": 4, "nodeSelector": {"taktline-test": "hand-driven"}}
    apply_and_wait(policies, "pick-scale", pools=[pool], replicas=1)
    policies.kubectl("-n", policies.namespace, "scale", "pd/pick-scale", "--replicas=3")
    policies.wait("pick-scale", "Progressing", "False", "Complete")
    status = policies.get("pick-scale")["status"]
    assert (status["replicas"], status["readyReplicas"]) == (3, 3)
    wait_until(lambda: len(policies.routes()["pick-scale"]) == 3, "three workers are routed")


def test_a_namespace_goes_at_once_with_policies_in_it(policies: Any, kubectl: Any, control_plane: Any) -> None:
    apply_and_wait(policies, "pick-namespace")
    kubectl("delete", "namespace", policies.namespace, "--timeout=60s")
    wait_until(lambda: "pick-namespace" not in policies.routes(), "its route is gone")
    kubectl("create", "namespace", policies.namespace)  # the fixture deletes it again


def test_an_object_of_somebody_else_is_left_alone(policies: Any) -> None:
    mine = {
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "pick-mine-workers", "namespace": policies.namespace},
        "spec": {"ports": [{"port": 80}], "selector": {"app": "mine"}},
    }  # fmt: skip
    policies.kubectl.apply(mine)
    policies.kubectl.apply(policies.body("pick-mine"))
    condition = policies.wait("pick-mine", "Accepted", "False", "ObjectConflict")
    assert "Service pick-mine-workers" in condition["message"]
    live = policies.kubectl.get("service", "pick-mine-workers", policies.namespace)
    assert live["spec"]["selector"] == {"app": "mine"}


def test_the_operators_own_token_was_enough(running_operator: Any) -> None:
    """Stands last: whatever the tests above made the operator do, nothing was forbidden or surprised it."""
    for line in running_operator.lines():
        assert "Forbidden" not in str(line), line
        assert "unexpectedly" not in line["message"], line
        assert "permission" not in str(line), line
