"""The Kubernetes API as the process node needs it: single objects, patches, and a watch that never goes silent."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import httpx
from kubernetes import client, config
from taktline_protocol.errors import ErrorCode, TaktlineError

logger = logging.getLogger(__name__)

Object = dict[str, Any]
WATCH_TIMEOUT_S = 240
PATCH_TYPES = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "apply": "application/apply-patch+yaml",
}


class ApiError(Exception):
    """The API server refused a request.

    Attributes:
        status: HTTP status.
        reason: the Status object's reason, for example `NotFound` or `Conflict`.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason


class KubeApi:
    """Asynchronous client of one API server, with one connection pool."""

    def __init__(self, kubeconfig: Path) -> None:
        """Take address and credentials from `kubeconfig`; raises TaktlineError where it is unusable."""
        settings = client.Configuration()
        try:
            config.load_kube_config(str(kubeconfig), client_configuration=settings)  # type: ignore[no-untyped-call]
        except (config.ConfigException, OSError) as error:
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID, f"kubeconfig {kubeconfig}: {error}", "give a readable kubeconfig"
            ) from error
        context = ssl.create_default_context(cafile=settings.ssl_ca_cert)
        if not settings.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if settings.cert_file:
            context.load_cert_chain(settings.cert_file, settings.key_file)
        self.url = str(settings.host)
        self.certificate_authority = Path(settings.ssl_ca_cert) if settings.ssl_ca_cert else None
        self._settings = settings
        self._http = httpx.AsyncClient(
            base_url=self.url,
            verify=context,
            timeout=httpx.Timeout(30.0, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    def _headers(self) -> dict[str, str]:
        # Asked for every request: a kubeconfig's token may come from a plugin that renews it.
        token = self._settings.get_api_key_with_prefix("authorization") or self._settings.get_api_key_with_prefix(
            "BearerToken"
        )
        return {"Authorization": token} if token else {}

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        patch: Literal["merge", "strategic", "apply"] | None = None,
        parameters: dict[str, str] | None = None,
    ) -> Object:
        """One request; returns the decoded object. Raises ApiError, or httpx.TransportError without an answer."""
        headers = self._headers()
        headers["Content-Type"] = PATCH_TYPES[patch] if patch else "application/json"
        content = None if body is None else json.dumps(body).encode()
        reply = await self._http.request(method, path, content=content, headers=headers, params=parameters)
        if reply.is_error:
            raise decode_error(reply.status_code, reply.content)
        decoded: Object = reply.json()
        return decoded

    async def get(self, path: str) -> Object:
        """Read one object or list."""
        return await self.request("GET", path)

    async def watch(self, path: str, field_selector: str) -> AsyncIterator[tuple[str, Object]]:
        """The matching objects now and every change, for ever: pairs of event type and object.

        Event types are `ADDED`, `MODIFIED`, `DELETED` and, after each fresh list, `LISTED` with the whole list, so
        that a reader also learns what vanished while the stream was down. Lost streams, expired versions and an
        absent API server are survived by listing again.
        """
        while True:
            try:
                listing = await self.request("GET", path, parameters={"fieldSelector": field_selector})
                yield "LISTED", listing
                version = listing["metadata"]["resourceVersion"]
                while version:
                    async for kind, item in self._stream(path, field_selector, version):
                        version = item["metadata"]["resourceVersion"]
                        if kind != "BOOKMARK":
                            yield kind, item
            except (httpx.TransportError, ApiError) as error:
                logger.warning("watch of %s (%s) starts again: %s", path, field_selector, error or type(error).__name__)
                await asyncio.sleep(0.5)

    async def _stream(self, path: str, field_selector: str, version: str) -> AsyncIterator[tuple[str, Object]]:
        parameters = {
            "watch": "true",
            "fieldSelector": field_selector,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_TIMEOUT_S),
        }
        # A stream silent for longer than the server may keep it open is dead.
        timeout = httpx.Timeout(30.0, read=WATCH_TIMEOUT_S + 30.0)
        async with self._http.stream("GET", path, params=parameters, headers=self._headers(), timeout=timeout) as reply:
            if reply.is_error:
                raise decode_error(reply.status_code, await reply.aread())
            async for line in reply.aiter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise ApiError(status.get("code", 500), status.get("reason", ""), status.get("message", ""))
                yield event["type"], event["object"]


def decode_error(status: int, content: bytes) -> ApiError:
    """The ApiError for an error response, whose body is usually a Status object."""
    try:
        body = json.loads(content)
        return ApiError(status, str(body.get("reason", "")), str(body.get("message", "")))
    except (ValueError, AttributeError):
        return ApiError(status, "", content[:200].decode("utf-8", "replace"))
