"""How a pool's rolling update proceeds: a new worker first, or an old one first where there is no spare accelerator."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from taktline_operator import diff, kueue, naming, routing, workload
from taktline_operator.rollout import seconds_between
from taktline_operator.status import PoolCount

Json = dict[str, Any]
Unit = Sequence[Json]
"""The pods of one worker."""

SURGE: Json = {"maxSurge": 1, "maxUnavailable": 0}  # a new worker is ready before an old one leaves
YIELD: Json = {"maxSurge": 0, "maxUnavailable": 1}  # one old worker makes room for each new one
BEGAN = "began"
"""Beside those of groups: how many served as their rollout began, where it waits since fewer do; else 0."""
HELD_S = 20.0
"""After so long in its queue a pod is not merely about to be admitted: every pod begins there."""
ROOM_S = workload.DRAIN_S + HELD_S
"""After so long the room of a worker that was told to leave has been found by another, if it is of use to any."""
_UNSCHEDULABLE = "Unschedulable"
_INSUFFICIENT = re.compile(r"Insufficient ([\w./-]*\w)")


def wants_room(pod: Json) -> bool:
    """Whether a pod holds no room: no node has enough left for it, or its queue has not admitted it."""
    return is_without_room(pod) or kueue.is_waiting(pod)


def is_without_room(pod: Json) -> bool:
    """Whether the scheduler finds no node with enough free resources; any other reason would not be cured by room."""
    scheduled = _scheduled(pod)
    return scheduled.get("status") == "False" and "Insufficient" in scheduled.get("message", "")


def finds_no_node(pod: Json) -> bool:
    """Whether the scheduler finds no node for a pod, whatever the reason, and no queue holds it."""
    scheduled = _scheduled(pod)
    return (
        scheduled.get("status") == "False" and scheduled.get("reason") == _UNSCHEDULABLE and not kueue.is_waiting(pod)
    )


def pressing(new: Iterable[Unit], old: Iterable[Unit], now: str, unready: Iterable[Unit] = ()) -> list[Unit]:
    """Those of the new workers that would run if an old one made room.

    A worker that waits in a queue is one of them only where an old one that serves has what it waits for: a place in
    the same queue, and no less of anything that it asks for. Nothing else would let it in. One that no node has room
    for is one only where an old one has no less of all that is short.

    Args:
        old: workers that serve.
        unready: old ones that do not.
    """
    served = [unit for unit in old if unit]
    holding = served + [unit for unit in unready if unit and not any(map(wants_room, unit))]
    return [
        unit
        for unit in new
        if (
            (short := _short_of(unit)) is not None
            and (not holding or any(_leaves_enough(other, unit, short) for other in holding))
        )
        or (
            any(kueue.is_waiting(pod) and wanted_s(pod, now) >= HELD_S for pod in unit)
            and any(_makes_room(other, unit) for other in served)
        )
    ]


def leaves(pod: Json, now: str) -> bool:
    """Whether a pod that was told to end is about to: one whose node is dead stays past its time, for good maybe."""
    told = pod["metadata"].get("deletionTimestamp", "")  # the end of its grace period
    return bool(told) and seconds_between(told, now) < HELD_S


def is_starting(unit: Unit) -> bool:
    """Whether a worker that does not serve yet has its room and starts."""
    return not any(wants_room(pod) or pod["metadata"].get("deletionTimestamp") for pod in unit)


def waited_s(units: Iterable[Unit], now: str) -> float:
    """How long the last of these workers to come has waited for room; 0 where there is none."""
    waits = [max((wanted_s(pod, now) for pod in unit if wants_room(pod)), default=0.0) for unit in units]
    return min(waits, default=0.0)


def look_again_s(pods: Sequence[Json], now: str, *, rolling: bool) -> float | None:
    """When it shows whether a pod that waits for room still does; None where none does.

    Args:
        rolling: whether old workers are there that could make room, and more of them as time goes by.
    """
    waits = [wanted_s(pod, now) for pod in pods if wants_room(pod)]
    looks = [HELD_S - wait for wait in waits if wait < HELD_S]
    looks += [ROOM_S - (wait - HELD_S) % ROOM_S for wait in waits if rolling and wait >= HELD_S]
    return min(looks, default=None)


def strategy(count: PoolCount, live: Json | None, now: str, *, admits: bool = True) -> Json:
    """The rolling-update parameters of a pool.

    With two workers or more, a rollout whose new pod finds no room takes one old worker away at a time; it keeps doing
    so until it is through, though a pod that has found room is no longer starved. Where fewer serve than are wanted as
    it begins, for there never was room for all, it counts from those. It counts no lower later: where the one that left
    has brought nobody, another would not either. The last worker is never taken away: robots would have none while the
    new one loads.

    Args:
        live: the Deployment as it is.
        admits: whether its queue admits anybody.
    """
    if count.desired < 2 or not count.old:
        return SURGE
    spec = (live or {}).get("spec", {})
    update = spec.get("strategy", {}).get("rollingUpdate", {})
    yielding = update.get("maxSurge") == 0
    pressed = admits and bool(_pressing(count, now)) and not _is_coming(count, now)
    # Not while the room of one that was replaced is yet to be found: where new ones serve, there was some.
    begins = pressed and (count.updated_ready == 0 or _is_quiet(live or {}, now))
    if not yielding and not begins:
        return SURGE
    serving = min(count.ready, count.desired)
    # Fewest that serve at any time. It rises with those that serve, and falls only as it begins.
    least = _number(spec.get("replicas")) - _number(update.get("maxUnavailable")) if yielding else count.desired - 1
    least = max(least, serving - 1)
    if not yielding and serving <= least:
        idle = any(not routing.is_ready(pod) and is_starting([pod]) for pod in count.old_pods)
        least = serving if idle else serving - 1  # one that holds room and does not serve leaves first
    return SURGE | {"maxSurge": 0, "maxUnavailable": count.desired - max(1, min(least, count.desired - 1))}


def note(
    counts: Sequence[PoolCount], strategies: Sequence[Json], now: str, makers: Sequence[str], *, admits: bool = True
) -> str:
    """What the Progressing condition adds about room; empty when there is enough.

    Args:
        strategies: of each pool; for groups, whose objects have none, what they do instead.
        makers: of each pool, the kind of object that makes its workers.
        admits: whether the policy's queue admits anybody; where it does not, the condition Queued says so.
    """
    for count, chosen, maker in zip(counts, strategies, makers, strict=True):
        if not count.old:
            continue
        found = _pressing(count, now)
        pressed = bool(found)
        # The room of the one that left has had its time to be found, and nobody else leaves.
        least = count.desired - chosen["maxUnavailable"] if maker == "Deployment" else 0
        fruitless = count.ready <= least and waited_s(found, now) >= HELD_S + ROOM_S
        if maker == "RayService":
            # KubeRay brings up a whole cluster beside the one that serves: none makes room for another.
            if admits and pressed:
                return f"; pool {count.name} has no room for another Ray cluster beside the one that serves: free some"
        elif chosen["maxSurge"] == 0 and count.ready > 1 and not fruitless:
            return f"; pool {count.name} has no spare accelerator, so an old worker leaves before each new one"
        elif admits and pressed:
            beside = "a second worker beside the one that serves" if count.ready == 1 else "another worker"
            said = f"; pool {count.name} has no room for {beside}: free some"
            began = chosen.get(BEGAN, 0)
            # The last one stays whatever is wanted.
            return said + (_waits(count.ready, began) if began > count.ready >= 2 else "")
        if not pressed and any(map(is_without_room, count.current_pods)):
            return (
                f"; new workers of pool {count.name} find no node with room, and the old ones stay: they ask for more"
                " than those would leave"
            )
        if admits and not pressed and any(_is_held(pod, now) for pod in count.current_pods):
            return (
                f"; new workers of pool {count.name} wait in their queue, and the old ones stay: it is not the room of"
                " those that they wait for"
            )
    return ""


def _waits(ready: int, began: int) -> str:
    return (
        f"; the rollout waits, as {ready} workers serve and {began} did when it began: with `replicas` of {ready} it"
        " would go on"
    )


def _pressing(count: PoolCount, now: str) -> list[Unit]:
    old: list[Unit] = [[pod] for pod in count.old_pods if routing.is_ready(pod)]
    unready: list[Unit] = [[pod] for pod in count.old_pods if not routing.is_ready(pod)]
    return pressing([[pod] for pod in count.current_pods], old, now, unready)


def _is_coming(count: PoolCount, now: str) -> bool:
    """Whether room is about to be found: a worker leaves, or a new one has its room and starts."""
    leaving = any(leaves(pod, now) for pod in (*count.old_pods, *count.current_pods))
    return leaving or any(not routing.is_ready(pod) and is_starting([pod]) for pod in count.current_pods)


def _is_quiet(live: Json, now: str) -> bool:
    """Whether a Deployment has come no further for so long that the worker that left last has made no room."""
    told = [c for c in live.get("status", {}).get("conditions", []) if c["type"] == "Progressing"]
    return any(seconds_between(c.get("lastUpdateTime", now), now) >= ROOM_S for c in told)


def _is_held(pod: Json, now: str) -> bool:
    return kueue.is_waiting(pod) and wanted_s(pod, now) >= HELD_S


def _makes_room(old: Unit, new: Unit) -> bool:
    """Whether a worker that leaves leaves all that another one asks of the same queue."""
    if kueue.queue_of(old[0]) != kueue.queue_of(new[0]):
        return False
    return _leaves_enough(old, new, _asks(new))


def _leaves_enough(old: Unit, new: Unit, names: Iterable[str]) -> bool:
    free, asked = _asks(old), _asks(new)
    return all(asked.get(name, Decimal(0)) <= free.get(name, Decimal(0)) for name in names)


def _short_of(unit: Unit) -> set[str] | None:
    """The resources that the scheduler finds too little of for a worker; None where it does not wait for room."""
    found = [set(_INSUFFICIENT.findall(_scheduled(pod)["message"])) for pod in unit if is_without_room(pod)]
    return set().union(*found) if found else None


def _asks(unit: Unit) -> Mapping[str, Decimal]:
    """What the containers of a worker ask for, by resource; pods of it that are yet to come are like the first."""
    found: dict[str, Decimal] = {}
    for container in unit[0].get("spec", {}).get("containers", []):
        resources = container.get("resources", {})
        for name, value in (resources.get("limits", {}) | resources.get("requests", {})).items():
            found[name] = found.get(name, Decimal(0)) + diff.quantity(value)
    size = int(unit[0]["metadata"].get("annotations", {}).get(naming.ANNOTATION_GROUP_SIZE, "1"))
    return {name: value * size for name, value in found.items()}


def _scheduled(pod: Json) -> Json:
    told = pod.get("status", {}).get("conditions", [])
    return next((condition for condition in told if condition["type"] == "PodScheduled"), {})


def wanted_s(pod: Json, now: str) -> float:
    """How long a pod has been without room."""
    since = "" if kueue.is_waiting(pod) else _scheduled(pod).get("lastTransitionTime", "")
    return seconds_between(since or pod["metadata"].get("creationTimestamp", ""), now)


def _number(value: object) -> int:
    return value if isinstance(value, int) else 1
