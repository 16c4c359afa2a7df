"""Priorities, ageing and shares under a simulated clock: who is served when there is not enough for everybody."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_gateway.ageing import AGED_AFTER_S, AGED_SHARE
from taktline_gateway.deadline_queue import Priority
from taktline_gateway.fairness import ROBOT_BURST, Shares
from taktline_gateway.priorities import priority_of
from taktline_gateway.scheduler import Scheduler
from taktline_protocol import Observation
from taktline_protocol.deployment import Route

from tests.gateway.conftest import until
from tests.gateway.simulated_clock import TIMES_MS, Simulation, scheduler, service_times, ticket

SERIAL = {1: 10.0}
"""A worker without batches: 100 observations a second."""


def stream(robot, period_s, budget_s, *, until, start=0.0, jitter_s=0.0, **fields):
    """Observations of one robot in a fixed rhythm."""
    count, rng = int((until - start) / period_s), random.Random(str(robot))
    moments = [start + turn * period_s + jitter_s * rng.random() for turn in range(count)]
    return [ticket(robot, at + budget_s, at=at, seq=turn, **fields) for turn, at in enumerate(moments)]


def served(simulation, key=lambda one: one.robot):
    return Counter(key(one) for one, end in simulation.done.items() if end <= one.deadline + 1e-9)


# ----- priorities


def test_each_class_goes_before_the_next_whatever_the_deadlines():
    simulation = Simulation(scheduler(max_batch=1))
    simulation.submit(ticket("busy", 9.0))
    for deadline, priority in zip((1.0, 2.0, 3.0, 4.0), reversed(Priority), strict=True):
        simulation.submit(ticket(priority.name, deadline, priority=priority))
    simulation.advance(9.0)
    assert [batch.tickets[0].robot for batch in simulation.batches[1:]] == [priority.name for priority in Priority]


def test_lower_classes_ride_in_the_padding_for_nothing():
    """Three in a bucket of four: the place that is left costs no time."""
    simulation = Simulation(scheduler())
    simulation.submit(ticket("busy", 9.0))
    for robot in range(3):
        simulation.submit(ticket(robot, 0.026 + 1e-6))
    for robot in range(5):
        simulation.submit(ticket(f"low{robot}", 9.0, priority=Priority.BACKGROUND))
    simulation.advance(0.010)
    assert sorted(one.robot for one in simulation.batches[1].tickets) == ["0", "1", "2", "low0"]


def test_a_batch_grows_by_lower_classes_only_while_its_urgent_members_stay_on_time():
    simulation = Simulation(scheduler())
    simulation.submit(ticket("busy", 9.0))
    urgent = ticket("urgent", 0.023)  # free at 10 ms: two end at 22 ms, four at 26 ms
    simulation.submit(urgent)
    for robot in range(6):
        simulation.submit(ticket(f"low{robot}", 9.0, priority=Priority.BACKGROUND))
    simulation.advance(1.0)
    assert simulation.done[urgent] <= urgent.deadline
    assert len(simulation.done) == 8


def test_rollouts_take_big_batches_when_nobody_else_is_there():
    simulation = Simulation(scheduler())
    simulation.submit(ticket("busy", 9.0, priority=Priority.ROLLOUT))
    for robot in range(16):
        simulation.submit(ticket(robot, 600.0, priority=Priority.ROLLOUT))
    simulation.advance(1.0)
    assert [len(batch.tickets) for batch in simulation.batches] == [1, 8, 8]


def test_rollouts_fill_what_production_leaves_and_never_make_it_late():
    """A batch of eight rollouts would take 24 ms; production has 30 ms and may come at any moment."""
    production = stream("arm", 0.050, 0.030, until=10.0, start=0.1)
    rollouts = [ticket(f"sim{n}", 600.0, at=0.0, priority=Priority.ROLLOUT) for n in range(1500)]
    simulation = Simulation(scheduler())
    simulation.run([*production, *rollouts])
    on_time = served(simulation, lambda one: one.priority)
    assert on_time[Priority.PRODUCTION] == len(production)
    assert on_time[Priority.ROLLOUT] == len(rollouts)
    while_production = [batch for batch in simulation.batches if 0.2 < batch.predicted < 9.9]
    assert max(len(batch.tickets) for batch in while_production) >= 4, "rollouts still share batches"


@pytest.mark.parametrize("low", [Priority.BACKGROUND, Priority.ROLLOUT])
def test_ageing_gives_the_low_classes_a_trickle_and_no_more(low):
    """Production alone is worth 1.5 times the worker: without ageing the others would starve for ever."""
    production = [one for robot in range(30) for one in stream(robot, 0.2, 0.15, until=20.0, start=robot * 0.006)]
    patient = [ticket(f"low{n}", 600.0, at=0.0, priority=low) for n in range(400)]
    simulation = Simulation(scheduler(max_batch=1, table=SERIAL))
    simulation.run([*production, *patient])
    counts = served(simulation, lambda one: one.priority)
    moved = [end for one, end in simulation.done.items() if one.priority is low and end < 20.0]
    assert min(moved) >= AGED_AFTER_S, "nothing moves up before it has waited"
    assert len(moved) >= 0.5 * AGED_SHARE * counts[Priority.PRODUCTION] * (20.0 - AGED_AFTER_S) / 20.0
    assert len(moved) <= 1.2 * AGED_SHARE * counts[Priority.PRODUCTION]


def test_a_ticket_that_moved_up_keeps_its_own_deadline():
    made = scheduler(max_batch=1, table=SERIAL)
    simulation = Simulation(made)
    background = ticket("low", 30.0, priority=Priority.BACKGROUND)
    production = [one for robot in range(30) for one in stream(robot, 0.2, 0.15, until=12.0, start=robot * 0.006)]
    simulation.run([background, *production])
    assert background in simulation.done
    assert background not in simulation.refused


# ----- claims


@pytest.mark.parametrize(
    ("claimed", "tenant", "expected"),
    [
        ("safety", "", Priority.PRODUCTION),
        ("safety", "cell-7", Priority.SAFETY),
        ("rollout", "cell-7", Priority.ROLLOUT),
        ("safety", "lab", Priority.BACKGROUND),
        ("rollout", "lab", Priority.ROLLOUT),
    ],
)
def test_a_claim_above_the_ceiling_is_lowered_to_it(claimed, tenant, expected):
    route = Route(policy="p", priority_ceilings={"cell-7": "safety", "lab": "background", "*": "production"})
    observation = Observation(
        robot_id="a", seq=1, captured_at=0.0, budget_ms=1.0, images={}, state=[], instruction="go", priority=claimed
    )
    assert priority_of(observation, tenant, route) is expected


@pytest.mark.parametrize(("tenant", "expected"), [("cell-7", Priority.SAFETY), ("forgotten", Priority.PRODUCTION)])
def test_a_tenant_that_no_ceiling_names_may_not_claim_safety(tenant, expected):
    route = Route(policy="p", priority_ceilings={"cell-7": "safety"})
    observation = Observation(
        robot_id="a", seq=1, captured_at=0.0, budget_ms=1.0, images={}, state=[], instruction="go", priority="safety"
    )
    assert priority_of(observation, tenant, route) is expected


@pytest.mark.parametrize(
    ("claimed", "tenant", "expected"),
    [
        ("production", "cell-7", Priority.SAFETY),
        ("production", "lab", Priority.BACKGROUND),
        ("background", "cell-7", Priority.BACKGROUND),
        ("rollout", "cell-7", Priority.ROLLOUT),
    ],
)
def test_an_observation_that_claims_nothing_has_the_class_of_its_policy(claimed, tenant, expected):
    route = Route(policy="p", priority="safety", priority_ceilings={"cell-7": "safety", "lab": "background"})
    observation = Observation(
        robot_id="a", seq=1, captured_at=0.0, budget_ms=1.0, images={}, state=[], instruction="go", priority=claimed
    )
    assert priority_of(observation, tenant, route) is expected
    low = Route(policy="p", priority="background")
    assert priority_of(observation, tenant, low) >= Priority.BACKGROUND


def test_without_ceilings_every_claim_stands():
    observation = Observation(
        robot_id="a", seq=1, captured_at=0.0, budget_ms=1.0, images={}, state=[], instruction="go", priority="safety"
    )
    assert priority_of(observation, "anyone", Route(policy="p")) is Priority.SAFETY


# ----- shares


def test_a_flooding_robot_cannot_starve_others():
    """One robot asks 500 times a second with the tightest deadlines, ten others want more than the rest together."""
    flood = stream("flood", 0.002, 0.012, until=10.0)
    # No robot's rhythm is exact: in an exact one the same are always the last.
    others = [
        one for robot in range(10) for one in stream(robot, 0.08, 0.06, until=10.0, start=robot * 0.008, jitter_s=0.005)
    ]
    simulation = Simulation(scheduler(max_batch=1, table=SERIAL))
    simulation.run([*flood, *others])
    counts = served(simulation)
    fair = sum(counts.values()) / 11
    assert counts["flood"] <= 1.5 * fair
    assert min(counts[str(robot)] for robot in range(10)) >= 0.5 * fair, "equals are left to their deadlines"
    assert sum(counts[str(robot)] for robot in range(10)) >= 0.85 * sum(counts.values())


def test_a_tenant_with_many_robots_does_not_crowd_out_a_tenant_with_few():
    crowd = [
        one
        for robot in range(50)
        for one in stream(f"c{robot}", 0.25, 0.10, until=10.0, start=robot * 0.005, tenant="crowd")
    ]
    few = [
        one
        for robot in range(5)
        for one in stream(f"f{robot}", 0.125, 0.12, until=10.0, start=robot * 0.02, tenant="few")
    ]
    simulation = Simulation(scheduler(max_batch=1, table=SERIAL))
    simulation.run([*crowd, *few])
    counts = served(simulation, lambda one: one.tenant)
    assert counts["few"] >= 0.9 * len(few), "its 40/s are less than half of the worker's 100/s"
    assert counts["crowd"] >= 0.85 * (1000 - len(few)), "the rest is the crowd's"


def test_tenants_share_by_weight():
    def robots(tenant, weight):
        return [
            one
            for robot in range(20)
            for one in stream(
                f"{tenant}{robot}", 0.1, 0.08, until=20.0, start=robot * 0.005, tenant=tenant, tenant_weight=weight
            )
        ]

    simulation = Simulation(scheduler(max_batch=1, table=SERIAL))
    simulation.run([*robots("heavy", 3.0), *robots("light", 1.0)])
    counts = served(simulation, lambda one: one.tenant)
    assert counts["heavy"] / counts["light"] == pytest.approx(3.0, rel=0.2)


def test_a_fast_robot_is_not_held_back_while_there_is_enough_for_everybody():
    fast = stream("fast", 0.025, 0.030, until=10.0)
    slow = [one for robot in range(10) for one in stream(robot, 0.5, 0.4, until=10.0, start=robot * 0.033)]
    simulation = Simulation(scheduler())
    simulation.run([*fast, *slow])
    assert served(simulation).total() >= 0.99 * (len(fast) + len(slow))


@pytest.mark.parametrize(("refused", "over"), [(0, False), (1, False), (2, True), (8, True)])
def test_a_robot_is_over_its_share_only_while_others_are_refused(refused, over):
    """As long as all can be served, whoever asks for more than the others has it at nobody's cost."""
    shares = Shares()
    shares.arrive(ticket("waiting", 1.0), 0.0)
    shares.enter()
    for robot in range(4):
        shares.arrive(ticket(robot, 1.0), 0.0)
    flood = ticket("flood", 1.0)
    for _ in range(100):
        shares.arrive(flood, 0.0)
        shares.enter()
        shares.serve([flood])
    for _ in range(refused):
        shares.turn_away()
    assert shares.arrive(flood, 0.0) is over
    for _ in range(400):  # and nobody is refused any more
        shares.enter()
        shares.serve([flood])
    assert not shares.arrive(flood, 0.0)


def test_one_fast_robot_among_slow_ones_loses_no_deadline_where_all_can_be_served():
    """A robot of 50 actions a second that replans every ten asks five times as often as its neighbours: 90% load."""
    made = Scheduler(max_batch=8, max_wait_s=0.0)
    made.add_worker("w", service_times({1: 22.0, 2: 32.0, 4: 51.0, 8: 90.0}, 8))
    arrivals = [ticket("fast", 0.2 * n + 0.5, at=0.2 * n) for n in range(150)]
    for robot in range(75):
        arrivals += [ticket(f"r{robot}", at + 0.8, at=at) for at in (0.0133 * robot + n for n in range(30))]
    simulation = Simulation(made)
    simulation.run(sorted(arrivals, key=lambda one: one.arrived_at))
    late = Counter(one.robot == "fast" for one, end in simulation.done.items() if end > one.deadline + 1e-9)
    assert len(simulation.done) == len(arrivals)
    assert not late


def test_a_robot_that_stops_flooding_is_soon_like_the_others():
    shares = Shares()
    flood, others = ticket("flood", 1.0), [ticket(robot, 1.0) for robot in range(4)]
    waiting = ticket("waiting", 1.0)
    shares.arrive(waiting, 0.0)
    shares.enter()  # and is left behind all the time
    for one in others:
        assert not shares.arrive(one, 0.0)

    def serve(one):
        over = shares.arrive(one, 0.0)
        shares.enter()
        shares.turn_away()  # somebody is refused for each that is served
        shares.serve([one])
        return over

    assert [serve(flood) for _ in range(100)][-1], "it was over its share for long"
    rounds = 0
    while shares.arrive(flood, 0.0):
        rounds += 1
        served_over = [serve(one) for one in others]
        assert not any(served_over)
        assert rounds <= 2 * ROBOT_BURST + 2
    for _ in range(10):
        serve(flood)
    assert shares.arrive(flood, 0.0)
    shares.forgive()
    assert not shares.arrive(flood, 0.0)


def test_a_batch_that_takes_everybody_is_nobodys_debt():
    shares, alone = Shares(), ticket("fast", 1.0)
    for _ in range(50):
        assert not shares.arrive(alone, 0.0)
        shares.enter()
        shares.serve([alone])


def contended(*tickets):
    """Books in which these have asked, and a debt is not forgiven: somebody is always left waiting."""
    shares = Shares()
    for one in (ticket("waits", 9.0, tenant="waits"), *tickets):
        shares.arrive(one, 0.0)
        shares.enter()
    return shares


def debts(shares, one):
    tenant = one.account.level.tenant
    return [round(account.served - account.level.now, 9) for account in (one.account, tenant)]


def test_what_a_worker_gives_back_unserved_is_no_debt():
    back, other = ticket("back", 9.0, tenant="a"), ticket("other", 9.0, tenant="b")
    shares = contended(back, other)
    before = debts(shares, back)
    for _ in range(50):
        shares.serve([back])
        assert debts(shares, back) != before
        shares.refund(back)
        shares.enter()
        assert debts(shares, back) == before
    shares.serve([other])
    shares.serve([back])
    once = contended(again := ticket("back", 9.0, tenant="a"), last := ticket("other", 9.0, tenant="b"))
    once.serve([last])
    once.serve([again])
    assert debts(shares, back) == debts(once, again)


def test_a_debt_that_was_forgiven_is_not_paid_back_as_well():
    back, other = ticket("back", 9.0, tenant="a"), ticket("other", 9.0, tenant="b")
    shares = contended(back, other)
    shares.serve([back])
    shares.forgive()
    before = back.account.level.now
    shares.refund(back)
    assert back.account.level.now == before


def test_whose_worker_failed_is_charged_once():
    failed = ticket("failed", 9.0)
    shares = contended(failed)
    shares.serve([failed])
    owed = debts(shares, failed)
    shares.enter()
    shares.serve([failed])
    assert debts(shares, failed) == owed


# ----- against brute force


def _most_by_class(tickets, times, limit):
    """Lexicographic optimum, by class, of what any sequence of batches from t=0 serves on time: exhaustive."""
    best = (0,) * len(Priority)
    for size in range(len(tickets), 0, -1):
        for kept in itertools.combinations(tickets, size):
            ordered = sorted(one.deadline for one in kept)
            if _schedulable(ordered, 0.0, times, limit):
                counts = Counter(one.priority for one in kept)
                best = max(best, tuple(counts[priority] for priority in Priority))
    return best


def _schedulable(deadlines, now, times, limit):
    if not deadlines:
        return True
    return any(
        now + times.median_s(size) <= deadlines[0]
        and _schedulable(deadlines[size:], now + times.median_s(size), times, limit)
        for size in range(1, min(limit, len(deadlines)) + 1)
    )


@settings(deadline=None, max_examples=120)
@given(st.lists(st.tuples(st.integers(9, 70), st.sampled_from(Priority)), min_size=1, max_size=6))
def test_the_highest_class_is_served_as_if_it_were_alone(wanted):
    """All are there at once: of the highest class present at most one fewer than the best possible is on time."""
    simulation = Simulation(scheduler())
    tickets = [ticket(number, ms / 1e3 + 1e-6, priority=priority) for number, (ms, priority) in enumerate(wanted)]
    for one in tickets:
        refused, _ = simulation.scheduler.submit(one, 0.0)
        if refused is not None:
            simulation.refused[one] = refused.reason
    simulation.poll()
    simulation.advance(1e9)
    assert set(simulation.done) | set(simulation.refused) == set(tickets)
    assert all(end <= one.deadline for one, end in simulation.done.items())
    optimum = _most_by_class(tickets, service_times(), max(TIMES_MS))
    top = min(one.priority for one in tickets)
    on_time = sum(one.priority is top for one in simulation.done)
    assert on_time >= optimum[top] - 1


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 200),
            st.integers(10, 400),
            st.sampled_from(Priority),
            st.sampled_from("ab"),
            st.integers(0, 5),
        ),
        min_size=1,
        max_size=50,
    ),
    st.integers(1, 3),
)
def test_every_ticket_of_every_class_ends_exactly_once_and_never_late(arrivals, workers):
    simulation = Simulation(scheduler(workers=workers, max_wait_s=0.004))
    tickets = [
        ticket(robot, (at + left) / 1e3, at=at / 1e3, seq=number, priority=priority, tenant=tenant)
        for number, (at, left, priority, tenant, robot) in enumerate(sorted(arrivals))
    ]
    simulation.run(tickets)
    ended = [set(simulation.done), set(simulation.refused), set(simulation.superseded)]
    assert set().union(*ended) == set(tickets)
    assert sum(map(len, ended)) == len(tickets)
    assert all(end <= one.deadline + 1e-9 for one, end in simulation.done.items())
    assert len(simulation.scheduler.queue) == 0


# ----- through the gateway


def test_classes_on_the_wire(bare_stack):
    """Queued behind a slow batch: the later production goes before the earlier rollout, unless its tenant may not."""
    stack = bare_stack
    stack.write_routes(stack.start_worker(t_sync="1:1500"), max_batch=1, priority_ceilings={"*": "production"})
    stack.start_gateway()
    stack.wait_workers(1)
    with ThreadPoolExecutor() as pool:
        busy = pool.submit(stack.act, robot="busy")
        until(stack.batches, "the first batch")
        depth = "taktline_queue_depth"
        asked = []
        for place, (robot, priority) in enumerate((("sim", "rollout"), ("low", "background"), ("arm", "safety"))):
            asked.append(pool.submit(stack.act, robot=robot, priority=priority))
            until(lambda place=place: stack.metric(depth, policy="scripted") == place + 1, f"{robot} is queued")
        assert {one.result()[0] for one in (busy, *asked)} == {200}
    assert [batch["robots"] for batch in stack.batches()] == [["busy"], ["arm"], ["low"], ["sim"]]
    unknown = stack.http.post(f"{stack.url}/v1/policies/scripted/act", json={"priority": "urgent"})
    assert unknown.status_code == 400
