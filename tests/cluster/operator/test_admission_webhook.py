"""The admission webhook on a real API server: refusals, warnings, rotation, and what happens while nobody answers."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml
from cryptography import x509
from kubernetes import client
from taktline_local.kubectl import Kubectl, wait_until
from taktline_local.network import free_port
from taktline_operator import certificates
from taktline_protocol.errors import TaktlineError

from tests.operator import test_operator_chart as chart

Json = dict[str, Any]
NAMESPACE = "taktline-system"
CONFIGURATION = f"{NAMESPACE}-taktline-policydeployments"
LABEL = "taktline-test-webhook"
LEASE = "taktline-operator"
INVERTED = {"requests": {"memory": "24Gi"}, "limits": {"memory": "8Gi"}}
SAYS = "pool line: resources.requests.memory 24Gi is more than its limit 8Gi"


def rendered() -> list[Json]:
    """The chart's webhook objects."""
    helm = chart.find_helm()
    if helm is None:
        pytest.skip("there is no helm here: run tools/install-helm")
    command = [helm, "template", "taktline", str(chart.CHART), f"--namespace={NAMESPACE}"]
    command += ["--set", "webhook.enabled=true", "--show-only", "templates/webhook.yaml"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [found for found in yaml.safe_load_all(text) if found]


class Door:
    """The chart's webhook with the operator's process behind it.

    The API server here is no part of a cluster network, so the configuration names the process's address in place of
    the Service; all else is the chart's.
    """

    def __init__(self, kubectl: Kubectl, start: Callable[..., Any]) -> None:
        self.kubectl = kubectl
        self.port = free_port()
        self._start = start

    def install(self, policy: str) -> None:
        """Apply the chart's objects; `policy` is the failurePolicy."""
        for found in rendered():
            if found["kind"] == "ValidatingWebhookConfiguration":
                hook = found["webhooks"][0]
                hook["clientConfig"] = {"url": f"https://127.0.0.1:{self.port}/validate"}
                hook["failurePolicy"] = policy
                hook["namespaceSelector"] = {"matchLabels": {LABEL: "yes"}}
            self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(found))

    def operator(self, name: str, *arguments: str, look_s: float = 0.3) -> Any:
        """An operator that serves the webhook."""
        return self._start(
            name,
            *arguments,
            f"--webhook-listen=127.0.0.1:{self.port}",
            "--webhook-host=127.0.0.1",
            f"--webhook-configuration={CONFIGURATION}",
            f"--webhook-look-seconds={look_s}",
        )

    def shown(self) -> str:
        """The certificate that the process shows."""
        return ssl.get_server_certificate(("127.0.0.1", self.port), timeout=20).strip()

    def told(self) -> bytes:
        """Authorities that the API server trusts."""
        found = self.kubectl.get("validatingwebhookconfiguration", CONFIGURATION) or {"webhooks": [{}]}
        return base64.b64decode(found["webhooks"][0].get("clientConfig", {}).get("caBundle", ""))

    def remove(self) -> None:
        """Take everything away, the way in first."""
        kinds = ("validatingwebhookconfiguration", "clusterrolebinding", "clusterrole")
        for kind, name in zip(kinds, (CONFIGURATION, *2 * [f"{NAMESPACE}-taktline-operator-webhook"]), strict=True):
            self.kubectl("delete", kind, name, "--ignore-not-found")
        for kind in ("rolebinding/taktline-operator-webhook", "role/taktline-operator-webhook"):
            self.kubectl("-n", NAMESPACE, "delete", kind, "--ignore-not-found")
        for kind in ("secret/taktline-webhook", "service/taktline-webhook"):
            self.kubectl("-n", NAMESPACE, "delete", kind, "--ignore-not-found")


@pytest.fixture
def door(kubectl: Kubectl, installed: None, start_operator: Callable[..., Any], namespace: str) -> Iterator[Door]:
    """The webhook's door, for policies of this test's namespace only."""
    kubectl("label", "namespace", namespace, f"{LABEL}=yes")
    found = Door(kubectl, start_operator)
    found.remove()
    yield found
    found.remove()


def wrong(policies: Any, name: str) -> Json:
    body: Json = policies.body(name)
    body["spec"]["pools"][0]["resources"] = INVERTED
    return body


def refusal(policies: Any, body: Json, *flags: str) -> str:
    """What kubectl says when it applies `body`; empty when it is taken."""
    text = json.dumps(body)
    try:
        policies.kubectl("-n", policies.namespace, "apply", *flags, "-f", "-", stdin=text)
    except TaktlineError as error:
        return str(error)
    return ""


def answers(door: Door, policies: Any) -> None:
    """Wait until the API server asks the webhook and gets its answer."""
    said = [""]

    def look() -> bool:
        said[0] = refusal(policies, wrong(policies, "probe"), "--dry-run=server")
        return SAYS in said[0]

    try:
        wait_until(look, "the webhook answers")
    except TaktlineError as error:
        raise AssertionError(f"{error}; the last answer: {said[0] or 'taken'}; trusted: {door.told()!r}") from error


def test_a_standby_refuses_and_warns_in_the_words_of_the_conditions(
    door: Door, policies: Any, start_operator: Callable[..., Any], core_api: client.CoreV1Api
) -> None:
    door.install("Ignore")
    # Without a webhook the leader says it as a condition.
    start_operator("leader", f"--lease={LEASE}")
    policies.kubectl.apply(wrong(policies, "wrong"))
    condition = policies.wait("wrong", "Accepted", "False", "InvalidSpec")
    assert SAYS in condition["message"]
    standby = door.operator("standby", f"--lease={LEASE}")
    answers(door, policies)
    assert not any(line["message"] == "operator started" for line in standby.lines())

    said = refusal(policies, wrong(policies, "another"))
    assert 'admission webhook "policydeployments.taktline.dev" denied the request: ' + condition["message"] in said

    api = client.CustomObjectsApi(core_api.api_client)
    body = policies.body("planned", model={"family": "minicpm-robot", "source": {"pvc": {"claimName": "nothing"}}})
    place = ("taktline.dev", "v1alpha1", policies.namespace, "policydeployments")
    _, _, headers = api.create_namespaced_custom_object_with_http_info(*place, body)
    warnings = headers["Warning"]
    assert "PersistentVolumeClaim nothing does not exist" in warnings
    cautioned = policies.wait("planned", "Cautioned", "True")
    assert "PersistentVolumeClaim nothing does not exist" in cautioned["message"]

    # One that was wrong before can be edited, relabelled and deleted.
    edited = wrong(policies, "wrong")
    edited["spec"]["slo"]["controlBudgetMs"] = 90
    assert refusal(policies, edited) == ""
    assert refusal(policies, edited | {"metadata": edited["metadata"] | {"labels": {"a": "b"}}}) == ""
    policies.kubectl("-n", policies.namespace, "delete", "pd", "wrong", "--timeout=30s")


def test_a_name_that_another_namespace_serves_is_refused_at_once(door: Door, policies: Any) -> None:
    door.install("Ignore")
    door.operator("operator")
    answers(door, policies)
    other = policies.kubectl("create", "namespace", f"{policies.namespace}-b", "-o", "name").strip().partition("/")[2]
    try:
        policies.kubectl("label", "namespace", other, f"{LABEL}=yes")
        assert refusal(policies, policies.body("welder")) == ""
        second = policies.body("welder")
        second["metadata"]["namespace"] = other
        try:
            policies.kubectl("-n", other, "apply", "-f", "-", stdin=json.dumps(second))
            said = ""
        except TaktlineError as error:
            said = str(error)
        assert f"policy name 'welder' is taken by the older PolicyDeployment {policies.namespace}/welder" in said
    finally:
        policies.kubectl("delete", "namespace", other, "--wait=false")


def test_an_old_authority_is_replaced_without_a_request_that_is_not_answered(
    door: Door, policies: Any, core_api: client.CoreV1Api
) -> None:
    """It is due from the start: the new one is told first, and shown at the next look, while requests go on."""
    door.install("Fail")
    issued = datetime.now(UTC) - timedelta(days=500)
    old = certificates.renewed(None, ["127.0.0.1"], b"", issued)
    # A certificate of the old authority that is not due itself.
    fresh = certificates.renewed(old, ["127.0.0.1"], old.authorities, issued + timedelta(days=480))
    parts = {"ca.crt": fresh.authorities, "ca.key": fresh.authority_key}
    parts |= {"tls.crt": fresh.certificate, "tls.key": fresh.key}
    data = {name: base64.b64encode(part).decode() for name, part in parts.items()}
    door.kubectl("-n", NAMESPACE, "patch", "secret", "taktline-webhook", "--patch", json.dumps({"data": data}))
    api = client.CustomObjectsApi(core_api.api_client)
    place = ("taktline.dev", "v1alpha1", policies.namespace, "policydeployments", wrong(policies, "reach"))
    stop = threading.Event()
    answers: list[str] = []

    def ask() -> None:
        while not stop.is_set():
            try:
                api.create_namespaced_custom_object(*place, dry_run="All")
                answers.append("taken")
            except client.ApiException as error:
                answers.append(str(error.body))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        door.operator("operator", look_s=3.0)
        wait_until(lambda: any(SAYS in answer for answer in answers), "the webhook answers")
        wait_until(lambda: len(x509.load_pem_x509_certificates(door.told())) == 2, "both authorities are trusted")
        newest = x509.load_pem_x509_certificates(door.told())[0]

        def shown_is_of_the_newest() -> bool:
            return x509.load_pem_x509_certificate(door.shown().encode()).issuer == newest.subject

        wait_until(shown_is_of_the_newest, "a certificate of the new authority is shown")
        before = len(answers)
        wait_until(lambda: len(answers) > before + 10, "requests go on")
    finally:
        stop.set()
        asking.join()
    since = next(number for number, answer in enumerate(answers) if SAYS in answer)
    assert [answer for answer in answers[since:] if SAYS not in answer] == []


def test_while_nobody_answers_ignore_lets_through_and_fail_refuses_but_never_a_deletion(
    door: Door, policies: Any
) -> None:
    kubectl, namespace = policies.kubectl, policies.namespace
    door.install("Fail")
    operator = door.operator("operator")
    answers(door, policies)
    assert refusal(policies, policies.body("kept")) == ""
    operator.stop()

    assert "failed calling webhook" in refusal(policies, policies.body("new"))
    changed = policies.body("kept", slo={"controlBudgetMs": 50})
    assert "failed calling webhook" in refusal(policies, changed)
    # What is no change of a spec goes on: labels, finalizers, status, scale, deletion, whole namespaces.
    kubectl("-n", namespace, "label", "pd/kept", "a=b")
    kubectl("-n", namespace, "patch", "pd/kept", "--type=merge", "--patch", '{"metadata":{"finalizers":["x.y/z"]}}')
    status = '{"status":{"currentRevision":"a"}}'
    kubectl("-n", namespace, "patch", "pd/kept", "--subresource=status", "--type=merge", "--patch", status)
    kubectl("-n", namespace, "delete", "pd/kept", "--wait=false")
    kubectl("-n", namespace, "patch", "pd/kept", "--type=merge", "--patch", '{"metadata":{"finalizers":null}}')
    kubectl("-n", namespace, "wait", "--for=delete", "pd/kept", "--timeout=30s")

    door.install("Ignore")
    wait_until(lambda: refusal(policies, wrong(policies, "new")) == "", "the object is let through")
