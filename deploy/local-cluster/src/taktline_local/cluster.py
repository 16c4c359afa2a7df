"""A cluster for tests and demos: the local control plane, or one that a kubeconfig names, with process nodes."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from taktline_protocol.errors import ErrorCode, TaktlineError

from taktline_local.child import Child, tail
from taktline_local.control_plane import ControlPlane
from taktline_local.kubectl import Kubectl, wait_until
from taktline_local.programs import build_programs, can_build, find_programs

KUBECONFIG_VARIABLE = "TAKTLINE_KUBECONFIG"
STOP_GRACE_S = 15.0


def missing_reason() -> str | None:
    """Why no cluster can be had here and what to install, in one line; None where one can."""
    if os.environ.get(KUBECONFIG_VARIABLE) or find_programs() is not None or can_build():
        return None
    return (
        "there is no Kubernetes API here: install Go 1.26 or newer (then `make control-plane` builds one), "
        f"or set {KUBECONFIG_VARIABLE} to the kubeconfig of a cluster that tests may use"
    )


class Cluster:
    """A running API with its kubectl, and process nodes on it.

    Attributes:
        kubectl: runs kubectl as administrator.
        log_folder: logs of everything that was started here.
        control_plane: the local one; None where a kubeconfig names another.
    """

    def __init__(self, kubectl: Kubectl, log_folder: Path, control_plane: ControlPlane | None) -> None:
        """Use `Cluster.open`."""
        self.kubectl = kubectl
        self.log_folder = log_folder
        self.control_plane = control_plane
        self._nodes: dict[str, Child] = {}

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.kubectl.kubeconfig

    @classmethod
    @contextlib.contextmanager
    def open(cls, log_folder: Path) -> Iterator[Cluster]:
        """Start or find the API, without nodes; everything started here ends with the context. Raises TaktlineError."""
        given = os.environ.get(KUBECONFIG_VARIABLE)
        with contextlib.ExitStack() as stack:
            if given:
                program = shutil.which("kubectl") or (found / "kubectl" if (found := find_programs()) else None)
                if program is None:
                    raise TaktlineError(
                        ErrorCode.CONFIG_INVALID,
                        f"{KUBECONFIG_VARIABLE} is set but there is no kubectl",
                        "install kubectl, or run `make control-plane`, which builds one",
                    )
                kubectl = Kubectl(Path(program), Path(given).resolve(), log_folder / "kubectl-cache")
                plane = None
            else:
                plane = stack.enter_context(ControlPlane(build_programs(), log_folder=log_folder))
                kubectl = plane.kubectl
            cluster = cls(kubectl, log_folder, plane)
            stack.callback(cluster._stop_nodes)
            yield cluster

    def start_node(
        self,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        capacity: Mapping[str, str] | None = None,
        restart_base_s: float = 1.0,
    ) -> Child:
        """Start one process node as a process of its own; returns when Pods can be bound to it."""
        plane = self.control_plane
        command = [sys.executable, "-m", "taktline_local", "node", f"--name={name}"]
        command += [f"--kubeconfig={plane.node_kubeconfig if plane else self.kubeconfig}"]
        command += [f"--restart-base-s={restart_base_s}", f"--log-folder={self.log_folder / 'pods'}"]
        if plane is not None:
            certificate, key = plane.node_tls
            command += [f"--serving-cert={certificate}", f"--serving-key={key}"]
            command += [f"--client-ca={plane.certificate_authority}"]
        command += [f"--label={key}={value}" for key, value in (labels or {}).items()]
        command += [f"--capacity={key}={value}" for key, value in (capacity or {}).items()]
        child = Child(command, log=self.log_folder / f"{name}.log")
        self._nodes[name] = child
        wait_until(lambda: self._is_ready(name, child), f"node {name} is ready")
        return child

    def stop_node(self, name: str) -> None:
        """End a node started here, with its Pods."""
        self._nodes.pop(name).stop_blocking(STOP_GRACE_S)

    def _stop_nodes(self) -> None:
        for name in list(self._nodes):
            self.stop_node(name)

    def _is_ready(self, name: str, child: Child) -> bool:
        if child.exit_code() is not None:
            raise TaktlineError(
                ErrorCode.INTERNAL,
                f"process node {name} ended while starting: {tail(child.log, max_lines=3)}",
                f"read {child.log}",
            )
        node = self.kubectl.get("node", name)
        if node is None:
            return False
        ready = any(
            item["type"] == "Ready" and item["status"] == "True" for item in node["status"].get("conditions", [])
        )
        # The controller manager takes a new node's taints away a moment after it reports ready.
        return ready and not node["spec"].get("taints")

    def create_namespace(self, prefix: str = "test") -> str:
        """A fresh namespace in which Pods can be made; returns its name."""
        name = f"{prefix}-{secrets.token_hex(3)}"
        self.kubectl("create", "namespace", name)
        wait_until(lambda: self.kubectl.get("serviceaccount", "default", name), f"{name} has a service account")
        return name
