"""Kueue as a local process on a local control plane: its kinds, webhooks and conversions, with its own certificates."""

from __future__ import annotations

import base64
from pathlib import Path

from taktline_local.controllers import HOST, Controller, Object, local_service
from taktline_local.kubectl import wait_until
from taktline_local.pki import write_private

NAMESPACE, SERVICE, SECRET = "kueue-system", "kueue-webhook-service", "kueue-webhook-server-cert"
CONVERTED = ("localqueues", "clusterqueues", "workloads", "cohorts", "multikueueclusters")
FRAMEWORKS = (
    "pod",
    "deployment",
    "statefulset",
    "leaderworkerset.x-k8s.io/leaderworkerset",
    "ray.io/raycluster",
    "ray.io/rayservice",
)


class Kueue(Controller):
    """Kueue's controllers and webhooks.

    It makes its own certificates, puts them into a Secret and into what calls it, and waits until the Secret's files
    are where a kubelet would mount them: here this class puts them there.
    """

    name = "kueue"

    def before(self) -> list[Object]:
        """Its kinds, which it converts itself, and a Service and a Secret for its certificates."""
        kinds = super().before()
        for kind in kinds:
            if kind["spec"]["names"]["plural"] in CONVERTED:
                webhook = {"clientConfig": self._client("/convert"), "conversionReviewVersions": ["v1"]}
                kind["spec"]["conversion"] = {"strategy": "Webhook", "webhook": webhook}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"namespace": NAMESPACE, "name": SECRET}}
        return [*local_service(NAMESPACE, SERVICE), secret, *kinds]

    def start(self) -> list[int]:
        """Webhooks, which it serves once its certificates are there."""
        mounted = self.folder / "kueue-pki"
        mounted.mkdir(mode=0o700)
        body = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": NAMESPACE,
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": True, "webhookServiceName": SERVICE, "webhookSecretName": SECRET},
            "webhook": {"host": HOST, "port": self.webhook_port, "certDir": str(mounted)},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": f"{HOST}:{self.health_port}"},
            "featureGates": {"VisibilityOnDemand": False},
            "integrations": {"frameworks": list(FRAMEWORKS)},
        }
        self.run(self.name, f"--config={self.configuration(body)}", "--zap-log-level=info")
        self._mount(mounted)
        return [self.webhook_port]

    def after(self) -> list[Object]:
        """Its webhook configurations; it writes the authority into them itself."""
        found = [one for one in self.documents() if one["kind"].endswith("WebhookConfiguration")]
        for one in found:
            one["metadata"]["name"] = f"{self.name}-{one['metadata']['name']}"
            for hook in one["webhooks"]:
                hook["clientConfig"] = self._client(hook["clientConfig"]["service"]["path"])
        return found

    def settle(self) -> None:
        """Until whoever calls it trusts it."""
        hooks = ("mutatingwebhookconfiguration", "validatingwebhookconfiguration")

        def trusted() -> bool:
            configurations = [
                self.kubectl.get(kind, f"{self.name}-{kind[:-20]}-webhook-configuration") for kind in hooks
            ]
            return all(
                hook["clientConfig"].get("caBundle") for one in configurations if one for hook in one["webhooks"]
            )

        wait_until(trusted, f"Kueue's webhooks are trusted (see {self.log})")

    def _client(self, path: str) -> Object:
        service = {"namespace": NAMESPACE, "name": SERVICE, "path": path, "port": self.webhook_port}
        return {"service": service}

    def _mount(self, folder: Path) -> None:
        def made() -> dict[str, str] | None:
            found = self.kubectl.get("secret", SECRET, NAMESPACE) or {}
            data: dict[str, str] = found.get("data") or {}
            return data if "tls.crt" in data else None

        for name, content in wait_until(made, f"Kueue's certificates (see {self.log})").items():
            write_private(folder / name, base64.b64decode(content))
