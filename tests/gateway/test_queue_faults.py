"""Faults that the queue once had, each kept out by a test that is named by it."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from taktline_gateway.lane import Lane
from taktline_gateway.scheduler import TRIAL_AFTER_S, Scheduler
from taktline_gateway.telemetry import Telemetry
from taktline_protocol import TaktlineError
from taktline_protocol.deployment import DegradeOptions, Route, Target
from taktline_protocol.messages import BucketTime, CheaperLevel, Observation, PolicyInfo

from tests.gateway.simulated_clock import running, scheduler, service_times, ticket


def bucket_times(scale: float = 1.0) -> tuple[BucketTime, ...]:
    times = {1: 10.0, 2: 12.0, 4: 16.0, 8: 24.0}
    return tuple(BucketTime(batch=b, median_ms=scale * ms, p99_ms=scale * ms) for b, ms in times.items())


def worker(name: str = "w", steps: tuple[int, ...] = (5, 3)) -> SimpleNamespace:
    """A connected worker of two seats, as a lane knows it; nothing is ever sent to it."""
    info = PolicyInfo(
        policy="p",
        family="scripted",
        revision="r1",
        ready=True,
        t_sync=bucket_times(),
        cheaper=tuple(CheaperLevel(solver_steps=n, t_sync=bucket_times(n / 10)) for n in steps),
    )
    return SimpleNamespace(
        name=name, info=info, up=True, revision="r1", seats=(name, f"{name}#1"), target=Target(address=name)
    )


def route(**changes) -> Route:
    return Route(**{"policy": "p", "max_batch": 2, "max_wait_ms": 0.0, **changes})


async def lane_with(link, **changes) -> Lane:
    made = Lane(route(**changes), Telemetry(), max_queued=100)
    made._worker_up(link)
    return made


def states(lane: Lane, link) -> list:
    return [lane._scheduler.fleet.get(seat) for seat in link.seats]


async def test_a_larger_batch_in_the_route_takes_effect_on_connected_workers():
    link = worker()
    lane = await lane_with(link)
    lane.apply(route(max_batch=8))
    assert [state.times.max_batch for state in states(lane, link)] == [8, 8]
    assert states(lane, link)[0].times.median[8] == pytest.approx(0.024)
    lane.apply(route(max_batch=4))
    assert [state.times.max_batch for state in states(lane, link)] == [4, 4]
    await lane.close()


async def test_a_changed_degrade_in_the_route_takes_effect_on_connected_workers():
    link = worker()
    lane = await lane_with(link)
    assert [len(state.levels) for state in states(lane, link)] == [1, 1]
    lane.apply(route(degrade=DegradeOptions(min_solver_steps=3)))
    assert [len(state.levels) for state in states(lane, link)] == [3, 3]
    assert [level.solver_steps for level in lane._dispatch.levels["w"].qualities] == [5, 3]
    # What was measured of a level that stays is not forgotten.
    five = lane._dispatch.levels["w"].times[0]
    lane.apply(route(degrade=DegradeOptions(min_solver_steps=5), max_batch=4))
    assert [state.levels[1:] for state in states(lane, link)] == [(five,), (five,)]
    assert five.max_batch == 4
    lane.apply(route())
    assert [len(state.levels) for state in states(lane, link)] == [1, 1]
    await lane.close()


def test_what_was_measured_outlives_a_change_of_the_largest_batch():
    times = service_times(max_batch=4)
    for _ in range(20):
        times.record(4, 0.050)
    times.limit(8)
    assert (times.median_s(4), times.median_s(8)) == (pytest.approx(0.050), pytest.approx(0.050))
    times.limit(2)
    assert len(times.tail) == 3
    times.limit(100)
    assert times.max_batch == 8


def test_a_health_blip_during_a_batch_does_not_release_the_next_one():
    made = scheduler()
    made.submit(ticket("a", 9.0), 0.0)
    before = made.poll(0.0).batches[0]
    made.remove_worker("w0")
    made.add_worker("w0", service_times(), 0.001)
    made.submit(ticket("b", 9.0), 0.002)
    after = made.poll(0.002).batches[0]
    for end in (lambda: made.finished(before, 0.010), lambda: made.failed(before, 5.0)):
        end()
        assert running(made, "w0") is after
        assert made.worker_state("w0", 0.011) == "busy"
    made.submit(ticket("c", 9.0), 0.011)
    assert made.poll(0.011).batches == (), "two batches would be in flight on one seat"
    made.finished(after, 0.010)
    assert [one.robot for one in made.poll(0.012).batches[0].tickets] == ["c"]


def test_the_same_batch_ends_once():
    made = scheduler()
    made.submit(ticket("a", 9.0), 0.0)
    batch = made.poll(0.0).batches[0]
    made.finished(batch, 0.010)
    made.submit(ticket("b", 9.0), 0.010)
    after = made.poll(0.010).batches[0]
    made.failed(batch, 5.0)
    assert running(made, "w0") is after


def slow() -> Scheduler:
    """A scheduler whose table refuses every short budget, idle for long enough to give a trial."""
    made = Scheduler(max_batch=4, max_wait_s=0.0)
    made.add_worker("w", service_times({1: 3200.0, 4: 6500.0}, 4))
    return made


@pytest.mark.parametrize("budget_s", [1.0, 30.0])
def test_a_newer_observation_replaces_the_trial_of_its_robot(budget_s):
    """Whether the newer one is admitted by the table or tried itself: one of a robot waits, and it is the newest."""
    made, now = slow(), TRIAL_AFTER_S
    old, new = ticket("arm", now + 1.0, at=now, seq=1), ticket("arm", now + budget_s, at=now, seq=2)
    assert made.submit(old, now) == (None, None)
    assert made.submit(new, now) == (None, old)
    assert made.waiting() == [new]
    assert [batch.tickets for batch in made.poll(now).batches] == [(new,)]


def test_a_trial_without_a_worker_drops_no_newer_observation():
    made, now = slow(), TRIAL_AFTER_S
    old, new = ticket("arm", now + 1.0, at=now, seq=1), ticket("arm", now + 30.0, at=now, seq=2)
    made.submit(old, now)
    assert made.submit(new, now)[1] is old
    made.remove_worker("w")
    assert made.poll(now).batches == ()
    assert made.waiting() == [new]


def test_a_failed_batch_never_queues_an_observation_beside_the_trial_of_its_robot():
    made, now = slow(), TRIAL_AFTER_S
    made.submit(ticket("arm", now + 1.0, at=now, seq=2), now)
    assert not made.resubmit(ticket("arm", now + 60.0, at=now, seq=1), now)


async def test_a_policy_that_ends_answers_the_observation_on_trial():
    link = worker()
    link.info = PolicyInfo(policy="p", family="scripted", revision="r1", ready=True, t_sync=bucket_times(1000.0))
    lane = await lane_with(link)
    for state in states(lane, link):
        state.used_at = time.monotonic() - 2 * TRIAL_AFTER_S
    sent = Observation(
        robot_id="arm",
        session_id="s",
        seq=1,
        captured_at=0.0,
        budget_ms=500.0,
        images={},
        state=[0.0],
        instruction="go",
    )
    pending = lane.submit("one", sent, time.monotonic() + 0.5)
    assert lane.depth == 1
    await lane.close()
    with pytest.raises(TaktlineError) as caught:
        await asyncio.wait_for(pending.result, 5.0)
    assert caught.value.code.value == "worker_unavailable"
