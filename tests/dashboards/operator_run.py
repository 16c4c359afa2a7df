"""The operator of the incident run: its own process and account on a real API server, beside the run's gateway.

What a kubelet does is done here: pods of the policy get scripted workers with addresses of their own, the gateway's
process stands for its pod, and the routing table reaches it as a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config
from taktline_local.cluster import KUBECONFIG_VARIABLE, Cluster
from taktline_local.kubectl import wait_until
from taktline_local.programs import find_programs
from taktline_operator import naming

from benchmarks.operator.noisy_gateway import GATEWAY, SYSTEM, gateway_pod
from tests.cluster.operator.conftest import MANIFESTS, NODE, HandDrivenNode, OperatorProcess

from .factory import Factory
from .prometheus_run import free_port

Json = dict[str, Any]
NAMESPACE = "factory"
BUDGET_MS = 8000.0
GOOD, BAD = "a", "b"
ACTIONS = {GOOD: 0.0, BAD: 1.0}
"""Action of each revision's workers, in all dimensions at all times."""
ROLLOUT = {"strategy": "Progressive", "stepSeconds": 60, "shadow": {"percent": 100, "minObservations": 60}}
LIMIT_S = 120.0


def require_control_plane() -> None:
    """Skips, saying what is missing, or fails where the cluster's tests do."""
    if os.environ.get(KUBECONFIG_VARIABLE):
        pytest.skip("the incident is played on a control plane of its own")
    if find_programs() is None:
        required = os.environ.get("CI") == "true" or os.environ.get("TAKTLINE_REQUIRE_CLUSTER") == "1"
        (pytest.fail if required else pytest.skip)("no control plane is built here: run `make control-plane`")


class _Node(HandDrivenNode):
    """Pods of the policy are scripted workers on loopback addresses of their own; the gateway's is its process."""

    def __init__(self, api: client.CoreV1Api, factory: Factory) -> None:
        super().__init__(api)
        self._factory = factory
        # Workers listen on one port everywhere: another run has another network, and process nodes those below 128.
        self._network = f"127.{random.randint(128, 250)}.{random.randint(1, 250)}"
        self.behave = self._behave
        self.ran: set[str] = set()  # revisions

    def address(self, pod: Json) -> str:
        if pod["metadata"]["name"] == GATEWAY:
            return "127.0.0.1"
        return self._addresses.setdefault(pod["metadata"]["uid"], f"{self._network}.{len(self._addresses) + 1}")

    def _behave(self, pod: Json) -> Json:
        if pod["metadata"]["name"] == GATEWAY:
            return self.serving(pod)
        metadata = pod["metadata"]
        revision, policy = metadata["annotations"][naming.ANNOTATION_REVISION], metadata["labels"][naming.LABEL_POLICY]
        address = f"{self.address(pod)}:{naming.WORKER_PORT}"
        if metadata["name"] not in self._factory.addresses:
            self.ran.add(revision)
            self._factory.addresses[metadata["name"]] = address
            self._factory.worker(metadata["name"], policy, t_ms=50.0, revision=revision, action=ACTIONS[revision])
        return self.serving(pod) if _listens(address) else self.starting(pod)


def _listens(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, int(port))) == 0


class OperatorRun:
    """An operator for one policy; `roll_out_badly` and `revert` are what a person does."""

    def __init__(self, policy: str, factory: Factory, folder: Path) -> None:
        """Start everything; `ready` says when the policy is served."""
        self.address = f"127.0.0.1:{free_port()}"
        self._policy, self._factory, self._folder = policy, factory, folder
        self._stop = threading.Event()
        self._carrier = threading.Thread(target=self._carry_routes, daemon=True)
        folder.mkdir()
        with contextlib.ExitStack() as stack:
            self.cluster = stack.enter_context(Cluster.open(folder))
            self._install()
            self._api = client.CoreV1Api(config.new_client_from_config(str(self.cluster.kubeconfig)))
            self._node = _Node(self._api, factory)
            stack.enter_context(self._node)
            arguments = (f"--health-listen={self.address}", "--lease=taktline-operator")
            process = OperatorProcess(self._own_kubeconfig(), folder / "operator.log", *arguments)
            process.start()
            stack.callback(process.stop, kill=True)
            port = int(factory.gateway.rpartition(":")[2])
            self.cluster.kubectl.apply(gateway_pod(port, {"taktline-test": NODE}))
            self._carrier.start()
            stack.callback(self._carrier.join, 30)
            stack.callback(self._stop.set)
            self._apply(GOOD)
            self._stack = stack.pop_all()

    def ready(self) -> bool:
        """Whether the policy is served by way of the gateway, with nothing under way."""
        conditions = {found["type"]: found["status"] for found in self.status().get("conditions", [])}
        settled = (conditions.get("Available"), conditions.get("Progressing")) == ("True", "False")
        return settled and self._factory.policy(self._policy).get("workers", 0) == 1

    def status(self) -> Json:
        """The policy's status."""
        found = self.cluster.kubectl.get("pd", self._policy, NAMESPACE) or {}
        status: Json = found.get("status", {})
        return status

    def events(self) -> set[tuple[str, str]]:
        """Type and reason of the Events of the policy."""
        return {(found["type"], found["reason"]) for found in self.cluster.kubectl.list("events", NAMESPACE)}

    def revisions_served(self) -> set[str]:
        """Revisions of which a worker ran."""
        return self._node.ran

    def roll_out_badly(self) -> None:
        """A person applies a revision whose actions differ from those of the one that serves."""
        self._apply(BAD)

    def revert(self) -> None:
        """A person takes the change back."""
        self._apply(GOOD)

    def stop(self) -> None:
        """Ends everything."""
        self._stack.close()

    def _install(self) -> None:
        kubectl = self.cluster.kubectl
        for name in ("namespace", "policydeployments", "rbac"):
            kubectl("apply", "--server-side", "-f", str(MANIFESTS / f"{name}.yaml"))
        kubectl("create", "namespace", NAMESPACE)

        def known() -> bool:
            kubectl("get", "pd", "-A", check=False)
            return "PolicyDeployment" in kubectl("explain", "pd", check=False)

        wait_until(known, "kubectl explain knows pd", timeout_s=LIMIT_S)
        for namespace in (NAMESPACE, SYSTEM):
            wait_until(lambda place=namespace: kubectl.get("serviceaccount", "default", place), "an account for pods")

    def _own_kubeconfig(self) -> Path:
        """A kubeconfig with nothing but the operator's own account's token."""
        token = self.cluster.kubectl("-n", SYSTEM, "create", "token", "taktline-operator").strip()
        found = yaml.safe_load(self.cluster.kubeconfig.read_text())
        found["users"] = [{"name": user["name"], "user": {"token": token}} for user in found["users"]]
        path = self._folder / "operator-kubeconfig"
        path.write_text(yaml.safe_dump(found))
        return path

    def _apply(self, revision: str) -> None:
        spec = {
            "model": {"family": "pi05", "source": {"path": "/srv/policies/change"}, "revision": revision},
            "pools": [{"name": "line", "accelerator": "h100", "nodeSelector": {"taktline-test": NODE}}],
            "slo": {"controlBudgetMs": BUDGET_MS},
            "rollout": ROLLOUT,
        }
        about = {"name": self._policy, "namespace": NAMESPACE}
        kind = {"apiVersion": "taktline.dev/v1alpha1", "kind": "PolicyDeployment"}
        self.cluster.kubectl.apply(kind | {"metadata": about, "spec": spec})

    def _carry_routes(self) -> None:
        """The operator's routing table beside the run's own routes, as a mounted ConfigMap would bring it."""
        seen = ""
        while not self._stop.wait(0.3):
            with contextlib.suppress(client.ApiException):  # not written yet
                found = self._api.read_namespaced_config_map(naming.ROUTES_NAME, SYSTEM)
                text = (found.data or {}).get("routes.json", seen)
                if text != seen:
                    seen = text
                    self._factory.carry(json.loads(text).get("routes", []))
