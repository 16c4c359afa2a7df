"""Which Deployment of a pool runs which revision: one in steady times, a second one beside it during a trial."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from taktline_operator import naming
from taktline_operator.spec import PolicyDeployment

Json = dict[str, Any]

_KINDS = ("Deployment", "StatefulSet", "LeaderWorkerSet", "RayService")  # what runs workers


def live_tracks(policy: PolicyDeployment, pool: str, children: Iterable[Json]) -> dict[str, str]:
    """Track -> hash of the revision it runs, of a pool's Deployments or groups; the track of the plain ones is empty.

    A Deployment that says no hash (made before revisions were kept) runs the empty one.
    """
    found = {}
    for child in children:
        metadata = child["metadata"]
        labels = metadata.get("labels", {})
        kind = child.get("kind")
        if kind in _KINDS and labels.get(naming.LABEL_POOL) == pool:
            track = labels.get(naming.LABEL_TRACK, "")
            if kind != "Deployment" or metadata["name"] == naming.workload_name(policy.name, pool, track):
                found[track] = metadata.get("annotations", {}).get(naming.ANNOTATION_REVISION_HASH, "")
    return found


def serving_track(live: Mapping[str, str], revision: str) -> str:
    """The track of the revision that serves, or is to take over in place."""
    running = _running(live, revision)
    if running is not None:
        return running
    return "" if not live.get("") else _free(live, revision)


def candidate_track(live: Mapping[str, str], revision: str) -> str:
    """The track of a candidate; never that of another revision."""
    running = _running(live, revision)
    return running if running is not None else _free(live, revision)


def in_place_track(live: Mapping[str, str], before: str) -> str:
    """The track that a rolling update goes through: the one that serves now."""
    running = _running(live, before)
    return running if running is not None else ("" if "" in live or not live else min(live))


def track_of(found: Json) -> str:
    """The track of a pod or Deployment."""
    track: str = found["metadata"].get("labels", {}).get(naming.LABEL_TRACK, "")
    return track


def _running(live: Mapping[str, str], revision: str) -> str | None:
    return next((track for track, found in sorted(live.items()) if found == revision), None)


def _free(live: Mapping[str, str], revision: str) -> str:
    return next(track for track in (revision, "", f"{revision}b") if track not in live)
