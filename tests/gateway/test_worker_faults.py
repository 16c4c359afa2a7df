"""Workers that go silent, drain, refuse or change revision: real processes, every request gets one answer."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from taktline_protocol import ErrorCode, TaktlineError

from tests.gateway.conftest import until
from tests.gateway.stream_robot import StreamRobot

WAIT = "slow 400"
HEDGES = ("attempted", "won")


def events(stack, name):
    lines = [line for line in stack.log.read_text().splitlines() if line.startswith("{")]
    return [entry for entry in map(json.loads, lines) if entry.get("message") == name]


@pytest.fixture
def two_workers(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker(), stack.start_worker())
    stack.start_gateway()
    stack.wait_workers(2)
    return stack


def test_a_silent_worker_costs_nothing_where_another_can_still_make_it(two_workers):
    """The process is stopped in its batch, its connection stays: nothing fails, and yet nothing comes."""
    stack = two_workers
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(stack.act, robot="a", instruction=WAIT, budget_ms=5_000.0)
        silent = until(stack.batches, "the first batch")[0]["worker"]
        os.kill(stack.workers[silent].pid, signal.SIGSTOP)
        status, chunk = asked.result()
        os.kill(stack.workers[silent].pid, signal.SIGCONT)
    assert status == 200
    assert chunk.worker != silent
    assert next(entry["worker"] for entry in events(stack, "worker_silent")) == silent
    assert not events(stack, "batch_failed"), "it was sent elsewhere before it was given up"
    assert [batch["worker"] for batch in stack.batches()] == [silent, chunk.worker]
    hedges = {result: stack.metric("taktline_hedges_total", policy="scripted", result=result) for result in HEDGES}
    assert hedges == {"attempted": 1, "won": 1}


def test_the_answer_of_a_worker_that_was_only_slow_still_counts(bare_stack):
    """Both workers get it, half a second apart; exactly one answer comes, and the gateway goes on."""
    stack = bare_stack
    stack.write_routes(*(stack.start_worker(t_sync="1:300") for _ in range(2)))
    stack.start_gateway()
    stack.wait_workers(2)
    status, chunk = stack.act(robot="a", instruction="slow 700", budget_ms=20_000.0)
    assert status == 200
    assert chunk.worker == stack.batches()[0]["worker"], "the first to answer is the first that was asked"
    assert stack.act(robot="a")[0] == 200
    assert stack.metric("taktline_requests_total", policy="scripted", code="ok") == 2
    assert stack.metric("taktline_hedges_total", policy="scripted", result="attempted") == 1
    assert stack.metric("taktline_hedges_total", policy="scripted", result="won") == 0


def test_without_another_worker_a_silent_one_is_waited_for(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker())
    stack.start_gateway()
    stack.wait_workers(1)
    status, _ = stack.act(robot="a", instruction=WAIT, budget_ms=5_000.0)
    assert status == 200
    assert len(stack.batches()) == 1
    assert events(stack, "worker_silent")[0]["hedged"] == []


def test_a_draining_worker_finishes_its_batch_and_gets_no_other(two_workers):
    stack = two_workers
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(stack.act, robot="a", instruction="slow 15", budget_ms=5_000.0)
        leaving = until(stack.batches, "the first batch")[0]["worker"]
        stack.workers[leaving].send_signal(signal.SIGTERM)
        status, _ = asked.result()
        stack.wait_workers(1)
        others = list(pool.map(lambda n: stack.act(robot=f"r{n}"), range(8)))
    assert status == 200
    assert {status for status, _ in others} == {200}
    assert leaving not in {chunk.worker for _, chunk in others}


def test_the_end_of_a_policy_answers_what_is_on_its_workers(bare_stack):
    """The batch on one worker ends with its channel; the idle one beside it is leaving, too, and cannot take it."""
    stack = bare_stack
    stack.write_routes(stack.start_worker(t_sync="1:2000"), stack.start_worker(t_sync="1:2000"))
    stack.start_gateway()
    stack.wait_workers(2)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(stack.act, robot="a", budget_ms=20_000.0)
        until(stack.batches, "the batch")
        temporary = stack.routes.with_suffix(".new")
        temporary.write_text('{"routes": []}')
        temporary.replace(stack.routes)
        status, error = asked.result(timeout=10.0)
    assert (status, error.code) == (502, "worker_failed")
    assert stack.act(robot="a")[0] == 404


def test_what_a_worker_will_not_look_at_is_offered_to_another(two_workers):
    """A worker that was restarted with another revision refuses the batches of the old one."""
    stack = two_workers
    status, error = stack.act(robot="a", instruction="unavailable")
    assert (status, error.code) == (503, "worker_unavailable")
    asked = [batch["worker"] for batch in stack.batches()]
    assert len(asked) == 2, "it is tried twice, and not for ever"


def test_a_batch_has_one_revision(bare_stack):
    """Two revisions serve one policy side by side: no batch is mixed, and each answer names its own."""
    stack = bare_stack
    revisions = {stack.start_worker(revision="old"): "old", stack.start_worker(revision="new"): "new"}
    stack.write_routes(*revisions)
    stack.start_gateway()
    stack.wait_workers(2)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: stack.act(robot=f"r{n}", instruction="slow 5"), range(48)))
    chunks = [chunk for status, chunk in answers if status == 200]
    assert len(chunks) == 48
    assert {chunk.revision for chunk in chunks} == {"old", "new"}
    assert all(revisions[chunk.worker] == chunk.revision for chunk in chunks)
    assert all(batch["revision"] == revisions[batch["worker"]] for batch in stack.batches())


def test_a_shed_robot_is_told_what_is_safe(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker(t_sync="1:3000"))
    stack.start_gateway()
    stack.wait_workers(1)
    status, error = stack.act(robot="a", budget_ms=2000.0)
    assert (status, error.code) == (503, "deadline_unreachable")
    assert error.safe_action == "continue", "it has two seconds of actions left"
    assert 0 < error.buffer_ms <= 2000.0
    _, error = stack.act(robot="b", budget_ms=30.0)
    assert error.safe_action == "hold", "less than one control period of 50 ms is nothing"
    _, error = stack.act(robot="c", instruction="")
    assert error.safe_action is None, "a faulty request is no matter of time"
    _, error = stack.act(robot="d", budget_ms=10.0, actuate_ms=20.0)
    assert (error.code, error.safe_action) == ("deadline_expired", "hold")
    robot = StreamRobot(stack.url, "e")
    robot.observe(budget_ms=2000.0)
    refusal = robot.answer()
    assert (refusal.code, refusal.safe_action) == ("deadline_unreachable", "continue")
    robot.observe(budget_ms=0.0)
    refusal = robot.answer()
    assert (refusal.code, refusal.safe_action, refusal.buffer_ms) == ("deadline_expired", "hold", 0.0)
    robot.close()
    stack.gateway.send_signal(signal.SIGTERM)
    until(lambda: stack.act(robot="f", budget_ms=2000.0)[1].code == "draining", "the drain")
    assert stack.act(robot="f", budget_ms=2000.0)[1].safe_action == "continue"


def test_what_is_safe_is_in_an_errors_text():
    """Where a client's protocol has nothing but a text for it."""
    error = TaktlineError(ErrorCode.OVERLOADED, "m", "n")
    assert str(error) == "overloaded: m (n)"
    error.safe_action, error.buffer_ms = "continue", 120.5
    assert str(error) == "overloaded: m (n; until then continue, 120.5 ms are buffered)"
    error.safe_action = "hold"
    assert str(error) == "overloaded: m (n; until then hold)"
