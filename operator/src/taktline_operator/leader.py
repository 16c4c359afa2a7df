"""Leader election with a Lease: of several operators one works, and another takes over when it falls silent.

kopf's own peering pauses operators of equal priority all at once and waits up to a minute for a dead one, so it is
switched off and this gate stands in front of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol

from taktline_operator import naming
from taktline_operator.kube import ApiError

logger = logging.getLogger(__name__)

Json = dict[str, Any]

LEASE_S = 15  # a lease that has not changed for this long is free
RENEW_LIMIT_S = 10.0  # a leader that could not renew for this long stops; the rest is for requests still on their way
RETRY_S = 2.0


class LeaseApi(Protocol):
    """The part of `kube.KubeApi` that the election uses."""

    async def get(self, kind: str, namespace: str, name: str) -> Json | None: ...  # noqa: D102

    async def create(self, body: Json) -> bool: ...  # noqa: D102

    async def replace(self, body: Json) -> Json: ...  # noqa: D102


def micro_time() -> str:
    """The wall clock as Kubernetes' MicroTime. It is written for people; no decision reads it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Election:
    """One candidate for one Lease.

    A foreign lease counts as free when it did not change for its own duration, measured on this machine's monotonic
    clock. The times written in it are never compared with ours, so clock skew between nodes costs nothing.
    """

    def __init__(
        self,
        api: LeaseApi,
        namespace: str,
        name: str,
        identity: str,
        *,
        heard: Callable[[], None] = lambda: None,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        """Prepare to stand for a lease.

        Args:
            identity: must differ between processes, also between restarts of one pod.
            heard: called whenever the API server has answered.
        """
        self.leads = False
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._heard = heard
        self._monotonic = monotonic or asyncio.get_running_loop().time
        self._seen: tuple[Any, ...] = ()
        self._seen_at = 0.0

    async def try_once(self) -> bool:
        """Take or renew the lease if that is possible now; returns whether we hold it.

        Raises:
            ApiError: the lease could not be read or written, for another reason than a rival's write.
        """
        live = await self._api.get("Lease", self._namespace, self._name)
        self._heard()
        try:
            if live is None:
                return await self._api.create(self._body(None))
            if not self._free(live.get("spec", {})):
                return False
            await self._api.replace(self._body(live))
        except ApiError as error:
            if error.status == 409:  # a rival was faster
                return False
            raise
        return True

    def _free(self, spec: Json) -> bool:
        holder = spec.get("holderIdentity")
        if not holder or holder == self._identity:
            return True
        now = self._monotonic()
        record = (holder, spec.get("renewTime"), spec.get("leaseTransitions"))
        if record != self._seen:
            self._seen, self._seen_at = record, now
        return now - self._seen_at > (spec.get("leaseDurationSeconds") or LEASE_S)

    def _body(self, live: Json | None, *, holder: str | None = None) -> Json:
        before = (live or {}).get("spec", {})
        changes = bool(before.get("holderIdentity")) and before.get("holderIdentity") != self._identity
        body: Json = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._identity if holder is None else holder,
                "leaseDurationSeconds": LEASE_S,
                "acquireTime": micro_time() if changes or not before.get("acquireTime") else before["acquireTime"],
                "renewTime": micro_time(),
                "leaseTransitions": int(before.get("leaseTransitions") or 0) + changes,
            },
        }
        if live is not None:  # with the version read, a rival's write in between is a conflict
            body["metadata"]["resourceVersion"] = live["metadata"]["resourceVersion"]
            body["metadata"]["labels"] = live["metadata"].get("labels", {})
        else:
            body["metadata"]["labels"] = {naming.LABEL_PART_OF: "taktline"}
        return body

    async def acquire(self) -> None:
        """Wait until we lead."""
        while not self.leads:
            try:
                self.leads = await self.try_once()
            except ApiError as error:
                logger.warning("leader election", extra={"cause": str(error)})
            if not self.leads:
                await asyncio.sleep(RETRY_S)
        logger.info("leading", extra={"lease": self._name, "identity": self._identity})

    async def keep(self) -> None:
        """Renew for ever; returns when the lease is lost, after which nothing may be written."""
        renewed_at = self._monotonic()
        while self.leads:
            await asyncio.sleep(RETRY_S)
            try:
                async with asyncio.timeout(max(0.1, renewed_at + RENEW_LIMIT_S - self._monotonic())):
                    started = self._monotonic()
                    self.leads = await self.try_once()
                    renewed_at = started
            except (ApiError, TimeoutError) as error:
                self.leads = self._monotonic() - renewed_at < RENEW_LIMIT_S
                logger.warning("lease not renewed", extra={"cause": str(error) or type(error).__name__})
        logger.error("lost the lease", extra={"lease": self._name, "identity": self._identity})

    async def release(self) -> None:
        """Hand the lease back at a planned stop, so that another takes over at once."""
        if not self.leads:
            return
        self.leads = False
        try:
            live = await self._api.get("Lease", self._namespace, self._name)
            if live is not None and live.get("spec", {}).get("holderIdentity") == self._identity:
                await self._api.replace(self._body(live, holder=""))
        except ApiError as error:
            logger.warning("lease not handed back; it runs out by itself", extra={"cause": str(error)})
