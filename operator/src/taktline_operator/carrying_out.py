"""Does what a plan says: writes, removals, deletions, Events, status, in an order that may be interrupted anywhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from taktline_operator import discovery, events, faults, status
from taktline_operator.api_errors import ApiError, is_without_rights
from taktline_operator.plan import Plan, ref_of

logger = logging.getLogger(__name__)

Json = dict[str, Any]


class Api(Protocol):
    """The part of `kube.KubeApi` that writes."""

    async def apply(self, desired: Json, subresource: str = "") -> Json: ...  # noqa: D102

    async def create(self, body: Json) -> bool: ...  # noqa: D102

    async def delete(  # noqa: D102
        self, kind: str, namespace: str, name: str, uid: str, version: str = ""
    ) -> None: ...


async def carry_out(api: Api, live: Json, result: Plan, clock: Callable[[], str]) -> None:
    """Bring a policy to its plan.

    Args:
        live: the PolicyDeployment as it was read.
        clock: the wall clock in RFC 3339.

    Raises:
        ApiError: the API refused or failed; what was written stays, and doing all of it again is safe. 409 where an
            object that was to go has been made anew, or where a pod has changed: the plan rests on what is no more.
    """
    namespace, name = live["metadata"]["namespace"], live["metadata"]["name"]
    for found in result.writes:
        logger.info("applying", extra={"policy": name, "namespace": namespace, "object": "/".join(ref_of(found))})
        try:
            await api.apply(found)
        except ApiError as error:
            if error.kind in discovery.KINDS and is_without_rights(error):
                raise  # it is planned anew without this kind
            fault = faults.of_refusal(error, "/".join(ref_of(found)))
            if fault is None:
                raise
            # People see it before it is tried again, ever later.
            await _store(api, live, status.degraded_by(result.status, live, fault, clock()), clock())
            raise
    for removal in result.removals:
        about = {"policy": name, "namespace": namespace, "object": f"Pod/{removal.pod}", "reason": removal.reason}
        logger.warning("removing a pod", extra=about | {"cause": removal.message})
        if removal.reason != "Tidied":  # tidying up is no news
            await _tell(api, events.of_removal(live, removal, clock()))
        await api.delete("Pod", namespace, removal.pod, removal.uid, removal.version)
    for ref in result.deletions:
        logger.info("deleting", extra={"policy": name, "namespace": namespace, "object": "/".join(ref)})
        await api.delete(ref.kind, namespace, ref.name, result.seen[ref])
    if result.status_changed:
        await _store(api, live, result.status, clock())


async def _store(api: Api, live: Json, wanted: Json, now: str) -> None:
    """Write a status that differs from the live one, and tell what is new about it."""
    previous = live.get("status", {})
    if wanted == previous:
        return
    # Events first: told again after a crash they are the same ones; once the status is stored they would be lost.
    told = events.of_changes(live, previous.get("conditions", []), wanted["conditions"], now)
    told += events.of_rollout(live, previous.get("rollout", {}), wanted.get("rollout", {}), now)
    for event in told:
        await _tell(api, event)
    metadata = live["metadata"]
    body = {
        "apiVersion": live["apiVersion"],
        "kind": live["kind"],
        # With the uid, a PolicyDeployment made anew under this name refuses the old one's status.
        "metadata": {name: metadata[name] for name in ("name", "namespace", "uid")},
        "status": wanted,
    }
    try:
        await api.apply(body, "status")
    except ApiError as error:
        if error.status == 404:  # deleted meanwhile; its event brings the rest
            return
        raise


async def _tell(api: Api, event: Json) -> None:
    try:
        await api.create(event)
    except ApiError as error:  # an Event is news, not state: its loss must not repeat the work
        if "NamespaceTerminating" in error.causes:
            raise
        about = {"policy": event["involvedObject"]["name"], "namespace": event["metadata"]["namespace"]}
        logger.warning("event not posted", extra=about | {"cause": str(error)})
