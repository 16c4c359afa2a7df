"""Controllers of other products as local processes on a local control plane, with their own kinds and webhooks."""

from __future__ import annotations

import base64
import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from taktline_local.child import Child
from taktline_local.kubectl import Kubectl, wait_until
from taktline_local.network import free_port
from taktline_local.pki import Authority

Object = dict[str, Any]
STOP_GRACE_S = 10.0
HOST = "127.0.0.1"


class Controller:
    """One controller with its manifests installed; use it as a context manager. It acts as the administrator.

    Attributes:
        name: of the program.
        log: what it writes.
    """

    def __init__(
        self, name: str, programs: Path, kubectl: Kubectl, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Prepare.

        Args:
            programs: folder with the controllers and their manifests, from `find_controllers`.
            folder: takes its log and credentials.
            environment: further variables of its process.
        """
        self.name = name
        self._environment = dict(environment or {})
        self.log = folder / f"{name}.log"
        self._program = programs / name
        self._manifests = programs / f"{name}-manifests"
        self._kubectl = kubectl
        self._folder = folder
        self._installed: list[str] = []
        self._child: Child | None = None

    def __enter__(self) -> Controller:
        """Install what it brings, start it, and wait until it answers. Raises TaktlineError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._webhook_port, self._health_port = free_port(), free_port()
        try:
            self._install(self._definitions())
            command, wanted = STARTS[self.name](self)
            environment = {**os.environ, **self._environment, "KUBECONFIG": str(self._kubectl.kubeconfig)}
            self._child = Child([str(self._program), *command], log=self.log, env=environment)
            wait_until(lambda: all(self._listens(port) for port in wanted), f"{self.name} listens (see {self.log})")
            # Not before: until somebody answers them, webhooks that fail closed stop every pod.
            self._install(self._webhooks())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it and take away what it brought, webhooks first."""
        hooks = [name for name in self._installed if "webhookconfigurations" in name]
        if hooks:
            self._kubectl("delete", *hooks, "--ignore-not-found", "--timeout=60s")
        kinds = [name for name in self._installed if name not in hooks]
        if kinds:
            self._kubectl("delete", *kinds, "--ignore-not-found", "--wait=true", "--timeout=120s")
        if self._child is not None:
            self._child.stop_blocking(STOP_GRACE_S)

    def _listens(self, port: int) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex((HOST, port)) == 0

    def _documents(self) -> list[Object]:
        files = sorted(self._manifests.glob("*.yaml"))
        return [found for file in files for found in yaml.safe_load_all(file.read_text()) if found]

    def _definitions(self) -> list[Object]:
        return [found for found in self._documents() if found["kind"] == "CustomResourceDefinition"]

    def _webhooks(self) -> list[Object]:
        """Its webhook configurations, which name this process in place of a Service."""
        found = [one for one in self._documents() if one["kind"].endswith("WebhookConfiguration")]
        for one in found:
            one["metadata"]["name"] = f"{self.name}-{one['metadata']['name']}"
            for hook in one["webhooks"]:
                path = hook["clientConfig"]["service"]["path"]
                bundle = base64.b64encode(self._authority.certificate.read_bytes()).decode()
                hook["clientConfig"] = {"url": f"https://{HOST}:{self._webhook_port}{path}", "caBundle": bundle}
        return found

    def _install(self, objects: list[Object]) -> None:
        for one in objects:
            plural = f"{one['kind'].lower()}s.{one['apiVersion'].partition('/')[0]}"
            # Server-side: the largest would not fit into the annotation that a client-side apply leaves.
            self._kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(one))
            self._installed.append(f"{plural}/{one['metadata']['name']}")
            if one["kind"] == "CustomResourceDefinition":
                self._published(f"{one['spec']['names']['plural']}.{one['spec']['group']}")

    def _published(self, kind: str) -> None:
        """Waits until the API server knows a kind, which it does a moment after its definition is established."""
        wait_until(
            lambda: kind in self._kubectl("api-resources", "--output=name", check=False).split(), f"{kind} is published"
        )

    def _certificates(self) -> Path:
        """A folder with tls.crt and tls.key for its webhooks, of an authority of its own."""
        folder = self._folder / f"{self.name}-pki"
        folder.mkdir(mode=0o700)
        self._authority = Authority(folder)
        certificate, key = self._authority.issue("webhook", addresses=[HOST])
        certificate.rename(folder / "tls.crt")
        key.rename(folder / "tls.key")
        return folder

    def _configuration(self, body: Object) -> Path:
        path = self._folder / f"{self.name}.yaml"
        path.write_text(yaml.safe_dump(body))
        return path

    def start_lws(self) -> tuple[list[str], list[int]]:
        """Arguments of LeaderWorkerSet's controller, and the ports it will listen on."""
        body = {
            "apiVersion": "config.lws.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "webhook": {"host": HOST, "port": self._webhook_port, "certDir": str(self._certificates())},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": f"{HOST}:{self._health_port}"},
        }
        arguments = [f"--config={self._configuration(body)}", "--zap-log-level=info"]
        return arguments, [self._health_port, self._webhook_port]

    def start_kuberay(self) -> tuple[list[str], list[int]]:
        """Arguments of KubeRay's operator, and the ports it will listen on."""
        arguments = [
            "--metrics-addr=0",
            f"--health-probe-bind-address={HOST}:{self._health_port}",
            "--enable-leader-election=false",
        ]
        return arguments, [self._health_port]


STARTS: dict[str, Callable[[Controller], tuple[list[str], list[int]]]] = {
    "lws": Controller.start_lws,
    "kuberay": Controller.start_kuberay,
}
