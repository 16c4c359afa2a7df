"""How many workers each pool of a policy gets: scaling says how many in all, placement says where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from taktline_protocol.messages import BucketTime

from taktline_operator import naming, placement, routing, scaling
from taktline_operator.capacity import Load
from taktline_operator.rollout import seconds_between
from taktline_operator.spec import PolicyDeployment

Json = dict[str, Any]
S = TypeVar("S", bound=msgspec.Struct)

WAITING_SHARE = 0.25  # of a cool-down: so long fewer workers must have been enough before it begins
PROFILE_CHANGE = 0.2  # a stored batch time is replaced where the measured one differs by more than this share


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """Workers by pool, and what status says of it.

    Attributes:
        replicas: workers wanted by pool, from the decisions that are stored already.
        scaling: the decision to store; None where the spec sets numbers itself.
        placement: the same of the order of pools; None where they are filled as written.
        profiles: batch times to keep by pool, for when it has no worker.
        moved: whether a decision differs from what is stored.
    """

    replicas: Mapping[str, int]
    scaling: scaling.State | None = None
    placement: placement.State | None = None
    profiles: Mapping[str, Sequence[BucketTime]] = {}
    moved: bool = False

    def differs_from(self, status: Json) -> bool:
        """Whether it would change what is stored: numbers, place, or when something began."""
        size = None if self.scaling is None else {"desired": self.scaling.desired, **msgspec.to_builtins(self.scaling)}
        place = None if self.placement is None else msgspec.to_builtins(self.placement)
        return bool(size != status.get("scaling") or place != status.get("placement"))

    def only_begins_to_wait(self, status: Json) -> bool:
        """Whether all that it would change is that fewer workers are enough from now on."""
        stored = status.get("scaling") or {}
        size = None if self.scaling is None else {"desired": self.scaling.desired, **msgspec.to_builtins(self.scaling)}
        place = None if self.placement is None else msgspec.to_builtins(self.placement)
        if size is None or place != status.get("placement") or "lowerSince" in stored:
            return False
        return bool(size.pop("lowerSince", "")) and size == stored


class Patience:
    """Holds back what noise makes and unmakes: at a demand near the edge, fewer workers are enough in every other look.

    Each turn would be a status, for nothing. So it counts only once it has lasted; that it is over counts at once.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}

    def is_due(self, key: tuple[str, str], size: Sizing, status: Json, patience_s: float, now: float) -> bool:
        """Whether a look's decision is to be stored now.

        Args:
            status: what is stored.
            patience_s: how long the beginning of a wait has to last.
            now: monotonic, s.
        """
        if not size.only_begins_to_wait(status):
            self._since.pop(key, None)
            return size.differs_from(status)
        if now - self._since.setdefault(key, now) < patience_s:
            return False
        del self._since[key]
        return True

    def forget(self, key: tuple[str, str]) -> None:
        """The policy is gone."""
        self._since.pop(key, None)


def of(
    policy: PolicyDeployment,
    live: Json,
    pods: Sequence[Json],
    deployments: Sequence[Json],
    demand: scaling.Demand | None,
    tables: Mapping[str, Sequence[BucketTime]],
    now: str,
) -> Sizing:
    """Decide from what was decided before (the status) and what is measured.

    Args:
        tables: T_sync by pool, as the gateways measure them now.
    """
    spec = policy.spec
    status = live.get("status", {})
    profiles = known_times(status, tables)
    if spec.scaling is None and spec.placement.mode == "Ordered":
        return Sizing(replicas=spec.desired_replicas(), profiles=profiles)
    load = demand.load if demand is not None else Load({})
    max_batch = spec.batching.max_batch or spec.engine.buckets[-1]
    utilisation = (spec.scaling.target_utilization if spec.scaling else 70) / 100
    before_place = _read(status.get("placement"), placement.State)
    place, ordered = before_place, list(spec.pools)
    if spec.placement.mode == "Cheapest":
        budget = spec.slo.control_budget_ms
        offers = placement.offers(spec.pools, profiles, budget, load, max_batch, utilisation, spec.engine.lanes)
        place = placement.choose(before_place, spec.placement, offers, now)
        ordered = placement.order(before_place if before_place.pool else place, offers)
    ready = sum(routing.is_ready(pod) for pod in pods)
    if spec.scaling is None:
        total = sum(spec.desired_replicas().values())
        size = None
        before_size = scaling.State()
    else:
        before_size = _read(status.get("scaling"), scaling.State)
        cold = max(before_size.cold_start_seconds, _cold_start(pods))
        times = _table(ordered[0].name, ordered[0].profile, profiles)
        bounds = scaling.room(spec.pools, spec.scaling)
        size = scaling.decide(
            msgspec.structs.replace(before_size, cold_start_seconds=cold),
            spec.scaling,
            bounds,
            demand,
            times,
            max_batch,
            spec.slo.on_time_objective,
            ready,
            now,
            spec.engine.lanes,
        )
        total = before_size.desired if before_size.changed_at else size.desired
        total = max(bounds.low if total else 0, min(total, bounds.high))
        if spec.scaling.mode == "Recommend":
            total = sum(spec.desired_replicas().values())
    wanted = scaling.shared_out(total, ordered)
    return Sizing(
        replicas=_made_before_broken(wanted, policy, pods, deployments),
        scaling=size,
        placement=place if spec.placement.mode == "Cheapest" else None,
        profiles=profiles,
        moved=(size is not None and size.desired != before_size.desired) or place.pool != before_place.pool,
    )


def _made_before_broken(
    wanted: Mapping[str, int], policy: PolicyDeployment, pods: Sequence[Json], deployments: Sequence[Json]
) -> dict[str, int]:
    """A pool whose workers move elsewhere keeps them until the others are ready."""
    ready: dict[str, int] = {}
    for pod in filter(routing.is_ready, pods):
        pool = pod["metadata"].get("labels", {}).get(naming.LABEL_POOL, "")
        ready[pool] = ready.get(pool, 0) + 1
    if all(ready.get(pool, 0) >= count for pool, count in wanted.items()):
        return dict(wanted)
    gaining = {pool for pool, count in wanted.items() if ready.get(pool, 0) < count}
    result = dict(wanted)
    for pool in policy.spec.pools:
        if pool.name not in gaining and gaining:
            running = [
                int(found["spec"].get("replicas", 0))
                for found in deployments
                if found["metadata"].get("labels", {}).get(naming.LABEL_POOL) == pool.name
            ]
            kept = min(max(running, default=0), ready.get(pool.name, 0), pool.ceiling)
            result[pool.name] = max(result[pool.name], kept)
    return result


def _table(name: str, profile: Sequence[Any], profiles: Mapping[str, Sequence[BucketTime]]) -> Sequence[BucketTime]:
    measured = profiles.get(name)
    return measured or [BucketTime(batch=t.batch, median_ms=t.median_ms, p99_ms=t.p99_ms) for t in profile]


def known_times(status: Json, tables: Mapping[str, Sequence[BucketTime]]) -> dict[str, Sequence[BucketTime]]:
    """Batch times by pool: stored ones, replaced where measured ones differ enough to matter: noise costs no write."""
    found: dict[str, Sequence[BucketTime]] = {}
    for entry in status.get("pools", []):
        times = [_time(row) for row in entry.get("tSync", [])]
        if times:
            found[entry["name"]] = times
    for pool, measured in tables.items():
        stored = {time.batch: time for time in found.get(pool, [])}
        same = {time.batch for time in measured} == stored.keys() and all(
            abs(time.p99_ms - stored[time.batch].p99_ms) <= PROFILE_CHANGE * stored[time.batch].p99_ms
            and abs(time.median_ms - stored[time.batch].median_ms) <= PROFILE_CHANGE * stored[time.batch].median_ms
            for time in measured
        )
        if measured and not same:
            found[pool] = [
                BucketTime(batch=time.batch, median_ms=_rounded(time.median_ms), p99_ms=_rounded(time.p99_ms))
                for time in measured
            ]
    return found


def remeasured(
    statuses: Mapping[tuple[str, str], Json], times: Callable[[str], Mapping[str, Sequence[BucketTime]]]
) -> list[tuple[str, str]]:
    """Accepted policies with a pool whose measured batch times are not those that its status holds.

    Args:
        statuses: metadata and status of each PolicyDeployment.
        times: T_sync by pool, as the gateways measure it, from the policy's name.
    """
    found = []
    for key, live in statuses.items():
        status = live.get("status") or {}
        names = {pool["name"] for pool in status.get("pools", []) if pool.get("ready")}
        measured = {name: table for name, table in times(key[1]).items() if name in names}
        accepted = any(c["type"] == "Accepted" and c["status"] == "True" for c in status.get("conditions", []))
        if accepted and known_times(status, measured) != known_times(status, {}):
            found.append(key)
    return found


def is_other_revision(live: Json, status: Json) -> bool:
    """Whether workers of another revision serve than at the last status."""
    before = (live.get("status") or {}).get("currentRevision")
    return before is not None and before != status.get("currentRevision")


def profile_rows(times: Sequence[BucketTime]) -> list[Json]:
    """Batch times as status.pools[].tSync has them."""
    return [{"batch": time.batch, "medianMs": time.median_ms, "p99Ms": time.p99_ms} for time in times]


def _time(row: Json) -> BucketTime:
    return BucketTime(batch=int(row["batch"]), median_ms=float(row["medianMs"]), p99_ms=float(row["p99Ms"]))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _cold_start(pods: Sequence[Json]) -> int:
    """Longest time from a pod's creation to its first being ready, of those that still say so; s, rounded up to 5."""
    longest = 0.0
    for pod in filter(routing.is_ready, pods):
        created = pod["metadata"].get("creationTimestamp", "")
        for condition in pod["status"].get("conditions", []):
            if condition["type"] == "Ready" and "lastTransitionTime" in condition and created:
                spent = seconds_between(created, condition["lastTransitionTime"])
                # A worker that became ready again later says nothing of a start.
                restarts = any(int(c.get("restartCount", 0)) for c in pod["status"].get("containerStatuses", []))
                longest = max(longest, 0.0 if restarts or spent > 3600 else spent)
    return int(-(-longest // 5) * 5)


def _read(value: Json | None, kind: type[S]) -> S:
    try:
        return msgspec.convert(value or {}, kind)
    except msgspec.ValidationError:
        return kind()
