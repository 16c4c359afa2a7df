"""Watches the cluster with kopf and turns every event into a key to reconcile; kopf itself never writes an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kopf
from kubernetes import client

from taktline_operator import naming, schema
from taktline_operator.kube import bearer_token
from taktline_operator.reconcile import ROUTES, Controller

Json = dict[str, Any]

# Where the operator's own objects are, and how few of the cluster's it asks for.
_CHILDREN = (
    ("apps", "v1", "deployments", naming.CHILD_SELECTOR),
    ("", "v1", "services", naming.CHILD_SELECTOR),
    ("", "v1", "configmaps", f"{naming.LABEL_MANAGED_BY}={naming.MANAGER}"),
    ("policy", "v1", "poddisruptionbudgets", naming.CHILD_SELECTOR),
    ("", "v1", "pods", naming.CHILD_SELECTOR),
)


class WatchLedger:
    """Remembers which version of each PolicyDeployment the watch delivered, to tell when the watch has died.

    A stream can go silent without an error, and a quiet cluster has no events to miss. So the test is a list: a version
    that two lists in a row show and the watch has not brought is one the watch will never bring.
    """

    def __init__(self) -> None:
        self.alive = True
        self._seen: dict[tuple[str, str], str] = {}
        self._late: set[tuple[tuple[str, str], str]] = set()

    def saw(self, live: Mapping[str, Any]) -> None:
        """The watch delivered this object."""
        metadata = live["metadata"]
        self._seen[metadata["namespace"], metadata["name"]] = metadata["resourceVersion"]

    def compare(self, listed: list[Json]) -> None:
        """Compare with a fresh list; call it at intervals longer than a watch may lag."""
        versions = {
            (live["metadata"]["namespace"], live["metadata"]["name"]): live["metadata"]["resourceVersion"]
            for live in listed
        }
        late = {(key, version) for key, version in versions.items() if self._seen.get(key) != version}
        self.alive = not (late & self._late)
        self._late = late
        self._seen = {key: version for key, version in self._seen.items() if key in versions}


def registry(controller: Controller, ledger: WatchLedger, credentials: client.Configuration) -> kopf.OperatorRegistry:
    """Handlers that only take note. None of them makes kopf add a finalizer or an annotation to anything."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    def login(**_: Any) -> kopf.ConnectionInfo:
        scheme, _space, token = (bearer_token(credentials) or "").partition(" ")
        return kopf.ConnectionInfo(
            server=str(credentials.host),
            ca_path=credentials.ssl_ca_cert or None,
            insecure=not credentials.verify_ssl,
            scheme=scheme.capitalize() or None,
            token=token or None,
            certificate_path=credentials.cert_file or None,
            private_key_path=credentials.key_file or None,
        )

    @kopf.on.event(schema.GROUP, schema.VERSION, schema.PLURAL, registry=handlers)
    async def policy_changed(event: kopf.RawEvent, namespace: str | None, name: str, **_: Any) -> None:
        ledger.saw(event["object"])
        if namespace and controller.serves(namespace):
            controller.queue.add((namespace, name))

    async def child_changed(namespace: str | None, name: str, labels: Mapping[str, str], **_: Any) -> None:
        policy = labels.get(naming.LABEL_POLICY)
        if policy:
            if namespace and controller.serves(namespace):
                controller.queue.add((namespace, policy))
        elif name == naming.ROUTES_NAME:
            controller.queue.add(ROUTES)

    for group, version, plural, _selector in _CHILDREN:
        kopf.on.event(group, version, plural, registry=handlers)(child_changed)
    return handlers


def settings() -> kopf.OperatorSettings:
    """kopf's settings: bounded streams, dead-stream detection, label selectors on the server, no posting."""
    found = kopf.OperatorSettings()
    found.watching.server_timeout = 300
    found.watching.client_timeout = 330
    found.watching.connect_timeout = 10
    found.watching.inactivity_timeout = 70  # the API server sends a bookmark every minute
    found.networking.enforce_retry_after = True
    found.posting.enabled = False
    found.scanning.disabled = True  # needs no rights on namespaces and CRDs; the CRD is waited for before
    for group, version, plural, selector in _CHILDREN:
        found.watching.label_selectors[group, version, plural] = selector
    return found
