"""The Node object: its registration, its Lease, and its end."""

from __future__ import annotations

import asyncio
import datetime
import logging
import platform
from collections.abc import Mapping
from typing import Any

import httpx

from taktline_local import DEVICE_NOTICE
from taktline_local.container import timestamp
from taktline_local.kube_api import ApiError, KubeApi
from taktline_local.network import NODE_PORT

Object = dict[str, Any]
logger = logging.getLogger(__name__)

LEASE_PERIOD_S = 2.0
LEASE_DURATION_S = 10
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Registration:
    """One Node in the API."""

    def __init__(
        self, api: KubeApi, name: str, address: str, *, labels: Mapping[str, str], capacity: Mapping[str, str]
    ) -> None:
        """`labels` and `capacity` are pretended: they are what schedulers and pools see of this node."""
        self._api = api
        self.name = name
        self._address = address
        architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
        self._architecture = architecture
        self._labels = {
            "kubernetes.io/hostname": name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": architecture,
            "taktline.dev/process-node": "true",
            **labels,
        }
        self._capacity = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": "200", **capacity}

    async def register(self) -> None:
        """Create the Node (or take over an earlier one of this name) and report it ready."""
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": self.name,
                "labels": self._labels,
                "annotations": {"taktline.dev/process-node": DEVICE_NOTICE},
            },
        }
        try:
            await self._api.request("POST", "/api/v1/nodes", body=node)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            change = {"metadata": {"labels": self._labels}}
            await self._api.request("PATCH", f"/api/v1/nodes/{self.name}", body=change, patch="merge")
        await self.renew_lease()
        await self.report_ready(True)

    async def report_ready(self, ready: bool) -> None:
        """Write the Node's status."""
        await self._api.request(
            "PATCH", f"/api/v1/nodes/{self.name}/status", body={"status": self._status(ready)}, patch="strategic"
        )

    def _status(self, ready: bool) -> Object:
        now = timestamp()

        def condition(kind: str, status: bool, reason: str) -> Object:
            return {
                "type": kind,
                "status": "True" if status else "False",
                "reason": reason,
                "message": DEVICE_NOTICE,
                "lastHeartbeatTime": now,
                "lastTransitionTime": now,
            }

        return {
            "addresses": [
                {"type": "InternalIP", "address": self._address},
                {"type": "Hostname", "address": self.name},
            ],
            "capacity": self._capacity,
            "allocatable": self._capacity,
            "daemonEndpoints": {"kubeletEndpoint": {"Port": NODE_PORT}},
            "conditions": [
                condition("Ready", ready, "ProcessNodeReady" if ready else "ProcessNodeStopping"),
                condition("MemoryPressure", False, "NotMeasured"),
                condition("DiskPressure", False, "NotMeasured"),
                condition("PIDPressure", False, "NotMeasured"),
            ],
            "nodeInfo": {
                "kubeletVersion": "v0.1.0-taktline-process-node",
                "kubeProxyVersion": "",
                "containerRuntimeVersion": "process://0.1.0",
                "operatingSystem": "linux",
                "architecture": self._architecture,
                "osImage": "local processes (test and demo device)",
                "kernelVersion": platform.release(),
                "machineID": "",
                "systemUUID": "",
                "bootID": "",
            },
        }

    async def renew_lease(self) -> None:
        """Say that the node lives."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": self.name, "leaseDurationSeconds": LEASE_DURATION_S, "renewTime": now}
        try:
            await self._api.request("PATCH", f"{LEASES}/{self.name}", body={"spec": spec}, patch="merge")
        except ApiError as error:
            if error.reason != "NotFound":
                raise
            lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self.name, "namespace": "kube-node-lease"},
                "spec": spec,
            }
            await self._api.request("POST", LEASES, body=lease)

    async def keep_alive(self) -> None:
        """Renew the Lease until cancelled."""
        while True:
            await asyncio.sleep(LEASE_PERIOD_S)
            try:
                await self.renew_lease()
            except (ApiError, httpx.TransportError) as error:
                logger.warning("lease not renewed: %s", error or type(error).__name__)

    async def remove(self) -> None:
        """Take the Node out of the cluster."""
        try:
            await self._api.request("DELETE", f"/api/v1/nodes/{self.name}")
        except (ApiError, httpx.TransportError) as error:
            logger.warning("node not removed: %s", error or type(error).__name__)
