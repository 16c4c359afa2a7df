"""The chart as people use it, on a cluster of its own: install, upgrade from an older CRD, test, serve, uninstall."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from taktline import Robot
from taktline_local.cluster import Cluster, missing_reason
from taktline_local.kubectl import Kubectl, wait_until
from taktline_protocol import TaktlineError

from tests.gateway.certificates import Authority
from tests.operator import test_operator_chart as chart
from tests.planner.conftest import make_folder, observe

SYSTEM = "taktline-system"
LIMIT_S = 300.0
Json = dict[str, Any]

VALUES = {
    "operator": {"nodeSelector": {"taktline.dev/pool": "cpu"}, "resources": {"requests": {"cpu": "50m"}}},
    "gateway": {
        "nodeSelector": {"taktline.dev/pool": "cpu"},
        "resources": {"requests": {"cpu": "50m"}},
        "workerTls": {"secret": "gateway-to-workers", "serverName": "worker.factory"},
        "clientPorts": [{"protocol": "openpi", "port": 8000, "policy": "planner"}],
    },
    "worker": {"tls": {"secret": "worker-tls", "clientAuth": True}},
}


class Release:
    """helm on one cluster and release."""

    def __init__(self, program: str, kubeconfig: Path, folder: Path) -> None:
        self._program, self._folder = program, folder
        homes = {f"HELM_{part}_HOME": str(folder / part) for part in ("CACHE", "CONFIG", "DATA")}
        self._environment = os.environ | homes | {"KUBECONFIG": str(kubeconfig)}

    def __call__(self, verb: str, *arguments: str, fails: bool = False) -> str:
        command = [self._program, verb, "taktline", *arguments, f"--namespace={SYSTEM}"]
        found = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=LIMIT_S)
        assert (found.returncode != 0) == fails, f"{' '.join(command)}\n{found.stdout}\n{found.stderr}"
        return found.stdout + found.stderr


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that has never heard of Taktline: what a chart installs cluster-wide is not shared with other tests."""
    reason = missing_reason()
    if reason or os.environ.get("TAKTLINE_KUBECONFIG"):
        pytest.skip(reason or "the chart's whole life is played on a control plane of its own")
    with Cluster.open(tmp_path_factory.mktemp("chart-cluster")) as opened:
        opened.start_node("process-node", labels={"taktline.dev/pool": "cpu"}, restart_base_s=0.5)
        yield opened


def older_chart(folder: Path) -> Path:
    """The chart as it was before pools had `spot`, a field that no rule of the CRD speaks of."""
    target = folder / "older"
    shutil.copytree(chart.CHART, target)
    path = target / "files" / "policydeployments.yaml"
    crd = yaml.safe_load(path.read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del spec["pools"]["items"]["properties"]["spot"]
    path.write_text(yaml.safe_dump(crd, width=1000))
    return target


def secret(kubectl: Kubectl, namespace: str, name: str, pair: tuple[Path, Path], ca: Path) -> None:
    certificate, key = pair
    files = (f"tls.crt={certificate}", f"tls.key={key}", f"ca.crt={ca}")
    kubectl("-n", namespace, "create", "secret", "generic", name, *(f"--from-file={file}" for file in files))


def pod_of(kubectl: Kubectl, component: str) -> Json | None:
    for pod in kubectl.list("pods", SYSTEM, f"app.kubernetes.io/name=taktline-{component}"):
        conditions = {found["type"]: found["status"] for found in pod["status"].get("conditions", [])}
        if conditions.get("Ready") == "True" and not pod["metadata"].get("deletionTimestamp"):
            return pod
    return None


@pytest.mark.timeout(900)  # a control plane, three helm revisions and a worker, on a machine that may be busy
def test_a_release_lives_through_install_upgrade_test_and_uninstall(own_cluster: Cluster, tmp_path: Path) -> None:
    program = chart.find_helm()
    if program is None:
        pytest.skip("there is no helm here: run tools/install-helm")
    kubectl = own_cluster.kubectl
    helm = Release(program, own_cluster.kubeconfig, tmp_path)
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(VALUES))
    authority = Authority(tmp_path, "factory")
    kubectl("create", "namespace", SYSTEM)
    secret(kubectl, SYSTEM, "gateway-to-workers", authority.issue("gateway", "gateway"), authority.ca)
    secret(kubectl, "default", "worker-tls", authority.issue("worker", "worker.factory"), authority.ca)

    # An older CRD: the operator says what it lacks and writes nothing, until an upgrade brings the new one.
    helm("install", str(older_chart(tmp_path)), "-f", str(values))
    text = wait_until(
        lambda: said if "the installed CRD" in (said := operator_log(own_cluster)) else None,
        "it says so",
        timeout_s=LIMIT_S,
    )
    assert "spec.pools[].spot" in text
    assert pod_of(kubectl, "operator") is None
    helm("upgrade", str(chart.CHART), "-f", str(values))
    wait_until(lambda: pod_of(kubectl, "operator"), "the operator is ready", timeout_s=LIMIT_S)

    # Served over mTLS between gateway and worker, by the command line that the chart gave both.
    folder = make_folder(tmp_path / "planner")
    policy = {
        "apiVersion": "taktline.dev/v1alpha1",
        "kind": "PolicyDeployment",
        "metadata": {"name": "planner", "namespace": "default"},
        "spec": {
            "model": {"family": "vjepa2-ac", "source": {"path": str(folder)}, "revision": "a"},
            "engine": {
                "precision": "fp32",
                "buckets": [1],
                "search": {"candidates": 64, "rounds": 2, "elites": 8, "microBatch": 16},
            },
            "pools": [
                {
                    "name": "cpu",
                    "accelerator": "cpu",
                    "nodeSelector": {"taktline.dev/pool": "cpu"},
                    "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
                }
            ],
            "slo": {"controlBudgetMs": 60_000},
        },
    }
    kubectl.apply(policy)
    wait_until(
        lambda: (kubectl.get("pd", "planner", "default") or {}).get("status", {}).get("readyReplicas") == 1,
        "the policy serves",
        timeout_s=LIMIT_S,
    )
    address = wait_until(lambda: (pod_of(kubectl, "gateway") or {}).get("status", {}).get("podIP"), "a gateway")
    chunk = wait_until(lambda: answer(f"http://{address}:8080"), "an answer", timeout_s=LIMIT_S)
    assert chunk.actions.shape[1] == 7

    # Service addresses have no endpoints here: helm test is told where the gateway is, as behind an ingress.
    helm("upgrade", str(chart.CHART), "-f", str(values), "--set", f"test.url=http://{address}:8080")
    helm("test", "--timeout=3m", "--logs")
    # And it can fail.
    helm("upgrade", str(chart.CHART), "-f", str(values), "--set", f"test.url=http://{address}:8080/nothing")
    helm("test", "--timeout=3m", fails=True)

    history = json.loads(helm("history", "-o", "json"))
    assert [entry["revision"] for entry in history] == [1, 2, 3, 4]
    ours = "app.kubernetes.io/instance=taktline"
    helm("uninstall", "--wait", "--timeout=3m")
    # The pod of the test that failed stays for reading, as helm leaves it; the next test replaces it.
    parts = f"{ours},app.kubernetes.io/component in (gateway,operator)"
    wait_until(lambda: not kubectl.list("pods", SYSTEM, parts), "its pods go", timeout_s=LIMIT_S)
    # PolicyDeployments and their workers live on, unattended.
    assert kubectl.get("pd", "planner", "default") is not None
    assert kubectl.list("pods", "default", "taktline.dev/policy=planner")
    assert not kubectl.list("clusterroles", None, ours)
    # Installed again, it takes up what is there.
    helm("install", str(chart.CHART), "-f", str(values))
    wait_until(lambda: pod_of(kubectl, "operator"), "the operator is back", timeout_s=LIMIT_S)
    # Policies first, as the pages say: the API server's garbage collector looks for new kinds only every half minute,
    # and keeps the children of a kind that came and went between two looks.
    kubectl("delete", "pd", "planner", "--wait=true", "--timeout=60s")
    wait_until(
        lambda: not kubectl.list("pods", "default", "taktline.dev/policy=planner"), "workers go", timeout_s=LIMIT_S
    )
    kubectl("delete", "crd", "policydeployments.taktline.dev", "--wait=true", "--timeout=60s")


def answer(url: str) -> Any:
    """A plan by way of the gateway, or None while it has no route yet."""
    good = observe()
    frames = {name: np.frombuffer(image.data, np.uint8).reshape(128, 128, 3) for name, image in good.images.items()}
    with Robot(url, "planner", "arm") as robot:
        try:
            return robot.act(frames, good.state, "reach the goal image", 60_000.0, seed=30)
        except TaktlineError:
            return None


def operator_log(cluster: Cluster) -> str:
    pods = cluster.kubectl.list("pods", SYSTEM, "app.kubernetes.io/name=taktline-operator")
    return "".join(
        cluster.kubectl("-n", SYSTEM, "logs", pod["metadata"]["name"], "--tail=50", check=False) for pod in pods
    )
