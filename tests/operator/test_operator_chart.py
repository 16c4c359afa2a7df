"""The Helm chart: it lints, refuses wrong values, and grants and runs the same as the plain manifests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from taktline_operator import schema

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "taktline"
Json = dict[str, Any]
Render = Callable[..., list[Json]]


def find_helm() -> str | None:
    """helm on PATH, else the one that tools/install-helm brought."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    brought = sorted((cache / "taktline").glob("helm-*/helm"))
    return shutil.which("helm") or (str(brought[-1]) if brought else None)


@pytest.fixture
def helm(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run helm on the chart."""
    program = find_helm()
    if program is None:
        pytest.skip("there is no helm here: run tools/install-helm")

    def run(verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        folders = {f"HELM_{part}_HOME": str(tmp_path / part) for part in ("CACHE", "CONFIG", "DATA")}
        name = ["taktline"] if verb == "template" else []
        command = [program, verb, *name, str(CHART), "--namespace=factory", *arguments]
        return subprocess.run(command, env=os.environ | folders, capture_output=True, text=True, check=False)

    return run


@pytest.fixture
def render(helm: Callable[..., subprocess.CompletedProcess[str]]) -> Render:
    """The chart's objects for some values."""

    def objects(*arguments: str) -> list[Json]:
        reply = helm("template", *arguments)
        assert reply.returncode == 0, reply.stderr
        return [found for found in yaml.safe_load_all(reply.stdout) if found]

    return objects


def pods(objects: list[Json]) -> list[Json]:
    """Every pod spec in a rendering."""
    return [
        found["spec"]["template"]["spec"] if found["kind"] == "Deployment" else found["spec"]
        for found in objects
        if found["kind"] in ("Deployment", "Pod")
    ]


def find(objects: list[Json], kind: str, name: str) -> Json:
    return next(found for found in objects if (found["kind"], found["metadata"]["name"]) == (kind, name))


VALUES = {
    "defaults": [],
    "high availability": ["-f", str(CHART / "values-ha.yaml")],
    "two namespaces": ["--set", "operator.namespaces={line-1,line-2}"],
    "no CRD, policed": ["--set", "crds.install=false,networkPolicy.enabled=true"],
    "mirror": ["--set", "imageRegistry=mirror.example/t/,imagePullSecrets[0].name=pull"],
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_chart_lints(helm: Any, values: list[str]) -> None:
    reply = helm("lint", "--strict", *values)
    assert reply.returncode == 0, reply.stdout


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("operator.replicas=two", "replicas"),
        ("operator.replica=2", "replica"),
        ("operator.namespaces={Line_1}", "namespaces"),
        ("gateway.image=taktline/gateway", "image"),
        ("gateway.service.type=External", "type"),
        ("gateway.service.port=0", "port"),
        ("gateway.access.mode=none", "mode"),
        ("gateway.tls.secrets=x", "secrets"),
        ("imagePullPolicy=Sometimes", "imagePullPolicy"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm: Any, value: str, says: str) -> None:
    reply = helm("template", "--set", value)
    assert reply.returncode != 0
    assert says in reply.stderr


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_every_pod_meets_the_restricted_pod_security_standard(render: Render, values: list[str]) -> None:
    found = pods(render(*values))
    assert len(found) == 3
    for pod in found:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_the_chart_carries_the_crd_and_keeps_it(render: Render) -> None:
    assert (CHART / "files" / "policydeployments.yaml").read_text() == schema.crd_text()
    found = find(render(), "CustomResourceDefinition", "policydeployments.taktline.dev")
    assert found["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert found == schema.crd()
    assert not [part for part in render("--set", "crds.install=false") if part["kind"] == "CustomResourceDefinition"]


def test_chart_and_manifests_grant_and_run_the_same(render: Render) -> None:
    manifests: list[Json] = []
    for path in sorted((ROOT / "deploy" / "manifests").glob("*.yaml")):
        manifests += [part for part in yaml.safe_load_all(path.read_text()) if part and "metadata" in part]
    chart = render()
    role = find(chart, "ClusterRole", "factory-taktline-operator")
    assert role["rules"] == find(manifests, "ClusterRole", "taktline-operator")["rules"]
    for name in ("taktline-view", "taktline-edit"):
        assert find(chart, "ClusterRole", name)["rules"] == find(manifests, "ClusterRole", name)["rules"]
    for name in ("taktline-operator", "taktline-gateway"):
        ours, theirs = (
            find(objects, "Deployment", name)["spec"]["template"]["spec"]["containers"][0]
            for objects in (chart, manifests)
        )
        words = [" ".join(part["command"] + part.get("args", [])).replace("=", " ") for part in (ours, theirs)]
        assert words[0] == words[1]
        for field in ("readinessProbe", "livenessProbe", "ports", "resources", "securityContext"):
            assert ours[field] == theirs[field], (name, field)


def test_an_operator_of_named_namespaces_has_no_right_outside_them(render: Render) -> None:
    objects = render("--set", "operator.namespaces={line-1,line-2}")
    assert not [found for found in objects if found["kind"] == "ClusterRoleBinding"]
    roles = {found["metadata"]["namespace"] for found in objects if found["kind"] == "Role"}
    assert roles == {"line-1", "line-2", "factory"}
    args = find(objects, "Deployment", "taktline-operator")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[:2] == ["--namespace=line-1", "--namespace=line-2"]
    assert "--all-namespaces" not in args


def test_an_air_gapped_registry_serves_every_image(render: Render) -> None:
    found = pods(render(*VALUES["mirror"]))
    images = [container["image"] for pod in found for container in pod["containers"]]
    images += [
        entry["value"] for pod in found for container in pod["containers"]
        for entry in container.get("env", []) if entry["name"] == "TAKTLINE_WORKER_IMAGE"
    ]  # fmt: skip
    assert len(images) == 4
    assert all(image.startswith("mirror.example/t/taktline/") for image in images)
    assert all(pod["imagePullSecrets"] == [{"name": "pull"}] for pod in found)


def test_two_of_each_are_protected_from_a_drain(render: Render) -> None:
    assert not [found for found in render() if found["kind"] == "PodDisruptionBudget"]
    budgets = [found for found in render(*VALUES["high availability"]) if found["kind"] == "PodDisruptionBudget"]
    assert [found["metadata"]["name"] for found in budgets] == ["taktline-gateway", "taktline-operator"]


def test_a_shared_cluster_asks_for_keys_and_may_encrypt(render: Render) -> None:
    def gateway(*values: str) -> tuple[list[str], Json]:
        pod = find(render(*values), "Deployment", "taktline-gateway")["spec"]["template"]["spec"]
        return pod["containers"][0]["command"], pod

    command, pod = gateway()
    assert "--allow-anonymous" in command
    assert "--access-file" not in command
    command, pod = gateway("--set", "gateway.access.mode=keys,gateway.access.secret=team-keys,gateway.tls.secret=cert")
    assert "--allow-anonymous" not in command
    assert command[command.index("--access-file") + 1] == "/etc/taktline-access/access.json"
    assert command[command.index("--tls-cert") + 1] == "/etc/taktline-tls/tls.crt"
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    assert secrets == {"access": "team-keys", "tls": "cert"}
    mounted = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted["access"] == "/etc/taktline-access"
    assert pod["containers"][0]["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"


def environment(container: Json) -> Json:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container.get("env", [])}


def container_of(objects: list[Json], name: str) -> Json:
    found: Json = find(objects, "Deployment", name)["spec"]["template"]["spec"]["containers"][0]
    return found


def test_gateways_that_speak_tls_and_ask_for_keys_are_asked_that_way(render: Render) -> None:
    objects = render(
        "--set",
        "gateway.tls.secret=cert",
        "--set",
        "gateway.access.mode=keys",
        "--set",
        "operator.gatewayKeySecret=key",
    )
    operator = container_of(objects, "taktline-operator")
    told = environment(operator)
    assert told["TAKTLINE_GATEWAY_SCHEME"] == "https"
    assert told["TAKTLINE_GATEWAY_KEY"] == {"secretKeyRef": {"name": "key", "key": "key"}}
    mounted = {mount["mountPath"] for mount in operator["volumeMounts"]}
    assert told["TAKTLINE_GATEWAY_CA"].rpartition("/")[0] in mounted
    volumes = find(objects, "Deployment", "taktline-operator")["spec"]["template"]["spec"]["volumes"]
    assert volumes[0]["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]  # never the private key


def test_the_redis_url_comes_from_a_secret_and_is_on_no_command_line(render: Render) -> None:
    gateway = container_of(render("--set", "gateway.redis.secret=sessions"), "taktline-gateway")
    assert environment(gateway)["TAKTLINE_REDIS_URL"] == {"secretKeyRef": {"name": "sessions", "key": "url"}}
    assert not any("redis" in word for word in gateway["command"])
    assert "TAKTLINE_REDIS_URL" not in environment(container_of(render(), "taktline-gateway"))


def test_an_operator_may_be_kept_from_nodes(render: Render) -> None:
    rules = find(render("--set", "operator.watchNodes=false"), "ClusterRole", "factory-taktline-operator")["rules"]
    assert not any("nodes" in rule["resources"] for rule in rules)


@pytest.mark.parametrize(
    ("value", "variable"), [("modelCache", "TAKTLINE_MODEL_CACHE"), ("kernelCache", "TAKTLINE_KERNEL_CACHE")]
)
def test_a_cache_of_the_nodes_is_told_to_the_operator(render: Render, value: str, variable: str) -> None:
    def told(*arguments: str) -> list[str]:
        operator = find(render(*arguments), "Deployment", "taktline-operator")
        env = operator["spec"]["template"]["spec"]["containers"][0]["env"]
        return [entry["value"] for entry in env if entry["name"] == variable]

    assert told() == []
    assert told("--set", f"operator.{value}=/var/lib/taktline/there") == ["/var/lib/taktline/there"]
