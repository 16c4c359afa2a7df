"""Watches the cluster with kopf and turns every event into a key to reconcile; kopf itself never writes an object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import kopf
from kubernetes import client

from taktline_operator import naming, schema
from taktline_operator.kube import PAGE, bearer_token
from taktline_operator.reconcile import ROUTES, Controller, Key

Json = dict[str, Any]

IDLE_S = 0.2  # how long kopf keeps an object that nothing more happened to

# Where the operator's own objects are, and how few of the cluster's it asks for.
_CHILDREN = (
    ("apps", "v1", "deployments", naming.CHILD_SELECTOR),
    ("apps", "v1", "statefulsets", naming.CHILD_SELECTOR),
    ("", "v1", "services", naming.CHILD_SELECTOR),
    ("", "v1", "configmaps", f"{naming.LABEL_MANAGED_BY}={naming.MANAGER}"),
    ("policy", "v1", "poddisruptionbudgets", naming.CHILD_SELECTOR),
    ("", "v1", "pods", naming.CHILD_SELECTOR),
)


class WatchLedger:
    """Remembers which version of each object the watch delivered, to find what it missed and to tell when it has died.

    A stream can go silent without an error, and a quiet cluster has no events to miss. So the test is a list: what the
    list shows and the watch has not brought is late, and what is late in two lists in a row will never be brought.
    """

    def __init__(self) -> None:
        self._seen: dict[str, dict[Key, tuple[str, Key]]] = {}  # kind -> object -> its version, its policy
        self._late: dict[str, set[tuple[Key, str]]] = {}
        self._dead: set[str] = set()

    @property
    def dead(self) -> str:
        """Kinds whose watch has died; empty when all is well."""
        return ", ".join(sorted(self._dead))

    def saw(self, kind: str, live: Mapping[str, Any], policy: Key, *, deleted: bool = False) -> None:
        """The watch delivered this object of a policy, or its deletion."""
        metadata = live["metadata"]
        seen = self._seen.setdefault(kind, {})
        key = (metadata["namespace"], metadata["name"])
        if deleted:
            seen.pop(key, None)
        else:
            seen[key] = (metadata["resourceVersion"], policy)

    def compare(self, kind: str, listed: Iterable[tuple[Mapping[str, Any], Key]]) -> set[Key]:
        """Compare with a fresh list of all objects of a kind, each with its policy; returns the policies to look at.

        Call it at intervals longer than a watch may lag.
        """
        seen = self._seen.setdefault(kind, {})
        late: set[tuple[Key, str]] = set()
        missed: set[Key] = set()
        gone = set(seen)
        for live, policy in listed:
            metadata = live["metadata"]
            key, version = (metadata["namespace"], metadata["name"]), metadata["resourceVersion"]
            gone.discard(key)
            if key not in seen or seen[key][0] != version:
                late.add((key, version))
                missed.add(policy)
        missed |= {seen.pop(key)[1] for key in gone}
        (self._dead.add if late & self._late.get(kind, set()) else self._dead.discard)(kind)
        self._late[kind] = late
        return missed


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
        if namespace and controller.serves(namespace):
            ledger.saw(schema.KIND, event["object"], (namespace, name), deleted=event["type"] == "DELETED")
            controller.queue.add((namespace, name))

    async def child_changed(namespace: str | None, name: str, labels: Mapping[str, str], **_: Any) -> None:
        policy = labels.get(naming.LABEL_POLICY)
        if policy:
            if namespace and controller.serves(namespace):
                controller.queue.add((namespace, policy))
        elif name == naming.ROUTES_NAME:
            controller.queue.add(ROUTES)

    async def pod_changed(event: kopf.RawEvent, namespace: str | None, labels: Mapping[str, str], **_: Any) -> None:
        policy = labels.get(naming.LABEL_POLICY)
        if policy and namespace and controller.serves(namespace):
            ledger.saw("Pod", event["object"], (namespace, policy), deleted=event["type"] == "DELETED")
            controller.queue.add((namespace, policy))

    kopf.on.event("", "v1", "pods", registry=handlers)(pod_changed)
    for group, version, plural, _selector in _CHILDREN[:-1]:
        kopf.on.event(group, version, plural, registry=handlers)(child_changed)
    return handlers


def settings() -> kopf.OperatorSettings:
    """kopf's settings: bounded streams, dead-stream detection, label selectors on the server, no posting."""
    found = kopf.OperatorSettings()
    found.watching.server_timeout = 300
    found.watching.client_timeout = 330
    found.watching.connect_timeout = 10
    found.watching.inactivity_timeout = 70  # the API server sends a bookmark every minute
    # What a list holds is in memory as a whole, and each object for as long as its worker idles: five thousand pods in
    # one piece, for five seconds, would be most of what the operator ever needs.
    found.watching.chunk_size = PAGE
    found.queueing.idle_timeout = IDLE_S
    found.networking.enforce_retry_after = True
    found.posting.enabled = False
    found.scanning.disabled = True  # needs no rights on namespaces and CRDs; the CRD is waited for before
    for group, version, plural, selector in _CHILDREN:
        found.watching.label_selectors[group, version, plural] = selector
    return found
