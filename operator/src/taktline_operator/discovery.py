"""Which optional kinds the cluster has and the operator may use: looked up again at every resync, never needed.

A look sees rights of reading in one namespace. What is withdrawn beyond that, or in between, is noticed where it is
missed: the kind counts as absent there for a while, and everything else of a policy goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from taktline_operator import groups, keda, kueue, monitors, ray_services
from taktline_operator.api_errors import ApiError, is_without_rights

logger = logging.getLogger(__name__)

Json = dict[str, Any]


RETRY_S = 600.0  # after so long it is tried again whether rights have come back


class Optional(NamedTuple):
    """A kind that another product brings.

    Attributes:
        versions: API versions that serve it, newest first.
        product: what people know it by.
        written: whether the operator makes objects of it, and so needs rights on them.
    """

    versions: tuple[str, ...]
    product: str
    written: bool = True


KINDS: dict[str, Optional] = {
    **{kind: Optional((monitors.API_VERSION,), "Prometheus operator") for kind in monitors.KINDS},
    groups.LWS_KIND: Optional((groups.LWS_VERSION,), "LeaderWorkerSet"),
    ray_services.KIND: Optional((ray_services.API_VERSION,), "KubeRay"),
    keda.KIND: Optional((keda.API_VERSION,), "KEDA"),
    kueue.KIND: Optional(kueue.API_VERSIONS, "Kueue", written=False),
}


class Withdrawn:
    """Optional kinds that the operator turned out to have no rights on, by namespace."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._until: dict[tuple[str, str], float] = {}

    def note(self, error: ApiError, namespace: str) -> bool:
        """Take note of what an error says; returns whether it is that an optional kind must do without."""
        if error.kind not in KINDS or not is_without_rights(error):
            return False
        place = (error.kind, namespace)
        self._until[place] = self._monotonic() + RETRY_S
        logger.warning("an optional kind is left alone", extra={"object": "/".join(place), "cause": error.message})
        return True

    def left(self, kinds: frozenset[str], namespace: str) -> frozenset[str]:
        """Those of `kinds` that may be tried in a namespace."""
        now = self._monotonic()
        return frozenset(kind for kind in kinds if self._until.get((kind, namespace), now) <= now)


class Api(Protocol):
    """The part of `kube.KubeApi` that is asked."""

    async def group_versions(self) -> frozenset[str]: ...  # noqa: D102

    async def kinds(self, group_version: str) -> frozenset[str]: ...  # noqa: D102

    async def get(self, kind: str, namespace: str, name: str) -> Json | None: ...  # noqa: D102


class Paths(Protocol):
    """The part of `kube.KubeApi` that is asked for what is no object."""

    async def raw(self, path: str) -> Json | None: ...  # noqa: D102


async def version(api: Paths) -> tuple[int, int] | None:
    """Major and minor version of the cluster; None where it does not say them as numbers.

    Raises:
        ApiError: the API server gave no answer.
    """
    found = await api.raw("/version") or {}
    try:
        return int(found["major"]), int(str(found["minor"]).rstrip("+"))
    except (KeyError, ValueError):
        return None


async def usable(api: Api, namespace: str) -> frozenset[str]:
    """The optional kinds that are served, without those that the operator would have to write and may not.

    Args:
        namespace: one in which the operator works.

    Raises:
        ApiError: the API server refused for another reason than missing rights, or gave no answer.
    """
    known = await api.group_versions()
    wanted = {version for optional in KINDS.values() for version in optional.versions}
    served = {version: await api.kinds(version) for version in sorted(wanted & known)}
    found = set()
    for kind, optional in KINDS.items():
        is_served = any(kind in served.get(version, ()) for version in optional.versions)
        if is_served and await _may_use(api, kind, namespace):
            found.add(kind)
    return frozenset(found)


async def _may_use(api: Api, kind: str, namespace: str) -> bool:
    if not KINDS[kind].written:
        return True
    try:
        await api.get(kind, namespace, "taktline-probe")
    except ApiError as error:
        if error.status not in (403, 404):
            raise
        logger.warning("an optional kind is left alone", extra={"object": kind, "cause": str(error)})
        return False
    return True
