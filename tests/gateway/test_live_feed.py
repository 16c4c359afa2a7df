"""The live page's feed: bounded in pages, bytes and memory; it ends when the gateway drains."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import time
from types import SimpleNamespace

import httpx
import msgspec
import numpy as np
import pytest
from taktline_gateway.books import Books
from taktline_gateway.cycles import ROBOTS_KEPT, ControlCycles, Cycle
from taktline_gateway.live.feed import MAX_PAGES
from taktline_gateway.live.recent import Recent
from taktline_gateway.live.snapshot import POINTS, past, policy_snapshot
from taktline_gateway.pending import Served
from taktline_gateway.telemetry import Levels, PredictedTime, Telemetry, WorkerLevel
from taktline_protocol import Array, ErrorCode, Observation, PolicyInfo, metrics
from taktline_protocol.messages import PlanReport

from tests.gateway.conftest import until

INFO = PolicyInfo(policy="reach", family="pi05", revision="r1", ready=True, horizon=10, dt_s=0.05)
NUMBERS = Array.from_numpy(np.zeros((1, 2), np.float32))
PLAN = PlanReport(predicted_states=NUMBERS, energies=NUMBERS, stopped="rounds")


def levels(workers: int = 1, predicted: tuple[PredictedTime, ...] = ()) -> Levels:
    known = tuple(WorkerLevel(f"10.0.0.{n}:50051", "h100", "r1", "idle") for n in range(workers))
    return Levels("reach", 2, 3, {"h100": workers}, {("h100", "idle"): workers}, predicted, known)


def observation(seq: int, captured_at: float, robot: str = "arm", session: str = "s") -> Observation:
    return Observation(
        robot_id=robot,
        session_id=session,
        seq=seq,
        captured_at=captured_at,
        budget_ms=100.0,
        images={},
        state=[],
        instruction="go",
    )


@contextlib.contextmanager
def events(stack):
    """Iterator over the messages of one page."""
    with (
        httpx.Client(timeout=30, trust_env=False) as client,
        client.stream("GET", f"{stack.url}/live/feed") as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))


def test_a_message_does_not_grow_with_traffic():
    recent = Recent()
    for number in range(10_000):
        recent.answered(-1.0 if number % 3 == 0 else 10.0, "queue" if number % 3 == 0 else None, Cycle(400, 420, 20))
        recent.refused(ErrorCode.DEADLINE_UNREACHABLE.value, missed=True)
    many = tuple(PredictedTime("h100", "r1", 2**bucket, 10.0, 12.0) for bucket in range(30))
    told = policy_snapshot(INFO, levels(1000, many), recent, 0)
    assert len(told["margins"]) == POINTS
    assert len(told["cycles"]) == POINTS
    assert len(msgspec.json.encode(told)) < 12_000
    assert told["codes"] == {"ok": 10_000, "deadline_unreachable": 10_000}
    assert told["misses"]["queue"] == 3334
    assert told["misses"]["refused"] == 10_000
    assert told["hidden_workers"] == 1000 - 64


def test_late_answers_are_told_before_others():
    recent = Recent()
    for number in range(200):
        recent.answered(-7.0 if number == 150 else 5.0, "inference" if number == 150 else None, None)
    told = policy_snapshot(INFO, levels(), recent, 100)
    assert [-7.0, "inference"] in told["margins"]


def test_only_what_is_new_is_told():
    recent = Recent()
    for margin in (1.0, 2.0, 3.0):
        recent.answered(margin, None, None)
    assert [margin for margin, _ in policy_snapshot(INFO, levels(), recent, 1)["margins"]] == [2.0, 3.0]
    assert policy_snapshot(INFO, levels(), recent, recent.serial)["margins"] == []


def test_a_new_page_is_told_of_the_last_minute_and_no_more():
    now = [1000.0]
    recent = Recent(lambda: now[0])
    assert past(recent, 0, POINTS) is None
    recent.answered(1.0, None, None)
    now[0] += 70.0
    assert past(recent, recent.serial, POINTS) is None, "what happened before that minute"
    recent.answered(-2.0, "queue", Cycle(400, 420, 20))
    now[0] += 0.5
    recent.refused(ErrorCode.DEADLINE_UNREACHABLE.value, missed=True)
    now[0] += 20.0
    recent.answered(3.0, None, None)
    told = past(recent, recent.serial - 1, POINTS)
    assert told == {
        "age_ms": 20_500,
        "ok": 1,
        "misses": {"queue": 0, "inference": 0, "transfer": 0, "refused": 0},
        "margins": [[20_500, -2.0, "queue"]],
        "cycles": [[20_500, 20.0, pytest.approx(400 / 420, rel=1e-3)]],
    }, "counts as they were before it; points but for those that the message itself has"


def test_what_a_new_page_is_told_is_bounded():
    now = [0.0]
    recent = Recent(lambda: now[0])
    for number in range(100_000):
        now[0] = number / 1000
        recent.answered(5.0, None, Cycle(400, 420, 20))
        recent.refused(ErrorCode.DEADLINE_UNREACHABLE.value, missed=True)
    told = past(recent, recent.serial, 16)
    assert 58_000 <= told["age_ms"] <= 60_000
    assert (len(told["margins"]), len(told["cycles"])) == (16, 16)
    assert len(recent.marks) <= 61


def test_a_new_page_is_told_of_the_whole_minute_however_many_answers_came():
    """50 a second; the late ones came half a minute ago."""
    now = [0.0]
    recent = Recent(lambda: now[0])
    for number in range(6000):
        now[0] = number / 50
        late = 85.0 <= now[0] < 90.0 and number % 2 == 0
        recent.answered(-4.0 if late else 5.0, "queue" if late else None, Cycle(400, 420, 20))
    told = past(recent, recent.serial, POINTS)
    ages = [age for age, _, _ in told["margins"]]
    assert len(told["margins"]) <= POINTS
    assert ages == sorted(ages, reverse=True)
    for points in (told["margins"], told["cycles"]):
        assert {age // 10_000 for age, *_ in points} >= {0, 1, 2, 3, 4, 5}, "some of each ten seconds"
    late = [(age, margin) for age, margin, cause in told["margins"] if cause == "queue"]
    assert len(late) >= 10
    assert all(29_000 < age < 36_000 and margin == -4.0 for age, margin in late)


def test_of_several_workers_the_slowest_time_is_told():
    predicted = (PredictedTime("h100", "r1", 1, 10.0, 12.0), PredictedTime("h100", "r1", 1, 11.0, 11.5))
    assert policy_snapshot(INFO, levels(2, predicted), Recent(), 0)["t_sync"] == [["h100", 1, 11.0, 11.5]]


def test_cycles_of_a_robot_that_is_never_late():
    cycles = ControlCycles()
    assert cycles.answered("reach", observation(1, 10.0), 50.0, 20.0, 0.5) is None
    cycle = cycles.answered("reach", observation(2, 10.4), 50.0, 20.0, 0.5)
    assert cycle is not None
    assert (cycle.environment_ms, cycle.control_ms) == (pytest.approx(400), pytest.approx(400))
    assert cycle.x == pytest.approx(20)
    assert cycle.y == pytest.approx(1)


def test_what_an_answer_was_late_is_time_in_which_the_robot_stood_still():
    cycles = ControlCycles()
    cycles.answered("reach", observation(1, 10.0), -100.0, 20.0, 0.5)
    cycle = cycles.answered("reach", observation(2, 10.5), 50.0, 20.0, 0.5)
    assert cycle is not None
    assert (cycle.environment_ms, cycle.control_ms) == (pytest.approx(400), pytest.approx(500))
    assert cycle.y == pytest.approx(0.8)


def test_what_is_no_cycle():
    cycles = ControlCycles()
    cycles.answered("reach", observation(1, 10.0), 50.0, 20.0, 0.5)
    assert cycles.answered("reach", observation(2, 12.0), 50.0, 20.0, 0.5) is None, "a pause"
    assert cycles.answered("reach", observation(3, 11.0), 50.0, 20.0, 0.5) is None, "a clock that went back"
    assert cycles.answered("reach", observation(1, 11.2, session="new"), 50.0, 20.0, 0.5) is None, "a restart"
    cycles.lost("reach", "arm")
    assert cycles.answered("reach", observation(2, 11.4, session="new"), 50.0, 20.0, 0.5) is None, "one was refused"
    assert cycles.answered("reach", observation(3, 11.6, session="new"), 50.0, 20.0, 0.5) is not None


@pytest.mark.parametrize(("rows", "plan", "told"), [(10, None, 1), (4, None, 0), (4, PLAN, 1)])
def test_a_pause_is_measured_against_the_chunk_that_the_robot_had(rows, plan, told):
    """A policy of 500 ms chunks; 600 ms are no pause behind such a one, but behind one of 200 ms."""

    async def run():
        books = Books(Telemetry())
        books.policy_served("reach")
        for seq, captured_at, actions in ((1, 10.0, rows), (2, 10.6, 14 - rows)):
            array = Array.from_numpy(np.zeros((actions, 2), np.float32))
            served = Served(array, "r1", "w", "h100", 1, 0.0, 0.0, 0.01, (0.0, 0.0, 0.0), plan=plan)
            pending = SimpleNamespace(arrived_at=0.0, trace=None)
            books.answered("id", INFO, observation(seq, captured_at), served, pending, time.monotonic())
        await asyncio.sleep(0)
        return books.telemetry.registry.get_sample_value(f"{metrics.CONTROL_PERIOD}_count", {"policy": "reach"})

    assert (asyncio.run(run()) or 0) == told


def test_robots_that_come_and_go_leave_no_memory():
    cycles = ControlCycles()
    for number in range(ROBOTS_KEPT + 100):
        cycles.answered("reach", observation(1, 10.0, f"arm-{number}"), 50.0, 20.0, 0.5)
    assert len(cycles._robots) == ROBOTS_KEPT


def test_a_page_is_told_what_happens(shared_stack):
    with events(shared_stack) as told:
        first = next(told)
        assert [policy["name"] for policy in first["policies"]] == ["scripted"]
        before = first["policies"][0]["codes"]["ok"]
        shared_stack.act(robot="seen")
        policies = [next(told)["policies"][0] for _ in range(3)]
    assert policies[-1]["codes"]["ok"] == before + 1
    assert sum(len(policy["margins"]) for policy in policies) == 1
    assert policies[-1]["workers"][0]["state"] == "idle"
    assert "seen" not in json.dumps(policies), "robots are not named"


def test_a_page_that_comes_later_is_told_what_happened_once(shared_stack):
    assert shared_stack.act(robot="before the page")[0] == 200
    with events(shared_stack) as told:
        messages = [next(told) for _ in range(3)]
    before = messages[0]["past"]["scripted"]
    assert before["ok"] < messages[0]["policies"][0]["codes"]["ok"]
    assert before["margins"]
    assert before["margins"][-1][0] < 60_000
    assert all("past" not in message for message in messages[1:])
    assert not any(message["policies"][0]["margins"] for message in messages)


def test_pages_are_limited_and_their_places_free_again(shared_stack):
    with contextlib.ExitStack() as pages:
        # Kept, as a message iterator that is thrown away closes its page.
        told = [pages.enter_context(events(shared_stack)) for _ in range(MAX_PAGES)]
        assert all(next(messages)["policies"] for messages in told)
        with shared_stack.http.stream("GET", f"{shared_stack.url}/live/feed") as refused:
            assert refused.status_code == 429
            assert json.loads(refused.read())["code"] == "overloaded"
        assert shared_stack.act()[0] == 200, "robots are served"
    until(lambda: _can_look(shared_stack), "a place being free again")


def test_a_page_does_not_hold_up_a_drain(bare_stack):
    bare_stack.write_routes(bare_stack.start_worker())
    bare_stack.start_gateway("--drain-settle-s", "0.6")
    bare_stack.wait_workers(1)
    with events(bare_stack) as told:
        next(told)
        bare_stack.gateway.send_signal(signal.SIGTERM)
        rest = list(told)
    assert rest[-1]["draining"] is True
    assert bare_stack.gateway.wait(10) == 0


@pytest.mark.parametrize("path", ["/", "/live/app.js", "/live/live.css", "/live/icon.svg"])
def test_files_come_from_the_gateway_alone(shared_stack, path):
    answer = shared_stack.http.get(shared_stack.url + path)
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    outside = re.findall(r"https?://[^\s\"')`]+", answer.text)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}, "nothing is loaded from elsewhere"
    assert shared_stack.http.get(shared_stack.url + "/live/../service.py").status_code == 404


def _can_look(stack) -> bool:
    with httpx.Client(timeout=30, trust_env=False) as client, client.stream("GET", f"{stack.url}/live/feed") as answer:
        return answer.status_code == 200
