"""Says how the delivery of a checkpoint to its nodes goes: the condition ModelDelivery, and numbers beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from taktline_protocol.delivery import DeliveryProgress

from taktline_operator import faults
from taktline_operator.delivery import CONTAINER, PROGRESS_PORT
from taktline_operator.spec import PolicyDeployment

Json = dict[str, Any]

CONDITION = "ModelDelivery"
LOOK_S = 3.0  # between two looks at a delivery under way
OLDEST_IMAGE_VOLUMES = (1, 31)
_LAST_WORDS = re.compile(r"taktline-worker: ([a-z_]+): (.*)", re.DOTALL)


def progress_address(pod: Json) -> str | None:
    """`address:port` where a pod that fetches tells how far it is; None where it does not fetch now."""
    address = pod.get("status", {}).get("podIP")
    if not address or pod["metadata"].get("deletionTimestamp") or "running" not in _container(pod).get("state", {}):
        return None
    return f"[{address}]:{PROGRESS_PORT}" if ":" in address else f"{address}:{PROGRESS_PORT}"


def is_under_way(pods: Sequence[Json]) -> bool:
    """Whether a pod fetches now."""
    return any(progress_address(pod) is not None for pod in pods)


def condition(
    policy: PolicyDeployment, pods: Sequence[Json], progress: Mapping[str, DeliveryProgress]
) -> tuple[tuple[str, str, str], Json]:
    """(status, reason, message) of the condition, and `status.delivery`.

    Unknown while it is under way, False where it failed, True where every worker has its files.

    Args:
        pods: the policy's worker pods.
        progress: what those that fetch tell, by pod name.
    """
    alive = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp") and _is_alive(pod)]
    alive.sort(key=lambda pod: str(pod["metadata"]["name"]))
    failed = [found for pod in alive if (found := _failure(pod, progress.get(str(pod["metadata"]["name"]))))]
    fetching = [pod for pod in alive if progress_address(pod) is not None]
    done = [pod for pod in alive if _container(pod).get("state", {}).get("terminated", {}).get("exitCode") == 0]
    told = [progress[name] for pod in fetching if (name := str(pod["metadata"]["name"])) in progress]
    counts: Json = {"delivered": len(done), "fetching": len(fetching), "failed": len(failed)}
    if told:
        # One that waits repeats what the one that fetches told a moment ago.
        own = [found for found in told if found.state != "waiting"] or told
        slowest = min(own, key=lambda found: found.percent)
        counts |= {
            "percent": slowest.percent,
            "doneBytes": slowest.done_bytes,
            "totalBytes": slowest.total_bytes,
        }
    elif alive and len(done) == len(alive):
        counts["percent"] = 100
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return ("False", failed[0][0], failed[0][1] + more), counts
    if fetching:
        return ("Unknown", "Downloading", _words(fetching, progress)), counts
    if not alive:
        return ("Unknown", "NoWorker", "there is no worker to bring the checkpoint to"), counts
    if len(done) < len(alive):
        left = len(alive) - len(done)
        return ("Unknown", "Pending", f"{left} of {len(alive)} workers have not begun to fetch"), counts
    what = policy.spec.revision()
    return ("True", "Verified", f"revision {what} is whole and verified where its {len(done)} workers are"), counts


def image_volumes_refusal(policy: PolicyDeployment, version: tuple[int, int] | None) -> tuple[str, str] | None:
    """Reason and message where the cluster has no image volumes; None where it may have, or none is wanted."""
    if policy.spec.model.source.oci is None or version is None or version >= OLDEST_IMAGE_VOLUMES:
        return None
    found, oldest = (".".join(map(str, pair)) for pair in (version, OLDEST_IMAGE_VOLUMES))
    return (
        "ImageVolumesUnsupported",
        f"model.source.oci mounts an image as a volume, which Kubernetes has since {oldest} (feature gate ImageVolume,"
        f" on by default since 1.35), and this cluster is {found}; use pvc, http or s3, or upgrade",
    )


def _words(fetching: Sequence[Json], progress: Mapping[str, DeliveryProgress]) -> str:
    parts = []
    for pod in fetching:
        name = str(pod["metadata"]["name"])
        found = progress.get(name)
        if found is None:
            parts.append(f"pod/{name}: starting")
            continue
        big = found.total_bytes >= 1e8
        size = f"{found.total_bytes / 1e9:.1f} GB" if big else f"{found.total_bytes / 1e6:.1f} MB"
        far = f"{found.percent}% of {size}, {found.done_files} of {found.total_files} files"
        text = f"pod/{name}: {far if found.total_bytes else found.state}"
        if found.state == "waiting" and found.total_bytes:
            text += ", fetched by another pod of its node"
        parts.append(text + (f"; trying again: {found.trouble[:200]}" if found.trouble else ""))
    return "; ".join(parts)[:2000]


def _container(pod: Json) -> Json:
    for found in pod.get("status", {}).get("initContainerStatuses", []):
        if found["name"] == CONTAINER:
            return dict(found)
    return {}


def _is_alive(pod: Json) -> bool:
    wanted = any(found["name"] == CONTAINER for found in pod.get("spec", {}).get("initContainers", []))
    return wanted and pod.get("status", {}).get("phase") not in ("Failed", "Succeeded")


def _failure(pod: Json, progress: DeliveryProgress | None) -> tuple[str, str] | None:
    """Reason and message of a pod whose fetch ended and was not taken up again with success."""
    container = _container(pod)
    state = container.get("state", {})
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated")
    if not ended or ended.get("exitCode") == 0 or state.get("terminated", {}).get("exitCode") == 0:
        return None
    if "running" in state and progress is not None and progress.state == "downloading" and progress.done_bytes:
        return None  # it goes on
    words = faults.last_words(ended.get("message", ""))
    name = f"pod/{pod['metadata']['name']}"
    match = _LAST_WORDS.fullmatch(words)
    if match is None:
        code = ended.get("exitCode")
        return "Failed", f"{name}: fetching ended with exit code {code}" + (f": {words}" if words else "")
    reason = "".join(part.capitalize() for part in match.group(1).split("_"))
    return reason, f"{name}: {match.group(2)}"
