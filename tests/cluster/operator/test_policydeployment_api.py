"""The real API server on the PolicyDeployment API: the same verdicts as the local check, and help that reads well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from tests.operator import test_operator_schema as rules

pytestmark = pytest.mark.usefixtures("installed")

Json = dict[str, Any]
RULES = rules.RULES
IDS = [rule[0] for rule in RULES]


@pytest.fixture
def dry_run(core_api: client.CoreV1Api, namespace: str) -> Any:
    """Create a PolicyDeployment without keeping it; returns the API server's answer."""
    api = client.CustomObjectsApi(core_api.api_client)

    def create(body: Json) -> Json:
        arguments = ("taktline.dev", "v1alpha1", namespace, "policydeployments", body)
        created: Json = api.create_namespaced_custom_object(*arguments, dry_run="All", field_validation="Strict")
        return created

    return create


def body_with(policies: Any, path: str, value: Any) -> Json:
    base: Json = policies.body("reach", pools=[{"name": "cpu", "accelerator": "cpu"}])
    if path == "spec":
        base["spec"] |= value
        return base
    changed: Json = rules.changed(base, path, value)
    return changed


@pytest.mark.parametrize(("path", "right"), [(r[1], r[2]) for r in RULES], ids=IDS)
def test_rule_accepts(policies: Any, dry_run: Any, path: str, right: Any) -> None:
    dry_run(body_with(policies, path, right))


@pytest.mark.parametrize(("path", "wrong", "says"), [(r[1], r[3], r[4]) for r in RULES], ids=IDS)
def test_rule_rejects_with_the_same_message(policies: Any, dry_run: Any, path: str, wrong: Any, says: str) -> None:
    with pytest.raises(client.ApiException) as caught:
        dry_run(body_with(policies, path, wrong))
    assert caught.value.status == 422
    assert says in json.loads(caught.value.body)["message"]


def test_an_unknown_field_is_named(policies: Any, dry_run: Any) -> None:
    with pytest.raises(client.ApiException, match=r"spec\.engin"):
        dry_run(policies.body("reach", engin={}))


FILLED = {
    "model": {"family": "vjepa2-ac", "source": {"path": "/srv/x"}},
    "engine": {"search": {"pins": {"z": 0}}, "parallel": {"search": 2}},
    "clients": [{"protocol": "openpi", "metadata": {"pose": [0.5, 1], "wrist": True, "hz": 20, "name": "a"}}],
}


@pytest.mark.parametrize("parts", [{}, FILLED, {"engine": {"rtc": {}}}], ids=["least", "planner", "rtc"])
def test_the_api_server_fills_the_same_defaults(policies: Any, dry_run: Any, parts: Json) -> None:
    from taktline_operator import schema

    body = policies.body("reach", **parts)
    created = dry_run(body)
    assert created["spec"] == schema.validated(body)["spec"]


def test_explain_describes_fields(kubectl: Any) -> None:
    for path, words in {
        "pd.spec.slo.controlBudgetMs": "capture to its actuation",
        "pd.spec.pools.accelerator": "Accelerator class",
        "pd.spec.model.source.pvc": "PersistentVolumeClaim",
        "pd.status.conditions.reason": "One word for programs",
    }.items():
        assert words in " ".join(kubectl("explain", path).split())


def test_every_field_is_described_by_the_api_server_as_explain_shows_it(kubectl: Any) -> None:
    """`kubectl explain` reads this document; a call of it for each of some hundred fields would say the same."""
    from taktline_operator import schema

    document = json.loads(kubectl("get", "--raw", "/openapi/v3/apis/taktline.dev/v1alpha1"))
    served = next(
        part
        for part in document["components"]["schemas"].values()
        if any(kind["kind"] == "PolicyDeployment" for kind in part.get("x-kubernetes-group-version-kind", []))
    )
    found = {path: part.get("description", "") for path, part in rules.walk(served)}
    fields = 0
    for path, part in rules.walk(schema.object_schema()):
        if path.startswith((".spec", ".status")) and not path.endswith("{}"):
            assert found[path] == part["description"], path
            fields += 1
    assert fields > 250
    for path, part in rules.walk(schema.object_schema()["properties"]["spec"], "pd.spec"):
        if path.count(".") == 2 and not path.endswith(("[]", "{}")):  # the parts of a spec, as people ask for them
            words = " ".join(kubectl("explain", path).split())
            assert " ".join(part["description"].split())[:60] in words, path


def test_short_name_category_and_columns(kubectl: Any, policies: Any) -> None:
    kubectl.apply(policies.body("reach", pools=[{"name": "cpu", "accelerator": "cpu", "minReplicas": 0}]))
    shown = kubectl("-n", policies.namespace, "get", "taktline")
    assert shown.splitlines()[0].split() == [
        "NAME", "FAMILY", "REVISION", "READY", "DESIRED", "AVAILABLE", "BUDGET-MS", "AGE",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "resource", "allowed"),
    [
        ("patch", "policydeployments.taktline.dev/status", True),
        ("update", "policydeployments.taktline.dev", False),
        ("patch", "policydeployments.taktline.dev", False),
        ("get", "secrets", False),
        ("delete", "pods", True),  # that a failing node holds, or that ended
        ("create", "pods", False),
        ("delete", "nodes", False),
        ("create", "clusterrolebindings.rbac.authorization.k8s.io", False),
    ],
)
def test_the_operator_may_do_no_more_than_it_needs(
    kubectl: Any, namespace: str, verb: str, resource: str, allowed: bool
) -> None:
    who = "--as=system:serviceaccount:taktline-system:taktline-operator"
    resource, _, subresource = resource.partition("/")
    arguments = [verb, resource, *([f"--subresource={subresource}"] if subresource else [])]
    answer = kubectl("-n", namespace, "auth", "can-i", *arguments, who, check=False).strip()
    assert answer == ("yes" if allowed else "no")


def test_all_manifests_pass_the_api_server(kubectl: Any) -> None:
    manifests = Path(__file__).resolve().parents[3] / "deploy" / "manifests"
    kubectl("apply", "--server-side", "--dry-run=server", "-k", str(manifests))


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).resolve().parents[3] / "deploy" / "examples").glob("*.yaml")), ids=lambda p: p.stem
)
def test_examples_pass_the_api_server(dry_run: Any, path: Path) -> None:
    from taktline_operator import planfile

    for body in planfile.read_policies(path):
        dry_run(body)
