"""The process node: watches the Pods bound to it and runs them as local processes. A test and demo device."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from taktline_local import DEVICE_NOTICE
from taktline_local.api_source import ApiObjectSource
from taktline_local.container import RunnerSettings
from taktline_local.events import PodEvents
from taktline_local.folders import owned_folder
from taktline_local.kube_api import ApiError, KubeApi
from taktline_local.network import LoopbackNetwork
from taktline_local.node_endpoint import EndpointTls, NodeEndpoint
from taktline_local.paths import peer_name
from taktline_local.pod import PodRunner
from taktline_local.registration import Registration
from taktline_local.tasks import end_task

Object = dict[str, Any]
logger = logging.getLogger(__name__)

SHUTDOWN_GRACE_S = 5.0
PUBLISH_RETRY_S = 0.5


@dataclass(frozen=True)
class NodeOptions:
    """What one process node is.

    Attributes:
        kubeconfig: credentials with the rights of `rbac.py`.
        labels, capacity: pretended, for schedulers and pools.
        folder: where Pods live; None makes a temporary one that goes with the node.
        log_folder: where the logs of ended Pods are kept, by namespace and name; None keeps none.
        tls: certificates of the log endpoint; None leaves `kubectl logs` without an answer.
        restart_base_s: first back-off of a crashing container.
    """

    kubeconfig: Path
    name: str = "process-node"
    labels: Mapping[str, str] = field(default_factory=dict)
    capacity: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    log_folder: Path | None = None
    tls: EndpointTls | None = None
    restart_base_s: float = 1.0


def default_search_path() -> str:
    """PATH of the containers: this environment's commands first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


class ManagedPod:
    """One Pod from its first sight until the API has forgotten it."""

    def __init__(self, node: ProcessNode, pod: Object) -> None:
        """Start the Pod and the reporting of its status."""
        self.uid: str = pod["metadata"]["uid"]
        self._node = node
        self._changed = asyncio.Event()
        self._changed.set()
        self._source = ApiObjectSource(node.api)
        self._events = PodEvents(node.api, pod, node.options.name)
        name = peer_name(pod)
        self._ip = node.network.take_named(name) if name else node.network.take()
        self.runner = PodRunner(
            pod,
            ip=self._ip,
            host_ip=node.network.node_address,
            folder=node.folder / "pods" / self.uid,
            source=self._source,
            settings=node.settings,
            event=self._events,
            changed=self._changed.set,
            address_of=node.network.take_named,
        )
        self.runner.folder.mkdir(parents=True)
        self.runner.start()
        self._reporting = asyncio.create_task(self._report())
        self._ending: asyncio.Task[None] | None = None

    @property
    def _path(self) -> str:
        metadata = self.runner.pod["metadata"]
        return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"

    def update(self, pod: Object) -> None:
        """The API's copy changed: keep it, and end the Pod where it is being deleted."""
        self.runner.pod = pod
        if pod["metadata"].get("deletionTimestamp"):
            self.end(float(pod["metadata"].get("deletionGracePeriodSeconds", 30)))
        elif pod["spec"].get("readinessGates"):
            self._changed.set()

    def end(self, grace_s: float) -> asyncio.Task[None]:
        """Stop the Pod, report its end, and let the API forget it; once only."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(grace_s))
        return self._ending

    async def _end(self, grace_s: float) -> None:
        self._events("Killing", f"Stopping the Pod, grace period {grace_s:g}s")
        await self.runner.stop(grace_s)
        await end_task(self._reporting)
        try:
            await self._publish()
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
            await self._node.api.request("DELETE", self._path, body=options)
        except (ApiError, httpx.TransportError) as error:
            # 404 and 409 mean that it is gone, or replaced by one of the same name: done either way.
            logger.info("pod %s: %s", self._path, error or type(error).__name__)
        await self._events.close()
        self._source.close()
        self._node.network.give_back(self._ip)
        self._node.forget(self)
        if self._node.options.log_folder is not None:
            metadata = self.runner.pod["metadata"]
            self.runner.keep_logs(self._node.options.log_folder / metadata["namespace"] / metadata["name"])
        self.runner.remove_folder()

    async def _report(self) -> None:
        reported: Object = {}
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                reported = await self._publish(reported)
            except ApiError as error:
                if error.status == 404:
                    continue  # deleted; the watch will say so
                logger.warning("status of %s not written: %s", self._path, error)
                await asyncio.sleep(PUBLISH_RETRY_S)
                self._changed.set()
            except httpx.TransportError as error:
                logger.warning("status of %s not written: %s", self._path, error or type(error).__name__)
                await asyncio.sleep(PUBLISH_RETRY_S)
                self._changed.set()

    async def _publish(self, reported: Object | None = None) -> Object:
        status = self.runner.status()
        if status != reported:
            body = {"metadata": {"uid": self.uid}, "status": status}
            pod = await self._node.api.request("PATCH", f"{self._path}/status", body=body, patch="strategic")
            # Transition times are kept from what the API holds, so the next status must start from this one.
            self.runner.pod = {**self.runner.pod, "status": pod["status"]}
        return status


class ProcessNode:
    """One node: register, run what is bound to it, and leave nothing behind."""

    def __init__(self, options: NodeOptions) -> None:
        """Reserves the node's network; raises TaktlineError where kubeconfig or addresses are unusable."""
        self.options = options
        self.api = KubeApi(options.kubeconfig)
        self.network = LoopbackNetwork()
        self._own_folder = options.folder is None
        self.folder = options.folder or owned_folder("taktline-node-")
        address = urlsplit(self.api.url)
        self.settings = RunnerSettings(
            search_path=default_search_path(),
            restart_base_s=options.restart_base_s,
            api_server=(address.hostname or "", address.port or 443),
        )
        self._pods: dict[str, ManagedPod] = {}

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set, then end all Pods and remove the Node."""
        logger.warning(DEVICE_NOTICE, extra={"node": self.options.name})
        registration = Registration(
            self.api,
            self.options.name,
            self.network.node_address,
            labels=self.options.labels,
            capacity=self.options.capacity,
        )
        endpoint = NodeEndpoint(self.network.listener, self.find_pod, self.options.tls)
        tasks: list[asyncio.Task[None]] = []
        try:
            await endpoint.start()
            await registration.register()
            logger.info("node ready", extra={"node": self.options.name, "address": self.network.node_address})
            tasks = [asyncio.create_task(registration.keep_alive()), asyncio.create_task(self._follow_pods())]
            stop = asyncio.create_task(stopping.wait())
            done, _ = await asyncio.wait([*tasks, stop], return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            for task in done - {stop}:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*(pod.end(SHUTDOWN_GRACE_S) for pod in list(self._pods.values())))
            await registration.remove()
            await endpoint.close()
            await self.api.close()
            self.network.close()
            if self._own_folder:
                shutil.rmtree(self.folder, ignore_errors=True)

    async def _follow_pods(self) -> None:
        async for kind, item in self.api.watch("/api/v1/pods", f"spec.nodeName={self.options.name}"):
            if kind == "LISTED":
                present = {pod["metadata"]["uid"] for pod in item["items"]}
                for pod in item["items"]:
                    self._see(pod)
                for uid, managed in list(self._pods.items()):
                    if uid not in present:
                        managed.end(0)
            elif kind == "DELETED":
                if managed_or_none := self._pods.get(item["metadata"]["uid"]):
                    managed_or_none.end(0)
            else:
                self._see(item)

    def _see(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        if uid in self._pods:
            self._pods[uid].update(pod)
            return
        ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if ended and not pod["metadata"].get("deletionTimestamp"):
            return
        self._pods[uid] = ManagedPod(self, pod)
        self._pods[uid].update(pod)

    def forget(self, managed: ManagedPod) -> None:
        """The Pod is over."""
        self._pods.pop(managed.uid, None)

    def find_pod(self, namespace: str, name: str) -> PodRunner | None:
        """The running Pod with this name."""
        for managed in self._pods.values():
            metadata = managed.runner.pod["metadata"]
            if (metadata["namespace"], metadata["name"]) == (namespace, name):
                return managed.runner
        return None
