"""How many workers, and where: every reason, every bound, and nothing that flaps."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from taktline_operator import capacity, placement, scaling, sizing
from taktline_operator.capacity import Load
from taktline_operator.demand import DemandTracker
from taktline_operator.scaling import Demand, Room, State
from taktline_operator.scaling_spec import Placement, Scaling, Shift, ToZero
from taktline_operator.spec import Pool
from taktline_protocol.measurements import Demand as Counted
from taktline_protocol.measurements import GatewayMeasurements, Outcomes, PolicyMeasurement, PoolTimes
from taktline_protocol.messages import BucketTime

# One worker: 10 ms alone, 25 ms for eight.
FAST = (BucketTime(batch=1, median_ms=10, p99_ms=12), BucketTime(batch=8, median_ms=25, p99_ms=30))
SLOW = (BucketTime(batch=1, median_ms=80, p99_ms=90), BucketTime(batch=8, median_ms=240, p99_ms=260))
BOUNDS = Room(1, 20)
DEFAULTS = Scaling()


def at(seconds: float) -> str:
    return f"2026-03-02T{8 + int(seconds) // 3600:02d}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}Z"


def demand(rate: float, edge: float = 200.0, **more: Any) -> Demand:
    return Demand(Load({edge: rate} if rate else {}), **more)


def decide(state: State, now: float, found: Demand | None, plan: Scaling = DEFAULTS, **more: Any) -> State:
    parts = {"bounds": BOUNDS, "times": FAST, "ready": state.desired} | more
    return scaling.decide(state, plan, parts["bounds"], found, parts["times"], 8, 0.999, parts["ready"], at(now))


def running(workers: int, **more: Any) -> State:
    return State(desired=workers, reason="Demand", changed_at=at(0), **more)


@pytest.mark.parametrize(
    ("left_ms", "rate"),
    [(150, 320.0), (60, 320.0), (59, 100.0), (24, 100.0), (23, 50.0), (12, 50.0), (11, 0.0)],
    ids=["eight, easily", "eight, just", "one by one", "one, just", "one, half idle", "one, barely", "never"],
)
def test_a_shorter_deadline_leaves_a_worker_less_to_give(left_ms: float, rate: float) -> None:
    assert capacity.rate_within(FAST, left_ms, 8) == pytest.approx(rate)


def test_classes_share_workers_and_what_cannot_be_met_buys_none() -> None:
    one = capacity.workers_for(Load({200.0: 320.0}), FAST, 8, 1.0)
    both = capacity.workers_for(Load({200.0: 320.0, 50.0: 100.0}), FAST, 8, 1.0)
    assert one == pytest.approx(1.0)
    assert both == pytest.approx(2.0)
    assert capacity.workers_for(Load({200.0: 320.0, 20.0: 500.0}), SLOW, 8, 1.0) is not None
    assert capacity.workers_for(Load({20.0: 500.0}), SLOW, 8, 1.0) is None


def test_demand_brings_workers_at_once_but_in_steps() -> None:
    plan = Scaling(scale_up_step=2, up_cooldown_seconds=15)
    first = decide(running(1), 100, demand(1500), plan)
    assert (first.desired, first.reason) == (3, "Demand")
    assert "1500 observations/s need 6.7 workers" in first.message
    assert decide(first, 105, demand(1500), plan).desired == 3
    assert decide(first, 115, demand(1500), plan).desired == 5


def test_workers_leave_one_by_one_after_the_cool_down_only() -> None:
    state = running(7)
    state = decide(state, 100, demand(300))
    assert state.desired == 7
    assert decide(state, 399, demand(300)).desired == 7
    state = decide(state, 401, demand(300))
    assert state.desired == 6
    assert decide(state, 600, demand(300)).desired == 6
    assert decide(state, 702, demand(300)).desired == 5


def test_demand_that_swings_within_the_cool_down_moves_nothing() -> None:
    state = running(5)
    for minute in range(60):
        state = decide(state, 60.0 * minute, demand(1100 if minute % 2 else 400))
        assert state.desired == 5


def test_a_measurement_that_repeats_changes_no_byte() -> None:
    state = decide(running(5), 100, demand(1100))
    assert decide(state, 200, demand(1100)) == state


def test_growth_is_met_before_it_arrives() -> None:
    still = decide(running(1), 100, demand(700))
    growing = decide(running(1), 100, demand(700, slope=10.0))
    assert growing.desired > still.desired
    assert "predicted" in growing.message


def test_growth_is_not_believed_beyond_double() -> None:
    assert decide(running(1), 100, demand(320, slope=1e6), Scaling(scale_up_step=100)).desired == 3


def test_robots_that_miss_deadlines_are_believed_over_the_tables() -> None:
    state = decide(running(2), 100, demand(300, missed=40, seen=1000))
    assert (state.desired, state.reason) == (3, "OnTimeShare")
    # Not while workers that were asked for are still starting.
    assert decide(running(2), 100, demand(300, missed=40, seen=1000), ready=1).desired == 2


def test_demand_that_no_batch_can_meet_buys_nothing() -> None:
    state = decide(running(2), 100, demand(500, 20.0), times=SLOW)
    assert state.desired == 2


def test_warm_workers_stay_ready_beyond_demand() -> None:
    assert decide(running(1), 100, demand(220), Scaling(warm_replicas=2)).desired == 3


def test_bounds_hold() -> None:
    assert decide(running(19), 100, demand(1e6), Scaling(scale_up_step=50)).desired == 20
    assert decide(State(), 0, demand(0), bounds=Room(2, 5)).desired == 2


def test_without_an_answer_the_last_decision_stands() -> None:
    state = running(7)
    assert decide(state, 5000, None) == state
    assert decide(State(), 0, None).desired == 1


def test_the_last_worker_goes_when_nobody_asks_and_a_start_is_quick() -> None:
    plan = Scaling(to_zero=ToZero(idle_seconds=600, cold_start_budget_seconds=60), down_cooldown_seconds=0)
    state = running(1, cold_start_seconds=40)
    bounds = Room(0, 5)
    state = decide(state, 100, demand(0), plan, bounds=bounds)
    assert state.desired == 1
    state = decide(state, 710, demand(0), plan, bounds=bounds)
    assert (state.desired, state.reason) == (0, "ScaledToZero")
    woken = decide(state, 800, demand(0.2), plan, bounds=bounds)
    assert woken.desired == 1


def test_one_worker_stays_where_a_start_is_too_slow_or_unknown() -> None:
    plan = Scaling(to_zero=ToZero(idle_seconds=1, cold_start_budget_seconds=60), down_cooldown_seconds=0)
    for cold in (0, 90):
        state = running(1, cold_start_seconds=cold)
        for now in (100, 200, 300):
            state = decide(state, now, demand(0), plan, bounds=Room(0, 5))
        assert state.desired == 1


SHIFTS = (
    Shift(name="early", start="06:00", end="14:00", min_replicas=6, days=("Mon", "Tue")),
    Shift(name="night", start="22:00", end="06:00", min_replicas=3),
)


@pytest.mark.parametrize(
    ("now", "lead", "expected"),
    [
        ("2026-03-02T05:58:00Z", 0, (3, "night")),
        ("2026-03-02T05:58:00Z", 180, (6, "early")),  # ready when the shift begins
        ("2026-03-02T13:59:00Z", 0, (6, "early")),
        ("2026-03-02T14:00:00Z", 0, (0, "")),
        ("2026-03-02T23:00:00Z", 0, (3, "night")),
        ("2026-03-04T07:00:00Z", 0, (0, "")),  # a Wednesday
    ],
)
def test_shifts(now: str, lead: float, expected: tuple[int, str]) -> None:
    assert scaling.shift_minimum(SHIFTS, "UTC", now, lead) == expected


def test_shifts_are_told_in_the_factorys_own_time() -> None:
    assert scaling.shift_minimum(SHIFTS, "Europe/Berlin", "2026-03-02T05:30:00Z", 0)[1] == "early"


def test_a_shift_that_is_shorter_than_the_lead_is_not_missed() -> None:
    """A changeover of five minutes, and starts that take ten: it begins and ends between now and the lead's end."""
    short = (Shift(name="changeover", start="08:04", end="08:09", min_replicas=4),)
    assert scaling.shift_minimum(short, "UTC", "2026-03-02T08:00:00Z", 600) == (4, "changeover")
    assert scaling.shift_minimum(short, "UTC", "2026-03-02T08:00:00Z", 239) == (0, "")
    assert scaling.shift_minimum(short, "UTC", "2026-03-02T08:09:00Z", 600) == (0, "")
    midnight = (Shift(name="midnight", start="23:58", end="00:03", min_replicas=2, days=("Mon",)),)
    assert scaling.shift_minimum(midnight, "UTC", "2026-03-02T23:50:00Z", 1200) == (2, "midnight")  # a Monday
    assert scaling.shift_minimum(midnight, "UTC", "2026-03-03T00:02:00Z", 0) == (2, "midnight")
    assert scaling.shift_minimum(midnight, "UTC", "2026-03-03T23:50:00Z", 1200) == (0, "")


def test_the_largest_of_all_shifts_up_to_the_lead_counts() -> None:
    breaks = (
        Shift(name="early", start="06:00", end="09:00", min_replicas=3),
        Shift(name="peak", start="09:15", end="09:20", min_replicas=8),
    )
    assert scaling.shift_minimum(breaks, "UTC", "2026-03-02T08:55:00Z", 3600) == (8, "peak")
    assert scaling.shift_minimum(breaks, "UTC", "2026-03-02T08:55:00Z", 600) == (3, "early")


def test_a_shift_begins_by_the_clock_on_the_day_that_clocks_change() -> None:
    early = (Shift(name="early", start="06:00", end="14:00", min_replicas=6),)
    # In Berlin on 2026-03-29 the hour from 02:00 is left out: 06:00 is 04:00 UTC, the day before it was 05:00.
    assert scaling.shift_minimum(early, "Europe/Berlin", "2026-03-28T04:30:00Z", 0) == (0, "")
    assert scaling.shift_minimum(early, "Europe/Berlin", "2026-03-29T04:30:00Z", 0) == (6, "early")
    assert scaling.shift_minimum(early, "Europe/Berlin", "2026-03-29T02:30:00Z", 5400) == (6, "early")


def test_a_shift_brings_workers_before_robots_ask() -> None:
    plan = Scaling(shifts=(Shift(name="early", start="08:02", end="14:00", min_replicas=6),), scale_up_step=10)
    state = decide(running(1), 65, demand(0), plan)
    assert (state.desired, state.reason) == (6, "Shift")


def pools() -> tuple[Pool, ...]:
    return (
        Pool(name="h", accelerator="h100", cost_per_hour=3.0, min_replicas=0, max_replicas=8),
        Pool(name="a", accelerator="a40", cost_per_hour=0.5, min_replicas=0, max_replicas=8),
        Pool(name="j", accelerator="jetson-thor", cost_per_hour=0.1, min_replicas=0, max_replicas=8),
    )


TABLES = {
    "h": FAST,
    "a": (BucketTime(batch=1, median_ms=40, p99_ms=45), BucketTime(batch=8, median_ms=100, p99_ms=110)),
    "j": SLOW,
}


def chosen(budget_ms: float, rate: float, tables: Any = TABLES, state: Any = None, now: float = 0.0) -> Any:
    found = placement.offers(pools(), tables, budget_ms, Load({200.0: rate} if rate else {}), 8, 0.7)
    return placement.choose(state or placement.State(), Placement(hold_seconds=600), found, at(now))


def test_the_cheapest_pool_that_keeps_the_budget_is_chosen_and_says_why() -> None:
    state = chosen(80, 10)
    assert state.pool == "a"  # the h100 is faster than anybody needs, the Jetson too slow
    assert "j: breaks the budget: T_sync(1) 90 ms and 8 ms on the way, of 80 ms" in state.message
    assert chosen(300, 10).pool == "j"
    assert chosen(30, 10).pool == "h"
    message = chosen(60, 10).message
    assert "a keeps the budget at the lowest cost" in message
    assert "j: breaks the budget" in message


def test_with_more_demand_the_faster_accelerator_can_be_the_cheaper_one() -> None:
    dear = {"h": FAST, "a": (BucketTime(batch=1, median_ms=40, p99_ms=45),)}
    assert chosen(100, 10, dear).pool == "a"
    assert chosen(100, 800, dear).pool == "h"


def test_workers_move_only_for_a_large_gain_that_lasts() -> None:
    state = chosen(60, 10)
    assert state.pool == "a"
    slower = TABLES | {"j": (BucketTime(batch=1, median_ms=30, p99_ms=35),)}
    state = chosen(60, 10, slower, state, 0)
    assert (state.pool, state.better_pool) == ("a", "j")
    assert chosen(60, 10, slower, state, 599).pool == "a"
    assert chosen(60, 10, TABLES, state, 599).better_pool == ""  # it was noise
    assert chosen(60, 10, slower, state, 600).pool == "j"


def test_a_pool_that_breaks_the_budget_is_left_at_once() -> None:
    state = chosen(60, 10)
    hot = TABLES | {"a": (BucketTime(batch=1, median_ms=80, p99_ms=90),)}
    assert chosen(60, 10, hot, state, 1).pool == "h"


def test_a_pool_nobody_has_measured_is_the_last_resort_before_one_that_is_too_slow() -> None:
    assert chosen(60, 10, {"j": SLOW}).pool == "a"
    assert "not measured yet" in chosen(60, 10, {"j": SLOW}).message


def test_a_declared_profile_stands_in_for_a_measurement(make: Any) -> None:
    declared = msgspec.structs.replace(
        pools()[2], profile=tuple(msgspec.convert([{"batch": 1, "medianMs": 20, "p99Ms": 22}], list[Any]))
    )
    assert declared.cost_per_hour == 0.1
    body = make.body(
        slo={"controlBudgetMs": 60},
        placement={"mode": "Cheapest"},
        pools=[
            {"name": "h", "accelerator": "h100", "minReplicas": 0, "maxReplicas": 4, "costPerHour": 3},
            {"name": "j", "accelerator": "cpu", "minReplicas": 0, "maxReplicas": 4, "costPerHour": 1,
             "profile": [{"batch": 1, "medianMs": 20, "p99Ms": 22}]},
        ],
        replicas=2,
    )  # fmt: skip
    policy = make.policy(**body["spec"])
    found = sizing.of(policy, body, [], [], None, {}, make.now)
    assert found.replicas == {"h": 0, "j": 2}


def two_pools(make: Any, **status: Any) -> tuple[Any, Any]:
    body = make.body(
        slo={"controlBudgetMs": 60},
        placement={"mode": "Cheapest", "holdSeconds": 0},
        pools=[
            {"name": "h", "accelerator": "cpu", "minReplicas": 0, "maxReplicas": 4, "costPerHour": 3},
            {"name": "a", "accelerator": "cpu", "minReplicas": 0, "maxReplicas": 4, "costPerHour": 1},
        ],
        replicas=2,
    )
    body["status"] = status
    return body, make.policy(**body["spec"])


def test_a_pool_keeps_its_workers_until_those_of_the_new_one_are_ready(make: Any) -> None:
    body, policy = two_pools(make, placement={"pool": "a"})
    deployment = {"kind": "Deployment", "metadata": {"name": "reach-h", "labels": {"taktline.dev/pool": "h"}},
                  "spec": {"replicas": 2}}  # fmt: skip
    pods = [make.pod(f"h{n}", f"10.0.0.{n}", owner=policy, pool="h") for n in (1, 2)]
    tables = {"h": FAST, "a": FAST}
    assert sizing.of(policy, body, pods, [deployment], None, tables, make.now).replicas == {"h": 2, "a": 2}
    pods += [make.pod(f"a{n}", f"10.0.1.{n}", owner=policy, pool="a") for n in (1, 2)]
    assert sizing.of(policy, body, pods, [deployment], None, tables, make.now).replicas == {"h": 0, "a": 2}


def test_measured_times_outlive_the_last_worker_and_noise_is_not_written(make: Any) -> None:
    body, policy = two_pools(make, pools=[{"name": "a", "tSync": [{"batch": 1, "medianMs": 10.0, "p99Ms": 12.0}]}])
    near = {"a": (BucketTime(batch=1, median_ms=11, p99_ms=13),)}
    far = {"a": (BucketTime(batch=1, median_ms=20, p99_ms=26),)}
    assert sizing.of(policy, body, [], [], None, {}, make.now).profiles["a"][0].p99_ms == 12.0
    assert sizing.of(policy, body, [], [], None, near, make.now).profiles["a"][0].p99_ms == 12.0
    assert sizing.of(policy, body, [], [], None, far, make.now).profiles["a"][0].p99_ms == 26.0


def counted(instance: str, seconds: float, on_time: int, late: int = 0) -> GatewayMeasurements:
    outcomes = Outcomes(on_time=on_time, late=late)
    policy = PolicyMeasurement(
        policy="reach",
        demand=(Counted(up_to_ms=200.0, outcomes=outcomes),),
        pools=(PoolTimes(pool="cpu", workers=1, t_sync=FAST),),
    )
    return GatewayMeasurements(instance=instance, seconds=seconds, policies=(policy,))


def test_rates_come_from_differences_summed_over_gateways() -> None:
    tracker = DemandTracker()
    for step in range(6):
        tracker.take([counted("one", 5.0 * step, 500 * step), counted("two", 5.0 * step, 100 * step)], 5.0 * step)
    found = tracker.of("reach", 25.0)
    assert found is not None
    assert found.load.total == pytest.approx(120, rel=0.01)
    assert found.seen == 3000
    assert tracker.times("reach")["cpu"] == FAST


def test_a_gateway_that_restarts_counts_from_nothing_and_gives_no_negative_rate() -> None:
    tracker = DemandTracker()
    tracker.take([counted("one", 0, 0)], 0.0)
    tracker.take([counted("one", 5, 1000)], 5.0)
    tracker.take([counted("new", 1, 10)], 10.0)
    tracker.take([counted("new", 6, 60)], 15.0)
    found = tracker.of("reach", 15.0)
    assert found is not None
    assert found.load.total >= 0
    assert found.seen == 1050


def test_before_there_is_a_difference_nothing_is_known() -> None:
    tracker = DemandTracker()
    tracker.take([counted("one", 100, 5000)], 0.0)
    assert tracker.of("reach", 0.0) is None


def test_misses_of_the_last_minute_are_told() -> None:
    tracker = DemandTracker()
    tracker.take([counted("one", 0, 0)], 0.0)
    tracker.take([counted("one", 5, 90, late=10)], 5.0)
    found = tracker.of("reach", 5.0)
    assert found is not None
    assert (found.missed, found.seen) == (10, 100)
    assert tracker.of("reach", 66.0) is None


def scaled(make: Any, found: Demand | None, status: Any = None, **plan: Any) -> Any:
    body = make.body(scaling=plan, pools=[{"name": "cpu", "accelerator": "cpu", "minReplicas": 1, "maxReplicas": 9}])
    body["status"] = status or {}
    policy = make.policy(**body["spec"])
    return make.plan(
        policy,
        make.Observed(live=body, now=make.now, children=make.applied(policy), demand=found, tables={"cpu": FAST}),
        make.settings,
    )


def replicas(result: Any) -> int:
    return next(int(d["spec"]["replicas"]) for d in result.desired if d["kind"] == "Deployment")


def test_a_decision_is_stored_before_workers_follow_it(make: Any) -> None:
    stored = {"scaling": {"desired": 2, "changedAt": "2026-03-01T07:00:00Z", "reason": "Demand"}}
    result = scaled(make, demand(900), stored)
    assert result.status["scaling"]["desired"] == 5
    assert replicas(result) == 2
    assert result.again_s == 0.0
    result = scaled(make, demand(900), result.status)
    assert replicas(result) == 5
    assert result.again_s is None


@pytest.mark.parametrize(("parallel", "workers", "needed"), [({"dp": 2}, 3, "2.0"), ({"dp": 4}, 2, "1.0")])
def test_a_worker_of_several_replicas_serves_as_many_times_the_demand(
    make: Any, parallel: Any, workers: int, needed: str
) -> None:
    """One replica at a time, 900 observations/s need 4.02 workers."""
    pools = [{"name": "cpu", "accelerator": "cpu", "minReplicas": 1, "maxReplicas": 9, "costPerHour": 1}]
    body = make.body(scaling={}, placement={"mode": "Cheapest"}, pools=pools, engine={"parallel": parallel})
    found = sizing.of(make.policy(**body["spec"]), body, [], [], demand(900), {"cpu": FAST}, make.now)
    assert found.scaling is not None
    assert found.scaling.desired == workers
    assert f"need {needed} workers" in found.scaling.message
    assert found.placement is not None
    assert f"cpu: {workers} x 1 = {workers} an hour" in found.placement.message


def test_after_a_restart_workers_stay_until_demand_is_known_again(make: Any) -> None:
    stored = {"scaling": {"desired": 6, "changedAt": "2026-03-01T07:00:00Z", "reason": "Demand"}}
    result = scaled(make, None, stored)
    assert replicas(result) == 6
    assert result.status["scaling"] == stored["scaling"]


def test_scaled_to_zero_is_said_with_its_reason(make: Any) -> None:
    body = make.body(
        scaling={"toZero": {}}, pools=[{"name": "cpu", "accelerator": "cpu", "minReplicas": 0, "maxReplicas": 2}]
    )
    body["status"] = {"scaling": {"changedAt": "2026-03-01T07:00:00Z", "message": "no robot asks"}}
    policy = make.policy(**body["spec"])
    result = make.plan(policy, make.Observed(live=body, now=make.now), make.settings)
    available = next(c for c in result.status["conditions"] if c["type"] == "Available")
    assert (available["reason"], replicas(result)) == ("ScaledToZero", 0)
    assert "no robot asks" in available["message"]


def test_a_recommendation_is_told_and_not_followed(make: Any) -> None:
    stored = {"scaling": {"desired": 2, "changedAt": "2026-03-01T07:00:00Z", "reason": "Demand"}}
    result = scaled(make, demand(900), stored, mode="Recommend")
    assert result.status["scaling"]["desired"] == 5
    assert replicas(scaled(make, demand(900), result.status, mode="Recommend")) == 1


EDGE = (BucketTime(batch=1, median_ms=100, p99_ms=110), BucketTime(batch=8, median_ms=300, p99_ms=360))


def looks_of_an_hour(rate: float, patience_s: float) -> tuple[int, int]:
    """Statuses that looks at a constant demand with its noise cost, and the workers in the end; three at first."""
    rules, random_ = Scaling(), random.Random(1)
    begins = datetime(2026, 1, 1, tzinfo=UTC)
    status: Any = {"scaling": {"desired": 3, "changedAt": "2025-12-31T00:00:00Z", "reason": "Demand"}}
    patience, writes = sizing.Patience(), 0
    for second in range(0, 3600, 5):
        noisy = max(0.0, random_.gauss(rate, (rate / 15) ** 0.5))  # a mean over 15 s
        before = msgspec.convert(status["scaling"], State)
        now = (begins + timedelta(seconds=second)).strftime("%Y-%m-%dT%H:%M:%SZ")
        asked = Demand(Load({1000.0: noisy}), 0.0, 0, 900)
        state = scaling.decide(before, rules, Room(1, 8), asked, EDGE, 8, 0.999, before.desired, now)
        size = sizing.Sizing(replicas={}, scaling=state)
        if patience.is_due(("line-1", "reach"), size, status, patience_s, float(second)):
            writes += 1
            status = {"scaling": {"desired": state.desired, **msgspec.to_builtins(state)}}
    return writes, int(status["scaling"]["desired"])


def test_noise_at_the_edge_of_fewer_workers_is_no_stream_of_statuses() -> None:
    patience_s = sizing.WAITING_SHARE * Scaling().down_cooldown_seconds
    assert looks_of_an_hour(34.0, 0.0)[0] > 100
    assert looks_of_an_hour(34.0, patience_s) == (0, 3)
    # Where fewer are enough for good, one leaves after the other.
    writes, workers = looks_of_an_hour(14.0, patience_s)
    assert workers == 1
    assert writes <= 6


def test_that_a_wait_is_over_counts_at_once(make: Any) -> None:
    patience = sizing.Patience()
    stored = {"scaling": {"desired": 3, "changedAt": make.now, "reason": "Demand", "lowerSince": make.now}}
    state = State(desired=3, changed_at=make.now, reason="Demand")
    assert patience.is_due(("a", "b"), sizing.Sizing(replicas={}, scaling=state), stored, 75.0, 0.0)
    # And so does another number of workers, whatever else is new.
    more = msgspec.structs.replace(state, desired=4, lower_since=make.now)
    assert patience.is_due(("a", "b"), sizing.Sizing(replicas={}, scaling=more), {"scaling": {"desired": 3}}, 75.0, 0.0)
