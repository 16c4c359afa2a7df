"""ConfigMaps, Secrets, claims and tokens from the API server, kept fresh by one small watch per object."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from taktline_local.fields import ContainerConfigError
from taktline_local.kube_api import ApiError, KubeApi

Object = dict[str, Any]

RENEW_AT = 0.8
MIN_TOKEN_S = 600


class WatchedObject:
    """The latest version of one named object, followed until `close`."""

    def __init__(self, api: KubeApi, resource: str, namespace: str, name: str) -> None:
        """Start following, on the running event loop."""
        self._current: Object | None = None
        self._listed = asyncio.Event()
        self._task = asyncio.create_task(self._follow(api, f"/api/v1/namespaces/{namespace}/{resource}", name))

    async def get(self) -> Object | None:
        """The object, None where there is none now."""
        await self._listed.wait()
        return self._current

    async def _follow(self, api: KubeApi, path: str, name: str) -> None:
        async for kind, item in api.watch(path, f"metadata.name={name}"):
            if kind == "LISTED":
                self._current = next(iter(item["items"]), None)
                self._listed.set()
            else:
                self._current = None if kind == "DELETED" else item

    def close(self) -> None:
        """Stop following."""
        self._task.cancel()


class ApiObjectSource:
    """An ObjectSource for one Pod. Close it with the Pod."""

    def __init__(self, api: KubeApi) -> None:
        """Nothing is asked until a volume or variable needs it."""
        self._api = api
        self._watched: dict[tuple[str, str, str], WatchedObject] = {}
        self._tokens: dict[tuple[str | None, int], tuple[str, float]] = {}

    async def config_map(self, namespace: str, name: str) -> Object | None:
        """The ConfigMap, None where there is none."""
        return await self._watch("configmaps", namespace, name)

    async def secret(self, namespace: str, name: str) -> Object | None:
        """The Secret, None where there is none."""
        return await self._watch("secrets", namespace, name)

    async def _watch(self, resource: str, namespace: str, name: str) -> Object | None:
        key = (resource, namespace, name)
        if key not in self._watched:
            self._watched[key] = WatchedObject(self._api, resource, namespace, name)
        return await self._watched[key].get()

    async def claim_path(self, namespace: str, name: str) -> str:
        """Folder of the hostPath or local PersistentVolume that the claim is bound to; raises ContainerConfigError."""
        try:
            claim = await self._api.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}")
            volume_name = claim["spec"].get("volumeName")
            if not volume_name:
                raise ContainerConfigError(f"persistentvolumeclaim {namespace}/{name} is not bound")
            volume = await self._api.get(f"/api/v1/persistentvolumes/{volume_name}")
        except ApiError as error:
            raise ContainerConfigError(f"persistentvolumeclaim {namespace}/{name}: {error}") from error
        for kind in ("hostPath", "local"):
            if kind in volume["spec"]:
                return str(volume["spec"][kind]["path"])
        raise ContainerConfigError(f"persistentvolume {volume_name} is neither hostPath nor local")

    async def token(self, pod: Object, audience: str | None, expiration_s: int) -> str:
        """A token of the Pod's service account, bound to the Pod; a new one when most of its life is over."""
        key = (audience, expiration_s)
        token, renew_at = self._tokens.get(key, ("", 0.0))
        if time.monotonic() < renew_at:
            return token
        metadata = pod["metadata"]
        account = pod["spec"].get("serviceAccountName", "default")
        lifetime = max(expiration_s, MIN_TOKEN_S)
        request: Object = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "expirationSeconds": lifetime,
                "audiences": [audience] if audience else [],
                "boundObjectRef": {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                },
            },
        }
        path = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token"
        try:
            reply = await self._api.request("POST", path, body=request)
        except ApiError as error:
            if token:
                return token
            raise ContainerConfigError(f"token of service account {account}: {error}") from error
        token = str(reply["status"]["token"])
        self._tokens[key] = (token, time.monotonic() + RENEW_AT * lifetime)
        return token

    def close(self) -> None:
        """Stop following all objects."""
        for watched in self._watched.values():
            watched.close()
