"""The SDK over the stream when things go wrong: cuts, restarts, drains, evictions, crowds, servers without a stream."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import taktline
from taktline.access import Access
from taktline.robot_metrics import RobotMetrics
from taktline.stream_client import StreamClient
from taktline.stream_link import NoStream
from taktline_protocol import Array, ErrorCode, Observation, TaktlineError
from taktline_protocol.codecs import MediaType, encode
from taktline_protocol.limits import DEFAULT_LIMITS
from taktline_protocol.stream import Hello, Observe, Refusal
from taktline_protocol.stream_codec import decode_from_robot, encode_frame
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosedError

from tests.client.cut_proxy import CutProxy
from tests.client.test_robot import OneShotServer, _http
from tests.example_messages import WELCOME
from tests.gateway.conftest import Stack
from tests.waiting import until

FRAME = np.zeros((8, 8, 3), dtype=np.uint8)
IMAGES = {"front": FRAME, "wrist": FRAME}
STATE = np.zeros(6)
BUDGET_MS = 20_000.0


@pytest.fixture
def bare(tmp_path):
    made = Stack(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def proxy(stack):
    made = CutProxy(stack.url)
    yield made
    made.close()


@pytest.fixture
def robot(proxy, request):
    with taktline.Robot(proxy.url, "scripted", f"arm-{request.node.name}") as made:
        yield made


def test_unchanged_cameras_travel_as_references(robot, proxy):
    robot.act(IMAGES, STATE, "go", BUDGET_MS)
    before = proxy.up
    robot.act(IMAGES, STATE, "go", BUDGET_MS)
    assert proxy.up - before < 1000, "two raw frames have 384 bytes each, two pings, a clock and a state the rest"
    moved = {**IMAGES, "wrist": FRAME + 1}
    robot.act(moved, STATE, "go", BUDGET_MS)
    metrics = robot.metrics
    assert (metrics.keyframes, metrics.deltas) == (1, 2)
    assert (metrics.cameras_whole, metrics.cameras_referenced) == (3, 3)
    assert metrics.chunks == 3
    assert metrics.bytes_sent < proxy.up


def test_the_clock_is_known_within_its_bound(robot):
    robot.act(IMAGES, STATE, "go", BUDGET_MS)
    until(lambda: robot.clock is not None and robot.clock.error_s < 0.1, "an estimate")
    # Gateway and robot read the same clock here.
    assert abs(robot.clock.offset_s) <= robot.clock.error_s
    robot.act(IMAGES, STATE, "go", BUDGET_MS)
    assert robot.metrics.clock is not None, "and the gateway was told"


def test_a_cut_connection_costs_no_answer(robot, proxy, stack):
    robot.act(IMAGES, STATE, "go", BUDGET_MS)
    batches = len(stack.batches())
    answer = robot.ask(IMAGES, STATE, "slow 600", BUDGET_MS)
    until(lambda: len(stack.batches()) > batches, "the second being on the worker")
    proxy.cut()
    chunk = answer.result(10)
    assert np.all(chunk.actions == 2.0)
    assert (robot.metrics.connects, robot.metrics.resumed) == (2, 1)
    robot.act(IMAGES, STATE, "go", BUDGET_MS)
    assert robot.metrics.deltas >= 2, "the session went on with what the gateway held"
    assert robot.metrics.errors == {}


def test_a_connection_away_for_a_while_is_waited_for_within_the_budget(robot, proxy):
    robot.act(IMAGES, STATE, "go", BUDGET_MS)
    proxy.accepting = False
    proxy.cut()
    with pytest.raises(taktline.TaktlineError) as caught:
        robot.act(IMAGES, STATE, "go", 150.0)
    assert caught.value.code is taktline.ErrorCode.GATEWAY_UNREACHABLE
    answer = robot.ask(IMAGES, STATE, "go", BUDGET_MS)
    time.sleep(0.1)
    assert not answer.done()
    proxy.accepting = True
    assert answer.result(10).seq == 3


def test_a_killed_gateway_is_replaced_by_the_next_one(bare):
    bare.write_routes(bare.start_worker())
    bare.start_gateway()
    bare.wait_workers(1)
    proxy = CutProxy(bare.url)
    with taktline.Robot(proxy.url, "scripted", "arm") as robot:
        robot.act(IMAGES, STATE, "go", BUDGET_MS)
        answer = robot.ask(IMAGES, STATE, "slow 600", BUDGET_MS)
        until(lambda: len(bare.batches()) == 2, "the second being on the worker")
        bare.gateway.send_signal(signal.SIGKILL)
        bare.gateway.wait()
        bare.start_gateway()
        bare.wait_workers(1)
        proxy.target = bare.url
        assert answer.result(20).seq == 2
        assert robot.metrics.resent == 1
        assert robot.metrics.resumed == 0, "nobody kept the session"
        assert robot.act(IMAGES, STATE, "go", BUDGET_MS).seq == 3
    proxy.close()


def test_a_drain_is_felt_by_no_robot(bare, tmp_path):
    bare.write_routes(bare.start_worker(), bare.start_worker())
    bare.start_gateway()
    bare.wait_workers(2)
    proxy = CutProxy(bare.url)
    stop = threading.Event()
    chunks: list[int] = []

    def drive(robot):
        while not stop.is_set():
            chunks.append(robot.act(IMAGES, STATE, "slow 20", BUDGET_MS).seq)

    with taktline.Robot(proxy.url, "scripted", "arm") as robot:
        driver = threading.Thread(target=drive, args=(robot,))
        driver.start()
        until(lambda: len(chunks) > 3, "the first chunks")
        old = bare.gateway
        bare.start_gateway()
        bare.wait_workers(2)
        proxy.target = bare.url
        old.send_signal(signal.SIGTERM)
        assert old.wait(timeout=20) == 0
        count = len(chunks)
        until(lambda: len(chunks) > count + 3, "chunks after the drain")
        stop.set()
        driver.join()
        assert chunks == list(range(1, len(chunks) + 1)), "none lost, none twice"
        assert robot.metrics.errors == {}
        assert robot.metrics.connects == 2
    proxy.close()


def test_frames_that_the_gateway_had_to_let_go_are_sent_again_unasked(bare):
    bare.write_routes(bare.start_worker())
    bare.start_gateway("--stream-held-mib", "0")
    bare.wait_workers(1)
    with taktline.Robot(bare.url, "scripted", "one") as one, taktline.Robot(bare.url, "scripted", "two") as two:
        for _ in range(3):
            one.act(IMAGES, STATE, "go", BUDGET_MS)
            two.act(IMAGES, STATE, "go", BUDGET_MS)
        assert one.metrics.errors == two.metrics.errors == {}
        assert one.metrics.resent == two.metrics.resent == 2
    assert bare.metric("taktline_requests_total", code="keyframe_needed") == 4


def test_several_at_once_and_the_newest_wins(robot, stack):
    batches = len(stack.batches())
    first = robot.ask(IMAGES, STATE, "slow 600", BUDGET_MS)
    until(lambda: len(stack.batches()) > batches, "the first being on the worker")
    second = robot.ask(IMAGES, STATE, "go", BUDGET_MS)
    third = robot.ask(IMAGES, STATE, "go", BUDGET_MS)
    assert first.result(10).seq == 1
    assert third.result(10).seq == 3
    with pytest.raises(taktline.TaktlineError) as caught:
        second.result(10)
    assert caught.value.code is taktline.ErrorCode.SUPERSEDED


def test_a_frame_may_be_overwritten_once_it_was_asked_with(robot):
    frame = FRAME.copy()
    answer = robot.ask({"front": frame, "wrist": FRAME}, STATE, "go", BUDGET_MS)
    frame[:] = 255
    answer.result(10)
    robot.act(IMAGES, STATE, "go", BUDGET_MS)
    assert robot.metrics.cameras_referenced == 2, "what was sent is what the frame held when asked"


def test_cancelling_takes_a_queued_observation_out(bare):
    bare.write_routes(bare.start_worker(t_sync="1:1500"))
    bare.start_gateway()
    bare.wait_workers(1)

    async def scene():
        async with (
            taktline.AsyncRobot(bare.url, "scripted", "blocker") as blocker,
            taktline.AsyncRobot(bare.url, "scripted", "arm") as arm,
        ):
            blocking = asyncio.create_task(blocker.act(IMAGES, STATE, "go", BUDGET_MS))
            await asyncio.to_thread(until, bare.batches, "the blocker being on the worker")
            await arm.connect()
            asking = asyncio.create_task(arm.act(IMAGES, STATE, "go", BUDGET_MS))
            await asyncio.to_thread(until, lambda: arm.metrics.keyframes, "the other being sent")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await blocking

    asyncio.run(scene())
    assert bare.metric("taktline_requests_total", code="cancelled") == 1
    assert [batch["robots"] for batch in bare.batches()] == [["blocker"]]


def test_a_pause_asked_for_is_kept_without_asking_again(bare):
    bare.write_routes(bare.start_worker(t_sync="1:1500"))
    bare.start_gateway("--max-queued", "1")
    bare.wait_workers(1)
    robots = [taktline.Robot(bare.url, "scripted", f"arm-{n}") for n in range(3)]
    answers = []
    for robot in robots:
        robot.connect()
    for robot in robots[:2]:
        answers.append(robot.ask(IMAGES, STATE, "go", BUDGET_MS))
        until(lambda: bare.batches(), "the first being on the worker")
    until(lambda: bare.metric("taktline_queue_depth") == 1, "the second being queued")
    for _ in range(2):
        with pytest.raises(taktline.TaktlineError) as caught:
            robots[2].act(IMAGES, STATE, "go", BUDGET_MS)
        assert caught.value.code is taktline.ErrorCode.OVERLOADED
        assert caught.value.retry_after_ms > 0
        until(lambda: robots[2]._robot._stream._pause_until > 0, "the pause")
    assert robots[2].metrics.pauses == 1
    assert bare.metric("taktline_requests_total", code="overloaded") == 1
    for answer in answers:
        answer.result(10)
    for robot in robots:
        robot.close()


def test_a_closed_robot_frees_its_name_at_once(stack):
    for _ in range(3):
        with taktline.Robot(stack.url, "scripted", "same name") as robot:
            assert robot.act(IMAGES, STATE, "go", BUDGET_MS).seq == 1


def test_a_robot_that_is_dropped_frees_its_name_once_nothing_is_to_come(stack):
    def dropped():
        return taktline.Robot(stack.url, "scripted", "dropped").ask(IMAGES, STATE, "slow 300", BUDGET_MS)

    def byes():
        return stack.metric("taktline_stream_closed_total", code="bye")

    for _ in range(2):
        answer = dropped()
        gc.collect()
        assert answer.result(10).seq == 1, "its answer still comes"
        before = byes()
        del answer
        gc.collect()
        until(lambda: byes() > before, "its bye")  # noqa: B023


FORGETFUL = """
import sys, numpy as np, taktline
frame = np.zeros((8, 8, 3), np.uint8)
robot = taktline.Robot(sys.argv[1], "scripted", "forgetful")
print(robot.act({"front": frame, "wrist": frame}, np.zeros(6), "go", 20_000.0).seq)
"""


def test_a_program_that_ends_without_closing_frees_its_robots_name_too(stack):
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", FORGETFUL, stack.url], capture_output=True, text=True, timeout=60)
        assert (done.stdout.strip(), done.stderr) == ("1", "")


async def test_the_player_plays_for_asyncio_too(stack):
    async with taktline.AsyncRobot(stack.url, "scripted", "async player") as robot:
        player = taktline.Player(robot.ask, 0.05, replan_rows=2)
        actions = []
        while len(actions) < 12 or (player.metrics()["hand_offs"] < 3 and len(actions) < 400):
            if player.wants_observation():
                player.observe(IMAGES, STATE, "go")
            actions.append(player.next_action())
            await asyncio.sleep(0.05)
        assert player.metrics()["hand_offs"] >= 3
        # The scripted worker answers with the sequence number: each hand-off is to a newer chunk.
        values = [float(action[0]) for action in actions if action is not None]
        assert values == sorted(values)
        assert values[-1] >= 3.0


def test_two_robots_of_one_name_are_told(stack):
    with taktline.Robot(stack.url, "scripted", "twin") as robot, taktline.Robot(stack.url, "scripted", "twin") as other:
        robot.act(IMAGES, STATE, "go", BUDGET_MS)
        with pytest.raises(taktline.TaktlineError) as caught:
            other.act(IMAGES, STATE, "go", BUDGET_MS)
        assert caught.value.code is taktline.ErrorCode.ROBOT_CONFLICT
        assert caught.value.retry_after_ms > 0


def test_where_there_is_no_stream_http_is_spoken_and_said(stack, caplog):
    chunk = stack.http.post(
        f"{stack.url}/v1/policies/scripted/act",
        content=encode(stack.observation(robot="arm", seq=1), MediaType.MSGPACK),
        headers={"content-type": MediaType.MSGPACK.value},
    ).content
    server = OneShotServer([_http("404 Not Found", b"", "text/plain"), _http("200 OK", chunk, MediaType.MSGPACK.value)])
    with taktline.Robot(server.url, "scripted", "arm") as robot:
        assert robot.act(IMAGES, STATE, "go", BUDGET_MS).actions.shape == (10, 6)
        assert robot.metrics.transport == "http"
        assert "404" in robot.metrics.fallback
    assert any("speaks HTTP" in record.message for record in caplog.records)


def test_where_only_the_stream_will_do_its_absence_is_an_error():
    server = OneShotServer([_http("404 Not Found", b"", "text/plain")])
    robot = taktline.Robot(server.url, "p", "arm", transport="stream")
    with robot, pytest.raises(taktline.TaktlineError) as caught:
        robot.act(IMAGES, STATE, "go", BUDGET_MS)
    assert caught.value.code is taktline.ErrorCode.GATEWAY_UNREACHABLE
    assert "transport" in caught.value.next_step


class ScriptedLink:
    """A connection whose sends wait until it is `cut`, and then fail."""

    def __init__(self, *, sends: bool) -> None:
        self.welcome = SimpleNamespace(
            resumed=False, token=b"t", held={}, pending=(), limits=SimpleNamespace(frame_bytes=2**24)
        )
        self.shown: dict[str, str] = {}
        self.gone = self.leaving = False
        self.goodbye = None
        self.heard_at = time.monotonic()
        self.sent: list[int] = []
        self.put = asyncio.Event()
        self._sends = sends
        self._cut = asyncio.Event()

    def cut(self) -> None:
        self._cut.set()

    def listen(self, hear) -> None:
        """Nobody says anything."""

    async def send(self, body: bytes, timeout_s: float) -> None:
        frame = decode_from_robot(body, DEFAULT_LIMITS)
        if isinstance(frame, Observe):
            self.sent.append(frame.seq)
            self.put.set()
            if not self._sends:
                await self._cut.wait()
                raise ConnectionClosedError(None, None)

    async def receive(self) -> bytes:
        await self._cut.wait()
        raise ConnectionClosedError(None, None)

    async def close(self) -> None:
        pass

    def abort(self) -> None:
        self.cut()


async def asked(monkeypatch, *outcomes):
    """A client whose attempts to connect end so, and the task of its first observation."""
    left = list(outcomes)

    async def open_link(uri, access, hello):
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr("taktline.stream_connecting.open_link", open_link)
    client = StreamClient("http://nowhere", "p", "arm", "s", Access(), RobotMetrics())
    observation = Observation(
        robot_id="arm",
        session_id="s",
        seq=1,
        captured_at=1.0,
        budget_ms=60_000.0,
        images={},
        state=Array("float64", (1,), bytes(8)),
        instruction="go",
    )
    return client, asyncio.create_task(client.ask(observation, {}, 60.0))


@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize(
    "refusal", [taktline.TaktlineError(taktline.ErrorCode.UNAUTHENTICATED, "no", "ask for a key"), NoStream("gone")]
)
def test_where_no_new_connection_is_had_what_the_lost_one_carried_is_told_why(monkeypatch, sends, refusal):
    async def scene():
        first = ScriptedLink(sends=sends)
        client, answer = await asked(monkeypatch, first, refusal)
        await first.put.wait()
        first.cut()
        with pytest.raises(type(refusal)) as caught:
            await answer
        assert caught.value is refusal
        await client.close()

    asyncio.run(asyncio.wait_for(scene(), 30))


@pytest.mark.parametrize("sends", [True, False])
def test_what_a_leaving_connection_still_owed_when_it_went_is_asked_over_the_open_one(monkeypatch, sends):
    async def scene():
        first, second = ScriptedLink(sends=sends), ScriptedLink(sends=True)
        client, answer = await asked(monkeypatch, first, second)
        await first.put.wait()
        client._leave(first)
        while client._connector.link is not second:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        first.cut()
        await second.put.wait()
        assert second.sent == [1]
        answer.cancel()
        await client.close()

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_a_policy_that_does_not_exist_is_named(stack):
    with taktline.Robot(stack.url, "nobody", "arm") as robot:
        for _ in range(2):
            with pytest.raises(taktline.TaktlineError) as caught:
                robot.act(IMAGES, STATE, "go", BUDGET_MS)
            assert caught.value.code is taktline.ErrorCode.UNKNOWN_POLICY


def test_a_blocking_robot_on_its_own_loop_says_so(robot):
    async def wrong():
        return robot.act(IMAGES, STATE, "go", BUDGET_MS)

    with pytest.raises(RuntimeError, match="AsyncRobot"):
        robot._loop.run(wrong())


def test_what_a_leaving_gateway_refuses_and_loses_is_sent_again_once(monkeypatch):
    """The second of two copies would be told that it came after itself."""

    async def scene():
        first, second = ScriptedLink(sends=True), ScriptedLink(sends=True)
        client, answer = await asked(monkeypatch, first, second)
        await first.put.wait()
        refusal = Refusal(1, 0.0, 0.0, taktline.ErrorCode.DRAINING.value, "it leaves", "ask the next one", held=False)
        connected, connect = asyncio.Event(), client._connector._connect

        async def connect_later():
            await connected.wait()
            await connect()

        monkeypatch.setattr(client._connector, "_connect", connect_later)
        client._hear(first, refusal, time.monotonic())
        first.cut()
        while not first.gone:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        connected.set()
        await second.put.wait()
        await asyncio.sleep(0.05)
        assert second.sent == [1]
        answer.cancel()
        await client.close()

    asyncio.run(asyncio.wait_for(scene(), 30))


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("ends_well", [True, False])
def test_frames_are_understood_however_they_come(pieces, ends_well):
    """At once or in pieces; what is none ends the connection, and the caller is told."""

    async def gateway(connection):
        assert isinstance(decode_from_robot(await connection.recv(), DEFAULT_LIMITS), Hello)
        await connection.send(encode_frame(WELCOME))
        async for body in connection:
            frame = decode_from_robot(body, DEFAULT_LIMITS)
            if isinstance(frame, Observe):
                answer = Refusal(frame.seq, 0.0, 0.0, "overloaded", "no room", "wait", True, 5.0, "q")
                said = encode_frame(answer) if ends_well else b"\xc1 no frame"
                size = -(-len(said) // pieces)
                await connection.send(said[at : at + size] for at in range(0, len(said), size)) if pieces > 1 else (
                    await connection.send(said)
                )

    async def check():
        async with serve(gateway, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            async with taktline.AsyncRobot(url, "p", "arm", transport="stream", answer_timeout_s=20.0) as robot:
                with pytest.raises(TaktlineError) as caught:
                    await robot.act(IMAGES, STATE, "go", 2000.0)
        return caught.value

    error = asyncio.run(check())
    if ends_well:
        assert (error.code, error.message) == (ErrorCode.OVERLOADED, "no room")
    else:
        assert error.code in (ErrorCode.INVALID_BODY, ErrorCode.GATEWAY_UNREACHABLE, ErrorCode.DEADLINE_EXPIRED)
