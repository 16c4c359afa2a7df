"""The operator as a process with its own service account's token, and a node whose kubelet is the test itself."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config
from taktline_local.cluster import Cluster
from taktline_local.kubectl import Kubectl, wait_until
from taktline_protocol.errors import TaktlineError

ROOT = Path(__file__).resolve().parents[3]
MANIFESTS = ROOT / "deploy" / "manifests"
NODE = "hand-driven"
Json = dict[str, Any]


class HandDrivenNode:
    """A Node without machine: pods bound to it get the status that the test decides.

    `behave` is called with each live pod and returns its status; pods being deleted are taken away at once.
    """

    def __init__(self, api: client.CoreV1Api) -> None:
        self._api = api
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._addresses: dict[str, str] = {}
        self._since: dict[tuple[str, bool], str] = {}
        self.behave: Callable[[Json], Json] = self.serving

    def address(self, pod: Json) -> str:
        """The pod's address: one of a documentation network, the same as long as the pod lives."""
        return self._addresses.setdefault(pod["metadata"]["uid"], f"192.0.2.{len(self._addresses) % 250 + 1}")

    def serving(self, pod: Json) -> Json:
        """A pod whose worker is ready."""
        return self._status(pod, ready=True, container={"state": {"running": {}}, "restartCount": 0})

    def starting(self, pod: Json) -> Json:
        """A pod whose worker loads."""
        return self._status(pod, ready=False, container={"state": {"running": {}}, "restartCount": 0})

    def refusing(self, pod: Json) -> Json:
        """A pod whose worker refuses its checkpoint, over and over."""
        words = '{"level": "error"}\ntaktline-worker: checkpoint_invalid: no statistics file (name one)\n'
        ended = {"exitCode": 2, "reason": "Error", "message": words}
        waiting = {"reason": "CrashLoopBackOff", "message": "back-off"}
        container = {"state": {"waiting": waiting}, "lastState": {"terminated": ended}, "restartCount": 3}
        return self._status(pod, ready=False, container=container)

    def _status(self, pod: Json, *, ready: bool, container: Json) -> Json:
        # Deployments count a pod as available from this instant on, minReadySeconds later.
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        since = self._since.setdefault((pod["metadata"]["uid"], ready), now)
        condition = {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": since}
        fixed = {"name": "worker", "image": "x", "imageID": "", "ready": ready, "started": ready}
        address = self.address(pod)
        return {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [condition, condition | {"type": "ContainersReady"}],
            "containerStatuses": [fixed | container],
        }

    def __enter__(self) -> HandDrivenNode:
        labels = {"taktline-test": NODE}
        self._api.create_node({"metadata": {"name": NODE, "labels": labels}})
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._api.delete_node(NODE)

    def _beat(self) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "", "lastHeartbeatTime": now}
        capacity = {"cpu": "64", "memory": "256Gi", "pods": "250", "nvidia.com/gpu": "8"}
        body = {"status": {"conditions": [ready], "capacity": capacity, "allocatable": capacity}}
        self._api.patch_node_status(NODE, body)
        self._api.patch_node(NODE, {"spec": {"taints": []}})

    def _run(self) -> None:
        reported: dict[str, str] = {}
        beat = time.monotonic()
        while not self._stop.wait(0.1):
            if time.monotonic() - beat > 5:
                with contextlib.suppress(client.ApiException):
                    self._beat()
                beat = time.monotonic()
            reply = self._api.list_pod_for_all_namespaces(
                field_selector=f"spec.nodeName={NODE}", _preload_content=False
            )
            for pod in json.loads(reply.data)["items"]:
                metadata = pod["metadata"]
                name, namespace = metadata["name"], metadata["namespace"]
                with contextlib.suppress(client.ApiException):  # gone meanwhile
                    if metadata.get("deletionTimestamp"):
                        self._api.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
                        continue
                    status = self.behave(pod)
                    text = json.dumps(status)
                    # The node controller marks pods not ready when heartbeats are late on a busy machine: say it again.
                    live = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
                    told = live.get("Ready") == status["conditions"][0]["status"]
                    if reported.get(metadata["uid"]) != text or not told:
                        self._api.patch_namespaced_pod_status(name, namespace, {"status": status})
                        reported[metadata["uid"]] = text


class OperatorProcess:
    """`taktline-operator run` as a process."""

    def __init__(self, kubeconfig: Path, log: Path, *arguments: str) -> None:
        self._kubeconfig = kubeconfig
        self._arguments = arguments
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, again after a stop."""
        command = [sys.executable, "-m", "taktline_operator.cli", "run", f"--kubeconfig={self._kubeconfig}"]
        with self.log.open("ab") as stream:
            self._process = subprocess.Popen(
                [*command, "--health-listen=127.0.0.1:0", *self._arguments], stderr=stream, stdout=stream
            )

    def stop(self, *, kill: bool = False) -> int:
        """End it by SIGTERM, or SIGKILL; returns the exit status."""
        assert self._process is not None
        (self._process.kill if kill else self._process.terminate)()
        return self._process.wait(timeout=30)

    def lines(self) -> list[Json]:
        """Its log so far, without a line that is being written."""
        return [json.loads(line) for line in self.log.read_text().split("\n")[:-1]]


@pytest.fixture(scope="session")
def kubectl(control_plane: Cluster) -> Kubectl:
    """kubectl as administrator."""
    return control_plane.kubectl


@pytest.fixture(scope="session")
def core_api(control_plane: Cluster) -> client.CoreV1Api:
    """The core API as administrator."""
    return client.CoreV1Api(config.new_client_from_config(str(control_plane.kubeconfig)))


@pytest.fixture(scope="session")
def installed(kubectl: Kubectl) -> None:
    """Namespace, CRD and rights from the manifests; no operator and no gateway."""
    for name in ("namespace", "policydeployments", "rbac"):
        kubectl("apply", "--server-side", "-f", str(MANIFESTS / f"{name}.yaml"))
    # Not `kubectl wait`: it fails on a definition that has no conditions yet. The API server publishes a new kind a
    # moment after it is established, and kubectl remembers what it saw before: a `get` makes it look again.

    def known() -> bool:
        kubectl("get", "pd", "-A", check=False)
        return "PolicyDeployment" in kubectl("explain", "pd", check=False)

    wait_until(known, "kubectl explain knows pd")


@pytest.fixture(scope="session")
def operator_kubeconfig(kubectl: Kubectl, installed: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kubeconfig with nothing but the operator's own service account's token."""
    token = kubectl("-n", "taktline-system", "create", "token", "taktline-operator").strip()
    found = yaml.safe_load(kubectl.kubeconfig.read_text())
    found["users"] = [{"name": user["name"], "user": {"token": token}} for user in found["users"]]
    path = tmp_path_factory.mktemp("operator") / "kubeconfig"
    path.write_text(yaml.safe_dump(found))
    return path


@pytest.fixture
def start_operator(operator_kubeconfig: Path, tmp_path: Path) -> Iterator[Callable[..., OperatorProcess]]:
    """Start more operators, each with a name of its own and further arguments; they end with the test."""
    started: list[OperatorProcess] = []

    def start(name: str, *arguments: str) -> OperatorProcess:
        started.append(OperatorProcess(operator_kubeconfig, tmp_path / f"{name}.log", *arguments))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        process.stop(kill=True)


@pytest.fixture(scope="module")
def running_operator(operator_kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """The operator, for all namespaces."""
    process = OperatorProcess(operator_kubeconfig, tmp_path_factory.mktemp("operator-log") / "operator.log")
    process.start()
    yield process
    process.stop()


@pytest.fixture(scope="session")
def _node(core_api: client.CoreV1Api, installed: None) -> Iterator[HandDrivenNode]:
    with HandDrivenNode(core_api) as found:
        yield found


@pytest.fixture
def node(_node: HandDrivenNode) -> Iterator[HandDrivenNode]:
    """The hand-driven node, on which workers serve until a test says otherwise."""
    _node.behave = _node.serving
    yield _node
    _node.behave = _node.serving


class Policies:
    """PolicyDeployments of one namespace, seen through kubectl."""

    def __init__(self, kubectl: Kubectl, namespace: str) -> None:
        self.kubectl = kubectl
        self.namespace = namespace

    def body(self, name: str, **parts: Any) -> Json:
        """A PolicyDeployment whose workers run on the hand-driven node."""
        pool = {"name": "line", "accelerator": "h100", "nodeSelector": {"taktline-test": NODE}}
        return {
            "apiVersion": "taktline.dev/v1alpha1",
            "kind": "PolicyDeployment",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "model": {"family": "pi05", "source": {"path": "/srv/policies/reach"}, "revision": "a"},
                "pools": [pool],
                "slo": {"controlBudgetMs": 100},
                **parts,
            },
        }

    def get(self, name: str) -> Json | None:
        """The live object."""
        return self.kubectl.get("pd", name, self.namespace)

    def wait(self, name: str, condition: str, status: str, reason: str | None = None) -> Json:
        """Wait until a condition of the current generation has a status (and reason); returns the condition."""

        def look() -> Json | None:
            live = self.get(name) or {}
            for found in live.get("status", {}).get("conditions", []):
                current = found["observedGeneration"] == live["metadata"]["generation"]
                if current and found["type"] == condition and found["status"] == status:
                    return found if reason in (None, found["reason"]) else None
            return None

        try:
            return wait_until(look, f"{name} has {condition}={status} {reason or ''}")
        except TaktlineError as error:
            live = self.get(name) or {}
            pods = [(pod["metadata"]["name"], pod["status"]) for pod in self.children(name) if pod["kind"] == "Pod"]
            raise AssertionError(f"{error}; status: {live.get('status')}; pods: {pods}") from error

    def routes(self) -> dict[str, list[str]]:
        """Addresses by policy in the routing table."""
        found = self.kubectl.get("configmap", "taktline-routes", "taktline-system") or {}
        table = json.loads(found.get("data", {}).get("routes.json", "{}"))
        return {
            route["policy"]: [target["address"] for target in route.get("targets", [])]
            for route in table.get("routes", [])
        }

    def children(self, name: str) -> list[Json]:
        """Every object of a policy."""
        kinds = "deployments,replicasets,pods,services,configmaps,poddisruptionbudgets"
        return self.kubectl.list(kinds, self.namespace, f"taktline.dev/policy={name}")


@pytest.fixture
def policies(kubectl: Kubectl, namespace: str, installed: None) -> Policies:
    """PolicyDeployments of a fresh namespace."""
    return Policies(kubectl, namespace)
