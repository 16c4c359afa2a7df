"""The chart's webhook and tenants: rights to one object each, certificates of either maker, limits by namespace."""

from __future__ import annotations

from typing import Any

import pytest
from taktline_operator import delivery
from taktline_operator.cli import _parser
from test_operator_chart import container_of, find, helm, render

__all__ = ["helm", "render"]  # fixtures
Json = dict[str, Any]
ON = ("--set", "webhook.enabled=true")
CERT_MANAGER = ("--set", "webhook.enabled=true,webhook.certManager.enabled=true")
CONFIGURATION = "factory-taktline-policydeployments"


def kinds(objects: list[Json]) -> set[str]:
    return {found["kind"] for found in objects}


def arguments(objects: list[Json]) -> Any:
    """The operator's command line, as it parses it."""
    return _parser().parse_args(["run", *container_of(objects, "taktline-operator")["args"]])


def test_without_it_nothing_of_it_is_there(render: Any) -> None:
    assert not kinds(render()) & {"ValidatingWebhookConfiguration", "Secret", "Certificate"}
    assert arguments(render()).webhook_listen is None


def test_the_operator_is_told_the_names_that_the_objects_have(render: Any) -> None:
    objects = render(*ON)
    told = arguments(objects)
    find(objects, "ValidatingWebhookConfiguration", told.webhook_configuration)
    find(objects, "Secret", told.webhook_secret)
    hook = find(objects, "ValidatingWebhookConfiguration", CONFIGURATION)["webhooks"][0]
    service = hook["clientConfig"]["service"]
    assert told.webhook_host == [f"{service['name']}.{service['namespace']}.svc"]
    port = int(told.webhook_listen.rpartition(":")[2])
    container = container_of(objects, "taktline-operator")
    assert {"name": "webhook", "containerPort": port} in container["ports"]
    assert find(objects, "Service", service["name"])["spec"]["ports"][0]["targetPort"] == "webhook"
    assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]  # the root is read-only


def test_its_rights_are_to_one_secret_and_one_configuration_by_name(render: Any) -> None:
    objects = render(*ON)
    assert find(objects, "Role", "taktline-operator-webhook")["rules"] == [
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["taktline-webhook"], "verbs": ["get", "update"]}
    ]
    assert find(objects, "ClusterRole", "factory-taktline-operator-webhook")["rules"] == [
        {
            "apiGroups": ["admissionregistration.k8s.io"],
            "resources": ["validatingwebhookconfigurations"],
            "resourceNames": [CONFIGURATION],
            "verbs": ["get", "patch"],
        }
    ]
    assert "data" not in find(objects, "Secret", "taktline-webhook")  # an upgrade leaves what the operator wrote


def test_with_cert_manager_the_operator_needs_no_right_and_reads_files(render: Any) -> None:
    objects = render(*CERT_MANAGER)
    names = {found["metadata"]["name"] for found in objects}
    assert "taktline-operator-webhook" not in names
    assert "factory-taktline-operator-webhook" not in names
    assert "Secret" not in kinds(objects)
    certificate = find(objects, "Certificate", "taktline-webhook")
    assert certificate["spec"]["dnsNames"] == ["taktline-webhook.factory.svc"]
    assert find(objects, "Issuer", certificate["spec"]["issuerRef"]["name"])["spec"] == {"selfSigned": {}}
    injected = find(objects, "ValidatingWebhookConfiguration", CONFIGURATION)["metadata"]["annotations"]
    assert injected == {"cert-manager.io/inject-ca-from": "factory/taktline-webhook"}
    told = arguments(objects)
    mounts = {mount["mountPath"]: mount for mount in container_of(objects, "taktline-operator")["volumeMounts"]}
    assert mounts[str(told.webhook_cert_dir)]["readOnly"] is True


def test_an_issuer_that_is_there_is_used(render: Any) -> None:
    issuer = "webhook.certManager.issuer.name=plant,webhook.certManager.issuer.kind=ClusterIssuer"
    objects = render(*CERT_MANAGER, "--set", issuer)
    assert "Issuer" not in kinds(objects)
    reference = find(objects, "Certificate", "taktline-webhook")["spec"]["issuerRef"]
    assert (reference["name"], reference["kind"]) == ("plant", "ClusterIssuer")


def test_failing_closed_and_the_namespaces_asked_about_are_values(render: Any) -> None:
    def hook(*values: str) -> Json:
        found: Json = find(render(*ON, *values), "ValidatingWebhookConfiguration", CONFIGURATION)["webhooks"][0]
        return found

    assert hook()["failurePolicy"] == "Ignore"
    assert "namespaceSelector" not in hook()
    closed = hook("--set", "webhook.failurePolicy=Fail,webhook.timeoutSeconds=3")
    assert (closed["failurePolicy"], closed["timeoutSeconds"]) == ("Fail", 3)
    served = hook("--set", "operator.namespaces={line-1,line-2}")["namespaceSelector"]["matchExpressions"][0]
    assert served == {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["line-1", "line-2"]}
    chosen = hook("--set", "webhook.namespaceSelector.matchLabels.robots=real")["namespaceSelector"]
    assert chosen == {"matchLabels": {"robots": "real"}}


def test_the_right_to_read_secrets_is_there_only_when_asked_for(render: Any) -> None:
    def secrets(*values: str) -> list[Json]:
        rules = find(render(*values), "ClusterRole", "factory-taktline-operator")["rules"]
        return [rule for rule in rules if "secrets" in rule["resources"]]

    assert secrets() == []
    assert secrets("--set", "operator.checkSecrets=true") == [
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
    ]


def test_a_policed_namespace_lets_the_api_server_in(render: Any) -> None:
    policy = find(render(*ON, "--set", "networkPolicy.enabled=true"), "NetworkPolicy", "taktline-operator")
    assert 9443 in {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}


def test_a_tenant_gets_the_limits_that_are_named_and_no_others(render: Any) -> None:
    second = "tenants[1].namespace=b,tenants[1].gpus=8,tenants[1].isolate=true"
    objects = render("--set", "tenants[0].namespace=a,tenants[0].policies=0", "--set", second)
    quotas = [found for found in objects if found["kind"] == "ResourceQuota"]
    assert {found["metadata"]["namespace"]: found["spec"]["hard"] for found in quotas} == {
        "a": {"count/policydeployments.taktline.dev": "0"},
        "b": {"requests.nvidia.com/gpu": "8"},
    }
    policies = [found for found in objects if found["kind"] == "NetworkPolicy"]
    assert [found["metadata"]["namespace"] for found in policies] == ["b"]
    ways = [rule for rule in policies[0]["spec"]["ingress"] if "ports" in rule]
    (progress,) = [rule for rule in ways if rule["ports"] == [{"port": delivery.PROGRESS_PORT, "protocol": "TCP"}]]
    operator = find(objects, "Deployment", "taktline-operator")["spec"]["template"]["metadata"]["labels"]
    (who,) = progress["from"]
    assert who["podSelector"]["matchLabels"].items() <= operator.items()
    assert who["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "factory"}


def test_kuberay_reaches_the_clusters_of_an_isolated_tenant_where_it_is_named(render: Any) -> None:
    objects = render("--set", "tenants[0].namespace=a,tenants[0].isolate=true,tenants[0].kuberayNamespace=ray-system")
    (policy,) = [found for found in objects if found["kind"] == "NetworkPolicy"]
    (way,) = [rule for rule in policy["spec"]["ingress"] if {"port": 8265, "protocol": "TCP"} in rule.get("ports", ())]
    (who,) = way["from"]
    # Ray's dashboard runs what it is sent: nobody of another namespace may take a label and come in.
    assert who["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "ray-system"}}
    assert who["podSelector"] == {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}}


@pytest.mark.parametrize(
    ("value", "says"),
    [("tenants[0].gpus=8", "namespace"), ("tenants[0].namespace=A", "namespace"), ("tenants[0].gpu=8", "gpu")],
)
def test_a_wrong_tenant_is_refused(helm: Any, value: str, says: str) -> None:
    reply = helm("template", "--set", value)
    assert reply.returncode != 0
    assert says in reply.stderr


@pytest.mark.parametrize("values", [ON, CERT_MANAGER], ids=["own", "cert-manager"])
def test_it_lints(helm: Any, values: tuple[str, ...]) -> None:
    reply = helm("lint", "--strict", *values)
    assert reply.returncode == 0, reply.stdout
