"""Looks up what `advice` wants to know around a PolicyDeployment. What the operator may not read stays unknown."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from taktline_operator import advice, grouping, meshes, routing, schema, sizing
from taktline_operator.kube import ApiError
from taktline_operator.spec import PolicyDeployment

logger = logging.getLogger(__name__)

Json = dict[str, Any]

NODES_S = 60.0  # nodes are listed for an admission request at most so often
FORBIDDEN_S = 600.0  # after so long it is tried again whether rights have come


class Api(Protocol):
    """The part of `kube.KubeApi` that is asked."""

    async def exists(self, kind: str, namespace: str, name: str) -> bool: ...  # noqa: D102

    async def list(  # noqa: D102
        self, kind: str, namespace: str | None, selector: str = "", *, metadata_only: bool = False, name: str = ""
    ) -> list[Json]: ...


class Existence:
    """Tells which of the objects that a spec names do not exist."""

    def __init__(self, api: Api, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._monotonic = monotonic
        self._forbidden: dict[tuple[str, str], float] = {}  # kind and namespace -> until when nobody is asked

    async def absent(self, policy: PolicyDeployment) -> frozenset[advice.Referred]:
        """Objects named by `policy` that do not exist, of the kinds that we may read.

        Raises:
            ApiError: the API server refused for another reason, or gave no answer.
        """
        found, now = set(), self._monotonic()
        for wanted in advice.references(policy):
            place = (wanted.kind, policy.namespace)
            if now < self._forbidden.get(place, now):
                continue
            try:
                if not await self._api.exists(wanted.kind, policy.namespace, wanted.name):
                    found.add(wanted)
            except ApiError as error:
                if error.status != 403:
                    raise
                self._forbidden[place] = now + FORBIDDEN_S
                logger.info("not looked up: no rights", extra={"object": "/".join(place), "cause": error.message})
        return frozenset(found)


class Surveyor:
    """Everything around a PolicyDeployment that a process without a view of the cluster (a stand-by) can ask for."""

    def __init__(self, api: Api, namespaces: Sequence[str], monotonic: Callable[[], float] = time.monotonic) -> None:
        """`namespaces` are those served; empty means all."""
        self._api = api
        self._namespaces = tuple(namespaces)
        self._existence = Existence(api, monotonic)
        self._monotonic = monotonic
        self._nodes: Sequence[Mapping[str, str]] | None = None
        self._nodes_at = self._gpus_at = -float("inf")
        self._gpus: Sequence[meshes.NodeGpus] = ()

    async def around(self, policy: PolicyDeployment, live: Json) -> advice.Surroundings:
        """What is known around `policy`.

        Args:
            live: the object itself, whose status may hold measured times.

        Raises:
            ApiError: the API server could not be asked.
        """
        owner, absent, nodes, gpus = await asyncio.gather(
            self._owner(policy), self._existence.absent(policy), self._node_labels(), self._node_gpus(policy)
        )
        status = live.get("status") or {}
        return advice.Surroundings(
            name_owner=owner,
            absent=absent,
            nodes=nodes,
            tables=sizing.known_times(status, {}),
            gpus_per_node=grouping.per_node(policy, status, gpus),
        )

    async def _owner(self, policy: PolicyDeployment) -> tuple[str, str] | None:
        scopes: Sequence[str | None] = self._namespaces or (None,)
        lists = await asyncio.gather(
            *(self._api.list(schema.KIND, scope, metadata_only=True, name=policy.name) for scope in scopes)
        )
        # One that is only about to be made is the youngest of all.
        created = {policy.key: policy.created or "9"}
        for found in (live["metadata"] for lives in lists for live in lives):
            created[found["namespace"], found["name"]] = str(found.get("creationTimestamp", ""))
        owner = routing.owners(created)[policy.name]
        return None if owner == policy.key else owner

    async def _node_labels(self) -> Sequence[Mapping[str, str]] | None:
        now = self._monotonic()
        if now - self._nodes_at < NODES_S:
            return self._nodes
        try:
            found = await self._api.list("Node", None, metadata_only=True)
        except ApiError as error:
            if error.status != 403:
                raise
            self._nodes = None
        else:
            self._nodes = [node["metadata"].get("labels", {}) for node in found]
        self._nodes_at = now
        return self._nodes

    async def _node_gpus(self, policy: PolicyDeployment) -> Sequence[meshes.NodeGpus]:
        """What reconciliation knows of GPUs, where it matters: nodes as a whole are ten times their labels."""
        if policy.spec.engine.gpus == 1 or all(pool.gpus_per_node is not None for pool in policy.spec.pools):
            return ()
        now = self._monotonic()
        if now - self._gpus_at >= NODES_S:
            try:
                self._gpus = meshes.of_nodes(await self._api.list("Node", None))
            except ApiError as error:
                if error.status != 403:
                    raise
                self._gpus = ()
            self._gpus_at = now
        return self._gpus
