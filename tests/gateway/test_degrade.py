"""Cheaper before refused: fewer solver steps and a smaller policy, only where allowed, and every answer says so."""

from __future__ import annotations

import asyncio
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from taktline_gateway import lane as lanes
from taktline_gateway.degrade import levels_of, stands_in
from taktline_gateway.scheduler import Refusal, Scheduler
from taktline_gateway.telemetry import Telemetry
from taktline_protocol.deployment import DegradeOptions, Route
from taktline_protocol.messages import Array, BucketTime, CheaperLevel, Degraded, ImageFit, Observation, PolicyInfo

from tests.gateway.simulated_clock import Simulation, service_times, ticket

FULL = {1: 100.0, 8: 200.0}
HALF = {1: 50.0, 8: 110.0}
FIFTH = {1: 30.0, 8: 60.0}


def scheduler(levels=(HALF, FIFTH), workers=1):
    made = Scheduler(max_batch=8, max_wait_s=0.0)
    for index in range(workers):
        made.add_worker(f"w{index}", service_times(FULL), cheaper=tuple(service_times(table) for table in levels))
    return made


# ----- the choice


def test_full_quality_while_there_is_time():
    made = scheduler()
    made.submit(ticket("a", 0.101), 0.0)
    assert made.poll(0.0).batches[0].level == 0


@pytest.mark.parametrize(("budget_s", "level"), [(0.099, 1), (0.051, 1), (0.049, 2), (0.031, 2)])
def test_the_mildest_level_that_meets_the_deadline(budget_s, level):
    made = scheduler()
    assert made.submit(ticket("a", budget_s), 0.0) == (None, None)
    batch = made.poll(0.0).batches[0]
    assert batch.level == level
    assert batch.predicted <= budget_s


def test_a_small_chance_of_being_late_costs_no_quality():
    """Three batches end at 300 ms by their medians, at 305.2 ms by the tail of all three; the deadline is between."""
    full = service_times({8: 100.0}, 8, tail=1.03)
    cheap = service_times({8: 50.0}, 8, tail=1.03)
    made = Scheduler(max_batch=8, max_wait_s=0.0)
    made.add_worker("w", full, 0.0, (cheap,))
    for number in range(24):
        made.submit(ticket(f"r{number}", 0.3045), 0.0)
    (batch,) = made.poll(0.0).batches
    assert (len(batch.tickets), batch.level) == (8, 0)


def test_what_no_level_can_meet_is_refused():
    refused, _ = scheduler().submit(ticket("a", 0.029), 0.0)
    assert refused.reason is Refusal.UNREACHABLE
    assert scheduler(levels=()).submit(ticket("a", 0.099), 0.0)[0].reason is Refusal.UNREACHABLE


def test_a_crowd_is_served_cheaply_rather_than_shed():
    """Eight within 120 ms: one at full quality, or all of them at half."""
    made = scheduler()
    for n in range(8):
        made.submit(ticket(n, 0.120), 0.0)
    batch = made.poll(0.0).batches[0]
    assert (len(batch.tickets), batch.level) == (8, 1)


STEPS = {1: 50.0, 8: 180.0}
SHORT = {1: 100.0, 8: 120.0}
"""Fewer actions save more of a full batch, fewer steps more of a batch of one."""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("levels", [(STEPS,), (STEPS, SHORT)])
def test_a_level_more_takes_nothing_from_what_another_makes(levels, workers):
    made = scheduler(levels, workers)
    assert made.submit(ticket("a", 0.075), 0.0) == (None, None)
    (batch,) = made.poll(0.0).batches
    assert batch.level == 1
    assert made.fleet.predicted_completion(0, 0.0) == pytest.approx(0.050 if workers == 2 else 0.100)


@pytest.mark.parametrize("workers", [1, 2])
def test_work_ahead_drains_at_the_level_of_the_best_throughput(workers):
    """Eight take 120 ms with shorter chunks, whichever level is the quickest with one."""
    for levels in ((STEPS, SHORT), (SHORT, STEPS)):
        assert scheduler(levels, workers).fleet.predicted_completion(7, 0.0) == pytest.approx(0.120 / workers)


def test_the_ticket_that_needs_luck_is_tried_at_the_level_that_is_quickest_with_one():
    made = Scheduler(max_batch=8, max_wait_s=0.0)
    levels = tuple(service_times(table, tail=1.2) for table in (FULL, STEPS, SHORT))
    made.add_worker("w", levels[0], 0.0, levels[1:])
    assert made.submit(ticket("a", 0.048), 0.0) == (None, None)
    assert [batch.level for batch in made.poll(0.0).batches] == [1]
    assert made.submit(ticket("b", 0.041, at=0.0), 0.0)[0] is not None, "by far too little time at every level"


def test_rollouts_are_never_degraded():
    """They have no deadline to lose."""
    from taktline_gateway.deadline_queue import Priority

    made = scheduler()
    for n in range(20):
        made.submit(ticket(n, 600.0, priority=Priority.ROLLOUT), 0.0)
    assert made.poll(0.0).batches[0].level == 0


def test_each_level_learns_its_own_times():
    made = scheduler()
    made.submit(ticket("a", 0.060), 0.0)
    batch = made.poll(0.0).batches[0]
    for _ in range(20):
        made.finished(batch, 0.055)
        made.submit(ticket("a", 10.060, at=10.0), 10.0)
        batch = made.poll(10.0).batches[0]
        assert batch.level == 1
    assert made.times("w0").median_s(1) == pytest.approx(0.100), "full quality was not measured"
    assert batch.predicted == pytest.approx(10.055)


def test_overload_serves_more_with_levels_than_without():
    def on_time(levels):
        arrivals = [ticket(n, n * 0.015 + 0.4, at=n * 0.015) for n in range(600)]  # 67/s against 40/s at full quality
        simulation = Simulation(scheduler(levels=levels))
        simulation.run(arrivals)
        return sum(end <= one.deadline + 1e-9 for one, end in simulation.done.items())

    full = on_time(())
    cheap = on_time((HALF, FIFTH))
    assert cheap > 1.3 * full
    assert cheap >= 0.98 * 600


@pytest.mark.parametrize("goes", [True, False])
def test_who_may_go_to_another_policy_is_not_kept_for_a_lucky_batch(goes):
    made = Scheduler(max_batch=1, max_wait_s=0.0, goes_elsewhere=lambda _: goes)
    made.add_worker("w", service_times({1: 100.0}, 1, tail=1.1))
    refused, _ = made.submit(ticket("a", 0.095), 0.0)
    assert (refused is not None) is goes
    made.submit(ticket("first", 9.0), 0.0)
    (_,) = made.poll(0.0).batches
    waits = ticket("b", 0.202)
    if made.depth:  # the one that was kept
        made.cancel(made.waiting()[0])
    assert made.submit(waits, 0.0) == (None, None)
    plan = made.poll(0.1025)
    assert [one.ticket for one in plan.refused] == ([waits] if goes else [])


# ----- what is allowed


def info(**changes):
    base = {
        "policy": "p",
        "family": "f",
        "revision": "r",
        "ready": True,
        "cameras": ("front",),
        "state_dim": 6,
        "action_dim": 6,
        "dt_s": 0.05,
        "cheaper": tuple(
            CheaperLevel(solver_steps=steps, t_sync=(BucketTime(batch=1, median_ms=steps, p99_ms=steps),))
            for steps in (1, 5, 2)
        ),
    }
    return PolicyInfo(**{**base, **changes})


@pytest.mark.parametrize(("least", "steps"), [(0, ()), (1, (5, 2, 1)), (2, (5, 2)), (3, (5,)), (6, ())])
def test_only_levels_that_the_deployment_allows(least, steps):
    found = levels_of(info(), DegradeOptions(min_solver_steps=least), 8)
    assert tuple(level.solver_steps for level in found.qualities) == steps


def level(steps, horizon, full_ms):
    times = (BucketTime(batch=1, median_ms=10, p99_ms=10), BucketTime(batch=8, median_ms=full_ms, p99_ms=full_ms))
    return CheaperLevel(solver_steps=steps, action_horizon=horizon, t_sync=times)


LEVELS = (level(5, 0, 60), level(0, 25, 80), level(0, 10, 50), level(2, 10, 30), level(0, 0, 90))


@pytest.mark.parametrize(
    ("steps", "horizon", "allowed"),
    [
        (0, 0, []),
        (5, 0, [(5, 0)]),
        (0, 25, [(0, 25)]),
        (5, 10, [(0, 25), (5, 0), (0, 10)]),
        (1, 1, [(0, 25), (5, 0), (0, 10), (2, 10)]),
        (1, 0, [(5, 0)]),
        (0, 26, []),
    ],
)
def test_steps_and_chunks_are_allowed_each_by_its_own_and_ordered_by_what_a_full_batch_takes(steps, horizon, allowed):
    options = DegradeOptions(min_solver_steps=steps, min_action_horizon=horizon)
    found = levels_of(info(cheaper=LEVELS), options, 8)
    assert [(one.solver_steps, one.action_horizon) for one in found.qualities] == allowed
    again = levels_of(info(cheaper=LEVELS), options, 8, found)
    assert [id(times) for times in again.times] == [id(times) for times in found.times], "what was measured is kept"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"cameras": ("front", "wrist")}, False),
        ({"cameras": (), "optional_cameras": ("front",)}, True),
        ({"cameras": ()}, False),
        ({"action_dim": 7}, False),
        ({"state_dim": 7}, False),
        ({"dt_s": 0.1}, False),
        ({"ready": False}, False),
        ({"horizon": 3}, True),
        ({"image_fit": ImageFit(height=224, width=224, filter="bilinear", letterbox=True)}, False),
    ],
)
def test_a_stand_in_has_the_same_robot_interface(changes, expected):
    assert stands_in(info(), info(policy="other", **changes)) is expected
    rule = {"image_fit": ImageFit(height=224, width=224, filter="bicubic", letterbox=True)}
    assert stands_in(info(**rule), info(policy="other", **{**rule, **changes})) is expected


# ----- through the gateway


def test_an_answer_says_how_many_steps_it_got(bare_stack):
    stack = bare_stack
    worker = stack.start_worker(t_sync="1:1500", cheaper="5=1:20")
    stack.write_routes(worker, degrade={"min_solver_steps": 5})
    stack.start_gateway()
    stack.wait_workers(1)
    status, chunk = stack.act(robot="a", budget_ms=5_000.0)
    assert (status, chunk.degraded) == (200, None)
    status, chunk = stack.act(robot="a", budget_ms=1400.0)
    assert (status, chunk.degraded) == (200, Degraded(solver_steps=5))
    assert [batch["solver_steps"] for batch in stack.batches()] == [0, 5]


def test_a_shorter_chunk_comes_before_a_refusal_and_says_what_it_is(bare_stack):
    stack = bare_stack
    worker = stack.start_worker(t_sync="1:1500", cheaper="0x4=1:20")
    stack.write_routes(worker, degrade={"min_action_horizon": 4})
    stack.start_gateway()
    stack.wait_workers(1)
    status, chunk = stack.act(robot="a", budget_ms=5_000.0)
    assert (status, chunk.degraded, chunk.actions.shape) == (200, None, (10, 6))
    status, chunk = stack.act(robot="a", budget_ms=1400.0)
    assert (status, chunk.degraded, chunk.actions.shape) == (200, Degraded(action_horizon=4), (4, 6))
    assert chunk.valid_until == pytest.approx(chunk.captured_at + 4 * chunk.dt_s)
    assert [(batch["solver_steps"], batch["action_horizon"]) for batch in stack.batches()] == [(0, 0), (0, 4)]
    page = stack.http.get(f"{stack.url}/metrics").text
    counted = dict(re.findall(r'taktline_degraded_total\{kind="(\w+)",policy="scripted"\} ([\d.]+)', page))
    assert counted == {"action_horizon": "1.0", "policy": "0.0", "solver_steps": "0.0"}


@pytest.mark.parametrize("least", [0, 5])
def test_a_shorter_chunk_than_the_route_allows_is_refused(bare_stack, least):
    stack = bare_stack
    stack.write_routes(
        stack.start_worker(t_sync="1:200", cheaper="0x4=1:20"),
        degrade={"min_solver_steps": 1, "min_action_horizon": least},
    )
    stack.start_gateway()
    stack.wait_workers(1)
    status, error = stack.act(robot="a", budget_ms=150.0)
    assert (status, error.code) == (503, "deadline_unreachable")


def test_nothing_is_degraded_that_the_route_does_not_allow(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker(t_sync="1:200", cheaper="5=1:20"))
    stack.start_gateway()
    stack.wait_workers(1)
    status, error = stack.act(robot="a", budget_ms=150.0)
    assert (status, error.code) == (503, "deadline_unreachable")


@pytest.mark.parametrize("fallback", ["small", ""])
def test_an_observation_that_the_large_policy_would_make_with_luck_only_goes_to_the_smaller_one(fallback, monkeypatch):
    monkeypatch.setattr(lanes, "stands_in", lambda *_: True)

    async def submitted():
        others, telemetry = {}, Telemetry()
        for name, ms in (("large", 100_000.0), ("small", 20_000.0)):
            degrade = DegradeOptions(fallback_policy=fallback if name == "large" else "")
            route = Route(policy=name, family="f", targets=(), max_batch=1, degrade=degrade)
            made = others[name] = lanes.Lane(route, telemetry, max_queued=9, others=others)
            made._scheduler.add_worker(name, service_times({1: ms}, 1, tail=1.1), time.monotonic())
            made._dispatch.poll_later = lambda: None
        state = Array.from_numpy(np.zeros(6))
        observation = Observation(
            robot_id="arm",
            session_id="s",
            seq=1,
            captured_at=0.0,
            budget_ms=95_000.0,
            images={},
            state=state,
            instruction="go",
        )
        others["large"].submit("id", observation, time.monotonic() + 95.0)
        depths = [others["large"].depth, others["small"].depth]
        for made in others.values():
            await made.close()
        return depths

    assert asyncio.run(submitted()) == ([0, 1] if fallback else [1, 0])


def test_a_smaller_policy_stands_in_at_once_and_for_the_queued(bare_stack):
    stack = bare_stack
    large = stack.start_worker(t_sync="1:4000,8:6000")
    small = stack.start_worker(policy="small", t_sync="1:600,8:700")
    stack.write_routes(large, degrade={"fallback_policy": "small"})
    table = json.loads(stack.routes.read_text())
    table["routes"].append({"policy": "small", "targets": [{"address": small}], "max_batch": 8, "max_wait_ms": 0})
    stack.routes.write_text(json.dumps(table))
    stack.start_gateway()
    stack.wait_workers(1)
    stack.wait_workers(1, "small")
    status, chunk = stack.act(robot="a", budget_ms=2000.0)
    assert (status, chunk.policy, chunk.degraded) == (200, "scripted", Degraded(policy="small"))
    assert chunk.worker == small
    with ThreadPoolExecutor() as pool:
        # The large one takes a batch of one; behind it there is time for one more, not for its slow neighbour.
        # What stands in has seconds to spare where this machine is busy: T of the large one less all of the small one.
        answers = list(
            pool.map(lambda n: stack.act(robot=f"r{n}", budget_ms=9000.0, instruction="slow 1000"), range(3))
        )
    assert [status for status, _ in answers] == [200] * 3
    assert {chunk.worker for _, chunk in answers} == {large, small}
