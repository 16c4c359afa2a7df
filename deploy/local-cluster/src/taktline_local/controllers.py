"""Controllers of other products as local processes on a local control plane, with their own kinds and webhooks."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import yaml

from taktline_local.child import Child
from taktline_local.kubectl import Kubectl, wait_until
from taktline_local.network import free_port
from taktline_local.pki import Authority

Object = dict[str, Any]
STOP_GRACE_S = 10.0
HOST = "127.0.0.1"
# KubeRay's kinds are 4 MB of YAML: half a minute in Python, a second in C, which some builds of PyYAML are without.
_LOADER: type[yaml.SafeLoader | yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Controller(ABC):
    """One controller with its manifests installed; use it as a context manager. It acts as the administrator.

    Attributes:
        name: of the program and of its manifests.
        log: what it writes.
    """

    name: ClassVar[str]

    def __init__(
        self, programs: Path, kubectl: Kubectl, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Prepare.

        Args:
            programs: folder with the controller and its manifests, from `find_controllers`.
            folder: takes its log and credentials.
            environment: further variables of its process.
        """
        self.kubectl, self.folder = kubectl, folder
        self.log = folder / f"{self.name}.log"
        self._environment = dict(environment or {})
        self._programs = programs
        self._installed: list[str] = []
        self._children: list[Child] = []

    def __enter__(self) -> Controller:
        """Install what it brings, start it, and wait until it answers. Raises TaktlineError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.webhook_port, self.health_port = free_port(), free_port()
        try:
            self.install(self.before())
            ports = self.start()
            wait_until(lambda: all(_listens(port) for port in ports), f"{self.name} listens (see {self.log})")
            # Not before: until somebody answers them, webhooks that fail closed stop every pod.
            self.install(self.after())
            self.settle()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it and take away what it brought, webhooks first.

        Each is tried whatever became of the others: a webhook that is left stops every pod, a process outlives us.
        """
        hooks = [name for name in self._installed if "webhookconfigurations" in name or "apiservices" in name]
        kinds = [name for name in self._installed if name not in hooks]
        with contextlib.ExitStack() as last:  # from the last to the first; the last error is raised, the others with it
            for child in self._children:
                last.callback(child.stop_blocking, STOP_GRACE_S)
            if kinds:
                last.callback(self.kubectl, "delete", *kinds, "--ignore-not-found", "--wait=true", "--timeout=120s")
            if hooks:
                last.callback(self.kubectl, "delete", *hooks, "--ignore-not-found", "--timeout=60s")

    def before(self) -> list[Object]:
        """What must be there before it starts: its kinds."""
        return [found for found in self.documents() if found["kind"] == "CustomResourceDefinition"]

    @abstractmethod
    def start(self) -> list[int]:
        """Start its processes with `run`; returns the ports that will listen."""

    def after(self) -> list[Object]:
        """Its webhook configurations, which name this process in place of a Service."""
        found = [one for one in self.documents() if one["kind"].endswith("WebhookConfiguration")]
        for one in found:
            one["metadata"]["name"] = f"{self.name}-{one['metadata']['name']}"
            for hook in one["webhooks"]:
                path = hook["clientConfig"]["service"]["path"]
                bundle = base64.b64encode(self.authority.certificate.read_bytes()).decode()
                hook["clientConfig"] = {"url": f"https://{HOST}:{self.webhook_port}{path}", "caBundle": bundle}
        return found

    def settle(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Wait for what it does of its own before it is of use."""

    def run(self, program: str, *arguments: str) -> None:
        """Start one of its programs."""
        environment = {**os.environ, **self._environment, "KUBECONFIG": str(self.kubectl.kubeconfig)}
        log = self.folder / f"{program}.log"
        self._children.append(Child([str(self._programs / program), *arguments], log=log, env=environment))

    def documents(self) -> list[Object]:
        """The objects of its manifests."""
        files = sorted((self._programs / f"{self.name}-manifests").glob("*.yaml"))
        return [found for file in files for found in yaml.load_all(file.read_text(), _LOADER) if found]

    def install(self, objects: list[Object]) -> None:
        """Apply these; `__exit__` takes away those without a namespace, and with a namespace all that is in it."""
        for one in objects:
            # Server-side: the largest would not fit into the annotation that a client-side apply leaves.
            self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(one))
            if "namespace" not in one["metadata"]:
                self._installed.append(f"{_plural(one)}/{one['metadata']['name']}")
            if one["kind"] == "CustomResourceDefinition":
                self._published(f"{one['spec']['names']['plural']}.{one['spec']['group']}")

    def _published(self, kind: str) -> None:
        """Waits until the API server knows a kind, which it does a moment after its definition is established."""
        wait_until(
            lambda: kind in self.kubectl("api-resources", "--output=name", check=False).split(), f"{kind} is published"
        )

    def certificates(self, *hosts: str) -> Path:
        """A folder with ca.crt, tls.crt and tls.key for its servers, of an authority of its own."""
        folder = self.folder / f"{self.name}-pki"
        folder.mkdir(mode=0o700)
        self.authority = Authority(folder)
        certificate, key = self.authority.issue("server", hosts=hosts, addresses=[HOST])
        certificate.rename(folder / "tls.crt")
        key.rename(folder / "tls.key")
        return folder

    def configuration(self, body: Object) -> Path:
        """A file with its configuration."""
        path = self.folder / f"{self.name}.yaml"
        path.write_text(yaml.safe_dump(body))
        return path


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def _plural(one: Object) -> str:
    """A kind as `kubectl delete` takes it; those without a group have none to name."""
    group, slash, _ = one["apiVersion"].partition("/")
    return f"{one['kind'].lower()}s.{group}" if slash else f"{one['kind'].lower()}s"


def local_service(namespace: str, name: str) -> list[Object]:
    """A Service that leads the API server to this machine, and its namespace: no endpoint may be on loopback."""
    about = {"namespace": namespace, "name": name}
    spec = {"type": "ExternalName", "externalName": "localhost"}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": spec},
    ]


class LeaderWorkerSets(Controller):
    """LeaderWorkerSet's controller and webhooks."""

    name = "lws"

    def start(self) -> list[int]:
        """Webhooks and health."""
        body = {
            "apiVersion": "config.lws.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "webhook": {"host": HOST, "port": self.webhook_port, "certDir": str(self.certificates())},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": f"{HOST}:{self.health_port}"},
        }
        self.run(self.name, f"--config={self.configuration(body)}", "--zap-log-level=info")
        return [self.health_port, self.webhook_port]


class KubeRay(Controller):
    """KubeRay's operator; its manifests hold no webhooks."""

    name = "kuberay"

    def start(self) -> list[int]:
        """Health only."""
        self.run(
            self.name,
            "--metrics-addr=0",
            f"--health-probe-bind-address={HOST}:{self.health_port}",
            "--enable-leader-election=false",
        )
        return [self.health_port]
