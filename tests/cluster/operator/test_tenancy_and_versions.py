"""Quotas of a namespace, isolation of its workers and versions of the API, on a real API server."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from kubernetes import client
from taktline_local.kubectl import Kubectl, wait_until
from taktline_operator import schema
from taktline_protocol.errors import TaktlineError

from tests.operator import test_operator_chart as chart

Json = dict[str, Any]
CRD = "policydeployments.taktline.dev"


def tenant(namespace: str, *values: str) -> list[Json]:
    """The chart's objects for one tenant."""
    helm = chart.find_helm()
    if helm is None:
        pytest.skip("there is no helm here: run tools/install-helm")
    command = [helm, "template", "taktline", str(chart.CHART), "--namespace=taktline-system"]
    command += ["--show-only", "templates/tenants.yaml", "--set", f"tenants[0].namespace={namespace}"]
    for value in values:
        command += ["--set", f"tenants[0].{value}"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [found for found in yaml.safe_load_all(text) if found]


def limited(kubectl: Kubectl, namespace: str, name: str, *values: str) -> None:
    """Apply a tenant's objects, and wait until its quota is in force: before that the API server refuses everything.

    A kind that the quota controller has not discovered yet (a fresh control plane; it looks every half minute) is left
    out of what the quota says is used. It counts again only a quota that is new or changed, or minutes later.
    """
    objects = tenant(namespace, *values)
    kubectl.apply(*objects)
    asked = [0]

    def look() -> bool:
        live = kubectl.get("resourcequota", "taktline", namespace) or {}
        status = live.get("status", {})
        if name in status.get("used", {}) and name in status.get("hard", {}):
            return True
        asked[0] += 1
        if status and asked[0] % 10 == 0:
            kubectl("-n", namespace, "delete", "resourcequota", "taktline")
            kubectl.apply(*objects)
        return False

    wait_until(look, f"the quota counts {name}", timeout_s=240)


def test_workers_beyond_a_quota_are_told_in_the_quotas_words_and_come_when_it_grows(
    policies: Any, node: Any, running_operator: Any
) -> None:
    kubectl, namespace = policies.kubectl, policies.namespace
    limited(kubectl, namespace, "requests.nvidia.com/gpu", "gpus=1")
    pool = policies.body("x")["spec"]["pools"][0] | {"minReplicas": 2}
    kubectl.apply(policies.body("pick-quota", pools=[pool]))
    condition = policies.wait("pick-quota", "Degraded", "True", "QuotaExceeded")
    assert "exceeded quota: taktline, requested: requests.nvidia.com/gpu=1" in condition["message"]
    assert "limited: requests.nvidia.com/gpu=1" in condition["message"]
    assert policies.wait("pick-quota", "Available", "True")  # the one that fits serves
    # The workers have no edges into other namespaces: a larger quota is all that is needed.
    kubectl.apply(*tenant(namespace, "gpus=4"))
    policies.wait("pick-quota", "Degraded", "False")


def test_policies_of_a_namespace_are_limited_by_the_api_server_itself(policies: Any) -> None:
    kubectl, namespace = policies.kubectl, policies.namespace
    limited(kubectl, namespace, f"count/{CRD}", "policies=1")
    kubectl.apply(policies.body("one", pools=[{"name": "cpu", "accelerator": "cpu", "minReplicas": 0}]))
    with pytest.raises(TaktlineError, match=rf"exceeded quota: taktline, requested: count/{CRD}=1"):
        kubectl.apply(policies.body("two"))


def test_isolated_workers_are_reached_by_gateways_only(policies: Any, node: Any, running_operator: Any) -> None:
    """What a policy lets through is the network's affair; which pods it is about, and whom it admits, is ours."""
    kubectl, namespace = policies.kubectl, policies.namespace
    kubectl.apply(*tenant(namespace, "isolate=true"))
    kubectl.apply(policies.body("pick-isolated"))
    policies.wait("pick-isolated", "Available", "True")
    found = kubectl.get("networkpolicy", "taktline-workers", namespace)["spec"]
    labels = [f"{name}={value}" for name, value in found["podSelector"]["matchLabels"].items()]
    chosen = kubectl.list("pods", namespace, ",".join([*labels, "taktline.dev/policy"]))
    assert len(chosen) == 1
    gateways = found["ingress"][0]["from"][0]
    assert gateways["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "taktline-system"}
    assert gateways["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "taktline-gateway"}
    ports = {
        frozenset(port["port"] for port in rule["ports"]): [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
        if "from" in rule
        else "everyone"
        for rule in found["ingress"]
        if "ports" in rule
    }
    operators = [{"app.kubernetes.io/name": "taktline-operator"}]
    assert ports == {frozenset({9464}): "everyone", frozenset({9465}): operators}


@pytest.fixture
def two_versions(kubectl: Kubectl, installed: None) -> Iterator[None]:
    """The CRD serves v1beta1 as well, with the same schema; afterwards it is as it was."""
    wanted = copy.deepcopy(schema.crd())
    first = wanted["spec"]["versions"][0]
    wanted["spec"]["versions"] = [first, copy.deepcopy(first) | {"name": "v1beta1", "storage": False}]
    wanted["spec"]["conversion"] = {"strategy": "None"}
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(wanted))
    wait_until(lambda: "taktline.dev/v1beta1" in kubectl("api-versions"), "v1beta1 is served")
    yield
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(schema.crd()))
    wait_until(lambda: "taktline.dev/v1beta1" not in kubectl("api-versions"), "v1beta1 is served no more")
    kubectl("api-resources", "--api-group=taktline.dev")  # it asks anew, and other tests' kubectl goes by what it heard


def test_the_next_version_can_be_served_beside_this_one_without_conversion(
    two_versions: None, policies: Any, kubectl: Kubectl, core_api: client.CoreV1Api
) -> None:
    """Written in one version and read in the other, an object is the same but for its apiVersion."""
    api = client.CustomObjectsApi(core_api.api_client)
    idle = [{"name": "cpu", "accelerator": "cpu", "minReplicas": 0}]
    body = policies.body("both", pools=idle, access={"robotWeights": {"arm-7": 2}})

    def read(version: str, name: str) -> Json:
        place = ("taktline.dev", version, policies.namespace, "policydeployments", name)
        found: Json = wait_until(lambda: attempt(lambda: api.get_namespaced_custom_object(*place)), f"{version} reads")
        return found

    kubectl.apply(body)
    old, new = read("v1alpha1", "both"), read("v1beta1", "both")
    assert new["apiVersion"] == "taktline.dev/v1beta1"
    assert old["spec"] == new["spec"]
    assert old["metadata"]["generation"] == new["metadata"]["generation"] == 1

    kubectl.apply(policies.body("newer", pools=idle) | {"apiVersion": "taktline.dev/v1beta1"})
    assert read("v1alpha1", "newer")["spec"] == read("v1beta1", "newer")["spec"]
    wrong = policies.body("wrong", slo={"controlBudgetMs": -1}) | {"apiVersion": "taktline.dev/v1beta1"}
    with pytest.raises(TaktlineError, match="controlBudgetMs must be greater than 0"):
        kubectl.apply(wrong)

    # Storage moves: v1beta1 is stored from now on, what is there is written once more, v1alpha1 can then be given up.
    moved = kubectl.get("crd", CRD) or {}
    for version in moved["spec"]["versions"]:
        version["storage"] = version["name"] == "v1beta1"
    kubectl("replace", "-f", "-", stdin=json.dumps(moved))
    wait_until(lambda: "v1beta1" in stored(kubectl), "v1beta1 is stored")
    kubectl("-n", policies.namespace, "annotate", "pd", "--all", "taktline.dev/rewritten=1")
    assert read("v1alpha1", "both")["spec"] == old["spec"]
    assert stored(kubectl) == ["v1alpha1", "v1beta1"]
    for name in ("both", "newer"):
        kubectl("-n", policies.namespace, "delete", f"pd/{name}")
    back = kubectl.get("crd", CRD) or {}
    for version in back["spec"]["versions"]:
        version["storage"] = version["name"] == "v1alpha1"
    kubectl("replace", "-f", "-", stdin=json.dumps(back))
    wait_until(lambda: stored(kubectl), "the CRD is back")
    only = [{"op": "replace", "path": "/status/storedVersions", "value": ["v1alpha1"]}]
    kubectl("patch", "crd", CRD, "--subresource=status", "--type=json", "--patch", json.dumps(only))


def stored(kubectl: Kubectl) -> list[str]:
    """Versions in which objects may be stored."""
    found: list[str] = (kubectl.get("crd", CRD) or {}).get("status", {}).get("storedVersions", [])
    return found


def attempt(call: Any) -> Any:
    """What a call returns; None where the API server does not know the object or the version yet."""
    try:
        return call()
    except client.ApiException as error:
        if error.status == 404:
            return None
        raise
