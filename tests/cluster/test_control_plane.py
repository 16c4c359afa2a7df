"""The control plane is a real one: it validates, authorizes, collects garbage, and answers for its nodes."""

from __future__ import annotations

import json

import pytest
from taktline_local.cluster import Cluster
from taktline_local.kubectl import wait_until
from taktline_protocol.errors import TaktlineError

CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "ranges.tests.taktline.dev"},
    "spec": {
        "group": "tests.taktline.dev",
        "scope": "Namespaced",
        "names": {"plural": "ranges", "singular": "range", "kind": "Range"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "properties": {"low": {"type": "integer"}, "high": {"type": "integer"}},
                                "required": ["low", "high"],
                                "x-kubernetes-validations": [
                                    {"rule": "self.low <= self.high", "message": "low must not exceed high"}
                                ],
                            }
                        },
                    }
                },
            }
        ],
    },
}


def range_object(low: int, high: int) -> dict[str, object]:
    return {
        "apiVersion": "tests.taktline.dev/v1",
        "kind": "Range",
        "metadata": {"name": "range"},
        "spec": {"low": low, "high": high},
    }


def test_versions_are_the_pinned_ones(cluster: Cluster) -> None:
    if cluster.control_plane is None:
        pytest.skip("a given cluster has its own versions")
    version = json.loads(cluster.kubectl("version", "-o", "json"))
    pinned = cluster.control_plane.programs.name.split("-etcd-")[0]
    assert version["serverVersion"]["gitVersion"] == pinned
    assert version["clientVersion"]["gitVersion"] == pinned


def test_cel_rules_of_a_custom_resource_are_enforced(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl.apply(CRD)
    try:
        cluster.kubectl("wait", "--for=condition=Established", "crd/ranges.tests.taktline.dev", "--timeout=30s")
        # Established is not yet published: the API server's list of kinds follows a moment later.
        listed = ("api-resources", "--api-group=tests.taktline.dev", "--output=name")
        wait_until(lambda: "ranges" in cluster.kubectl(*listed, check=False), "the new kind is published")
        cluster.kubectl.apply(range_object(1, 2), namespace=namespace)
        with pytest.raises(TaktlineError, match="low must not exceed high"):
            cluster.kubectl.apply(range_object(3, 2), namespace=namespace)
    finally:
        cluster.kubectl("delete", "crd", "ranges.tests.taktline.dev")


def test_rbac_denies_what_nobody_granted(cluster: Cluster, namespace: str) -> None:
    account = f"system:serviceaccount:{namespace}:default"
    answer = cluster.kubectl("auth", "can-i", "delete", "nodes", f"--as={account}", check=False)
    assert answer.strip() == "no"


def test_children_go_with_their_owner(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("create", "configmap", "owner", "-n", namespace)
    owner = cluster.kubectl.get("configmap", "owner", namespace)
    assert owner is not None
    child = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "child",
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
            ],
        },
    }
    cluster.kubectl.apply(child, namespace=namespace)
    cluster.kubectl("delete", "configmap", "owner", "-n", namespace)
    wait_until(lambda: cluster.kubectl.get("configmap", "child", namespace) is None, "the child is collected")


def test_process_node_says_what_it_is(cluster: Cluster) -> None:
    node = cluster.kubectl.get("node", "process-node")
    assert node is not None
    assert "test and demo device" in node["metadata"]["annotations"]["taktline.dev/process-node"]
    assert node["metadata"]["labels"]["taktline.dev/process-node"] == "true"
