"""Batches on their way, with a worker scripted in this process: whatever it answers, each member is answered."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest
from taktline_gateway.batch_channel import WorkerCallError
from taktline_gateway.decisions import Plan
from taktline_gateway.degrade import Levels
from taktline_gateway.dispatch import SUSPEND_S, Dispatch
from taktline_gateway.pending import ClientGone, Pending
from taktline_gateway.phases import PhasePlanner
from taktline_gateway.scheduler import Batch, Scheduler
from taktline_gateway.telemetry import Telemetry
from taktline_protocol import ErrorCode, TaktlineError, worker_pb2
from taktline_protocol.deployment import Target
from taktline_protocol.messages import CheaperLevel
from taktline_protocol.rpc import to_tensor

from tests.gateway.simulated_clock import service_times


class Link:
    """A worker that answers every item by `answer(result)` once `meanwhile` has happened."""

    name = "w"
    revision = "r1"
    target = Target(address="w")
    info = None
    failures = 0
    failed_at = 0.0

    def __init__(self, answer, meanwhile=lambda: None) -> None:
        self._answer, self._meanwhile = answer, meanwhile

    async def infer(self, request, members, timeout_s: float, metadata, came=None) -> worker_pb2.InferResponse:
        self._meanwhile()
        response = worker_pb2.InferResponse(revision="r1", bucket=1)
        for item, _ in members:
            self._answer(response.results.add(request_id=item.request_id))
        return response


def actions(result) -> None:
    result.actions.CopyFrom(to_tensor(np.zeros((10, 6), np.float32)))


def overloaded(result) -> None:
    result.error.code = "overloaded"


def world(level: int):
    """A dispatch with one worker, and a batch of one observation that is on it."""
    now, times = time.monotonic(), service_times()
    scheduler = Scheduler(max_batch=8, max_wait_s=0.0)
    scheduler.add_worker("w", times, now, (times,))
    dispatch = Dispatch("p", scheduler, Telemetry(), PhasePlanner(), lambda *_: None)
    dispatch.levels["w"] = Levels((CheaperLevel(solver_steps=4, t_sync=()),), (times,))
    pending = Pending("arm", 1, now + 10.0, now, policy="p", request_id="one")
    pending.item.request_id = "one"
    pending.flights = 1
    return dispatch, pending, Batch("w", (pending,), now + 0.01, now + 0.02, now + 5.0, level)


def numbered(seed: int):
    def answer(result) -> None:
        result.actions.CopyFrom(to_tensor(np.full((10, 6), seed, np.float32)))

    return answer


class NumberingLink(Link):
    """Answers the items with 1, 2, 3, ... in an order, or not at all."""

    def __init__(self, order) -> None:
        self._order = order

    async def infer(self, request, members, timeout_s: float, metadata, came=None) -> worker_pb2.InferResponse:
        response = worker_pb2.InferResponse(revision="r1", bucket=4)
        for index in self._order:
            numbered(index + 1)(response.results.add(request_id=members[index][0].request_id))
        return response


@pytest.mark.parametrize(
    ("names", "order", "got"),
    [
        (("a", "a", "b"), (0, 1, 2), (1, 2, 3)),
        (("a", "a", "b"), (2, 0, 1), (1, 2, 3)),
        (("a", "a", "b"), (1, 2), (None, None, 3)),  # whose it is, nobody can say
        (("a", "b", "c"), (2, 1, 0), (1, 2, 3)),
    ],
)
def test_robots_that_name_their_requests_alike_get_their_own_actions(names, order, got):
    async def run():
        dispatch, _, _ = world(level=0)
        now = time.monotonic()
        members = []
        for index, name in enumerate(names):
            pending = Pending(f"arm-{index}", 1, now + 10.0, now, policy="p", request_id=name)
            pending.item.request_id, pending.flights, pending.attempts = name, 1, 1
            members.append(pending)
        batch = Batch("w", tuple(members), now + 0.01, now + 0.02, now + 5.0, 0)
        await dispatch._send(NumberingLink(order), batch, now)
        return [member.result for member in members]

    for result, number in zip(asyncio.run(run()), got, strict=True):
        if number is None:
            assert result.exception().code is ErrorCode.WORKER_FAILED
        else:
            assert np.frombuffer(result.result().actions.data, "<f4")[0] == number


def test_a_fault_on_the_way_to_the_worker_answers_every_member():
    def fault() -> None:
        raise RuntimeError("the channel is closed")

    async def run():
        dispatch, pending, batch = world(level=0)
        pending.attempts = 1
        await dispatch._send(Link(actions, fault), batch, time.monotonic())
        return pending.result

    assert asyncio.run(run()).exception().code is ErrorCode.WORKER_FAILED


def test_a_level_that_is_withdrawn_while_its_batch_runs_costs_no_answer():
    async def run():
        dispatch, pending, batch = world(level=1)
        link = Link(actions, lambda: dispatch.levels.update(w=Levels()))
        await dispatch._send(link, batch, time.monotonic())
        return pending.result.result()

    assert asyncio.run(run()).degraded.solver_steps == 4


@pytest.mark.parametrize(("copies", "answered"), [(1, True), (2, False)])
def test_what_one_worker_will_not_look_at_waits_for_the_copy_on_another(copies, answered):
    async def run():
        dispatch, pending, batch = world(level=0)
        pending.flights, pending.attempts = copies, 1
        await dispatch._send(Link(overloaded), batch, time.monotonic())
        return pending.result

    result = asyncio.run(run())
    assert result.done() is answered
    if answered:
        error = result.exception()
        assert isinstance(error, TaktlineError)
        assert error.code is ErrorCode.OVERLOADED


class TellingLink(Link):
    """A worker whose batch port gives the response at once to who is to hear of it first, and then to who waits."""

    def __init__(self, answer, before=lambda: None) -> None:
        super().__init__(answer)
        self._before = before

    async def infer(self, request, members, timeout_s: float, metadata, came=None) -> worker_pb2.InferResponse:
        response = await super().infer(request, members, timeout_s, metadata)
        self._before()
        came(response)
        return response


@pytest.mark.parametrize("other", ["none", "queued", "on a worker", "error"])
async def test_a_robot_is_told_in_the_turn_that_brings_its_answer_where_nobody_else_waits(other):
    dispatch, pending, batch = world(level=0)
    dispatch.in_flight = 2 if other == "on a worker" else 1
    dispatch._calls[id(batch)] = None
    told, ended = [], []
    dispatch._poll, dispatch.poll_later = dispatch._end_landed, lambda: None
    dispatch._ended = lambda *args: ended.append(len(told))
    pending.attempts = 1
    pending.tell = lambda served: told.append((served.worker, pending.result.result() is served))
    if other == "queued":
        waits = Pending("another", 1, pending.deadline, pending.arrived_at, policy="p")
        assert dispatch._scheduler.submit(waits, pending.arrived_at) == (None, None)
    heard = []
    link = TellingLink(overloaded if other == "error" else actions)
    link._before = lambda: asyncio.get_running_loop().call_soon(lambda: heard.append(list(told)))
    await dispatch._send(link, batch, time.monotonic())
    for _ in range(3):
        await asyncio.sleep(0)
    assert heard == [[("w", True)] if other == "none" else []]
    assert pending.result.done()
    assert pending.flights == 0
    assert len(ended) == 1, "the batch has ended once, whoever was told first"
    dispatch.stop()


async def test_a_batch_that_has_come_back_is_ended_before_anything_is_decided():
    """A gateway that had stood still took two answered batches for a silent one and one to recall, and failed on it:
    what that decision sent was lost.
    """
    dispatch, pending, batch = world(level=0)
    done = []
    dispatch._scheduler.finished = lambda batch, *_, **__: done.append(batch)
    dispatch._scheduler.poll = lambda _: done.append("poll") or Plan((), (), None, (), (), ())
    dispatch._calls[id(batch)] = None
    dispatch.in_flight = 1
    await dispatch._send(Link(actions), batch, time.monotonic())
    assert pending.result.done()
    dispatch._poll()  # a timer that was due, in the turn that brought the answer
    assert done == [batch, "poll"]
    for _ in range(4):
        await asyncio.sleep(0)
    assert done == [batch, "poll"], "it has ended once, and nothing is left to decide"
    dispatch.stop()


async def test_what_is_decided_when_a_batch_comes_back_counts_all_that_its_turn_has_read():
    dispatch, _, batch = world(level=0)
    now, scheduler, seen = time.monotonic(), dispatch._scheduler, []
    scheduler.poll = lambda _: seen.append(scheduler.depth) or Plan((), (), None, (), (), ())
    waits, read = (Pending(robot, 1, now + 10.0, now, policy="p") for robot in ("waits", "read"))
    assert scheduler.submit(waits, now) == (None, None)
    link = Link(actions, lambda: asyncio.get_running_loop().call_soon(scheduler.submit, read, now))
    await dispatch._send(link, batch, now)
    for _ in range(3):
        await asyncio.sleep(0)
    assert seen == [2]
    dispatch.stop()


class NeverLink(Link):
    """A worker that never answers; `told` says what it heard of its batch."""

    def __init__(self) -> None:
        self.told = []

    async def infer(self, request, members, timeout_s: float, metadata, came=None) -> worker_pb2.InferResponse:
        self.told.append("begun")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.told.append("cancelled")
            raise
        raise AssertionError


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_recalled_batch_leaves_nothing_behind_and_its_members_queue_again(gone, begun):
    async def run():
        dispatch, pending, batch = world(level=0)
        dispatch.poll_later = lambda: None
        pending.gone = gone  # its robot left while it was on the worker
        dispatch.in_flight = 1
        link = NeverLink()
        call = dispatch._calls[id(batch)] = dispatch.spawn(dispatch._send(link, batch, time.monotonic()))
        call.add_done_callback(lambda task: dispatch._landed(batch, task))
        if begun:
            await asyncio.sleep(0)
        dispatch._recall(batch, time.monotonic())
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.sleep(0)
        assert dispatch.in_flight == 0
        assert not dispatch._calls
        assert link.told == ["begun", "cancelled"], "also of one that is recalled in the turn that sent it"
        assert (pending in dispatch._scheduler.queue) is not gone
        assert pending.flights == 0
        dispatch.stop()
        return pending.result

    result = asyncio.run(run())
    if gone:
        assert isinstance(result.exception(), ClientGone)
    else:
        assert not result.done()


class PortLink(Link):
    """A worker whose answer is read from a socket: who waits for it is woken in a later turn."""

    def __init__(self) -> None:
        self.request_ids: list[str] = []

    def infer(self, request, members, timeout_s: float, metadata, came=None):
        self.request_ids = [item.request_id for item, _ in members]
        self.came = asyncio.get_running_loop().create_future()
        return self.came

    def read(self, *, failed: bool) -> None:
        if failed:
            self.came.set_exception(WorkerCallError("UNAVAILABLE", "the connection has ended"))
            return
        response = worker_pb2.InferResponse(revision="r1", bucket=1)
        for request_id in self.request_ids:
            actions(response.results.add(request_id=request_id))
        self.came.set_result(response)


@pytest.mark.parametrize("failed", [False, True])
def test_a_batch_that_is_recalled_in_the_turn_that_read_its_answer_has_ended_once(failed):
    """It had ended twice: its members were on no worker while one had them, and the scheduler counted one too few."""

    async def run():
        dispatch, pending, batch = world(level=0)
        ended = []
        dispatch._scheduler.finished = lambda *_, **__: ended.append("finished")
        dispatch._scheduler.failed = lambda *_, **__: ended.append("failed")
        dispatch.poll_later = lambda: None
        dispatch.in_flight = 1
        link = PortLink()
        call = dispatch._calls[id(batch)] = dispatch.spawn(dispatch._send(link, batch, time.monotonic()))
        call.add_done_callback(lambda task: dispatch._landed(batch, task))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(dispatch._recall, batch, time.monotonic())  # a decision of this turn
        link.read(failed=failed)
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.sleep(0)
        assert ended == []
        assert pending.flights == 0
        assert pending in dispatch._scheduler.queue
        assert dispatch.in_flight == 0
        dispatch.stop()
        return pending.result

    assert not asyncio.run(run()).done()


def test_of_a_robot_in_a_silent_batch_and_in_the_one_behind_it_the_newer_observation_queues_again():
    async def run():
        now, times = time.monotonic(), service_times({1: 100.0}, 1)
        scheduler = Scheduler(max_batch=1, max_wait_s=0.0)
        dispatch = Dispatch("p", scheduler, Telemetry(), PhasePlanner(), lambda *_: None)
        dispatch.poll_later = lambda: None
        older, newer = (Pending("arm", seq, now + 60.0, now + seq, policy="p") for seq in (4, 5))
        silent, behind = (Batch("w", (one,), now, now, now + 5.0) for one in (older, newer))
        older.flights = newer.flights = 1
        dispatch._calls[id(behind)] = asyncio.create_task(asyncio.sleep(0))
        scheduler.add_worker("other", times, now)
        scheduler.poll = lambda _: Plan((), (), None, (silent,), (behind,), ())
        dispatch._poll()
        return older, newer, scheduler.waiting()

    older, newer, waiting = asyncio.run(run())
    assert waiting == [newer]
    assert not older.result.done()  # its worker may still answer
    assert not newer.result.done()


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("again", ["recalled", "failed"])
def test_an_older_observation_that_queued_again_first_leaves_for_the_newer_one(again, in_flight):
    async def run():
        dispatch, newer, batch = world(level=0)
        dispatch.poll_later = dispatch._poll = lambda: None
        older = Pending("arm", 0, newer.deadline, newer.arrived_at - 1.0, policy="p")
        older.flights = in_flight
        assert dispatch._scheduler.resubmit(older, newer.arrived_at)
        if again == "recalled":
            dispatch._calls[id(batch)] = asyncio.create_task(asyncio.sleep(0))
            dispatch._recall(batch, newer.arrived_at)
        else:
            newer.attempts = 0
            assert dispatch._again(newer, newer.arrived_at)
        return older, newer, dispatch._scheduler.waiting()

    older, newer, waiting = asyncio.run(run())
    assert waiting == [newer]
    assert not newer.result.done()
    assert older.result.done() is not bool(in_flight)
    if not in_flight:
        assert older.result.exception().code is ErrorCode.SUPERSEDED


class LostLink(Link):
    """A worker whose connection is lost with whatever is on it, once `lose` is set."""

    def __init__(self) -> None:
        super().__init__(actions)
        self.lose = asyncio.Event()

    async def infer(self, request, members, timeout_s: float, metadata, came=None) -> worker_pb2.InferResponse:
        await self.lose.wait()
        raise WorkerCallError("UNAVAILABLE", "the connection to the worker was lost")


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_a_connection_that_is_lost_has_failed_once_however_many_batches_were_on_it(batches, monkeypatch):
    now = 1.0
    monkeypatch.setattr("taktline_gateway.dispatch.time", SimpleNamespace(monotonic=lambda: now))

    async def run():
        nonlocal now
        dispatch, _, _ = world(level=0)
        dispatch._poll = lambda: None
        rests = []
        dispatch._scheduler.failed = lambda batch, until: rests.append(until - now)
        link = LostLink()

        async def lose():
            nonlocal now
            flying = [Batch("w", (), now, now, now + 5.0, sent_at=now) for _ in range(batches)]
            link.lose.clear()
            calls = [asyncio.create_task(dispatch._send(link, batch, now)) for batch in flying]
            await asyncio.sleep(0)
            now += 0.010
            link.lose.set()
            await asyncio.gather(*calls)

        for _ in range(3):
            await lose()
            now += 1.0
        return rests, link.failures

    rests, failures = asyncio.run(run())
    assert failures == 3
    expected = [SUSPEND_S * 2**number for number in range(3) for _ in range(batches)]
    assert rests == pytest.approx(expected)
