"""The process node behaves like a kubelet where Pods can tell: probes, restarts, volumes, identity, endings."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from taktline_local.cluster import Cluster
from taktline_local.kubectl import wait_until

Object = dict[str, Any]
NODE = "process-node"


def pod(name: str, container: Object, *, node: str = NODE, **spec: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "terminationGracePeriodSeconds": 5,
            "containers": [{"name": "main", "image": "none", **container}],
            **spec,
        },
    }


def python(code: str) -> list[str]:
    return ["python3", "-u", "-c", code]


def status(cluster: Cluster, namespace: str, name: str) -> Object:
    found = cluster.kubectl.get("pod", name, namespace)
    return {} if found is None else found["status"]


def condition(found: Object, kind: str) -> str | None:
    return next((item["status"] for item in found.get("conditions", []) if item["type"] == kind), None)


def container_state(found: Object, name: str = "main") -> Object:
    for item in found.get("containerStatuses", []):
        if item["name"] == name:
            return item
    return {}


def wait_for_phase(cluster: Cluster, namespace: str, name: str, phase: str) -> Object:
    def look() -> Object | None:
        found = status(cluster, namespace, name)
        return found if found.get("phase") == phase else None

    return wait_until(look, f"pod {name} is {phase}")


def logs(cluster: Cluster, namespace: str, name: str, *flags: str) -> str:
    return cluster.kubectl("logs", name, "-n", namespace, *flags)


def messages(cluster: Cluster, namespace: str, reason: str) -> list[str]:
    return [item["message"] for item in cluster.kubectl.list("events", namespace) if item["reason"] == reason]


def test_deployment_runs_becomes_ready_answers_and_goes(cluster: Cluster, namespace: str) -> None:
    container = {
        "name": "web",
        "image": "none",
        "command": ["python3", "-m", "http.server", "8000", "--bind", "0.0.0.0"],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1},
        "livenessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {"nodeSelector": {"kubernetes.io/hostname": NODE}, "containers": [container]},
            },
        },
    }
    cluster.kubectl.apply(deployment, namespace=namespace)
    cluster.kubectl("rollout", "status", "deployment/web", "-n", namespace, "--timeout=60s")
    pods = cluster.kubectl.list("pods", namespace, "app=web")
    addresses = {item["status"]["podIP"] for item in pods}
    assert len(addresses) == 2, "two Pods with one port need two addresses"
    for address in addresses:
        assert httpx.get(f"http://{address}:8000/", trust_env=False).status_code == 200
    cluster.kubectl("delete", "deployment", "web", "-n", namespace)
    wait_until(lambda: not cluster.kubectl.list("pods", namespace), "no Pod is left")
    for address in addresses:
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://{address}:8000/", trust_env=False)


def test_readiness_follows_its_probe(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    flag = tmp_path / "ready"
    flag.touch()
    probe = {"exec": {"command": ["test", "-e", str(flag)]}, "periodSeconds": 1, "failureThreshold": 1}
    cluster.kubectl.apply(pod("flaky", {"command": ["sleep", "600"], "readinessProbe": probe}), namespace=namespace)
    wait_until(lambda: condition(status(cluster, namespace, "flaky"), "Ready") == "True", "the Pod is ready")
    flag.unlink()
    wait_until(lambda: condition(status(cluster, namespace, "flaky"), "Ready") == "False", "the Pod is unready")
    assert container_state(status(cluster, namespace, "flaky"))["restartCount"] == 0


def test_failed_liveness_probe_restarts_the_container(cluster: Cluster, namespace: str) -> None:
    probe = {"tcpSocket": {"port": 9}, "periodSeconds": 1, "failureThreshold": 2}
    cluster.kubectl.apply(pod("stuck", {"command": ["sleep", "600"], "livenessProbe": probe}), namespace=namespace)

    def restarted() -> Object | None:
        found = container_state(status(cluster, namespace, "stuck"))
        return found if found.get("restartCount", 0) >= 1 else None

    assert wait_until(restarted, "the container restarted")["lastState"]["terminated"]["exitCode"] == 143
    assert any("liveness" in text for text in messages(cluster, namespace, "Killing"))


def test_crash_loop_backs_off_and_tells_the_last_words(cluster: Cluster, namespace: str) -> None:
    code = "import sys; print('no such checkpoint', file=sys.stderr); sys.exit(2)"
    container = {"command": python(code), "terminationMessagePolicy": "FallbackToLogsOnError"}
    cluster.kubectl.apply(pod("crashing", container), namespace=namespace)

    def waiting() -> Object | None:
        found = container_state(status(cluster, namespace, "crashing"))
        return found if found.get("state", {}).get("waiting", {}).get("reason") == "CrashLoopBackOff" else None

    found = wait_until(waiting, "the container is backed off")
    ended = found["lastState"]["terminated"]
    assert (ended["exitCode"], ended["message"]) == (2, "no such checkpoint")
    assert found["restartCount"] >= 1
    assert not found["ready"]
    assert "no such checkpoint" in logs(cluster, namespace, "crashing", "--previous")


def test_missing_command_is_reported_not_hidden(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl.apply(pod("absent", {"command": ["no-such-program"]}, restartPolicy="Never"), namespace=namespace)
    found = wait_for_phase(cluster, namespace, "absent", "Failed")
    ended = container_state(found)["state"]["terminated"]
    assert ended["reason"] == "StartError"
    assert "no-such-program" in ended["message"]


def test_config_map_volume_follows_changes_at_one_instant(cluster: Cluster, namespace: str) -> None:
    def config(value: int) -> Object:
        data = {"a": str(value), "b": str(value)}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "pair"}, "data": data}

    # Reads both files through one resolved ..data, as a careful reader does; prints every distinct pair.
    code = (
        "import os, time\nseen = None\n"
        "while True:\n"
        "    folder = os.path.realpath('/etc/pair/..data')\n"
        "    try: now = (open(folder + '/a').read(), open(folder + '/b').read())\n"
        "    except FileNotFoundError: continue\n"
        "    if now != seen: print(*now); seen = now\n"
        "    time.sleep(0.01)\n"
    ).replace("'/etc/pair/..data'", "__import__('sys').argv[1]")
    container = {
        "command": [*python(code), "/etc/pair/..data"],
        "volumeMounts": [{"name": "pair", "mountPath": "/etc/pair"}],
    }
    cluster.kubectl.apply(config(1), namespace=namespace)
    volumes = [{"name": "pair", "configMap": {"name": "pair"}}]
    cluster.kubectl.apply(pod("reader", container, volumes=volumes), namespace=namespace)
    wait_until(lambda: "1 1" in logs_or_nothing(cluster, namespace, "reader"), "the first value is read")
    cluster.kubectl.apply(config(2), namespace=namespace)
    wait_until(lambda: "2 2" in logs_or_nothing(cluster, namespace, "reader"), "the second value is read")
    assert logs(cluster, namespace, "reader").splitlines() == ["1 1", "2 2"]


def logs_or_nothing(cluster: Cluster, namespace: str, name: str) -> str:
    return cluster.kubectl("logs", name, "-n", namespace, check=False)


def test_pod_waits_for_a_missing_config_map(cluster: Cluster, namespace: str) -> None:
    volumes = [{"name": "late", "configMap": {"name": "late"}}]
    container = {"command": ["cat", "/late/x"], "volumeMounts": [{"name": "late", "mountPath": "/late"}]}
    cluster.kubectl.apply(pod("early", container, volumes=volumes, restartPolicy="Never"), namespace=namespace)
    wait_until(lambda: messages(cluster, namespace, "FailedMount"), "the wait is reported")
    cluster.kubectl("create", "configmap", "late", "--from-literal=x=here", "-n", namespace)
    wait_for_phase(cluster, namespace, "early", "Succeeded")
    assert logs(cluster, namespace, "early") == "here"


def test_environment_comes_from_fields_and_objects(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("create", "configmap", "settings", "--from-literal=LEVEL=high", "-n", namespace)
    cluster.kubectl("create", "secret", "generic", "keys", "--from-literal=token=s3cret", "-n", namespace)
    container = {
        "command": ["sh", "-c", "env; echo arg=$0", "$(NAME)-$(UNKNOWN)-$$(NAME)"],
        "envFrom": [{"configMapRef": {"name": "settings"}, "prefix": "X_"}],
        "env": [
            {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "WHERE", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
            {"name": "GREETING", "value": "hello $(NAME)"},
            {"name": "NONE", "valueFrom": {"configMapKeyRef": {"name": "no", "key": "no", "optional": True}}},
        ],
    }
    cluster.kubectl.apply(pod("env", container, restartPolicy="Never"), namespace=namespace)
    found = wait_for_phase(cluster, namespace, "env", "Succeeded")
    lines = set(logs(cluster, namespace, "env").splitlines())
    assert {"X_LEVEL=high", "NAME=env", "TOKEN=s3cret", "GREETING=hello env", f"WHERE={found['podIP']}"} <= lines
    assert "arg=env-$(UNKNOWN)-$(NAME)" in lines
    assert not any(line.startswith("NONE=") for line in lines)


def test_in_cluster_clients_act_as_their_service_account(cluster: Cluster, namespace: str) -> None:
    code = (
        "from kubernetes import client, config\n"
        "try: config.load_incluster_config()\n"
        "except config.ConfigException: config.load_kube_config()\n"
        "review = client.AuthenticationV1Api().create_self_subject_review({})\n"
        "print(review.status.user_info.username)\n"
        "try: client.CoreV1Api().list_node()\n"
        "except client.ApiException as error: print(error.status)\n"
    )
    cluster.kubectl.apply(pod("who", {"command": ["python", "-c", code]}, restartPolicy="Never"), namespace=namespace)
    wait_for_phase(cluster, namespace, "who", "Succeeded")
    assert logs(cluster, namespace, "who").split() == [f"system:serviceaccount:{namespace}:default", "403"]


def test_termination_is_asked_for_before_it_is_forced(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    record = tmp_path / "record"
    code = (
        "import signal, sys, time\n"
        "def leave(*_): open(sys.argv[1], 'a').write('drained'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\nprint('up')\ntime.sleep(600)\n"
    )
    cluster.kubectl.apply(pod("polite", {"command": [*python(code), str(record)]}), namespace=namespace)
    wait_until(lambda: "up" in logs_or_nothing(cluster, namespace, "polite"), "the process is up")
    cluster.kubectl("delete", "pod", "polite", "-n", namespace)
    assert record.read_text() == "drained"
    assert cluster.kubectl.get("pod", "polite", namespace) is None


def test_deaf_process_is_killed_after_its_grace(cluster: Cluster, namespace: str) -> None:
    code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid()); time.sleep(600)"
    cluster.kubectl.apply(pod("deaf", {"command": python(code)}, terminationGracePeriodSeconds=1), namespace=namespace)
    wait_until(lambda: logs_or_nothing(cluster, namespace, "deaf").strip(), "the process is up")
    process = int(logs(cluster, namespace, "deaf"))
    cluster.kubectl("delete", "pod", "deaf", "-n", namespace, "--timeout=30s")
    assert not runs(process)


def runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_init_containers_go_first_and_block_when_they_fail(cluster: Cluster, namespace: str) -> None:
    shared: Object = {"volumeMounts": [{"name": "shared", "mountPath": "/shared"}], "image": "none"}
    good = pod(
        "prepared",
        {"command": ["cat", "/shared/made"], **shared},
        restartPolicy="Never",
        volumes=[{"name": "shared", "emptyDir": {}}],
        initContainers=[{"name": "make", "command": ["sh", "-c", "echo made > /shared/made"], **shared}],
    )
    bad = pod(
        "blocked",
        {"command": ["true"]},
        restartPolicy="Never",
        initContainers=[{"name": "fail", "image": "none", "command": ["false"]}],
    )
    cluster.kubectl.apply(good, bad, namespace=namespace)
    wait_for_phase(cluster, namespace, "prepared", "Succeeded")
    assert logs(cluster, namespace, "prepared") == "made\n"
    blocked = wait_for_phase(cluster, namespace, "blocked", "Failed")
    assert container_state(blocked)["state"] == {"waiting": {"reason": "PodInitializing"}}


def test_unsupported_pods_are_refused_by_name(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl.apply(pod("odd", {"args": ["only"]}), namespace=namespace)
    found = wait_until(
        lambda: status(cluster, namespace, "odd").get("containerStatuses") and status(cluster, namespace, "odd"),
        "the refusal is reported",
    )
    waiting = container_state(found)["state"]["waiting"]
    assert waiting["reason"] == "UnsupportedPod"
    assert "no command" in waiting["message"]
    assert wait_until(lambda: messages(cluster, namespace, "UnsupportedPod"), "an event says so")
    cluster.kubectl("delete", "pod", "odd", "-n", namespace, "--timeout=30s")


def test_fields_without_effect_are_named(cluster: Cluster, namespace: str) -> None:
    container = {"command": ["sleep", "600"], "resources": {"limits": {"memory": "1Gi"}}}
    cluster.kubectl.apply(pod("limited", container), namespace=namespace)
    found = wait_for_phase(cluster, namespace, "limited", "Running")
    ignored = next(item for item in found["conditions"] if item["type"] == "taktline.dev/ProcessNode")
    assert "containers.resources" in ignored["message"]


def test_processes_die_with_a_killed_node(cluster: Cluster, namespace: str) -> None:
    node = cluster.start_node("doomed-node")
    code = "import os, time; print(os.getpid()); time.sleep(600)"
    cluster.kubectl.apply(pod("orphan", {"command": python(code)}, node="doomed-node"), namespace=namespace)
    wait_until(lambda: logs_or_nothing(cluster, namespace, "orphan").strip(), "the process is up")
    process = int(logs(cluster, namespace, "orphan"))
    node.send(signal.SIGKILL)
    wait_until(lambda: node.exit_code() is not None and not runs(process), "node and process are gone")

    def marked() -> bool:
        found = cluster.kubectl.get("node", "doomed-node")
        assert found is not None
        return condition(found["status"], "Ready") == "Unknown"

    wait_until(marked, "the control plane notices")
    cluster.kubectl("delete", "node", "doomed-node")
    cluster.stop_node("doomed-node")


def test_idle_pod_causes_no_writes(cluster: Cluster, namespace: str) -> None:
    probe = {"exec": {"command": ["true"]}, "periodSeconds": 1}
    cluster.kubectl.apply(pod("idle", {"command": ["sleep", "600"], "readinessProbe": probe}), namespace=namespace)
    wait_until(lambda: condition(status(cluster, namespace, "idle"), "Ready") == "True", "the Pod is ready")
    before = cluster.kubectl.get("pod", "idle", namespace)
    time.sleep(3)  # three probe periods
    after = cluster.kubectl.get("pod", "idle", namespace)
    assert json.dumps(before) == json.dumps(after)
