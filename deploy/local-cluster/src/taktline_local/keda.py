"""KEDA as local processes on a local control plane: its operator, and its adapter behind external.metrics.k8s.io."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

from taktline_local.controllers import HOST, Controller, Object, local_service
from taktline_local.kubectl import Kubectl, wait_until
from taktline_local.network import free_port

NAMESPACE, SERVICE = "keda", "keda-metrics-apiserver"


class Keda(Controller):
    """KEDA's operator and its metrics adapter, to which the API server passes requests for external metrics on."""

    name = "keda"

    def __init__(
        self, programs: Path, kubectl: Kubectl, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Prepare, as `Controller` says."""
        own = {"WATCH_NAMESPACE": "", "POD_NAMESPACE": NAMESPACE, "KEDA_CLUSTER_OBJECT_NAMESPACE": NAMESPACE}
        super().__init__(programs, kubectl, folder, own | dict(environment or {}))

    def before(self) -> list[Object]:
        """Its kinds, and the Service that leads to the adapter."""
        return [*local_service(NAMESPACE, SERVICE), *super().before()]

    def start(self) -> list[int]:
        """The adapter, and the operator's own service that the adapter asks."""
        folder = self.certificates("localhost", f"{SERVICE}.{NAMESPACE}.svc")
        self._adapter_port, metrics = free_port(), free_port()
        kubeconfig = self.kubectl.kubeconfig
        self.run(
            "keda",
            "--enable-prometheus-metrics=false",
            f"--health-probe-bind-address={HOST}:{self.health_port}",
            f"--metrics-service-bind-address={HOST}:{metrics}",
            f"--cert-dir={folder}",
        )
        self.run(
            "keda-adapter",
            f"--secure-port={self._adapter_port}",
            f"--bind-address={HOST}",
            f"--port={free_port()}",
            f"--metrics-service-address=localhost:{metrics}",
            f"--cert-dir={folder}",
            f"--tls-cert-file={folder / 'tls.crt'}",
            f"--tls-private-key-file={folder / 'tls.key'}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            f"--lister-kubeconfig={kubeconfig}",
        )
        return [self.health_port, metrics, self._adapter_port]

    def after(self) -> list[Object]:
        """The API that the adapter serves."""
        found = [one for one in self.documents() if one["kind"] == "APIService"]
        for one in found:
            one["spec"]["service"] |= {"namespace": NAMESPACE, "name": SERVICE, "port": self._adapter_port}
            one["spec"]["caBundle"] = base64.b64encode(self.authority.certificate.read_bytes()).decode()
        return found

    def settle(self) -> None:
        """Until the API server reaches the adapter."""

        def served() -> bool:
            found = self.kubectl.get("apiservice", "v1beta1.external.metrics.k8s.io") or {}
            conditions = found.get("status", {}).get("conditions", [])
            return any(one["type"] == "Available" and one["status"] == "True" for one in conditions)

        wait_until(served, f"external metrics are served (see {self.log})")
