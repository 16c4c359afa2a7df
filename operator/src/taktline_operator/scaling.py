"""How many workers a policy should have: from predicted demand by deadline class, T_sync tables and the on-time share.

Pure: the state of the last decision, the demand and the time in, the next decision out. CPU and queue length play no
part: a queue of robots is short until it is too late, and a GPU that is half busy may already miss every deadline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, time, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo

import msgspec
from taktline_protocol.messages import BucketTime

from taktline_operator.capacity import Load, workers_for
from taktline_operator.rollout import seconds_between
from taktline_operator.scaling_spec import Scaling, Shift
from taktline_operator.spec import Pool

DOWN_ROOM = 1.1
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


class State(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """status.scaling; the CRD describes the fields."""

    desired: int = 0
    reason: str = ""
    message: str = ""
    changed_at: str = ""
    lower_since: str = ""
    idle_since: str = ""
    cold_start_seconds: int = 0


class Demand(NamedTuple):
    """What was measured since the last look.

    Attributes:
        load: arrivals by deadline class, observations a second.
        slope: how fast the total rate grows, observations a second, each second.
        missed: observations without a chunk in time in the last minute, of `seen`.
    """

    load: Load
    slope: float = 0.0
    missed: int = 0
    seen: int = 0


class Room(NamedTuple):
    """What the pools allow: `low` to `high` workers in all."""

    low: int
    high: int


def room(pools: Sequence[Pool], scaling: Scaling) -> Room:
    """Bounds of the total. With scale-to-zero a floor of pools' minReplicas gives way when nobody asks."""
    return Room(sum(pool.min_replicas for pool in pools), sum(pool.ceiling for pool in pools))


def shift_minimum(shifts: Sequence[Shift], zone: str, now: str, lead_s: float) -> tuple[int, str]:
    """Workers that a shift asks for at any moment from now to `lead_s` ahead, and its name; (0, "") outside all."""
    begins = datetime.fromisoformat(now).astimezone(UTC)
    ends = begins + timedelta(seconds=lead_s)
    found, name = 0, ""
    for shift in shifts:
        if shift.min_replicas > found and _falls_into(shift, ZoneInfo(zone), begins, ends):
            found, name = shift.min_replicas, shift.name
    return found, name


def _falls_into(shift: Shift, zone: ZoneInfo, begins: datetime, ends: datetime) -> bool:
    """Whether one of the shift's days overlaps the time from `begins` to `ends`; a shift may be shorter than that."""
    overnight = shift.end <= shift.start
    day = begins.astimezone(zone).date() - timedelta(days=1)  # a shift that began yesterday may still last
    while day <= ends.astimezone(zone).date():
        if not shift.days or DAYS[day.weekday()] in shift.days:
            starts = datetime.combine(day, time.fromisoformat(shift.start), zone)
            last = datetime.combine(day + timedelta(days=overnight), time.fromisoformat(shift.end), zone)
            if starts.astimezone(UTC) <= ends and begins < last.astimezone(UTC):
                return True
        day += timedelta(days=1)
    return False


def decide(
    state: State,
    scaling: Scaling,
    bounds: Room,
    demand: Demand | None,
    times: Sequence[BucketTime],
    max_batch: int,
    objective: float,
    ready: int,
    now: str,
    lanes: int = 1,
) -> State:
    """The next decision. Without demand (no gateway answered, or a first look) the last one stands.

    Args:
        times: T_sync table of the pool that takes more workers.
        max_batch: largest batch the gateway makes.
        objective: slo.onTimeObjective.
        ready: workers that serve now.
        lanes: batches that a worker runs at a time.
    """
    lead_s = float(max(state.cold_start_seconds, scaling.lead_seconds))
    floor, shift = shift_minimum(scaling.shifts, scaling.time_zone, now, lead_s)
    if demand is None:
        wanted, reason, message = max(state.desired, floor, bounds.low), "NoMeasurements", "no gateway has answered"
        if state.desired >= max(floor, bounds.low) and state.desired <= bounds.high:
            return state
        return _set(state, min(wanted, bounds.high), reason, message, now)
    wanted, reason, message = _wanted(state, scaling, demand, times, max_batch, objective, ready, lead_s, lanes)
    if floor > wanted:
        wanted, reason, message = floor, "Shift", f"shift {shift} asks for {floor}"
    low = bounds.low
    idle = demand.load.total == 0.0 and floor == 0
    idle_since = (state.idle_since or now) if idle else ""
    state = msgspec.structs.replace(state, idle_since=idle_since)
    if scaling.to_zero is not None and idle:
        low, wanted, reason, message = _when_idle(state, scaling, bounds, idle_since, now)
    elif demand.load.total > 0.0 or floor:
        low = max(low, 1)
    wanted = max(low, min(wanted, bounds.high))
    return _stepped(state, scaling, wanted, low, reason, message, now)


def _wanted(
    state: State,
    scaling: Scaling,
    demand: Demand,
    times: Sequence[BucketTime],
    max_batch: int,
    objective: float,
    ready: int,
    lead_s: float,
    lanes: int,
) -> tuple[int, str, str]:
    load = demand.load
    ahead = max(0.0, demand.slope * lead_s)
    growth = 1.0 + min(1.0, ahead / load.total) if load.total > 0.0 else 1.0
    predicted = Load({edge: rate * growth for edge, rate in load.rates.items()})
    needed = workers_for(predicted, times, max_batch, scaling.target_utilization / 100, lanes)
    described = f"{load.total:.0f} observations/s" + (f", {predicted.total:.0f} predicted" if growth > 1.01 else "")
    if needed is None:
        if load.total > 0.0 and times:
            return state.desired, "OutOfReach", f"{described}: no batch of this pool meets their deadlines"
        wanted, reason = max(state.desired, 1 if load.total > 0.0 else 0), "NotMeasured"
        return wanted, reason, f"{described}; T_sync is not measured yet"
    warm = scaling.warm_replicas if load.total > 0.0 else 0
    wanted = math.ceil(needed - 1e-9) + warm
    if wanted < state.desired:  # fewer must be enough with room to spare, or noise would bring the worker back
        wanted = min(state.desired, math.ceil(DOWN_ROOM * needed - 1e-9) + warm)
    reason, message = "Demand", f"{described} need {needed:.1f} workers"
    missing = demand.seen >= 50 and demand.missed > 3.0 * (1.0 - objective) * demand.seen
    if missing and ready >= state.desired >= wanted:
        # The tables said that this is enough and robots say that it is not: believe the robots.
        late = f"{demand.missed} of {demand.seen} chunks were not in time"
        return state.desired + 1, "OnTimeShare", f"{late}, whatever the tables say"
    return wanted, reason, message


def _when_idle(state: State, scaling: Scaling, bounds: Room, idle_since: str, now: str) -> tuple[int, int, str, str]:
    """(floor, wanted, reason, message) while no robot asks."""
    assert scaling.to_zero is not None
    budget = scaling.to_zero.cold_start_budget_seconds
    if state.cold_start_seconds == 0 or state.cold_start_seconds > budget:
        cold = f"takes {state.cold_start_seconds} s" if state.cold_start_seconds else "is not measured yet"
        keep = max(1, bounds.low)
        return keep, keep, "ColdStart", f"a start {cold} and the budget is {budget} s: one worker stays warm"
    if seconds_between(idle_since, now) < scaling.to_zero.idle_seconds:
        return 1, 1, "Idle", "no robot asks; the last worker waits for one"
    return 0, 0, "ScaledToZero", "no robot asks"


def _stepped(state: State, scaling: Scaling, wanted: int, low: int, reason: str, message: str, now: str) -> State:
    """Towards `wanted`: up at once but at most `scaleUpStep`, down by `scaleDownStep` after the cool-down."""
    if not state.changed_at:
        return _set(state, wanted, reason, message, now)
    if wanted > state.desired:
        state = msgspec.structs.replace(state, lower_since="")
        recent = seconds_between(state.changed_at, now) < scaling.up_cooldown_seconds
        if recent and state.desired >= low:
            return state
        step = state.desired + scaling.scale_up_step
        return _set(state, max(low, min(wanted, step)), reason, message, now)
    if wanted == state.desired:
        return msgspec.structs.replace(state, lower_since="")
    lower_since = state.lower_since or now
    if seconds_between(lower_since, now) < scaling.down_cooldown_seconds:
        return msgspec.structs.replace(state, lower_since=lower_since)
    lowered = _set(state, max(wanted, state.desired - scaling.scale_down_step), reason, message, now)
    # The next step down waits for a cool-down of its own.
    return msgspec.structs.replace(lowered, lower_since=now if lowered.desired > wanted else "")


def _set(state: State, desired: int, reason: str, message: str, now: str) -> State:
    if desired == state.desired and state.changed_at:
        return state
    return msgspec.structs.replace(
        state, desired=desired, reason=reason, message=message, changed_at=now, lower_since=""
    )


def shared_out(total: int, order: Sequence[Pool]) -> dict[str, int]:
    """Workers by pool: each pool's minimum, then pools fill up in `order`. Too few for all minimums fill the first."""
    wanted = {pool.name: 0 for pool in order}
    left = total
    for pool in order:
        wanted[pool.name] = min(pool.min_replicas, left)
        left -= wanted[pool.name]
    for pool in order:
        added = max(0, min(left, pool.ceiling - wanted[pool.name]))
        wanted[pool.name] += added
        left -= added
    return wanted
