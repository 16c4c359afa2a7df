"""Objects of other products that nobody looks at: their kind is installed, and its controller does not run.

Nothing else would say so: no pod is there to fail, and no rollout to stall.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from taktline_operator import groups, ray_services
from taktline_operator.faults import Fault
from taktline_operator.rollout import seconds_between

Json = dict[str, Any]

PATIENCE_S = 120.0
# kind -> whose controller
CONTROLLERS = {groups.LWS_KIND: "LeaderWorkerSet's controller", ray_services.KIND: "KubeRay's operator"}


def fault(children: Iterable[Json], now: str) -> Fault | None:
    """The first object that its controller has left without a status for `PATIENCE_S`; None where there is none."""
    for child in sorted(_untouched(children), key=lambda found: str(found["metadata"]["name"])):
        if seconds_between(child["metadata"]["creationTimestamp"], now) >= PATIENCE_S:
            what = f"{child['kind'].lower()}/{child['metadata']['name']}"
            return Fault(
                "ControllerAbsent",
                f"{what}: {CONTROLLERS[child['kind']]} has not looked at it for {PATIENCE_S:.0f} s: see whether it runs"
                " and what it logs",
            )
    return None


def look_again_s(children: Iterable[Json], now: str) -> float | None:
    """When the youngest of them has waited for long enough; None where none waits."""
    left = [PATIENCE_S - seconds_between(child["metadata"]["creationTimestamp"], now) for child in _untouched(children)]
    return min((seconds for seconds in left if seconds > 0.0), default=None)


def _untouched(children: Iterable[Json]) -> list[Json]:
    return [
        child
        for child in children
        if child["kind"] in CONTROLLERS
        and not child.get("status")
        and child["metadata"].get("creationTimestamp")
        and not child["metadata"].get("deletionTimestamp")
    ]
