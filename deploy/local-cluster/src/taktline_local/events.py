"""A Pod's events, posted in order and without repeating themselves: the same words raise a count."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx

from taktline_local.container import timestamp
from taktline_local.kube_api import ApiError, KubeApi
from taktline_local.tasks import end_task

Object = dict[str, Any]
logger = logging.getLogger(__name__)

REPEAT_LIMIT_S = 5.0


class PodEvents:
    """An EventSink that posts to the API, for one Pod."""

    def __init__(self, api: KubeApi, pod: Object, node_name: str) -> None:
        """Start posting, on the running event loop."""
        self._api = api
        self._pod = pod
        self._node_name = node_name
        self._queue: asyncio.Queue[tuple[str, str, bool]] = asyncio.Queue()
        self._posted: dict[tuple[str, str], tuple[str, int, float]] = {}
        self._task = asyncio.create_task(self._post_all())

    def __call__(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Queue one event; it is also logged here."""
        level = logging.WARNING if warning else logging.INFO
        key = (reason, message)
        if key not in self._posted:
            logger.log(level, "%s: %s", reason, message, extra={"pod": self._pod["metadata"]["name"]})
        self._queue.put_nowait((reason, message, warning))

    async def close(self) -> None:
        """Wait until everything queued is posted or refused, then stop."""
        await self._queue.join()
        await end_task(self._task)

    async def _post_all(self) -> None:
        while True:
            reason, message, warning = await self._queue.get()
            try:
                await self._post(reason, message[:1024], warning)
            except (ApiError, httpx.TransportError) as error:
                logger.warning("event not posted: %s", error, extra={"pod": self._pod["metadata"]["name"]})
            finally:
                self._queue.task_done()

    async def _post(self, reason: str, message: str, warning: bool) -> None:
        namespace = self._pod["metadata"]["namespace"]
        path = f"/api/v1/namespaces/{namespace}/events"
        now = asyncio.get_running_loop().time()
        name, count, last = self._posted.get((reason, message), ("", 0, 0.0))
        if name and now - last < REPEAT_LIMIT_S:
            self._posted[reason, message] = (name, count + 1, last)
            return
        count += 1
        if name:
            change = {"count": count, "lastTimestamp": timestamp()}
            await self._api.request("PATCH", f"{path}/{name}", body=change, patch="merge")
        else:
            name = (await self._api.request("POST", path, body=self._event(reason, message, warning)))["metadata"][
                "name"
            ]
        self._posted[reason, message] = (name, count, now)

    def _event(self, reason: str, message: str, warning: bool) -> Object:
        metadata = self._pod["metadata"]
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "reason": reason,
            "message": message,
            "type": "Warning" if warning else "Normal",
            "source": {"component": "taktline-process-node", "host": self._node_name},
            "firstTimestamp": timestamp(),
            "lastTimestamp": timestamp(),
            "count": 1,
        }
