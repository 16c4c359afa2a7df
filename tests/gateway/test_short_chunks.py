"""A chunk that would be over for a robot before it is there is not offered: real-time chunking under degradation."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from taktline_gateway.deadline_queue import Priority, Ticket
from taktline_gateway.scheduler import Scheduler
from taktline_gateway.service_times import ServiceTimes
from taktline_protocol.messages import Array, BucketTime, Degraded, Rtc

from tests.gateway.simulated_clock import service_times

FULL = {1: 100.0, 8: 200.0}
SHORT = {1: 30.0, 8: 60.0}
STEPS = {1: 40.0, 8: 90.0}


@dataclasses.dataclass(slots=True, eq=False)
class Continuing(Ticket):
    """A robot that executes an action every `dt_s`, or says how many pass."""

    delay: int = 0
    dt_s: float = 0.0

    def passing(self, ends_at: float) -> int:
        return self.delay if not self.dt_s else round((ends_at - self.arrived_at) / self.dt_s)


def ticket(robot, deadline, **fields):
    return Continuing(robot=str(robot), seq=1, deadline=deadline, arrived_at=0.0, **fields)


def short(table, actions):
    rows = [BucketTime(batch=batch, median_ms=ms, p99_ms=ms) for batch, ms in table.items()]
    return ServiceTimes(rows, 8, actions)


def scheduler(*cheaper):
    made = Scheduler(max_batch=8, max_wait_s=0.0)
    made.add_worker("w", service_times(FULL), 0.0, cheaper)
    return made


@pytest.mark.parametrize(("delay", "level"), [(0, 1), (9, 1), (10, None), (12, None)])
def test_the_chunk_must_hold_more_than_passes_while_it_is_made(delay, level):
    made = scheduler(short(SHORT, 10))
    asked = ticket("a", 0.080, delay=delay)
    assert made.submit(asked, 0.0) == (None, None)
    assert [batch.level for batch in made.poll(0.0).batches] == ([] if level is None else [level])
    if level is None:
        plan = made.poll(0.0502)
        assert [one.ticket for one in plan.refused] == [asked]
        assert not plan.batches


def test_what_passes_depends_on_when_the_batch_ends():
    """A batch of one ends after 30 ms, one of eight after 60, when ten actions have passed."""
    for robots, levels in ((1, [1]), (8, [])):
        made = scheduler(short(SHORT, 10))
        for robot in range(robots):
            made.submit(ticket(robot, 0.080, dt_s=0.006), 0.0)
        assert [batch.level for batch in made.poll(0.0).batches] == levels


def test_another_level_is_taken_that_leaves_the_chunk_whole():
    made = scheduler(service_times(STEPS), short(SHORT, 10))
    made.submit(ticket("a", 0.035, delay=9), 0.0)
    assert [batch.level for batch in made.poll(0.0).batches] == [2]
    made = scheduler(short(STEPS, 10), service_times(SHORT))
    made.submit(ticket("a", 0.080, delay=10), 0.0)
    assert [batch.level for batch in made.poll(0.0).batches] == [2]


def test_others_are_served_meanwhile():
    made = scheduler(short(SHORT, 10))
    made.submit(ticket("long", 0.080, delay=10), 0.0)
    made.submit(ticket("whole", 0.300, delay=10), 0.0)
    (batch,) = made.poll(0.0).batches
    assert (batch.level, [one.robot for one in batch.tickets]) == (0, ["whole"])


def test_nobody_rides_in_a_batch_whose_chunks_are_too_short_for_it():
    for delay, members in ((9, ["a", "low"]), (10, ["a"])):
        made = scheduler(short({1: 30.0, 8: 31.0}, 10))
        made.submit(ticket("a", 0.080), 0.0)
        made.submit(ticket("low", 9.0, delay=delay, priority=Priority.BACKGROUND), 0.0)
        (batch,) = made.poll(0.0).batches
        assert (batch.level, [one.robot for one in batch.tickets]) == (1, members)


def test_luck_is_not_tried_with_a_chunk_that_is_over_too_soon():
    for delay, tried in ((9, True), (10, False)):
        made = Scheduler(max_batch=8, max_wait_s=0.0)
        rows = [BucketTime(batch=1, median_ms=30.0, p99_ms=36.0)]
        made.add_worker("w", service_times({1: 100.0}), 0.0, (ServiceTimes(rows, 8, 10),))
        assert made.submit(ticket("a", 0.029, delay=delay), 0.0) == (None, None)
        assert bool(made.poll(0.0).batches) is tried


# ----- through the gateway


def test_a_robot_whose_delay_is_longer_is_refused_and_not_sent(bare_stack):
    stack = bare_stack
    stack.write_routes(
        stack.start_worker(rtc="guided", t_sync="1:1500", cheaper="0x4=1:20"), degrade={"min_action_horizon": 4}
    )
    stack.start_gateway()
    stack.wait_workers(1)
    tail = Array.from_numpy(np.zeros((8, 6), dtype=np.float32))
    status, error = stack.act(robot="a", budget_ms=1400.0, rtc=Rtc(tail=tail, delay=4))
    assert (status, error.code) == (503, "deadline_unreachable")
    status, error = stack.act(robot="b", budget_ms=1400.0, captured_at=100.0, sent_at=103.0, rtc=Rtc(tail=tail))
    assert (status, error.code) == (503, "deadline_unreachable"), "its delay is estimated: the whole tail"
    status, chunk = stack.act(robot="c", budget_ms=1400.0, rtc=Rtc(tail=tail, delay=3))
    assert (status, chunk.degraded) == (200, Degraded(action_horizon=4))
    status, chunk = stack.act(robot="d", budget_ms=1400.0, rtc=Rtc(delay=9))
    assert (status, chunk.degraded) == (200, Degraded(action_horizon=4)), "it continues no chunk"
    assert [batch["action_horizon"] for batch in stack.batches()] == [4, 4]
