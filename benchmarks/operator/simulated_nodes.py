"""Node objects without machines, and a kubelet for all: bound pods are ready at once, deleted ones gone at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import httpx
from taktline_local.kube_api import ApiError, KubeApi

Json = dict[str, Any]
PODS_PER_NODE = 250
BEAT_S = 2.5
STATUS_EVERY = 4  # beats


def is_ready(pod: Json) -> bool:
    """Whether a pod counts as ready."""
    conditions = pod["status"].get("conditions", [])
    return any(found["type"] == "Ready" and found["status"] == "True" for found in conditions)


class SimulatedNodes:
    """Node objects, and a kubelet for all of them: bound pods are ready at once, deleted ones gone at once."""

    def __init__(
        self,
        api: KubeApi,
        count: int,
        *,
        labels: Mapping[str, str] | None = None,
        extended: Mapping[str, str] | None = None,
        addresses: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare `count` nodes.

        Args:
            labels: of every node.
            extended: further resources of every node, such as `nvidia.com/gpu: 8`.
            addresses: pods by name that get this address; all others get one that nobody answers at.
        """
        self._api, self._count = api, count
        self._labels, self._extended, self._fixed = dict(labels or {}), dict(extended or {}), dict(addresses or {})
        self._tasks: list[asyncio.Task[None]] = []
        self._addresses = 0
        self._due: asyncio.Queue[Json] = asyncio.Queue()
        self._doing: set[tuple[str, bool]] = set()

    async def start(self) -> None:
        """Makes the nodes and begins to report."""
        await asyncio.gather(*(self._make(number) for number in range(self._count)))
        self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._watch())]
        self._tasks += [asyncio.create_task(self._work()) for _ in range(16)]

    async def stop(self) -> None:
        """Stops reporting."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def remove(self) -> None:
        """Stops, and takes the nodes away."""
        await self.stop()
        for number in range(self._count):
            await self._api.request("DELETE", f"/api/v1/nodes/sim-{number}")

    async def _make(self, number: int) -> None:
        name = f"sim-{number}"
        await self._api.request("POST", "/api/v1/nodes", body={"metadata": {"name": name, "labels": self._labels}})
        await self._renew(name)
        await self._ready(name)
        await self._api.request("PATCH", f"/api/v1/nodes/{name}", body={"spec": {"taints": []}}, patch="merge")

    async def _ready(self, name: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {"type": "Ready", "status": "True", "reason": "Simulated", "message": "", "lastHeartbeatTime": now}
        capacity = {"cpu": "10000", "memory": "100Ti", "pods": str(PODS_PER_NODE), **self._extended}
        status = {"conditions": [condition], "capacity": capacity, "allocatable": capacity}
        await self._api.request("PATCH", f"/api/v1/nodes/{name}/status", body={"status": status}, patch="strategic")

    async def _beat(self) -> None:
        # Late heartbeats make the node controller evict after ten seconds. A Lease is the cheap one, as kubelets do;
        # the status gives a node back what was taken from it on a machine that was too busy.
        names = [f"sim-{number}" for number in range(self._count)]
        for beat in itertools.count(1):
            await asyncio.sleep(BEAT_S)
            await asyncio.gather(*(self._renew(name) for name in names), return_exceptions=True)
            if beat % STATUS_EVERY == 0:
                await asyncio.gather(*(self._ready(name) for name in names), return_exceptions=True)

    async def _renew(self, name: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec}
        path = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}"
        parameters = {"fieldManager": "simulated-nodes", "force": "true"}
        await self._api.request("PATCH", path, body=lease, patch="apply", parameters=parameters)

    async def _watch(self) -> None:
        async for kind, found in self._api.watch("/api/v1/pods", "spec.nodeName!="):
            for pod in found["items"] if kind == "LISTED" else [found]:
                key = (pod["metadata"]["uid"], bool(pod["metadata"].get("deletionTimestamp")))
                # Where heartbeats were late the node controller takes readiness away; a kubelet gives it back.
                if kind != "DELETED" and key not in self._doing and (key[1] or not is_ready(pod)):
                    self._doing.add(key)
                    self._due.put_nowait(pod)

    async def _work(self) -> None:
        while True:
            pod = await self._due.get()
            # From here on a later change of the pod counts anew.
            self._doing.discard((pod["metadata"]["uid"], bool(pod["metadata"].get("deletionTimestamp"))))
            path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
            with contextlib.suppress(ApiError, httpx.TransportError):  # gone meanwhile
                if pod["metadata"].get("deletionTimestamp"):
                    await self._api.request("DELETE", path, body={"gracePeriodSeconds": 0})
                else:
                    await self._run(pod)

    async def _run(self, pod: Json) -> None:
        if not (address := pod["status"].get("podIP") or self._fixed.get(pod["metadata"]["name"])):
            self._addresses += 1
            high, low = divmod(self._addresses % 60_000, 250)
            address = f"198.18.{high % 250}.{low + 1}"
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")  # Deployments count how long a pod has been ready
        kinds = ("Ready", "ContainersReady")
        ready = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds]
        names = [container["name"] for container in pod["spec"]["containers"]]
        state = {
            "image": "x",
            "imageID": "",
            "ready": True,
            "started": True,
            "restartCount": 0,
            "state": {"running": {}},
        }
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": ready,
            "containerStatuses": [{"name": name, **state} for name in names],
        }
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}/status"
        await self._api.request("PATCH", path, body={"status": status}, patch="strategic")
