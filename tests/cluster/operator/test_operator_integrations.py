"""Objects of other products on a real API that knows their kinds: nothing is pruned, nothing is written twice."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import yaml
from taktline_local.kubectl import Kubectl, wait_until
from taktline_operator import discovery, groups, monitors
from taktline_operator.plan import Observed, plan
from taktline_operator.spec import WorkerTls
from taktline_protocol.errors import TaktlineError

from tests.cluster.operator import foreign_kinds as definitions
from tests.operator import conftest as doubles
from tests.operator import test_operator_chart as chart_tests

Json = dict[str, Any]
PLANNER = {"family": "vjepa2-ac", "source": {"path": "/srv/policies/planner"}, "revision": "a"}
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def foreign_kinds(kubectl: Kubectl, installed: None) -> Iterator[None]:
    """The kinds of other products as they are published; no controller of theirs."""
    names = []
    for crd in definitions.published():
        if kubectl.get("crd", crd["metadata"]["name"]):  # a cluster that somebody brought has it for good
            continue
        # Server-side: the largest would not fit into the annotation that a client-side apply leaves.
        kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(crd))
        names.append(f"crd/{crd['metadata']['name']}")
    if names:
        # Not `kubectl wait`: it fails on a definition that has no conditions yet. Published is later than established.
        wanted = {name.removeprefix("crd/") for name in names}
        wait_until(
            lambda: wanted <= set(kubectl("api-resources", "--output=name", check=False).split()), "they are published"
        )
    yield
    if names:
        kubectl("delete", *names, "--wait=true", "--timeout=60s")


def live(kubectl: Kubectl, kind: str, namespace: str, policy: str) -> Json | None:
    found = kubectl.list(kind, namespace, f"taktline.dev/policy={policy}")
    return found[0] if found else None


def has(wanted: Json, name: str) -> Any:
    return wanted["metadata"]["labels"].get(name)


@pytest.mark.usefixtures("foreign_kinds")
def test_their_kinds_take_what_the_operator_writes(
    kubectl: Kubectl, policies: Any, namespace: str, start_operator: Callable[..., Any]
) -> None:
    start_operator("with-foreign-kinds")
    pool = {"name": "line", "accelerator": "h100", "gpusPerNode": 8, "maxReplicas": 4}
    queue = {"name": "robots"}
    bodies = {
        "groups": {"model": PLANNER, "engine": {"parallel": {"search": 16}}, "pools": [pool], "queue": queue},
        "ray": {
            "model": PLANNER,
            "engine": {"runtime": "ray", "parallel": {"search": 4}},
            "pools": [{"name": "line", "accelerator": "h100", "maxReplicas": 4}],
            "queue": queue,
        },
        "keda": {
            "pools": [pool],
            "replicas": 1,
            "scaling": {"mode": "Recommend", "keda": {"serverAddress": "http://prometheus:9090"}},
        },
    }
    for name, parts in bodies.items():
        kubectl.apply(policies.body(name, **parts), namespace=namespace)
    made = {}
    for name, kind in (("groups", "leaderworkersets"), ("ray", "rayservices"), ("keda", "scaledobjects")):
        made[kind] = wait_until(
            lambda name=name, kind=kind: live(kubectl, kind, namespace, name), f"{name} has {kind}", timeout_s=LIMIT_S
        )
        condition = policies.wait(name, "Integrated", "True")
        assert condition["reason"] == "Present"
        assert policies.wait(name, "Monitored", "True")["reason"] == "Applied"
        for kind in ("prometheusrules", "podmonitors"):
            assert live(kubectl, kind, namespace, name), f"{name} has no {kind}"
    lws = made["leaderworkersets"]["spec"]
    assert lws["leaderWorkerTemplate"]["size"] == 2
    assert lws["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert made["rayservices"]["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] == 4
    assert made["scaledobjects"]["spec"]["scaleTargetRef"]["name"] == "keda"
    assert has(made["leaderworkersets"], "kueue.x-k8s.io/queue-name") == "robots"
    head = made["rayservices"]["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]
    assert has(head, "kueue.x-k8s.io/queue-name") == "robots"
    assert policies.wait("groups", "Queued", "False")

    # What Kueue would do is left alone, and what was pruned would be written for ever.
    name = made["rayservices"]["metadata"]["name"]
    suspend = '{"spec": {"rayClusterConfig": {"suspend": true}}}'
    kubectl("-n", namespace, "patch", "rayservice", name, "--type=merge", "-p", suspend)
    kubectl("-n", namespace, "annotate", "pd", "ray", "groups", "keda", "look=again")

    def versions() -> list[str]:
        wanted = [*zip(bodies, made, strict=True), ("groups", "prometheusrules"), ("groups", "podmonitors")]
        found = [live(kubectl, kind, namespace, name) for name, kind in wanted]
        return [one["metadata"]["resourceVersion"] for one in found if one]

    policies.wait("ray", "Queued", "True")
    before = versions()
    assert len(before) == 5
    time.sleep(3.0)  # a write that repeats itself does so at every look, each of which wakes the next
    assert versions() == before
    assert live(kubectl, "rayservices", namespace, "ray")["spec"]["rayClusterConfig"]["suspend"] is True

    # The scale subresource, as KEDA's autoscaler uses it.
    kubectl("-n", namespace, "scale", "pd", "keda", "--replicas=3")
    wait_until(
        lambda: (policies.get("keda") or {}).get("status", {}).get("replicas") == 3, "three workers", timeout_s=LIMIT_S
    )
    kubectl("-n", namespace, "delete", "pd", *bodies, "--wait=true", "--timeout=60s")


H100 = {"name": "line", "accelerator": "h100", "gpusPerNode": 8}
FORMS: dict[str, Json] = {
    "plain": {"pools": [{"name": "cpu", "accelerator": "cpu"}]},
    "mig, spot": {
        "pools": [{"name": "m", "accelerator": "h100", "migProfile": "1g.10gb", "spot": True, "startupSeconds": 300}]
    },
    "jetson": {"pools": [{"name": "j", "accelerator": "jetson-thor", "nodeSelector": {"line": "3"}}]},
    "group": {
        "model": PLANNER,
        "engine": {"parallel": {"search": 16}},
        "pools": [H100 | {"mesh": {"interface": "eth0", "topologyKey": "rack"}}],
        "queue": {"name": "robots", "priorityClass": "line"},
    },
    "ray": {
        "model": PLANNER,
        "engine": {"runtime": "ray", "parallel": {"search": 4}},
        "pools": [{"name": "line", "accelerator": "h100"}],
        "queue": {"name": "robots"},
    },
    "keda": {
        "pools": [H100 | {"maxReplicas": 4}],
        "scaling": {"mode": "Recommend", "keda": {"serverAddress": "http://prometheus:9090"}},
        "replicas": 1,
    },
}


def strictly(kubectl: Kubectl, objects: list[Json]) -> str:
    """What the API server says to objects of which it may drop no field; raises with its words where it would."""
    listed = {"apiVersion": "v1", "kind": "List", "items": objects}
    arguments = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts", "-f", "-")
    return kubectl(*arguments, stdin=json.dumps(listed))


@pytest.mark.usefixtures("foreign_kinds")
def test_no_field_of_what_is_written_is_unknown_to_the_published_kinds(kubectl: Kubectl, namespace: str) -> None:
    kinds = frozenset(discovery.KINDS)
    tls = WorkerTls(secret="worker-tls", client_auth=True)
    written = []
    for parts in FORMS.values():
        policy = doubles.policy(**parts)
        for settings in (doubles.SETTINGS, msgspec.structs.replace(doubles.SETTINGS, worker_tls=tls)):
            observed = Observed(live=doubles.body(**parts), now=doubles.NOW, kinds=kinds, monitoring=kinds)
            written += plan(policy, observed, settings).desired
    foreign = [found for found in written if found["kind"] in kinds]
    assert {found["kind"] for found in foreign} == {kind for kind, about in discovery.KINDS.items() if about.written}
    for found in foreign:
        found["metadata"]["namespace"] = namespace
    # One at a time: two objects of one name in one request are one object.
    for found in {json.dumps(found, sort_keys=True): found for found in foreign}.values():
        assert "serverside-applied" in strictly(kubectl, [found])


@pytest.mark.usefixtures("foreign_kinds")
@pytest.mark.parametrize("issuer", ["", "factory-ca"], ids=["own issuer", "issuer that is there"])
def test_the_charts_monitors_and_certificates_are_ones_that_their_products_take(
    kubectl: Kubectl, namespace: str, issuer: str
) -> None:
    helm = chart_tests.find_helm()
    if helm is None:
        pytest.skip("there is no helm here: run tools/install-helm")
    values = "monitoring.enabled=true,monitoring.labels.release=prometheus,webhook.enabled=true"
    values += f",webhook.certManager.enabled=true,webhook.certManager.issuer.name={issuer},networkPolicy.enabled=true"
    command = [helm, "template", "taktline", str(chart_tests.CHART), f"--namespace={namespace}", "--set", values]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    objects = [found for found in yaml.safe_load_all(rendered) if found]
    kinds = {found["kind"] for found in objects}
    assert {"PodMonitor", "PrometheusRule", "Certificate"} <= kinds
    assert ("Issuer" in kinds) == (issuer == "")
    strictly(kubectl, objects)


@pytest.mark.usefixtures("foreign_kinds")
def test_what_their_products_would_refuse_is_refused_here(kubectl: Kubectl, namespace: str) -> None:
    monitor = monitors.pod_monitor(doubles.policy())
    monitor["metadata"]["namespace"] = namespace
    endpoint = monitor["spec"]["podMetricsEndpoints"][0]
    for field, value, says in (
        # kubectl says it where the kind's schema is published already, else the API server does, with the whole path.
        ("intervall", "15s", 'intervall"'),
        ("interval", "15 seconds", "spec.podMetricsEndpoints[0].interval"),
    ):
        bad = monitor | {"spec": monitor["spec"] | {"podMetricsEndpoints": [endpoint | {field: value}]}}
        with pytest.raises(TaktlineError) as refused:
            strictly(kubectl, [bad])
        assert says in str(refused.value)
    policy = doubles.policy(**FORMS["group"])
    observed = Observed(live=doubles.body(**FORMS["group"]), now=doubles.NOW, kinds=frozenset(discovery.KINDS))
    (group,) = [found for found in plan(policy, observed, doubles.SETTINGS).desired if found["kind"] == groups.LWS_KIND]
    group["metadata"]["namespace"] = namespace
    group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(TaktlineError, match="imagePullPolice"):
        strictly(kubectl, [group])
