"""The timeline: a Chrome trace whose slices nest, of the last requests only."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
from taktline_gateway.tracing.timeline import KEPT, TimedRequest, Timeline, chrome_trace

from tests.gateway.conftest import until


def request(number: int = 0, robot: str = "arm-1", received_at: float = 100.0, **changes) -> TimedRequest:
    given = {
        "request_id": f"q{number}",
        "robot": robot,
        "seq": number,
        "outcome": "ok",
        "received_at": received_at,
        "queued_at": received_at + 0.001,
        "sent_at": received_at + 0.004,
        "returned_at": received_at + 0.024,
        "ended_at": received_at + 0.025,
        "deadline_at": received_at + 0.1,
        "observe_ms": 2.0,
        "margin_ms": 75.0,
        "worker": "10.0.0.1:50051",
        "batch_size": 1,
        "inference_ms": 19.0,
        "phases_ms": (2.0, 15.0, 1.0),
        **changes,
    }
    return TimedRequest(**given)


def slices(trace: dict, process: int) -> list[dict]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == process]


def check_nesting(trace: dict) -> None:
    """Of two slices of one track, either one holds the other or they do not touch."""
    tracks: dict[tuple, list] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        for (a, b), (c, d) in itertools.combinations(spans, 2):
            slack = 0.002  # rounding to ns
            apart = b <= c + slack or d <= a + slack
            held = (a <= c + slack and d <= b + slack) or (c <= a + slack and b <= d + slack)
            assert apart or held, (a, b, c, d)


def test_one_request():
    trace = chrome_trace("reach", [request()])
    robot = {event["name"]: event for event in slices(trace, 1)}
    assert list(robot) == ["0: ok", "observe", "admission", "queue", "batch", "reply"]
    assert (robot["0: ok"]["ts"], robot["0: ok"]["dur"]) == (0.0, 27_000.0)
    assert robot["queue"]["dur"] == pytest.approx(3000.0)
    assert robot["0: ok"]["args"]["margin_ms"] == 75.0
    worker = {event["name"]: event for event in slices(trace, 2)}
    assert list(worker) == ["batch of 1", "preprocess", "engine", "postprocess"]
    assert worker["engine"]["dur"] == pytest.approx(15_000.0)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and "name" in e["args"]}
    assert names == {"robots of reach", "workers of reach", "arm-1", "10.0.0.1:50051"}
    check_nesting(trace)


def test_members_of_a_batch_share_its_slice_and_have_an_arrow_each():
    members = [request(number, f"arm-{number}", batch_size=3) for number in range(3)]
    trace = chrome_trace("reach", members)
    (batch,) = [event for event in slices(trace, 2) if event["name"] == "batch of 3"]
    assert batch["args"]["request_ids"] == ["q0", "q1", "q2"]
    for phase in "sf":
        assert sorted(e["id"] for e in trace["traceEvents"] if e["ph"] == phase) == ["q0", "q1", "q2"]


def test_requests_of_one_robot_that_overlap_get_tracks_of_their_own():
    trace = chrome_trace("reach", [request(n, received_at=100.0 + 0.01 * n) for n in range(5)])
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"]
    assert [name for name in names if name.startswith("arm")] == ["arm-1", "arm-1 (2)", "arm-1 (3)"]
    check_nesting(trace)


def test_requests_that_got_less_far():
    refused = request(outcome="deadline_unreachable", cause="refused", queued_at=None, sent_at=None, returned_at=None)
    gone = request(1, "arm-2", outcome="client_gone", sent_at=None, returned_at=None, deadline_at=None)
    trace = chrome_trace("reach", [refused, gone])
    assert [event["name"] for event in slices(trace, 1)] == [
        "0: deadline_unreachable",
        "observe",
        "admission",
        "1: client_gone",
        "observe",
        "admission",
        "queue",
    ]
    assert not slices(trace, 2)
    check_nesting(trace)


def test_an_empty_timeline_is_a_trace_too():
    assert slices(chrome_trace("reach", []), 1) == []


def test_memory_is_bounded():
    timeline = Timeline()
    for number in range(3 * KEPT):
        timeline.note(request(number))
    assert len(timeline) == KEPT
    assert [r.seq for r in timeline.last(2)] == [3 * KEPT - 2, 3 * KEPT - 1]


def test_the_endpoint_shows_what_just_happened(shared_stack):
    with ThreadPoolExecutor(3) as pool:
        busy = pool.submit(shared_stack.act, robot="slow-one", instruction="slow 600")
        until(lambda: shared_stack.metric("taktline_in_flight") == 1, "the first batch being on the worker")
        list(pool.map(lambda robot: shared_stack.act(robot=robot), ["a", "b"]))
        busy.result()
    shared_stack.act(robot="bad", state=[0.0])
    answer = shared_stack.http.get(f"{shared_stack.url}/v1/policies/scripted/timeline")
    assert answer.headers["content-type"] == "application/json"
    trace = answer.json()
    check_nesting(trace)
    shown = {event["name"].split(": ")[1] for event in slices(trace, 1) if ": " in event["name"]}
    assert {"ok", "state_invalid"} <= shown
    two = [event for event in slices(trace, 2) if event["name"] == "batch of 2"]
    assert sorted(two[-1]["args"]["robots"]) == ["a", "b"]


@pytest.mark.parametrize(("last", "requests"), [("1", 1), ("2", 2)])
def test_a_caller_may_ask_for_fewer(shared_stack, last, requests):
    for _ in range(3):
        shared_stack.act()
    trace = shared_stack.http.get(f"{shared_stack.url}/v1/policies/scripted/timeline?last={last}").json()
    assert sum(": " in event["name"] for event in slices(trace, 1)) == requests


@pytest.mark.parametrize("last", ["0", "-1", "513", "many", "1.5", "٣"])
def test_a_number_that_is_none_is_refused(shared_stack, last):
    answer = shared_stack.http.get(f"{shared_stack.url}/v1/policies/scripted/timeline", params={"last": last})
    assert answer.status_code == 400
    assert answer.json()["next_step"] == "ask for 1 to 512"


def test_an_unknown_policy_has_no_timeline(shared_stack):
    answer = shared_stack.http.get(f"{shared_stack.url}/v1/policies/nope/timeline")
    assert answer.status_code == 404
    assert answer.json()["code"] == "unknown_policy"
