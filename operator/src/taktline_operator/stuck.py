"""Workers that run but never become ready: loading or capturing hangs, or the rest of their group finds no room.

The kubelet's startup probe gives up a minute later by itself, so that workers are restarted without an operator too; it
cannot say why, nor try another node. What hangs again and again is left to the kubelet for ever longer: pods that are
made anew every few minutes, day and night, load a checkpoint each and help nobody.

A group that is half placed holds room that another one, which is half placed too, may wait for. Nobody but a queue that
admits groups whole prevents that, so it is let go for others to be placed, and is placed again where there are none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from taktline_operator import group_pods, healing, naming, routing, surge
from taktline_operator.faults import Fault
from taktline_operator.healing import Removal
from taktline_operator.rollout import seconds_between
from taktline_operator.spec import Pool
from taktline_operator.status import has_ended

Json = dict[str, Any]

STARTUP_S = 1740
"""How long a worker may take from the start of its process to being ready, where the pool says nothing."""
LONGEST_S = 6 * 3600
"""The operator takes a pod whose start hangs away at least this often, or once in its budget where that is longer."""
REASON = "StuckStart"
FIELD = "stuckStarts"
HALF_S = 300.0
"""How long a group that is half placed holds the room of its other half at first; twice as long each time after."""
HALF_REASON = "HalfPlaced"
HALF_FIELD = "halfPlaced"
CREATING_S = 60.0
"""A pod whose containers are not even made after so long is pointed at: only its events say what it waits for."""
_CONTAINER = "worker"


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done about starts that hang, and what is to be remembered.

    Attributes:
        removals: pods to delete now.
        records: by pool, what status keeps: which template, how many in a row, when the last one was taken away.
        let_go: by pool, how often each group that has not served since was let go as it was half placed.
        again_s: when to look again; None while no worker starts.
        fault: what people should know; None unless starts hang repeatedly.
    """

    removals: tuple[Removal, ...] = ()
    records: Mapping[str, Json] = {}
    let_go: Mapping[str, Mapping[str, int]] = {}
    again_s: float | None = None
    fault: Fault | None = None


def budget_s(pool: Pool) -> int:
    """How long a worker of this pool may load, capture and calibrate."""
    return pool.startup_seconds or STARTUP_S


def pause_s(count: int, budget: float) -> float:
    """How long after the `count`-th removal in a row the next one may follow: twice as long each time."""
    return float(min(budget * 2.0 ** min(count, 20), max(budget, LONGEST_S)))


def look(
    pods: Sequence[Json],
    pools: Iterable[Pool],
    status: Json,
    wanted: Mapping[str, int],
    now: str,
    groups: Collection[str],
) -> Found:
    """Decide about workers whose process has run for longer than its budget and was never ready, and groups in halves.

    A group goes as a whole.

    Args:
        status: the last status, with the records of before.
        wanted: workers wanted by hash of their pod template; what hung under another one is forgotten.
        groups: names of the objects that make groups: one may be without a pod for a moment.
    """
    removals: list[Removal] = []
    records: dict[str, Json] = {}
    let_go: dict[str, dict[str, int]] = {}
    waits: list[float] = []
    faults: list[Fault] = []
    before = {entry["name"]: entry for entry in status.get("pools", [])}
    for pool in pools:
        budget = budget_s(pool)
        own = [pod for pod in pods if pod["metadata"].get("labels", {}).get(naming.LABEL_POOL) == pool.name]
        entry = before.get(pool.name, {})
        record = _kept(entry.get(FIELD), own, wanted)
        units = group_pods.units(own)
        times = {
            told["group"]: int(told["count"])
            for told in entry.get(HALF_FIELD, [])
            if (told["group"] in units or told["group"] in groups)
            and not group_pods.is_whole(units.get(told["group"], ()))
        }
        gone: list[Removal] = []
        hung = ""
        for name, members in units.items():
            half = _half_placed(members, now)
            if half is not None:
                short, waited_s = half
                left = half_s(name, times.get(name, 0)) - waited_s
                waits.append(left + 1.0)
                if left < 0.0:
                    words = _half_words(short, waited_s)
                    removals += [healing.removal(pod, HALF_REASON, words, unless_changed=True) for pod in members]
                    times[name] = times.get(name, 0) + 1
                continue
            spent = [found for pod in members if (found := _spent_s(pod, now)) is not None]
            if not spent:
                continue
            template = _template_of(members[0])
            held = _held_s(record, template, budget, now)
            waits.append(max(budget - max(spent) + 1.0, held))
            if max(spent) > budget and held <= 0.0:
                gone += [healing.removal(pod, REASON, _words(pod, budget), unless_changed=True) for pod in members]
                hung = template
        if gone:
            again = record is not None and record["template"] == hung
            record = {"template": hung, "count": 1 + (record["count"] if record and again else 0), "lastTime": now}
            removals += gone
        let_go[pool.name] = times
        if record is not None:
            records[pool.name] = record
            faults += _fault(pool.name, record, budget)
    return Found(
        removals=tuple(removals),
        records=records,
        let_go=let_go,
        again_s=max(1.0, min(waits)) if waits else None,
        fault=faults[0] if faults else None,
    )


def tell(status: Json, found: Found) -> None:
    """Add to a new status what is to be remembered."""
    for entry in status["pools"]:
        if entry["name"] in found.records:
            entry[FIELD] = found.records[entry["name"]]
        if times := found.let_go.get(entry["name"]):
            entry[HALF_FIELD] = [{"group": name, "count": count} for name, count in sorted(times.items())]


def _kept(record: Json | None, pods: Sequence[Json], wanted: Mapping[str, int]) -> Json | None:
    """The record of before, until as many workers of its template as are wanted serve, or none is wanted."""
    if record is None:
        return None
    ready = [pod for pod in group_pods.leaders(pods) if _template_of(pod) == record["template"]]
    serving = sum(routing.is_ready(pod) for pod in ready)
    return record if serving < wanted.get(record["template"], 0) else None


def _held_s(record: Json | None, template: str, budget: float, now: str) -> float:
    """How long a hanging worker is still left to the kubelet."""
    if record is None or record["template"] != template:
        return 0.0
    return max(0.0, pause_s(record["count"], budget) - seconds_between(record["lastTime"], now))


def _fault(pool: str, record: Json, budget: float) -> list[Fault]:
    if record["count"] < 2:  # the Event tells of the first
        return []
    pause = timedelta(seconds=pause_s(record["count"], budget))
    following = (datetime.fromisoformat(record["lastTime"]) + pause).strftime("%Y-%m-%dT%H:%M:%SZ")
    return [
        Fault(
            REASON,
            f"pool {pool}: {record['count']} starts in a row hung for {budget} s (pools[].startupSeconds); the kubelet"
            f" restarts the worker in place, and it is moved no sooner than {following}; see its log, or edit the spec",
        )
    ]


def half_s(name: str, times: int) -> float:
    """How long a group may hold half of its room after it was let go so often: twice as long each time.

    And up to half as long again by its name: two that are let go at the same moment would meet in the same way again.
    """
    apart = 1.0 + int(naming.content_hash(name), 16) % 1000 / 2000.0
    return min(HALF_S * 2.0 ** min(times, 20), LONGEST_S / 1.5) * apart


def _half_placed(members: Sequence[Json], now: str) -> tuple[Json, float] | None:
    """The pod of a group that has waited longest for a node while others have theirs, and how long those have waited.

    None where it is not so. The times are those of the pods: containers start again while they wait for their peers.
    """
    lasting = [pod for pod in members if not pod["metadata"].get("deletionTimestamp")]
    placed = [pod for pod in lasting if pod.get("spec", {}).get("nodeName") and not has_ended(pod)]
    waiting = [pod for pod in lasting if surge.finds_no_node(pod)]
    if not placed or not waiting:
        return None
    short = max(waiting, key=lambda pod: surge.wanted_s(pod, now))
    return short, min(surge.wanted_s(short, now), *(_placed_s(pod, now) for pod in placed))


def _placed_s(pod: Json, now: str) -> float:
    since = pod.get("status", {}).get("startTime") or pod["metadata"].get("creationTimestamp", "")
    return seconds_between(since, now)


def _half_words(short: Json, waited_s: float) -> str:
    return (
        f"the scheduler finds no node for pod {short['metadata']['name']}, for which the rest of its group has waited"
        f" for {waited_s:.0f} s: the group is let go, so that others may be placed, and placed anew"
    )


def _words(pod: Json, budget: int) -> str:
    return (
        f"pod {pod['metadata']['name']} has run for longer than the {budget} s in which its worker should"
        " have loaded and captured (pools[].startupSeconds), and is not ready"
    )


def _spent_s(pod: Json, now: str) -> float | None:
    """How long a pod's worker has been starting; None where it is ready, was, or does not run."""
    if pod["metadata"].get("deletionTimestamp"):
        return None
    for status in pod.get("status", {}).get("containerStatuses", []):
        since = status.get("state", {}).get("running", {}).get("startedAt")
        if status.get("name") == _CONTAINER and since and not status.get("started") and not status.get("ready"):
            return seconds_between(since, now)
    return None


def _template_of(pod: Json) -> str:
    found: str = pod["metadata"].get("annotations", {}).get(naming.ANNOTATION_TEMPLATE, "")
    return found


def creating_note(pods: Iterable[Json], now: str) -> str:
    """What the Progressing condition adds of pods that their node has had for long without starting a container.

    A volume that cannot be mounted is told in events alone, which the operator has no right to read, and so is an image
    that takes its time.
    """
    slow = sorted(str(pod["metadata"]["name"]) for pod in pods if _creating_s(pod, now) >= CREATING_S)
    if not slow:
        return ""
    return f"; pod/{slow[0]} has no container yet: `kubectl describe pod {slow[0]}` says what it waits for"


def creating_again_s(pods: Iterable[Json], now: str) -> float | None:
    """When the first pod will have been without a container for long; None where none is about to be."""
    left = [CREATING_S - spent for pod in pods if 0.0 <= (spent := _creating_s(pod, now)) < CREATING_S]
    return min(left, default=None)


def _creating_s(pod: Json, now: str) -> float:
    """How long a node has been about to make a pod's first container; below 0 where it is not."""
    status = pod.get("status", {})
    told = status.get("initContainerStatuses") or status.get("containerStatuses") or [{}]
    reason = told[0].get("state", {}).get("waiting", {}).get("reason", "")
    making = reason in ("ContainerCreating", "PodInitializing")
    if pod["metadata"].get("deletionTimestamp") or not making or not status.get("startTime"):
        return -1.0
    return seconds_between(status["startTime"], now)
