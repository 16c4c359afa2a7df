"""One Pod: its folder, volumes, init containers, containers, and its end."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taktline_local.container import ContainerRunner, EventSink, PodContext, RunnerSettings, timestamp
from taktline_local.fields import ContainerConfigError, ObjectSource
from taktline_local.paths import LocalPaths, mount_places
from taktline_local.pki import write_private
from taktline_local.pod_spec import not_enforced, refusals
from taktline_local.pod_status import PodView, pod_status
from taktline_local.tasks import end_task
from taktline_local.volumes import Volumes

Object = dict[str, Any]
logger = logging.getLogger(__name__)

REFRESH_S = 0.5
SERVICE_ACCOUNT_MOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class PodRunner:
    """Runs one Pod until its containers are done or `stop` is called.

    Attributes:
        pod: the Pod as last seen; the node replaces it when the API's copy changes.
        ip: the Pod's address.
    """

    def __init__(
        self,
        pod: Object,
        *,
        ip: str,
        host_ip: str,
        folder: Path,
        source: ObjectSource,
        settings: RunnerSettings,
        event: EventSink,
        changed: Callable[[], None],
        address_of: Callable[[str], str] = str,
    ) -> None:
        """`changed` is called whenever `status` may have; `event` takes events; `address_of` knows Pods by name."""
        self.pod = pod
        self.ip = ip
        self._context = PodContext(pod, ip, host_ip, folder, source, settings, event, changed, address_of=address_of)
        self._started_at = timestamp()
        before = {
            item["name"]: item["restartCount"] + 1
            for item in pod.get("status", {}).get("containerStatuses", [])
            if item.get("state", {}).get("running") or item.get("lastState")
        }
        self.init = [ContainerRunner(self._context, spec, init=True) for spec in pod["spec"].get("initContainers", [])]
        self.main = [
            ContainerRunner(self._context, spec, init=False, restarts=before.get(spec["name"], 0))
            for spec in pod["spec"]["containers"]
        ]
        self._refused = refusals(pod)
        self._not_enforced = not_enforced(pod)
        self._volumes = Volumes(folder / "volumes", pod, source, pod_ip=ip, host_ip=host_ip)
        self._initialized = False
        self._ended = False
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def folder(self) -> Path:
        """Folder with the Pod's volumes, logs and scratch space."""
        return self._context.folder

    @property
    def done(self) -> bool:
        """Whether no container runs nor ever will."""
        return self._task is not None and self._task.done()

    def status(self) -> Object:
        """The status to report now."""
        view = PodView(
            self.pod, self.ip, self._context.host_ip, self.init, self.main, self._started_at,
            refused=self._refused, not_enforced=self._not_enforced, initialized=self._initialized, ended=self._ended,
        )  # fmt: skip
        return pod_status(view, timestamp())

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._task = asyncio.create_task(self._run(), name=f"pod {self.pod['metadata']['name']}")

    async def stop(self, grace_s: float) -> None:
        """End all containers within `grace_s` seconds, then kill them; returns when none is left."""
        task = self._task
        self._stopping = True
        running = [container for container in [*self.init, *self.main] if container.exit_code is None]
        await asyncio.gather(*(container.stop(grace_s) for container in running))
        if task is not None:
            # Whatever still waits (for a volume, a back-off, a refusal to be read) has no process.
            await asyncio.wait([task], timeout=1.0)
            await end_task(task)
        self._ended = True
        self._context.changed()

    def keep_logs(self, folder: Path) -> None:
        """Copy the containers' logs to `folder`, before `remove_folder` takes them."""
        if (logs := self._context.folder / "logs").is_dir():
            shutil.copytree(logs, folder, dirs_exist_ok=True)

    def remove_folder(self) -> None:
        """Delete the Pod's files, logs included."""
        shutil.rmtree(self._context.folder, ignore_errors=True)

    async def _run(self) -> None:
        if self._refused:
            for reason in self._refused:
                self._context.event("UnsupportedPod", reason, warning=True)
            self._context.changed()
            await asyncio.Event().wait()
        if self._not_enforced:
            self._context.event("NotEnforced", "plain processes ignore these fields: " + ", ".join(self._not_enforced))
        await self._prepare_volumes()
        refreshing = asyncio.create_task(self._refresh_volumes())
        try:
            for container in self.init:
                await container.supervise()
                if container.exit_code != 0:
                    return
                container.ready = True
            self._initialized = True
            self._context.changed()
            await asyncio.gather(*(container.supervise() for container in self.main))
        finally:
            refreshing.cancel()
            self._context.changed()

    async def _prepare_volumes(self) -> None:
        """Write all volumes; keeps trying while something they refer to is absent."""
        while True:
            try:
                self._context.paths = LocalPaths(mount_places(self.pod, await self._volumes.places()))
                await self._volumes.refresh(self._context.paths.rewrite)
                self._write_kubeconfig()
                return
            except (ContainerConfigError, OSError) as error:
                self._context.event("FailedMount", str(error), warning=True)
                for container in [*self.init, *self.main]:
                    container.state = {"waiting": {"reason": "ContainerCreating", "message": str(error)}}
                self._context.changed()
                await asyncio.sleep(REFRESH_S)

    async def _refresh_volumes(self) -> None:
        # What a Pod refers to may be deleted with it; while it ends its volumes stay as they are.
        while not self._stopping:
            await asyncio.sleep(REFRESH_S)
            try:
                for name in await self._volumes.refresh(self._context.paths.rewrite):
                    logger.info("volume updated", extra={"pod": self.pod["metadata"]["name"], "volume": name})
            except (ContainerConfigError, OSError) as error:
                if self._stopping:
                    return
                # As with the kubelet, what was mounted stays.
                self._context.event("FailedMount", str(error), warning=True)

    def _write_kubeconfig(self) -> None:
        """For clients that run in the Pod: the same token and CA as at the fixed in-cluster path."""
        place = self._context.paths.local(SERVICE_ACCOUNT_MOUNT)
        server = self._context.settings.api_server
        if server is None or str(place) == SERVICE_ACCOUNT_MOUNT:
            return
        namespace = self.pod["metadata"]["namespace"]
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "in-cluster",
                    "cluster": {
                        "server": f"https://{server[0]}:{server[1]}",
                        "certificate-authority": str(place / "ca.crt"),
                    },
                }
            ],
            "users": [{"name": "pod", "user": {"tokenFile": str(place / "token")}}],
            "contexts": [
                {"name": "in-cluster", "context": {"cluster": "in-cluster", "user": "pod", "namespace": namespace}}
            ],
            "current-context": "in-cluster",
        }
        write_private(self._context.folder / "kubeconfig", json.dumps(config, indent=2).encode())
