"""The Kubernetes API as the operator needs it: read, list, server-side apply, delete, all on plain JSON objects."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes import client, config
from taktline_protocol.errors import ErrorCode, TaktlineError

from taktline_operator import naming, schema
from taktline_operator.api_errors import ApiError as ApiError
from taktline_operator.api_errors import decoded

Json = dict[str, Any]

# kind -> (API prefix, apiVersion, plural)
RESOURCES: dict[str, tuple[str, str, str]] = {
    "ConfigMap": ("/api/v1", "v1", "configmaps"),
    "Service": ("/api/v1", "v1", "services"),
    "Node": ("/api/v1", "v1", "nodes"),
    "PersistentVolumeClaim": ("/api/v1", "v1", "persistentvolumeclaims"),
    "Pod": ("/api/v1", "v1", "pods"),
    "Secret": ("/api/v1", "v1", "secrets"),
    "Event": ("/api/v1", "v1", "events"),
    "Deployment": ("/apis/apps/v1", "apps/v1", "deployments"),
    "StatefulSet": ("/apis/apps/v1", "apps/v1", "statefulsets"),
    "LeaderWorkerSet": (
        "/apis/leaderworkerset.x-k8s.io/v1",
        "leaderworkerset.x-k8s.io/v1",
        "leaderworkersets",
    ),
    "ControllerRevision": ("/apis/apps/v1", "apps/v1", "controllerrevisions"),
    "PodDisruptionBudget": ("/apis/policy/v1", "policy/v1", "poddisruptionbudgets"),
    "ValidatingWebhookConfiguration": (
        "/apis/admissionregistration.k8s.io/v1",
        "admissionregistration.k8s.io/v1",
        "validatingwebhookconfigurations",
    ),
    "Lease": ("/apis/coordination.k8s.io/v1", "coordination.k8s.io/v1", "leases"),
    "RayService": ("/apis/ray.io/v1", "ray.io/v1", "rayservices"),
    "ScaledObject": ("/apis/keda.sh/v1alpha1", "keda.sh/v1alpha1", "scaledobjects"),
    "PrometheusRule": ("/apis/monitoring.coreos.com/v1", "monitoring.coreos.com/v1", "prometheusrules"),
    "PodMonitor": ("/apis/monitoring.coreos.com/v1", "monitoring.coreos.com/v1", "podmonitors"),
    schema.KIND: (f"/apis/{schema.GROUP}/{schema.VERSION}", f"{schema.GROUP}/{schema.VERSION}", schema.PLURAL),
}

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
JSON = "application/json"
METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
ONE_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
PAGE = 250  # objects of one list page
TIMEOUT_S = 30


def load_configuration(kubeconfig: Path | None) -> client.Configuration:
    """Address and credentials: the named kubeconfig, else the pod's service account, else the default kubeconfig.

    Raises:
        TaktlineError: CONFIG_INVALID; nothing usable was found.
    """
    settings = client.Configuration()
    try:
        if kubeconfig is None:
            try:
                config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
                return settings
            except config.ConfigException:
                pass  # not in a pod
        file = str(kubeconfig) if kubeconfig else None
        config.load_kube_config(file, client_configuration=settings)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"no usable cluster credentials: {error}",
            "run in a pod with a service account, set KUBECONFIG, or give --kubeconfig",
        ) from error
    return settings


def bearer_token(settings: client.Configuration) -> str | None:
    """The Authorization header, asked for at every use: service account tokens rotate."""
    for name in ("BearerToken", "authorization"):
        token: str | None = settings.get_api_key_with_prefix(name)
        if token:
            return token
    return None


def path_of(kind: str, namespace: str | None, name: str | None = None) -> str:
    """URL path of an object, or of a list; namespace None means all namespaces."""
    prefix, _, plural = RESOURCES[kind]
    parts = [prefix] + ([f"namespaces/{namespace}"] if namespace else []) + [plural] + ([name] if name else [])
    return "/".join(parts)


def kind_of(path: str) -> str:
    """The kind that a URL path of ours is about."""
    parts = set(path.split("/"))
    return next((kind for kind, (_, _, plural) in RESOURCES.items() if plural in parts), "other")


class KubeApi:
    """Asynchronous client of one API server. Must be made inside a running event loop; close it after use."""

    def __init__(
        self,
        settings: client.Configuration,
        observe: Callable[[str, str, int, float], None] = lambda verb, kind, status, seconds: None,
    ) -> None:
        """`observe` is told of every request: HTTP method, kind, status (0: no answer), seconds."""
        self._settings = settings
        self._observe = observe
        context = ssl.create_default_context(cafile=settings.ssl_ca_cert)
        if not settings.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if settings.cert_file:
            context.load_cert_chain(settings.cert_file, settings.key_file)
        self._session = aiohttp.ClientSession(
            base_url=settings.host,
            connector=aiohttp.TCPConnector(ssl=context, limit=32),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def raw(self, path: str) -> Json | None:
        """The JSON at an API path; None when there is nothing."""
        try:
            return await self._request("GET", path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def get(self, kind: str, namespace: str | None, name: str) -> Json | None:
        """One object, of a kind without namespaces where that is None; None when it does not exist.

        Who wrote which field is left out, as in lists.
        """
        try:
            found = await self._request("GET", path_of(kind, namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        found["metadata"].pop("managedFields", None)
        return found

    async def exists(self, kind: str, namespace: str, name: str) -> bool:
        """Whether there is an object; only its metadata is asked for, so that no Secret's content is ever read."""
        try:
            await self._request("GET", path_of(kind, namespace, name), accept=ONE_METADATA)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def list(
        self, kind: str, namespace: str | None, selector: str = "", *, metadata_only: bool = False, name: str = ""
    ) -> list[Json]:
        """All objects that `selector` (labels) matches, page by page; items carry their kind.

        Who wrote which field is left out: it is half of what a pod's metadata is, and nobody here asks for it.

        Args:
            metadata_only: leave spec and status out: a tenth of the bytes for pods.
            name: only those of this name, in any namespace; empty is all.
        """
        _, version, _ = RESOURCES[kind]
        items: list[Json] = []
        accept = METADATA if metadata_only else JSON
        parameters = {"limit": str(PAGE)} | ({"labelSelector": selector} if selector else {})
        parameters |= {"fieldSelector": f"metadata.name={name}"} if name else {}
        while True:
            page = await self._request("GET", path_of(kind, namespace), parameters=parameters, accept=accept)
            for item in page["items"] or ():
                item["metadata"].pop("managedFields", None)
                items.append({"apiVersion": version, "kind": kind} | item)
            following = page["metadata"].get("continue")
            if not following:
                return items
            parameters["continue"] = following

    async def kinds(self, group_version: str) -> frozenset[str]:
        """Kinds that the cluster serves in a group and version, `group/version`; none where it does not know it."""
        try:
            found = await self._request("GET", f"/apis/{group_version}")
        except ApiError as error:
            if error.status == 404:
                return frozenset()
            raise
        return frozenset(str(resource["kind"]) for resource in found["resources"])

    async def group_versions(self) -> frozenset[str]:
        """All groups and versions that the cluster serves beside the core, as `group/version`."""
        found = await self._request("GET", "/apis")
        return frozenset(str(version["groupVersion"]) for group in found["groups"] for version in group["versions"])

    async def apply(self, desired: Json, subresource: str = "") -> Json:
        """Server-side apply with our field manager: our fields win, all others stay."""
        metadata = desired["metadata"]
        path = path_of(desired["kind"], metadata.get("namespace"), metadata["name"])
        parameters = {"fieldManager": naming.MANAGER, "force": "true"}
        return await self._request(
            "PATCH", f"{path}/{subresource}" if subresource else path, APPLY, desired, parameters
        )

    async def annotate(self, kind: str, namespace: str, name: str, annotations: dict[str, str]) -> None:
        """Set annotations of an object that somebody else owns; nothing happens when it is gone."""
        try:
            await self._request(
                "PATCH", path_of(kind, namespace, name), MERGE, {"metadata": {"annotations": annotations}}
            )
        except ApiError as error:
            if error.status != 404:
                raise

    async def create(self, body: Json) -> bool:
        """Create an object; False when one of its name exists."""
        try:
            await self._request("POST", path_of(body["kind"], body["metadata"]["namespace"]), JSON, body)
        except ApiError as error:
            if error.reason == "AlreadyExists":
                return False
            raise
        return True

    async def replace(self, body: Json) -> Json:
        """Replace an object; its metadata.resourceVersion decides, and a conflict is an ApiError 409."""
        metadata = body["metadata"]
        path = path_of(body["kind"], metadata["namespace"], metadata["name"])
        return await self._request("PUT", path, JSON, body)

    async def delete(self, kind: str, namespace: str, name: str, uid: str, version: str = "") -> None:
        """Delete an object and, in the background, what it owns; nothing happens when it is gone.

        Args:
            uid: of the object that was seen: one that somebody made anew under its name stays.
            version: the resourceVersion that was seen, where a change since then may be a reason to keep it.

        Raises:
            ApiError: 409 where it is another one, or changed, by now.
        """
        seen = {"uid": uid} | ({"resourceVersion": version} if version else {})
        body = {"propagationPolicy": "Background", "preconditions": seen}
        try:
            await self._request("DELETE", path_of(kind, namespace, name), JSON, body)
        except ApiError as error:
            if error.status != 404:
                raise

    async def _request(
        self,
        method: str,
        path: str,
        content_type: str = "",
        body: Json | None = None,
        parameters: dict[str, str] | None = None,
        accept: str = JSON,
    ) -> Json:
        headers = {"Accept": accept}
        token = bearer_token(self._settings)
        if token:
            headers["Authorization"] = token
        if content_type:
            headers["Content-Type"] = content_type
        data = None if body is None else json.dumps(body).encode()
        began, status = time.monotonic(), 0
        try:
            async with self._session.request(method, path, params=parameters, data=data, headers=headers) as reply:
                content = await reply.read()
                status = reply.status
        except (TimeoutError, aiohttp.ClientError) as error:
            raise ApiError(0, type(error).__name__, str(error), kind=kind_of(path)) from error
        finally:
            self._observe(method, kind_of(path), status, time.monotonic() - began)
        if reply.status >= 400:
            raise decoded(reply.status, content, reply.headers.get("Retry-After"), kind_of(path))
        found: Json = json.loads(content)
        return found
