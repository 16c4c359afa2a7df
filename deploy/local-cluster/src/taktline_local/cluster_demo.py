"""The cluster demo: kubectl applies a PolicyDeployment to a real control plane, robots use it, kubectl deletes it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from rich.console import Console
from taktline_protocol.errors import ErrorCode, TaktlineError

from taktline_local import DEVICE_NOTICE
from taktline_local.child import Child
from taktline_local.cluster import Cluster
from taktline_local.kubectl import Kubectl, wait_until
from taktline_local.node import default_search_path

Object = dict[str, Any]
Value = TypeVar("Value")

REPOSITORY = Path(__file__).resolve().parents[4]
MANIFESTS = REPOSITORY / "deploy" / "manifests"
SYSTEM_NAMESPACE = "taktline-system"
NAMESPACE = "default"
GATEWAY_SELECTOR = "app.kubernetes.io/name=taktline-gateway"
POLICY_LABEL = "taktline.dev/policy"
CHILD_KINDS = "deployments,replicasets,pods,services,configmaps,poddisruptionbudgets"
AVAILABLE_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class DemoOptions:
    """What the demo shows.

    Attributes:
        file: PolicyDeployment YAML with one policy.
        fleet: further arguments of the robots' process.
        log_folder: keeps all logs.
    """

    file: Path
    robots: int
    fleet: tuple[str, ...]
    log_folder: Path


class Narrator:
    """Prints each step with the time since the start, and each kubectl command with its answer."""

    def __init__(self) -> None:
        """The clock starts now."""
        self._console = Console(highlight=False, soft_wrap=True)
        self._began = time.monotonic()

    def step(self, text: str) -> None:
        """One line of the story."""
        self._console.print(f"[bold]\\[{time.monotonic() - self._began:5.1f} s][/bold] {text}")

    def kubectl(self, kubectl: Kubectl, *arguments: str, stdin: str | None = None, shown: str = "") -> None:
        """Run kubectl as a person would, and show it."""
        self._console.print(f"$ kubectl {shown or ' '.join(arguments)}", markup=False, style="cyan")
        answer = kubectl(*arguments, stdin=stdin).rstrip() or "No resources found"
        self._console.print(answer, markup=False)


def read_policy(file: Path) -> Object:
    """The file's PolicyDeployment with its model folder absolute, as a node needs it. Raises TaktlineError."""
    try:
        documents = [item for item in yaml.safe_load_all(file.read_text()) if item]
        policy = next(item for item in documents if item.get("kind") == "PolicyDeployment")
        source = policy["spec"]["model"]["source"]
    except (OSError, yaml.YAMLError, StopIteration, KeyError, TypeError, AttributeError) as error:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID, f"{file} holds no readable PolicyDeployment", "see deploy/examples"
        ) from error
    if "path" in source:
        source["path"] = str((file.parent / source["path"]).resolve())
    found: Object = policy
    return found


def run_demo(options: DemoOptions) -> int:
    """The whole story; returns the robots' exit code. Everything started here ends with it. Raises TaktlineError."""
    policy = read_policy(options.file)
    name = policy["metadata"]["name"]
    tell = Narrator()
    tell.step(f"starting etcd, kube-apiserver, kube-controller-manager, kube-scheduler; logs: {options.log_folder}")
    with Cluster.open(options.log_folder) as cluster:
        tell.step(f"starting one process node ({DEVICE_NOTICE})")
        node = cluster.start_node("process-node")
        kubectl = cluster.kubectl
        tell.kubectl(kubectl, "get", "nodes")
        tell.kubectl(
            kubectl, "apply", "--server-side", "-k", str(MANIFESTS), shown="apply --server-side -k deploy/manifests"
        )
        kubectl("wait", "--for=condition=Established", "crd/policydeployments.taktline.dev", "--timeout=60s")
        tell.kubectl(
            kubectl,
            "apply",
            "-n",
            NAMESPACE,
            "-f",
            "-",
            stdin=yaml.safe_dump(policy),
            shown=f"apply -f {options.file.name}",
        )
        tell.step("the operator plans, the worker loads and warms up, the gateway takes up the route")

        def awaited(look: Callable[[], Value | None], what: str) -> Value:
            return wait_until(
                look,
                what,
                timeout_s=AVAILABLE_TIMEOUT_S,
                why=lambda: unready(kubectl),
                next_step=f"read the logs in {options.log_folder}",
            )

        awaited(lambda: policy_is_available(kubectl, name, node), f"PolicyDeployment {name} is Available")
        address = awaited(lambda: gateway_address(kubectl), "the gateway is ready")
        tell.step("serving")
        tell.kubectl(kubectl, "get", "pd,deployments,pods", "-A", "-o", "wide")
        code = run_fleet(f"http://{address}:8080", name, options)
        tell.step(f"robots are done (exit code {code})")
        tell.kubectl(kubectl, "get", "pd", name)
        tell.kubectl(kubectl, "delete", "pd", name)
        wait_until(lambda: not kubectl.list(CHILD_KINDS, selector=f"{POLICY_LABEL}={name}"), "all its objects are gone")
        tell.kubectl(kubectl, "get", CHILD_KINDS, "-A", "-l", f"{POLICY_LABEL}={name}")
        tell.step("nothing of it is left; stopping the control plane")
    tell.step("stopped")
    return code


def policy_is_available(kubectl: Kubectl, name: str, node: Child) -> bool:
    """Whether the policy serves; raises TaktlineError as soon as it is clear that it will not."""
    if node.exit_code() is not None:
        raise TaktlineError(ErrorCode.INTERNAL, "the process node ended", f"read {node.log}")
    policy = kubectl.get("pd", name, NAMESPACE)
    conditions = {item["type"]: item for item in (policy or {}).get("status", {}).get("conditions", [])}
    for kind, bad in (("Accepted", "False"), ("Degraded", "True")):
        if conditions.get(kind, {}).get("status") == bad:
            found = conditions[kind]
            raise TaktlineError(
                ErrorCode.WORKER_FAILED, f"{kind}={bad} {found['reason']}: {found['message']}", "see deploy/examples"
            )
    return bool(conditions.get("Available", {}).get("status") == "True")


def gateway_address(kubectl: Kubectl) -> str | None:
    """IP of a ready gateway Pod."""
    for pod in kubectl.list("pods", SYSTEM_NAMESPACE, GATEWAY_SELECTOR):
        if is_ready(pod) and not pod["metadata"].get("deletionTimestamp"):
            return str(pod["status"]["podIP"])
    return None


def is_ready(pod: Object) -> bool:
    """Whether a Pod has said that it is ready."""
    told = pod["status"].get("conditions", [])
    return any(item["type"] == "Ready" and item["status"] == "True" for item in told)


def unready(kubectl: Kubectl) -> str:
    """Pods of the demo that are not ready, each with the last warning about it."""
    found = []
    for namespace in (SYSTEM_NAMESPACE, NAMESPACE):
        last = {}
        for event in sorted(kubectl.list("events", namespace), key=lambda event: event.get("lastTimestamp") or ""):
            if event.get("type") == "Warning":
                last[event["involvedObject"].get("name")] = event.get("message", "")
        names = [pod["metadata"]["name"] for pod in kubectl.list("pods", namespace) if not is_ready(pod)]
        found += [f"{name} is not ready" + (f" ({last[name]})" if name in last else "") for name in sorted(names)]
    return "; ".join(found)


def run_fleet(url: str, policy: str, options: DemoOptions) -> int:
    """The robots, drawing their progress on this terminal."""
    command = ["taktline-demo", "fleet", "--url", url, "--policy", policy, "--robots", str(options.robots)]
    sys.stdout.flush()
    fleet = Child([*command, *options.fleet], log=None, env={**os.environ, "PATH": default_search_path()})
    try:
        while (code := fleet.exit_code()) is None:
            time.sleep(0.1)
    except BaseException:
        fleet.send(signal.SIGINT)
        fleet.stop_blocking(5.0)
        raise
    return code
