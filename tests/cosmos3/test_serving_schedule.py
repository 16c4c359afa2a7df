"""Requests for a video in the gateway's queue: given their robot's time, and kept out of what the table learns."""

from __future__ import annotations

from taktline_gateway.deadline_queue import Ticket
from taktline_gateway.pending import is_away
from taktline_gateway.scheduler import Scheduler
from taktline_gateway.service_times import ServiceTimes
from taktline_protocol import ErrorCode, TaktlineError, worker_pb2
from taktline_protocol.messages import BucketTime
from taktline_protocol.rpc import from_error, to_error

TIMES = (BucketTime(batch=1, median_ms=100.0, p99_ms=110.0),)


def made() -> tuple[Scheduler, ServiceTimes]:
    scheduler, times = Scheduler(max_batch=1, max_wait_s=0.0), ServiceTimes(TIMES, 1)
    scheduler.add_worker("w", times)
    return scheduler, times


def launch(scheduler: Scheduler, now: float, *, extra: bool):
    scheduler.submit(Ticket("arm", seq=int(now * 1000) + 1, deadline=now + 60.0, arrived_at=now, extra=extra), now)
    (batch,) = scheduler.poll(now).batches
    return batch


def test_a_batch_with_a_video_may_take_as_long_as_its_robot_waits() -> None:
    scheduler, _ = made()
    assert launch(scheduler, 0.0, extra=True).hangs_at == 60.0
    # Nor is its worker silent, and its members offered to others, before that.
    assert scheduler.poll(30.0).silent == ()
    scheduler, _ = made()
    assert launch(scheduler, 0.0, extra=False).hangs_at == 1.0
    assert len(scheduler.poll(30.0).silent) == 1


def test_the_table_learns_nothing_from_a_batch_with_a_video() -> None:
    scheduler, times = made()
    for index in range(20):
        batch = launch(scheduler, 10.0 * index, extra=True)
        scheduler.finished(batch, 3.0, 2.9)
    assert times.median_s(1) == 0.1
    for index in range(20, 40):
        scheduler.finished(launch(scheduler, 10.0 * index, extra=False), 0.15, 0.14)
    assert times.median_s(1) == 0.15


def test_the_table_learns_nothing_from_a_batch_of_refusals() -> None:
    scheduler, times = made()
    for index in range(20):
        scheduler.finished(launch(scheduler, 10.0 * index, extra=False), 0.001, 0.001, measured=False)
    assert times.median_s(1) == 0.1


def test_a_worker_says_when_it_may_be_asked_again() -> None:
    away = TaktlineError(ErrorCode.WORKER_UNAVAILABLE, "a rank is lost", "try later", retry_after_ms=5000.0)
    told = from_error(to_error(away))
    assert (told.code, told.message, told.next_step, told.retry_after_ms) == (
        away.code,
        away.message,
        away.next_step,
        5000.0,
    )
    assert from_error(to_error(TaktlineError(ErrorCode.STATE_INVALID, "m", "n"))).retry_after_ms is None


def test_a_worker_that_is_away_is_not_taken_for_a_quick_one() -> None:
    def result(error: TaktlineError) -> worker_pb2.InferResult:
        return worker_pb2.InferResult(request_id="r", error=to_error(error))

    assert is_away(result(TaktlineError(ErrorCode.WORKER_UNAVAILABLE, "m", "n", retry_after_ms=1.0)))
    # Another revision, or a level of quality that it has no more: it serves others well.
    assert not is_away(result(TaktlineError(ErrorCode.WORKER_UNAVAILABLE, "m", "n")))
    assert not is_away(worker_pb2.InferResult(request_id="r"))
