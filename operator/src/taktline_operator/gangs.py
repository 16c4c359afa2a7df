"""Which groups of a line exist at this moment: new ones before old ones go, each built whole from one revision."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from taktline_operator import group_pods, groups, naming, surge, workload
from taktline_operator.lineup import Line
from taktline_operator.meshes import Shape

Json = dict[str, Any]

_MAKERS = ("Deployment", "StatefulSet", groups.LWS_KIND, "RayService")


class Gang(NamedTuple):
    """The groups of one line.

    Attributes:
        template: pod template of its groups.
        shape: pods and ranks of each.
        kind: what makes them: StatefulSet, LeaderWorkerSet or RayService.
        objects: those that must exist, in the order to create them.
        kept: (kind, name) of groups of an earlier template that serve on, as they are.
        removed: (kind, name) of workloads whose place is taken.
        serving: RayServices of the line whose application runs.
        again_s: when a new group will have been ready for long enough, while an old one waits for that, or when an old
            one that falters has had its time.
        yields: whether an old group leaves before each new one comes, as there is no room beside them.
        began: groups that served as the rollout began, where it waits since fewer do; 0 where it does not.
    """

    template: Json
    shape: Shape
    kind: str
    objects: tuple[Json, ...]
    kept: frozenset[tuple[str, str]]
    removed: tuple[tuple[str, str], ...]
    serving: int = 0
    again_s: float | None = None
    yields: bool = False
    began: int = 0


def of(
    line: Line,
    image: str,
    shape: Shape,
    children: Sequence[Json],
    pods: Sequence[Json],
    now: str,
    *,
    lws_installed: bool,
    admits: bool = True,
) -> Gang:
    """The groups of a line, from what is live.

    A line keeps the kind of object that its groups have: installing LeaderWorkerSet moves no worker that serves.

    Args:
        children: live objects of the policy.
        pods: its pods, all members of groups.
        now: RFC 3339 time.
        admits: whether the policy's queue admits anybody.
    """
    ours = [child for child in children if child["kind"] in _MAKERS and is_of(line, child)]
    kind = groups.LWS_KIND if lws_installed and not any(c["kind"] == "StatefulSet" for c in ours) else "StatefulSet"
    make = groups.leader_worker_set if kind == groups.LWS_KIND else groups.stateful_set
    made = groups.template(line, image, shape, lws=kind == groups.LWS_KIND)
    hash_ = workload.template_hash(made)
    units = group_pods.units(pods)
    whole = {name: members for name, members in units.items() if group_pods.is_whole(members)}
    settling = {name: group_pods.settles_s(members, now) for name, members in whole.items()}
    own = [pod for pod in pods if line.has(pod)]
    # One that has several groups, as other versions of the operator made, is replaced as a whole like any other kind.
    sets = [child for child in ours if child["kind"] == kind and naming.LABEL_GROUP in child["metadata"]["labels"]]
    others = [child for child in ours if child not in sets]
    numbers = {name: _number(name) for name in (child["metadata"]["name"] for child in sets)}
    current_sets = {
        child["metadata"]["name"]: settling.get(child["metadata"]["name"]) == 0.0
        for child in sets
        if child["metadata"].get("annotations", {}).get(naming.ANNOTATION_TEMPLATE) == hash_
    }
    old_sets = {
        child["metadata"]["name"]: child["metadata"]["name"] in whole
        for child in sets
        if child["metadata"]["name"] not in current_sets
    }
    faltering = {
        name: left_s
        for name, serves in old_sets.items()
        if not serves and (left_s := group_pods.falters_s(units.get(name, ()), now))
    }
    # Workers of another kind of object (one pod each, before the mesh outgrew a node) are replaced as a whole.
    # Pods outlive the object that made them by a moment: those of a group that was taken away serve no longer.
    leaving = {_group_label(pod) for pod in own} - {"", *(child["metadata"]["name"] for child in ours)}
    serving_elsewhere = [
        pod for pod in own if _is_ready(pod, whole) and _template_of(pod) != hash_ and _group_label(pod) not in leaving
    ]
    elsewhere = len(serving_elsewhere) - sum(old_sets.values())
    new = group_pods.units(pod for pod in own if _template_of(pod) == hash_)
    unready: list[list[Json]] = []
    serving_old: list[list[Json]] = []
    for name, unit in group_pods.units(own).items():
        if name not in new and _group_label(unit[0]) not in leaving:
            (serving_old if name in whole else unready).append(unit)
    pressing = surge.pressing(new.values(), serving_old, now, unready) if admits else []
    starved = any(surge.is_without_room(pod) for unit in new.values() for pod in unit)
    coming = (
        any(surge.leaves(pod, now) for pod in own)
        or any(_group_label(pod) in leaving and not pod["metadata"].get("deletionTimestamp") for pod in own)
        or any(name not in whole and surge.is_starting(unit) for name, unit in new.items())
    )
    served = 0
    if old_sets or others:  # told by the groups themselves: an operator that starts anew knows of it
        serve = sum(current_sets.values()) + sum(old_sets.values()) + max(0, elsewhere)
        served = min(max(map(_served, sets), default=0), len(sets) + max(0, elsewhere))
        if not served and current_sets and old_sets and starved and serve < line.replicas:
            served = serve + 1  # begun by an earlier version, which told nothing: one may have left in vain already
    chosen = roll(
        line.replicas,
        {numbers[name]: is_ready for name, is_ready in current_sets.items()},
        old_sets,
        elsewhere,
        starved,
        held=bool(pressing),
        coming=coming,
        waited_s=surge.waited_s(pressing, now),
        faltering=faltering,
        served=served,
        placed={
            numbers[name]
            for name, unit in new.items()
            if name in current_sets and len(unit) == shape.pods and surge.is_starting(unit)
        },
    )
    removed = [(kind, name) for name in old_sets if name not in chosen.kept]
    wanted = {groups.group_name(line, hash_, number) for number in chosen.numbers}
    removed += [(kind, name) for name in current_sets if name not in wanted]
    serving = sum(current_sets[name] for name in wanted if name in current_sets)
    removed += [_ref(child) for child in others if serving >= line.replicas]
    if old_sets or others:
        served = max(served, min(line.replicas, serve))
    waits = [settling[name] for name in current_sets if settling.get(name)] if old_sets or others else []
    waits += [left_s for name, left_s in faltering.items() if name in chosen.kept]
    return Gang(
        template=made,
        shape=shape,
        kind=kind,
        objects=tuple(_telling(make(line, made, number, shape), served) for number in chosen.numbers),
        kept=frozenset((kind, name) for name in chosen.kept)
        | frozenset(_ref(child) for child in others if serving < line.replicas),
        removed=tuple(sorted(removed)),
        again_s=min(waits, default=None),
        yields=chosen.yields,
        began=min(served, line.replicas) if chosen.fruitless and not coming else 0,
    )


class Chosen(NamedTuple):
    """Which groups to have.

    Attributes:
        numbers: of the new ones.
        kept: names of the old ones.
        yields: whether those make room for the new.
        fruitless: whether they do not as fewer serve than did: another one that leaves would bring nobody either.
    """

    numbers: tuple[int, ...]
    kept: frozenset[str]
    yields: bool = False
    fruitless: bool = False


def roll(
    wanted: int,
    current: Mapping[int, bool],
    old: Mapping[str, bool],
    elsewhere: int = 0,
    starved: bool = False,
    *,
    held: bool = False,
    coming: bool = False,
    waited_s: float = 0.0,
    faltering: Collection[str] = (),
    served: int = 0,
    placed: Collection[int] = (),
) -> Chosen:
    """Which groups to have now.

    Old groups that serve are kept until new ones do in their place; those that do not serve go at once. One group more
    than wanted may exist. Where a new one finds no room, and there are two or more, an old one makes room for it; and
    beside those that have all their room one group at a time is put together, so that no two wait for each other with
    half of their pods placed. Where fewer serve than are wanted, as there never was room for all, one of those leaves:
    but only after so long that the room of each that is missing would have been found, never the last, and never a
    second one where the first that left has brought nobody. One that falters may come back and is kept after all that
    serve; nobody leaves meanwhile.

    Args:
        wanted: groups in the end.
        current: number -> whether it serves, of the groups of the new template.
        old: name -> whether it serves, of groups of other templates.
        elsewhere: workers of other kinds of objects that serve and will go.
        starved: whether the scheduler finds no room for a pod of a new group.
        held: whether one would run if an old one made room. What a queue admits it admits as a whole.
        coming: whether room is about to be found: a group leaves, or a new one has its room and starts.
        waited_s: how long the last to come of the new groups that find no room has waited; each that leaves brings one.
        faltering: old groups that do not serve at this moment and have only just ceased to.
        served: most groups that have served at a time since the rollout began; another edit begins none.
        placed: numbers of new groups that have all their room.
    """
    serving = sum(current.values())
    left = sum(old.values()) + max(0, elsewhere)
    spared = max(0, wanted - serving)
    missing = wanted - serving - left
    fruitless = serving + left < min(wanted, served)
    yields = held and wanted >= 2 and left > 0 and not fruitless
    if yields and left <= spared and not (coming or faltering):
        # Time for the room of those that are missing to be found, and of the one that the last new one replaced.
        times = max(0, missing) + (1 if serving else 0)
        if not times or waited_s >= surge.HELD_S + times * surge.ROOM_S:
            spared = max(left - 1, 0 if serving else 1)
    candidates = sorted(name for name, is_ready in old.items() if is_ready) + sorted(faltering)
    kept = frozenset(candidates[: max(0, spared - elsewhere)])
    count = wanted if elsewhere else min(wanted, max(len(current), wanted + 1 - len(kept)))
    if starved:
        count = min(count, sum(current[number] or number in placed for number in current) + 1)
    ranked = sorted(current, key=lambda number: (not current[number], number not in placed, number))
    staying = sorted(ranked[:count])
    free = (number for number in range(wanted + len(current) + 1) if number not in current)
    return Chosen(
        tuple(sorted([*staying, *(next(free) for _ in range(count - len(staying)))])), kept, yields, fruitless
    )


def superseded(line: Line, children: Sequence[Json], serving: int) -> tuple[tuple[str, str], ...]:
    """Groups of a line whose workers are one pod each by now, once these serve instead."""
    if serving < line.replicas:
        return ()
    kinds = [kind for kind in _MAKERS if kind != "Deployment"]
    return tuple(sorted(_ref(child) for child in children if child["kind"] in kinds and is_of(line, child)))


def is_of(line: Line, child: Json) -> bool:
    """Whether a workload runs workers of this line."""
    labels = child["metadata"].get("labels", {})
    if labels.get(naming.LABEL_MANAGED_BY) != naming.MANAGER or labels.get(naming.LABEL_POLICY) != line.policy.name:
        return False
    same = labels.get(naming.LABEL_POOL) == line.pool.name and labels.get(naming.LABEL_TRACK, "") == line.track
    return bool(same and not child["metadata"].get("deletionTimestamp"))


def _served(child: Json) -> int:
    found: str = child["metadata"].get("annotations", {}).get(naming.ANNOTATION_SERVED, "")
    return int(found) if found.isdecimal() else 0


def _telling(made: Json, served: int) -> Json:
    if served:
        made["metadata"]["annotations"][naming.ANNOTATION_SERVED] = str(served)
    return made


def _is_ready(pod: Json, ready: Collection[str]) -> bool:
    return group_pods.index_of(pod) in (None, 0) and group_pods.group_of(pod) in ready


def _template_of(pod: Json) -> str:
    found: str = pod["metadata"].get("annotations", {}).get(naming.ANNOTATION_TEMPLATE, "")
    return found


def _group_label(pod: Json) -> str:
    found: str = pod["metadata"].get("labels", {}).get(naming.LABEL_GROUP, "")
    return found


def _number(name: str) -> int:
    text = name.rpartition("-")[2]
    return int(text) if text.isdecimal() else 0


def _ref(child: Json) -> tuple[str, str]:
    return child["kind"], child["metadata"]["name"]
