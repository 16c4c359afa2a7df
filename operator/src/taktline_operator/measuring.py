"""Asks every gateway what it measures of its policies; what the planner does with the answers is not known here."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import aiohttp
import msgspec
from taktline_protocol.measurements import GatewayMeasurements, PolicyMeasurement

from taktline_operator import naming, routing

logger = logging.getLogger(__name__)

Json = dict[str, Any]

FRESH_S = 2.0  # answers are shared by all policies for so long
TIMEOUT_S = 2.0


class PodLister(Protocol):
    """The part of `kube.KubeApi` that finds the gateways."""

    async def list(self, kind: str, namespace: str | None, selector: str = "") -> list[Json]: ...  # noqa: D102


class Gateways:
    """The gateways of one namespace. Must be made inside a running event loop; close it after use."""

    def __init__(
        self,
        api: PodLister,
        namespace: str,
        *,
        scheme: str = "http",
        key: str = "",
        authority: str = "",
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        """Prepare to ask.

        Args:
            scheme: http, or https where gateways serve TLS.
            key: API key with the right `observe`, where gateways ask for one.
            authority: PEM file of the authority that signed the gateways' certificates; empty trusts the system's.
        """
        self._api = api
        self._namespace = namespace
        self._scheme = scheme
        self._monotonic = monotonic or asyncio.get_running_loop().time
        self._asked_at: float | None = None
        self._asking = asyncio.Lock()
        self._answers: tuple[GatewayMeasurements, ...] = ()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        context: ssl.SSLContext | bool = True
        if scheme == "https":
            context = ssl.create_default_context(cafile=authority or None)
            context.check_hostname = False  # pods are asked by address; the authority still has to have signed
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(ssl=context, limit=32),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def all(self) -> tuple[GatewayMeasurements, ...]:
        """The answers of all gateways, not older than `FRESH_S`.

        Raises:
            ApiError: the gateways' pods could not be listed.
        """
        async with self._asking:
            if self._asked_at is None or self._monotonic() - self._asked_at >= FRESH_S:
                self._answers = await self._ask()
                self._asked_at = self._monotonic()
        return self._answers

    async def of_policy(self, policy: str) -> tuple[PolicyMeasurement, ...] | None:
        """What each gateway that answers says of a policy; None where no gateway answers.

        Raises:
            ApiError: the gateways' pods could not be listed.
        """
        answers = await self.all()
        if not answers:
            return None
        return tuple(found for answer in answers for found in answer.policies if found.policy == policy)

    async def _ask(self) -> tuple[GatewayMeasurements, ...]:
        pods = await self._api.list("Pod", self._namespace, naming.GATEWAY_SELECTOR)
        urls = [f"{self._scheme}://{host}/measurements" for pod in pods if (host := _host(pod))]
        answers: Sequence[GatewayMeasurements | None] = await asyncio.gather(*(self._ask_one(url) for url in urls))
        return tuple(answer for answer in answers if answer is not None)

    async def _ask_one(self, url: str) -> GatewayMeasurements | None:
        try:
            async with self._session.get(url) as reply:
                content = await reply.read()
                if reply.status != 200:
                    logger.warning("gateway gives no measurements", extra={"url": url, "cause": f"HTTP {reply.status}"})
                    return None
            return msgspec.json.decode(content, type=GatewayMeasurements)
        except (TimeoutError, aiohttp.ClientError, msgspec.DecodeError) as error:
            # One gateway that is starting or leaving must not hold up the others.
            logger.warning("gateway gives no measurements", extra={"url": url, "cause": str(error) or repr(error)})
            return None


def _host(pod: Json) -> str | None:
    """`address:port` of a gateway pod that is ready; the port is the one it names http or https."""
    if not routing.is_ready(pod):
        return None
    ports = {
        str(port.get("name")): int(port["containerPort"])
        for container in pod.get("spec", {}).get("containers", [])
        for port in container.get("ports", [])
    }
    address = str(pod["status"]["podIP"])
    port = ports.get("http") or ports.get("https") or 8080
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
