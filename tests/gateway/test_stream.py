"""The timed stream against a real gateway: sessions, deltas, flow control, and every way a stream can end."""

from __future__ import annotations

import os
import signal
import time

import msgspec
import numpy as np
import pytest
from taktline_protocol.codecs import MediaType, encode
from taktline_protocol.stream import (
    Ack,
    Answer,
    Backpressure,
    Bye,
    Cancel,
    Clock,
    Goodbye,
    Hello,
    ObservationDetails,
    Observe,
    Ping,
    Pong,
)
from taktline_protocol.stream_codec import encode_frame
from websockets.exceptions import ConnectionClosed

from tests.gateway.stream_robot import RAW, STATE, StreamRobot, raw_frame
from tests.waiting import until

HELD = {"front": b"front--0", "wrist": b"wrist--0"}


@pytest.fixture
def robot(shared_stack, request):
    made = StreamRobot(shared_stack.url, f"arm of {request.node.name}")
    yield made
    made.close()


def values(answer: Answer) -> float:
    actions = np.frombuffer(answer.actions, "<f4")
    assert actions.size == answer.horizon * answer.width
    assert (actions == actions[0]).all()
    return float(actions[0])


# ----- the ordinary course


def test_an_observation_gets_a_chunk_with_its_terms_validity_and_provenance(robot, shared_stack):
    welcome = robot.welcome
    assert (welcome.version, welcome.resumed, welcome.held) == (1, False, {})
    assert welcome.policy.cameras == ("front", "wrist")
    assert welcome.limits.window == 4
    sent = time.monotonic()
    seq = robot.observe()
    answer = robot.answer()
    assert isinstance(answer, Answer), answer
    assert (answer.seq, values(answer)) == (seq, seq), "the scripted worker answers with the sequence number"
    assert (answer.horizon, answer.width) == (10, 6)
    assert answer.valid_until == pytest.approx(answer.captured_at + 10 * answer.dt_s)
    observe, _, _, inference, _ = answer.timings
    assert observe == pytest.approx(2.0, abs=0.01)
    assert inference >= 10.0
    assert answer.margin_ms == pytest.approx(20_000.0 + observe - sum(answer.timings))
    assert answer.revision == "r1"
    assert answer.worker in shared_stack.workers
    assert answer.received_at < answer.sent_at
    assert sent < time.monotonic()


def test_a_camera_that_did_not_change_is_sent_by_reference(bare_stack):
    # The record of the worker shows what it was given.
    bare_stack.write_routes(bare_stack.start_worker())
    bare_stack.start_gateway()
    bare_stack.wait_workers(1)
    robot = StreamRobot(bare_stack.url)
    robot.observe()
    assert isinstance(robot.answer(), Answer)
    robot.observe(None, images={"wrist": raw_frame(b"wrist--1", 9)}, unchanged={"front": b"front--0"})
    assert isinstance(robot.answer(), Answer)
    robot.observe(None, images={}, unchanged={"front": b"front--0", "wrist": b"wrist--1"})
    assert isinstance(robot.answer(), Answer)
    kinds = {kind: bare_stack.metric("taktline_stream_observations_total", kind=kind) for kind in ("keyframe", "delta")}
    assert kinds == {"keyframe": 1, "delta": 2}
    assert bare_stack.metric("taktline_requests_total", code="ok") == 3
    assert bare_stack.metric("taktline_stream_bytes_total", kind="received") > 0
    assert bare_stack.metric("taktline_streams", policy="scripted") == 1
    robot.close()
    until(lambda: bare_stack.metric("taktline_streams", policy="scripted") == 0, "the stream being counted out")


@pytest.mark.parametrize(
    "changes",
    [
        {"images": {}, "unchanged": {"front": b"front--9", "wrist": b"wrist--0"}},
        {"images": {}, "unchanged": {"front": b"front--0", "wrist": b"wrist--0", "side": b"side---0"}},
    ],
)
def test_a_reference_that_is_not_held_asks_for_a_keyframe(robot, changes):
    robot.observe()
    robot.answer()
    robot.observe(None, **changes)
    refused = robot.answer()
    assert (refused.code, refused.held) == ("keyframe_needed", False)
    robot.observe()
    assert isinstance(robot.answer(), Answer)


def test_the_first_observation_must_be_a_keyframe(robot):
    robot.observe(None)
    refused = robot.answer()
    assert refused.code == "keyframe_needed"
    assert "instruction" in refused.message


def test_what_was_refused_as_broken_is_not_held(robot):
    broken = msgspec.structs.replace(raw_frame(b"wrist--0"), height=9)
    robot.observe(images={"front": raw_frame(b"front--0"), "wrist": broken})
    refused = robot.answer()
    assert (refused.code, refused.held) == ("image_corrupt", False)
    robot.observe(images={}, unchanged=HELD)
    assert robot.answer().code == "keyframe_needed"


def test_what_was_refused_for_lack_of_time_is_held(robot):
    robot.observe(budget_ms=0.5)
    refused = robot.answer()
    assert (refused.code, refused.held) == ("deadline_unreachable", True)
    robot.observe(None, images={}, unchanged=HELD)
    assert isinstance(robot.answer(), Answer)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"images": {"front": raw_frame(b"front--0")}}, "camera_missing"),
        ({"images": {name: raw_frame(b"12345678") for name in ("front", "wrist", "tail")}}, "camera_unknown"),
        ({"unchanged": {"front": b"front--0"}}, "invalid_body"),
        ({"state": msgspec.structs.replace(STATE, data=bytes(7))}, "state_invalid"),
        ({"state": msgspec.structs.replace(STATE, data=bytes(8))}, "state_invalid"),
        ({"budget_ms": -1.0}, "budget_invalid"),
        ({"budget_ms": float("nan")}, "budget_invalid"),
        ({"instruction": " "}, "instruction_invalid"),
        ({"instruction": "item-error"}, "image_corrupt"),
        ({"details": ObservationDetails(network_ms=30_000.0)}, "deadline_expired"),
    ],
)
def test_errors_have_the_codes_of_rest_and_leave_the_stream_open(robot, changes, code):
    robot.observe(**changes)
    refused = robot.answer()
    assert refused.code == code
    assert refused.next_step
    assert refused.request_id
    robot.observe()
    assert isinstance(robot.answer(), Answer)


def test_rest_and_stream_share_one_queue_and_one_robot_guard(robot, shared_stack):
    robot.observe()
    assert isinstance(robot.answer(), Answer)
    status, error = shared_stack.act(robot=robot.robot, session_id="another")
    assert (status, error.code) == (409, "robot_conflict")
    third = StreamRobot(shared_stack.url, robot.robot, session_id="a third")
    assert isinstance(third.welcome, Goodbye)
    assert third.welcome.code == "robot_conflict"
    assert third.closed() == (1008, "robot_conflict")


def test_pings_give_the_gateways_clock(robot):
    sent = time.monotonic()
    robot.send(Ping(sent))
    pong = robot.until(Pong)
    # Robot and gateway run on one machine here, so that their monotonic clocks are one.
    assert sent == pong.ping_sent_at
    assert sent <= pong.received_at <= pong.sent_at <= time.monotonic()


# ----- several at once


def test_newest_wins(robot):
    """While a worker has one, of the others only the newest is served; each gets an answer."""
    first = robot.observe("slow 600")
    robot.until(Ack)
    second = robot.observe()
    third = robot.observe()
    answers = {}
    for _ in range(3):
        answer = robot.answer()
        answers[answer.seq] = answer
    assert answers[second].code == "superseded"
    assert answers[second].held
    assert values(answers[first]) == first
    assert values(answers[third]) == third


def test_an_older_observation_is_refused(robot):
    seq = robot.observe()
    robot.answer()
    robot.observe(seq=seq - 1) if seq > 1 else None
    robot.seq = seq
    robot.observe(seq=0)
    assert robot.answer().code == "superseded"


def test_cancel_takes_a_queued_observation_out_and_comes_too_late_for_one_on_a_worker(bare_stack):
    bare_stack.write_routes(bare_stack.start_worker(t_sync="1:1500"))
    bare_stack.start_gateway()
    bare_stack.wait_workers(1)
    blocker, robot = StreamRobot(bare_stack.url, "blocker"), StreamRobot(bare_stack.url)
    blocker.observe()
    blocker.until(Ack)
    queued = robot.observe()
    robot.send(Cancel(queued))
    refused = robot.answer()
    assert (refused.seq, refused.code) == (queued, "cancelled")
    blocker.send(Cancel(1))
    assert values(blocker.answer()) == 1
    assert [batch["robots"] for batch in bare_stack.batches()] == [["blocker"]]
    assert bare_stack.metric("taktline_requests_total", code="cancelled") == 1
    assert bare_stack.metric("taktline_requests_total", code="ok") == 1


def test_what_dallies_is_acknowledged(robot):
    seq = robot.observe("slow 100")
    assert robot.until(Ack).seq == seq
    assert isinstance(robot.answer(), Answer)


def test_a_full_window_is_said_and_kept(bare_stack):
    times = "1:1000,2:1000,4:1000,8:1000"
    bare_stack.write_routes(bare_stack.start_worker(t_sync=times), bare_stack.start_worker(t_sync=times))
    bare_stack.start_gateway("--stream-window", "2")
    bare_stack.wait_workers(2)
    robot = StreamRobot(bare_stack.url)
    assert robot.welcome.limits.window == 2
    robot.observe()
    robot.until(Ack)
    robot.observe()
    pressure = robot.until(Backpressure)
    assert (pressure.reason, pressure.pause_ms, pressure.unanswered) == ("window", 0.0, 2)
    robot.until(Ack)  # then the other worker has it
    refused = robot.observe()
    answer = robot.answer()
    assert (answer.seq, answer.code, answer.held) == (refused, "overloaded", True)
    assert {robot.answer().seq, robot.answer().seq} == {1, 2}
    robot.observe()
    assert isinstance(robot.answer(), Answer)
    assert bare_stack.metric("taktline_requests_total", code="overloaded") == 1


def test_in_a_full_window_the_newest_still_wins(bare_stack):
    bare_stack.write_routes(bare_stack.start_worker(t_sync="1:1000"))
    bare_stack.start_gateway("--stream-window", "2")
    bare_stack.wait_workers(1)
    robot = StreamRobot(bare_stack.url)
    first = robot.observe()
    robot.until(Ack)
    queued = robot.observe()
    newest = robot.observe()
    answers = {answer.seq: answer for answer in (robot.answer() for _ in range(3))}
    assert answers[queued].code == "superseded"
    assert values(answers[first]) == first
    assert values(answers[newest]) == newest


def test_a_full_queue_is_said_as_a_pause(bare_stack):
    bare_stack.write_routes(bare_stack.start_worker(t_sync="1:5000"))
    bare_stack.start_gateway("--max-queued", "1")
    bare_stack.wait_workers(1)
    robots = [StreamRobot(bare_stack.url, f"arm-{n}") for n in range(3)]
    robots[0].observe()
    robots[0].until(Ack)
    robots[1].observe()
    robots[1].until(Ack)
    robots[2].observe()
    assert robots[2].answer().code == "overloaded"
    pressure = robots[2].until(Backpressure)
    assert pressure.reason == "queue"
    assert pressure.pause_ms > 0


# ----- time


def clocked(robot, late_s: float, budget_ms: float, **details):
    """An observation that was sent `late_s` ago, on a robot that knows the gateway's clock to a millisecond."""
    robot.send(Clock(0.0, 0.001))
    now = time.monotonic() - late_s
    robot.observe(
        captured_at=now, sent_at=now, budget_ms=budget_ms, details=ObservationDetails(network_ms=100.0, **details)
    )
    return robot.answer()


def test_time_on_the_way_is_taken_off_the_budget_where_the_clock_is_known(robot, shared_stack):
    answer = clocked(robot, 5.0, 10_000.0)
    assert isinstance(answer, Answer)
    _, transfer, _, _, _ = answer.timings
    assert transfer >= 4999.0
    assert answer.margin_ms < 5000.0
    robot.send(Clock(0.0, 10.0))  # an estimate that says nothing
    late = time.monotonic() - 5.0
    robot.observe(captured_at=late, sent_at=late, budget_ms=10_000.0)
    assert robot.answer().margin_ms > 5000.0


def test_an_observation_that_spent_its_budget_on_the_way_is_refused(robot):
    assert clocked(robot, 1.5, 1000.0).code == "deadline_unreachable"


# ----- the ends of a stream


def test_bye_frees_the_robot_at_once(shared_stack):
    robot = StreamRobot(shared_stack.url, "polite")
    robot.observe()
    robot.answer()
    robot.send(Bye())
    assert robot.closed() == (1000, "bye")
    again = StreamRobot(shared_stack.url, "polite", session_id="new session", token=robot.welcome.token)
    assert again.welcome.resumed is False, "a session that said bye is over"
    again.close()


def test_resume_after_a_drop_goes_on_where_it_was(shared_stack):
    robot = StreamRobot(shared_stack.url, "dropped")
    robot.observe()
    robot.answer()
    robot.drop()
    again = StreamRobot(shared_stack.url, "dropped", token=robot.welcome.token, seq=robot.seq, answered=robot.seq)
    assert again.welcome.resumed
    assert again.welcome.held == HELD
    again.observe(None, images={}, unchanged=HELD)
    assert isinstance(again.answer(), Answer)
    again.close()


def test_an_answer_under_way_reaches_the_next_connection(shared_stack):
    robot = StreamRobot(shared_stack.url, "flaky")
    robot.observe("slow 600")
    robot.until(Ack)
    robot.drop()
    again = StreamRobot(shared_stack.url, "flaky", token=robot.welcome.token, seq=1)
    assert again.welcome.pending == (1,)
    assert values(again.answer()) == 1
    again.close()


def test_an_answer_that_found_nobody_is_kept(shared_stack):
    robot = StreamRobot(shared_stack.url, "sleepy")
    before = shared_stack.metric("taktline_requests_total", code="ok")
    robot.observe("slow 100")
    robot.until(Ack)
    robot.drop()
    until(lambda: shared_stack.metric("taktline_requests_total", code="ok") > before, "the answer")
    again = StreamRobot(shared_stack.url, "sleepy", token=robot.welcome.token, seq=1)
    assert again.welcome.pending == (1,), "else the robot would send it again"
    assert values(again.answer()) == 1
    again.drop()
    # A robot that says that it has got it does not get it twice.
    third = StreamRobot(shared_stack.url, "sleepy", token=robot.welcome.token, seq=1, answered=1)
    assert third.welcome.pending == ()
    third.send(Ping(0.0))
    assert isinstance(third.receive(), Pong)
    third.close()


def test_what_is_queued_leaves_with_a_dropped_connection(bare_stack):
    bare_stack.write_routes(bare_stack.start_worker(t_sync="1:1500"))
    bare_stack.start_gateway()
    bare_stack.wait_workers(1)
    blocker, robot = StreamRobot(bare_stack.url, "blocker"), StreamRobot(bare_stack.url)
    blocker.observe()
    blocker.until(Ack)
    robot.observe()
    robot.until(Ack)
    robot.drop()
    until(
        lambda: bare_stack.metric("taktline_requests_total", code="client_gone") == 1, "the queued one counts as gone"
    )
    blocker.answer()
    assert [batch["robots"] for batch in bare_stack.batches()] == [["blocker"]]


def test_a_second_connection_of_a_session_replaces_the_first(shared_stack):
    robot = StreamRobot(shared_stack.url, "twice")
    again = StreamRobot(shared_stack.url, "twice", token=robot.welcome.token)
    assert again.welcome.resumed
    goodbye, close = robot.goodbye()
    assert goodbye.code == "superseded"
    assert close == (1008, "superseded")
    again.observe()
    assert isinstance(again.answer(), Answer)
    again.close()


def test_what_leaves_the_queue_as_a_connection_is_replaced_is_not_called_pending(bare_stack):
    """The old connection still seems open, as after a robot changed its access point; the robot must ask again."""
    stack = bare_stack
    stack.write_routes(stack.start_worker(t_sync="1:1500"))
    stack.start_gateway()
    stack.wait_workers(1)
    robot = StreamRobot(stack.url, "roamer")
    on_worker = robot.observe()
    until(stack.batches, "the first batch")
    queued = robot.observe()
    robot.until(Ack)
    until(lambda: stack.metric("taktline_queue_depth", policy="scripted") == 1, "the second one queued")
    again = StreamRobot(stack.url, "roamer", token=robot.welcome.token, seq=queued)
    assert again.welcome.resumed
    assert again.welcome.pending == (on_worker,)
    assert again.until(Answer).seq == on_worker
    again.close()


def test_versions_are_negotiated(shared_stack):
    robot = StreamRobot(shared_stack.url, "new", versions=(9, 1, 3))
    assert robot.welcome.version == 1
    robot.close()
    robot = StreamRobot(shared_stack.url, "newer", versions=(2, 3))
    assert robot.welcome.code == "stream_version"
    assert "[1]" in robot.welcome.message
    assert robot.closed() == (1002, "stream_version")


def test_an_unknown_policy_is_named(shared_stack):
    robot = StreamRobot(shared_stack.url, policy="nobody")
    assert robot.welcome.code == "unknown_policy"
    assert robot.closed() == (1008, "unknown_policy")


@pytest.mark.parametrize(
    ("body", "close"),
    [
        (b"", 1007),
        (b"\xc1", 1007),
        (encode_frame(Ping(1.0)), 1007),
        (b"\x94\x01\x91\x01\xa0\xa1s", 1007),
        (b"\xdd\xff\xff\xff\xff", 1007),
        ("text", 1007),
    ],
)
def test_a_stream_that_begins_with_something_else_is_closed_with_the_reason(shared_stack, body, close):
    robot = StreamRobot(shared_stack.url, greet=False)
    robot.socket.send(body)
    goodbye, closed = robot.goodbye()
    assert goodbye.code == "invalid_body"
    assert closed == (close, "invalid_body")


def test_garbage_later_ends_the_stream_but_not_the_session(shared_stack):
    robot = StreamRobot(shared_stack.url, "garbler")
    robot.observe()
    robot.answer()
    robot.socket.send(encode_frame(Hello((1,), "garbler", "s")))
    assert robot.goodbye()[1] == (1007, "invalid_body")
    again = StreamRobot(shared_stack.url, "garbler", token=robot.welcome.token)
    assert again.welcome.held == HELD
    again.close()


def flood(robot: StreamRobot, body: bytes, seconds: float = 20.0) -> None:
    """Sends without reading until the connection breaks."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        robot.socket.send(body)


def test_a_message_over_the_limit_is_refused_by_its_header(bare_stack):
    bare_stack.write_routes(bare_stack.start_worker())
    bare_stack.start_gateway("--max-body-mib", "0.1")
    robot = StreamRobot(bare_stack.url)
    # A masked binary message that says it has 200 kB; none of them is sent.
    robot.socket.socket.sendall(b"\x82\xff" + (200_000).to_bytes(8, "big") + bytes(4))
    assert robot.closed()[0] == 1009


def test_silence_ends_a_stream(bare_stack):
    bare_stack.write_routes(bare_stack.start_worker())
    bare_stack.start_gateway("--stream-idle-s", "0.5")
    robot = StreamRobot(bare_stack.url)
    goodbye, close = robot.goodbye()
    assert goodbye.code == "stream_idle"
    assert close == (1001, "stream_idle")


def test_a_robot_that_reads_nothing_is_cut_off_and_bounded(bare_stack):
    bare_stack.write_routes(bare_stack.start_worker(t_sync="1:0.1,2:0.1,4:0.1,8:0.1"))
    bare_stack.start_gateway("--stream-stall-s", "0.5")
    bare_stack.wait_workers(1)
    robot = StreamRobot(bare_stack.url, "deaf")
    unknown = {f"{n}{'x' * 60}": b"12345678" for n in range(8)}
    frame = Observe(1, 1.0, 1.0, 100.0, STATE, unchanged=unknown)
    # Each gets a long refusal that nobody reads: buffers fill, the gateway reads no further, and cuts the connection.
    with pytest.raises((ConnectionClosed, OSError)):
        flood(robot, encode_frame(frame))
    until(lambda: bare_stack.metric("taktline_stream_closed_total", code="slow_reader") == 1, "the cut")
    assert bare_stack.act()[0] == 200, "others are served"


def test_drain_answers_what_is_under_way_and_closes_cleanly(bare_stack):
    bare_stack.write_routes(bare_stack.start_worker(t_sync="1:1500"))
    bare_stack.start_gateway()
    bare_stack.wait_workers(1)
    idle, busy = StreamRobot(bare_stack.url, "idle"), StreamRobot(bare_stack.url, "busy")
    seq = busy.observe()
    busy.until(Ack)
    bare_stack.gateway.send_signal(signal.SIGTERM)
    goodbye, close = idle.goodbye()
    assert goodbye.code == "draining"
    assert close == (1001, "draining")
    assert busy.until(Goodbye).code == "draining"
    late = busy.observe()
    found = {answer.seq: answer for answer in (busy.answer(), busy.answer())}
    assert found[late].code == "draining"
    assert values(found[seq]) == seq
    assert busy.closed() == (1001, "draining")
    assert bare_stack.gateway.wait(timeout=20) == 0


def test_a_gateway_full_of_streams_says_so(bare_stack):
    bare_stack.write_routes(bare_stack.start_worker())
    bare_stack.start_gateway("--stream-max", "1")
    first = StreamRobot(bare_stack.url, "first")
    second = StreamRobot(bare_stack.url, "second")
    assert second.welcome.code == "overloaded"
    assert second.closed() == (1013, "overloaded")
    first.close()


def test_a_hello_that_is_refused_leaves_the_session_with_its_connection(bare_stack):
    """A gateway that has no room for the newer connection must not have cut the older one for it."""
    bare_stack.write_routes(bare_stack.start_worker())
    bare_stack.start_gateway("--stream-max", "1")
    bare_stack.wait_workers(1)
    robot = StreamRobot(bare_stack.url, "steady")
    again = StreamRobot(bare_stack.url, "steady", token=robot.welcome.token)
    assert again.welcome.code == "overloaded"
    assert again.closed() == (1013, "overloaded")
    robot.observe()
    assert isinstance(robot.answer(), Answer)
    robot.close()


def test_a_gateway_that_dies_breaks_the_stream(bare_stack):
    bare_stack.write_routes(bare_stack.start_worker())
    bare_stack.start_gateway()
    robot = StreamRobot(bare_stack.url)
    os.kill(bare_stack.gateway.pid, signal.SIGKILL)
    assert robot.closed()[0] == 1006


def test_the_same_observation_is_smaller_than_a_post(robot, shared_stack):
    keyframe = shared_stack.observation(images={"front": RAW, "wrist": RAW})
    rest = len(encode(keyframe, MediaType.MSGPACK))
    before = shared_stack.metric("taktline_stream_bytes_total", kind="received")
    robot.observe()
    robot.answer()
    whole = shared_stack.metric("taktline_stream_bytes_total", kind="received") - before
    robot.observe(None, images={}, unchanged=HELD)
    robot.answer()
    delta = shared_stack.metric("taktline_stream_bytes_total", kind="received") - before - whole
    assert whole < rest
    assert delta < rest / 4
