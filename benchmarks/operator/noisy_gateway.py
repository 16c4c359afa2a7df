"""A gateway that only says what it measures: counts with noise of robots that do not exist, and of a candidate."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from taktline_protocol.measurements import Demand, GatewayMeasurements, Outcomes, PolicyMeasurement, PoolTimes, Trial
from taktline_protocol.messages import BucketTime

Json = dict[str, Any]
GATEWAY = "taktline-gateway-0"
SYSTEM = "taktline-system"


class NoisyGateway:
    """Answers as a gateway of one policy whose robots ask at a constant rate: Poisson counts, times within 3 %.

    Attributes:
        rate: observations a second; what it is set to counts from then on.
        trial: what it measures of a candidate; None while there is none.
    """

    def __init__(self, policy: str, pool: str, *, rate: float, seed: int = 0) -> None:
        self._policy, self._pool, self.rate = policy, pool, rate
        self.trial: Trial | None = None
        self._random = random.Random(seed)
        self._began = self._at = time.monotonic()
        self._count = 0
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Listens on a port of its own."""
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Listens no more."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def measurements(self) -> GatewayMeasurements:
        """The counts by now."""
        now = time.monotonic()
        mean = self.rate * (now - self._at)
        self._count += max(0, round(self._random.gauss(mean, math.sqrt(mean)))) if mean else 0
        self._at = now
        times = tuple(self._time(batch, median, p99) for batch, median, p99 in ((1, 100.0, 110.0), (8, 300.0, 360.0)))
        demand = (Demand(up_to_ms=1000.0, outcomes=Outcomes(on_time=self._count)),)
        policy = PolicyMeasurement(
            policy=self._policy,
            demand=demand,
            pools=(PoolTimes(pool=self._pool, workers=1, t_sync=times),),
            trial=self.trial,
        )
        return GatewayMeasurements(instance="steady", seconds=now - self._began, policies=(policy,))

    def _time(self, batch: int, median_ms: float, p99_ms: float) -> BucketTime:
        noise = self._random.uniform(0.97, 1.03)
        return BucketTime(batch=batch, median_ms=noise * median_ms, p99_ms=noise * p99_ms)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            content = msgspec.json.encode(self.measurements())
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + content)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the asker went away; it asks again
        finally:
            writer.close()

    def pod(self, node: Mapping[str, str]) -> Json:
        """The Pod by which the operator finds it.

        Args:
            node: labels of the node that gives it the address at which its port answers.
        """
        return gateway_pod(self.port, node)


def gateway_pod(port: int, node: Mapping[str, str]) -> Json:
    """The Pod by which the operator finds a gateway that listens on `port` of an address that its node gives.

    Args:
        node: labels of that node.
    """
    ports = [{"name": "http", "containerPort": port}]
    allowed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "gateway", "image": "none", "ports": ports, "securityContext": allowed}
    user = {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
    labels = {"app.kubernetes.io/name": "taktline-gateway"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": GATEWAY, "namespace": SYSTEM, "labels": labels},
        "spec": {
            "containers": [container],
            "securityContext": user,
            "automountServiceAccountToken": False,
            "nodeSelector": dict(node),
        },
    }
