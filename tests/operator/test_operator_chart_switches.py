"""The chart's switches: client protocols, certificates of workers, runbooks, the test; and what becomes of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from taktline_operator import cli, monitors, naming, schema, workload
from taktline_operator.plan import Settings, plan
from taktline_operator.spec import WorkerTls
from test_operator_chart import CHART, ROOT, find, helm, pods, render

__all__ = ["helm", "render"]  # fixtures
Json = dict[str, Any]


PORTS = [
    "gateway.clientPorts[0].protocol=openpi,gateway.clientPorts[0].port=8000,gateway.clientPorts[0].policy=pi05",
    "gateway.clientPorts[1].protocol=lerobot,gateway.clientPorts[1].port=8090",
    "gateway.clientPorts[2].protocol=groot,gateway.clientPorts[2].port=5555,gateway.clientPorts[2].policy=gr00t",
    "gateway.clientPorts[3].protocol=vla-eval,gateway.clientPorts[3].port=8100",
    "gateway.grootTokenSecret=groot-token",
    "networkPolicy.enabled=true",
]


def test_each_client_protocol_gets_port_argument_and_way_in(render: Any) -> None:
    objects = render(*(word for part in PORTS for word in ("--set", part)))
    service = {port["name"]: port for port in find(objects, "Service", "taktline-gateway")["spec"]["ports"]}
    assert {name: port["port"] for name, port in service.items()} == {
        "http": 80,
        "openpi-8000": 8000,
        "lerobot-8090": 8090,
        "groot-5555": 5555,
        "vla-eval-8100": 8100,
    }
    pod = find(objects, "Deployment", "taktline-gateway")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = container["command"]
    for flag, value in (
        ("--openpi-listen", "pi05=0.0.0.0:8000"),
        ("--lerobot-listen", "0.0.0.0:8090"),
        ("--groot-listen", "gr00t=0.0.0.0:5555"),
        ("--vla-eval-listen", "0.0.0.0:8100"),
        ("--groot-token-file", "/etc/taktline-groot/token"),
    ):
        assert command[command.index(flag) + 1] == value
    assert {port["containerPort"] for port in container["ports"]} == {8080, 8000, 8090, 5555, 8100}
    (rule,) = find(objects, "NetworkPolicy", "taktline-gateway")["spec"]["ingress"]
    assert {port["port"] for port in rule["ports"]} == {8080, 8000, 8090, 5555, 8100}
    assert all(len(port["name"]) <= 15 for port in container["ports"]), "port names have at most 15 letters"


def test_the_gateway_knows_every_flag_that_the_chart_gives_it(render: Any) -> None:
    from taktline_gateway import cli as gateway_cli

    more = ["worker.tls.secret=w,worker.tls.clientAuth=true,gateway.workerTls.secret=g,gateway.tls.secret=t"]
    objects = render(*(word for part in [*PORTS, *more] for word in ("--set", part)))
    command = find(objects, "Deployment", "taktline-gateway")["spec"]["template"]["spec"]["containers"][0]["command"]
    source = Path(gateway_cli.__file__).parent
    text = "".join(path.read_text() for path in source.rglob("*.py"))
    for flag in (word for word in command if word.startswith("--")):
        protocol = re.fullmatch(r"--(openpi|groot|lerobot|vla-eval)-listen", flag)
        assert f'"{flag}"' in text or (protocol and protocol.group(1) in text), flag


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("gateway.clientPorts[0].protocol=ros,gateway.clientPorts[0].port=8000", "protocol"),
        ("gateway.clientPorts[0].protocol=openpi,gateway.clientPorts[0].port=8080", "port"),
        ("gateway.clientPorts[0].protocol=openpi", "port"),
        ("worker.tls.secret=w", "set gateway.workerTls.secret, or gateways cannot reach them"),
        ("worker.tls.clientAuth=true", "worker.tls.clientAuth needs worker.tls.secret"),
        ("monitoring.runbookUrl=wiki", "runbookUrl"),
    ],
)
def test_what_cannot_work_is_refused(helm: Any, values: str, says: str) -> None:
    reply = helm("template", "--set", values)
    assert reply.returncode != 0
    assert says in reply.stderr


def test_certificates_reach_gateway_and_operator(render: Any) -> None:
    tls = "worker.tls.secret=worker-cert,worker.tls.clientAuth=true,gateway.workerTls.secret=gateway-cert"
    objects = render("--set", tls, "--set", "gateway.workerTls.serverName=w.factory")
    pod = find(objects, "Deployment", "taktline-gateway")["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    assert command[command.index("--worker-tls-ca") + 1] == "/etc/taktline-worker-tls/ca.crt"
    assert command[command.index("--worker-tls-name") + 1] == "w.factory"
    assert command[command.index("--worker-tls-key") + 1] == "/etc/taktline-worker-tls/tls.key"
    assert {"name": "worker-tls", "secret": {"secretName": "gateway-cert"}} in pod["volumes"]
    (container,) = find(objects, "Deployment", "taktline-operator")["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["TAKTLINE_WORKER_TLS_SECRET"] == "worker-cert"
    assert environment["TAKTLINE_WORKER_TLS_CLIENT_AUTH"] == "true"


def test_worker_images_by_class_come_from_the_mirror_too(render: Any) -> None:
    objects = render("--set", "worker.images.jetson-thor=taktline/worker:1-arm64,imageRegistry=mirror.example")
    (container,) = find(objects, "Deployment", "taktline-operator")["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["TAKTLINE_WORKER_IMAGES"] == "jetson-thor=mirror.example/taktline/worker:1-arm64"


def test_workers_speak_tls_and_are_probed_beside_it(make: Any) -> None:
    policy = make.policy()
    plain = plan(policy, make.Observed(live=make.body(), now=make.now), Settings(image="w"))
    tls = Settings(image="w", worker_tls=WorkerTls(secret="worker-cert", client_auth=True))
    found = plan(policy, make.Observed(live=make.body(), now=make.now), tls)
    (template,) = [o["spec"]["template"]["spec"] for o in found.desired if o["kind"] == "Deployment"]
    (container,) = template["containers"]
    command = container["command"]
    assert command[command.index("--tls-cert") + 1] == "/etc/taktline-tls/tls.crt"
    assert command[command.index("--tls-client-ca") + 1] == "/etc/taktline-tls/ca.crt"
    assert command[command.index("--health-listen") + 1] == f"0.0.0.0:{naming.HEALTH_PORT}"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == naming.HEALTH_PORT
    (volume,) = [part for part in template["volumes"] if part["name"] == "tls"]
    assert volume["secret"]["secretName"] == "worker-cert"
    (before,) = [o["spec"]["template"] for o in plain.desired if o["kind"] == "Deployment"]
    assert before == workload.pod_template(policy, policy.spec.pools[0], "w"), "without a Secret nothing changes"
    assert "--tls-cert" not in before["spec"]["containers"][0]["command"]


def test_the_operator_takes_the_certificates_by_flag_and_refuses_half_of_them(capsys: Any, tmp_path: Path) -> None:
    import yaml

    file = tmp_path / "policy.yaml"
    body = {
        "apiVersion": f"{schema.GROUP}/{schema.VERSION}",
        "kind": schema.KIND,
        "metadata": {"name": "reach"},
        "spec": {
            "model": {"family": "pi05", "source": {"path": "/srv/x"}},
            "pools": [{"name": "cpu", "accelerator": "cpu"}],
            "slo": {"controlBudgetMs": 100},
        },
    }
    file.write_text(yaml.safe_dump(body))
    assert cli.main(["plan", "-f", str(file), "--worker-tls-secret", "worker-cert"]) == 0
    assert "/etc/taktline-tls/tls.crt" in capsys.readouterr().out
    assert cli.main(["plan", "-f", str(file), "--worker-tls-client-auth"]) != 0
    assert "--worker-tls-client-auth needs --worker-tls-secret" in capsys.readouterr().err


def test_what_is_scraped_keeps_the_namespace_of_the_policy(render: Any) -> None:
    # KEDA's query, dashboards and alerts ask for the policy's namespace; the pod's own would take its place.
    objects = render("--set", "monitoring.enabled=true")
    for name in ("taktline-gateway", "taktline-operator"):
        (endpoint,) = find(objects, "PodMonitor", name)["spec"]["podMetricsEndpoints"]
        assert endpoint["honorLabels"] is True


def test_alerts_link_to_the_factorys_own_runbooks(render: Any, make: Any) -> None:
    objects = render("--set", "monitoring.enabled=true,monitoring.runbookUrl=https://wiki.example/runbooks/")
    rules = find(objects, "PrometheusRule", "taktline-platform")["spec"]
    links = [
        rule["annotations"]["runbook_url"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule
    ]
    assert links
    assert all(link.startswith("https://wiki.example/runbooks/Taktline") for link in links)
    (container,) = find(objects, "Deployment", "taktline-operator")["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["TAKTLINE_RUNBOOK_URL"] == "https://wiki.example/runbooks"
    made = monitors.objects(make.policy(), frozenset({"PrometheusRule"}), "https://wiki.example/runbooks")
    assert "https://wiki.example/runbooks/" in str(made)
    assert "taktline.dev/runbooks" not in str(made)


def test_the_air_gapped_values_fetch_nothing_from_outside(render: Any) -> None:
    objects = render("-f", str(CHART / "values-airgapped.yaml"))
    images = [container["image"] for pod in pods(objects) for container in pod["containers"]]
    assert images
    assert all(image.startswith("registry.factory.example/taktline-mirror/taktline/") for image in images)
    assert find(objects, "NetworkPolicy", "taktline-gateway")


def test_helm_test_asks_the_service_or_the_named_way(render: Any) -> None:
    def gateway(*values: str) -> Json:
        (container,) = find(render(*values), "Pod", "taktline-test")["spec"]["containers"]
        return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}

    assert gateway()["GATEWAY"] == "http://taktline-gateway.factory:80"
    assert gateway("--set", "gateway.tls.secret=t")["GATEWAY"] == "https://taktline-gateway.factory:80"
    assert gateway("--set", "test.url=https://robots.example")["GATEWAY"] == "https://robots.example"
    assert gateway("--set", "test.keySecret=k")["KEY"] == {"secretKeyRef": {"name": "k", "key": "key"}}


def notes(helm: Any, *values: str) -> str:
    """What `helm install` tells at its end."""
    said = helm("install", "--generate-name", "--dry-run=client", *values)
    assert said.returncode == 0, said.stderr
    return str(said.stdout.partition("NOTES:")[2])


def test_an_installation_ends_with_the_commands_that_come_next(helm: Any) -> None:
    said = notes(helm)
    assert re.search(r"^  helm test taktline-\d+ -n factory$", said, re.MULTILINE)
    (example,) = re.findall(r"^  kubectl apply -f (\S+)$", said, re.MULTILINE)
    (policy,) = re.findall(r"^  kubectl wait --for=condition=Available pd/(\S+)", said, re.MULTILINE)
    assert yaml.safe_load((ROOT / example).read_text())["metadata"]["name"] == policy
    assert "http://taktline-gateway.factory/v1/policies/NAME/act" in said
    assert "get secret" not in said


def test_it_says_where_robots_of_this_installation_go_and_what_they_show(helm: Any) -> None:
    values = "gateway.tls.secret=t,gateway.access.mode=keys,gateway.access.secret=robot-keys"
    said = notes(helm, "--set", values)
    assert "https://taktline-gateway.factory:80/v1/policies/NAME/act" in said
    assert "kubectl -n factory get secret robot-keys" in said
    assert "https://taktline-gateway.factory/v1/" in notes(helm, "--set", values + ",gateway.service.port=443")
    assert "http://taktline-gateway.factory:8080/v1/" in notes(helm, "--set", "gateway.service.port=8080")
    assert "taktline-operator crd | kubectl apply" in notes(helm, "--set", "crds.install=false")
