"""A table calibrated on a busy machine must not refuse a fleet for ever."""

from __future__ import annotations

from taktline_gateway.deadline_queue import Ticket
from taktline_gateway.scheduler import TRIAL_AFTER_S, Refusal, Scheduler
from taktline_gateway.service_times import ServiceTimes
from taktline_protocol.messages import BucketTime

from tests.gateway.simulated_clock import running

TRUE_S = 0.1


def inflated() -> ServiceTimes:
    table = {1: 3200.0, 2: 5800.0, 4: 6500.0}
    return ServiceTimes([BucketTime(batch=b, median_ms=ms, p99_ms=1.2 * ms) for b, ms in table.items()], 4)


def ask(made: Scheduler, robot: str, now: float, budget_s: float = 1.0):
    return made.submit(Ticket(robot=robot, seq=1, deadline=now + budget_s, arrived_at=now), now)[0]


def test_an_idle_worker_gets_a_trial_and_one_fast_answer_corrects_every_bucket():
    made, times = Scheduler(max_batch=4, max_wait_s=0.0), inflated()
    made.add_worker("w", times)
    assert ask(made, "a", 0.5).reason is Refusal.UNREACHABLE
    assert ask(made, "a", TRIAL_AFTER_S) is None
    batch = made.poll(TRIAL_AFTER_S).batches[0]
    assert [ticket.robot for ticket in batch.tickets] == ["a"]
    made.finished(running(made, "w"), TRUE_S)
    assert times.median[1] == TRUE_S
    assert times.median[4] == TRUE_S * 6500 / 3200
    assert ask(made, "b", TRIAL_AFTER_S + TRUE_S) is None


def test_a_trial_that_confirms_the_table_changes_nothing_and_the_next_one_waits():
    made, times = Scheduler(max_batch=4, max_wait_s=0.0), inflated()
    made.add_worker("w", times)
    assert ask(made, "a", TRIAL_AFTER_S) is None
    made.poll(TRIAL_AFTER_S)
    made.finished(running(made, "w"), 3.3)
    end = TRIAL_AFTER_S + 3.3
    assert times.median[1] == 3.2
    assert ask(made, "a", end).reason is Refusal.UNREACHABLE, "it has just answered, and is not rusty"
    assert ask(made, "a", end + TRIAL_AFTER_S) is None
    made.poll(end + TRIAL_AFTER_S)
    assert ask(made, "b", end + TRIAL_AFTER_S).reason is Refusal.UNREACHABLE


def test_samples_of_a_bad_time_give_way_too():
    made, times = Scheduler(max_batch=4, max_wait_s=0.0), inflated()
    for _ in range(128):
        times.record(1, 4.0)
    made.add_worker("w", times)
    assert ask(made, "a", TRIAL_AFTER_S) is None
    made.poll(TRIAL_AFTER_S)
    made.finished(running(made, "w"), TRUE_S)
    assert times.median[1] == TRUE_S


def test_a_robot_that_leaves_before_its_trial_begins_is_not_sent():
    made = Scheduler(max_batch=4, max_wait_s=0.0)
    made.add_worker("w", inflated())
    one = Ticket(robot="a", seq=1, deadline=TRIAL_AFTER_S + 1, arrived_at=TRIAL_AFTER_S)
    assert made.submit(one, TRIAL_AFTER_S) == (None, None)
    assert made.cancel(one)
    assert made.poll(TRIAL_AFTER_S).batches == ()


def test_a_trial_whose_worker_left_is_refused_like_any_other():
    made = Scheduler(max_batch=4, max_wait_s=0.0)
    made.add_worker("w", inflated())
    one = Ticket(robot="a", seq=1, deadline=TRIAL_AFTER_S + 1, arrived_at=TRIAL_AFTER_S)
    made.submit(one, TRIAL_AFTER_S)
    made.remove_worker("w")
    made.poll(TRIAL_AFTER_S)
    assert [refused.ticket for refused in made.poll(TRIAL_AFTER_S + 1.1).refused] == [one]
