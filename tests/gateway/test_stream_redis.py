"""Sessions that move between gateways through a real Redis, what that costs a request, and life without it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import taktline
from taktline_gateway.stream.store import _decoder
from taktline_protocol.stream import Ack, Answer, Bye, Goodbye

from tests.client.cut_proxy import CutProxy
from tests.gateway.conftest import Stack, until
from tests.gateway.redis_server import RedisServer
from tests.gateway.stream_robot import StreamRobot, raw_frame

HELD = {"front": b"front--0", "wrist": b"wrist--0"}
UP = "taktline_session_store_up"


@pytest.fixture(scope="module")
def running_store():
    made = RedisServer()
    yield made
    made.stop()


@pytest.fixture
def store(running_store):
    """A store that holds nothing."""
    running_store.client.flushdb()
    return running_store


def written(store, robot: str = "arm", seq: int = 1) -> None:
    """Waits until the robot's session is in the store with both frames and all that it sent up to `seq`."""

    def found() -> bool:
        bodies = [store.client.get(key) for key in store.client.scan_iter()]
        records = [_decoder.decode(body) for body in bodies if body]
        return any(one.robot_id == robot and one.seq >= seq and len(one.held) == 2 for one in records)

    until(found, f"the session of {robot} being written")


@pytest.fixture
def own_store():
    made = RedisServer()
    yield made
    made.stop()


class Pair:
    """Two gateways before one worker, sharing a store."""

    def __init__(self, folder: Path) -> None:
        self.stacks = [Stack(folder), Stack(folder)]

    def start(self, *flags: str) -> Pair:
        first, second = self.stacks
        first.write_routes(first.start_worker())
        second.log = second.folder / "second.log"
        for stack in self.stacks:
            stack.start_gateway(*flags)
            stack.wait_workers(1)
        until(lambda: all(store_up(stack) == 1 for stack in self.stacks), "the store being up for both")
        return self

    def stop(self) -> None:
        for stack in self.stacks:
            stack.stop()


@pytest.fixture
def pair(tmp_path):
    made = Pair(tmp_path)
    yield made
    made.stop()


def store_up(stack: Stack) -> float:
    lines = [line for line in stack.http.get(f"{stack.url}/metrics").text.splitlines() if line.startswith(f"{UP} ")]
    return float(lines[0].rsplit(" ", 1)[1])


def test_a_session_goes_on_at_another_gateway_after_a_drain(pair, store):
    one, two = pair.start("--redis-url", store.url, "--redis-every-s", "60").stacks
    robot = StreamRobot(one.url)
    robot.observe()
    assert isinstance(robot.answer(), Answer)
    seq = robot.observe("slow 700")
    robot.until(Ack)
    one.gateway.send_signal(signal.SIGTERM)
    assert robot.until(Goodbye).code == "draining"
    # Beside the old connection, over which the answer still comes.
    again = StreamRobot(two.url, token=robot.welcome.token, seq=robot.seq, answered=1)
    assert again.welcome.resumed
    assert again.welcome.held == HELD
    assert robot.answer().seq == seq
    again.observe(None, images={"wrist": raw_frame(b"wrist--1", 7)}, unchanged={"front": b"front--0"})
    assert isinstance(again.answer(), Answer)
    assert two.metric("taktline_stream_sessions_total", result="moved") == 1
    again.close()


def test_a_session_survives_its_gateway_being_killed(pair, store):
    one, two = pair.start("--redis-url", store.url, "--redis-every-s", "0.05").stacks
    robot = StreamRobot(one.url)
    robot.observe()
    robot.answer()
    written(store)
    one.gateway.send_signal(signal.SIGKILL)
    again = StreamRobot(two.url, token=robot.welcome.token, seq=robot.seq, answered=1)
    assert again.welcome.resumed
    again.observe(None, images={}, unchanged=HELD)
    assert isinstance(again.answer(), Answer)
    again.close()


def test_the_sdk_goes_on_at_another_gateway(pair, store):
    one, two = pair.start("--redis-url", store.url, "--redis-every-s", "0.05").stacks
    proxy = CutProxy(one.url)
    frames = {"front": np.zeros((8, 8, 3), np.uint8), "wrist": np.ones((8, 8, 3), np.uint8)}
    with taktline.Robot(proxy.url, "scripted", "arm") as robot:
        robot.act(frames, np.zeros(6), "go", 20_000.0)
        written(store)
        one.gateway.send_signal(signal.SIGKILL)
        proxy.target = two.url
        for _ in range(3):
            robot.act(frames, np.zeros(6), "go", 20_000.0)
        metrics = robot.metrics
        assert (metrics.connects, metrics.resumed, metrics.errors) == (2, 1, {})
        assert metrics.cameras_whole == 2, "the other gateway held both"
    proxy.close()


def test_a_token_moves_no_session_but_its_own(pair, store):
    one, two = pair.start("--redis-url", store.url, "--redis-every-s", "0.05").stacks
    robot = StreamRobot(one.url)
    robot.observe()
    robot.answer()
    written(store)
    stranger = StreamRobot(two.url, "stranger", token=robot.welcome.token)
    assert not stranger.welcome.resumed
    assert stranger.welcome.held == {}
    stranger.close()
    token = robot.welcome.token
    assert not any(token in key or token.hex().encode() in key for key in store.client.scan_iter())
    robot.send(Bye())
    robot.closed()
    until(lambda: not StreamRobot(two.url, token=robot.welcome.token, seq=9).welcome.resumed, "the session being over")


def alone(stack: Stack, *flags: str) -> Stack:
    stack.write_routes(stack.start_worker())
    stack.start_gateway(*flags)
    stack.wait_workers(1)
    return stack


def test_no_request_asks_the_store(bare_stack, store):
    alone(bare_stack, "--redis-url", store.url, "--redis-every-s", "600")
    robot = StreamRobot(bare_stack.url)
    robot.observe()
    robot.answer()
    before = store.commands()
    for _ in range(30):
        robot.observe()
        assert isinstance(robot.answer(), Answer)
        robot.observe(None, images={}, unchanged=HELD)
        assert isinstance(robot.answer(), Answer)
        assert bare_stack.act(robot="another")[0] == 200
    assert store.commands() - before == 1, "the question itself"
    robot.close()


def test_writing_behind_takes_one_round_trip_for_all(bare_stack, store):
    alone(bare_stack, "--redis-url", store.url, "--redis-every-s", "1")
    robots = [StreamRobot(bare_stack.url, f"arm-{n}") for n in range(8)]
    writes, began = store.client.info("commandstats").get("cmdstat_set", {}).get("calls", 0), time.monotonic()
    sent = 0
    while time.monotonic() - began < 2.5:
        for robot in robots:
            robot.observe()
        for robot in robots:
            robot.answer()
        sent += len(robots)
    made = store.client.info("commandstats")["cmdstat_set"]["calls"] - writes
    assert made <= 8 * (time.monotonic() - began + 1), "each changed session once in each interval"
    assert made < sent
    for robot in robots:
        robot.close()


def test_without_the_store_requests_go_on_and_a_metric_says_so(pair, own_store):
    one, two = pair.start("--redis-url", own_store.url, "--redis-every-s", "0.05").stacks
    robot = StreamRobot(one.url)
    robot.observe()
    robot.answer()
    own_store.kill()
    until(lambda: store_up(one) == 0, "its loss being seen")
    robot.observe(None, images={}, unchanged=HELD)
    assert isinstance(robot.answer(), Answer)
    assert "session_store_down" in one.log.read_text()
    # At the same gateway a session is resumed all the same; at another one it begins anew, at once.
    robot.drop()
    again = StreamRobot(one.url, token=robot.welcome.token, seq=robot.seq)
    assert again.welcome.resumed
    again.drop()
    began = time.monotonic()
    moved = StreamRobot(two.url, token=robot.welcome.token, seq=robot.seq)
    assert not moved.welcome.resumed
    assert time.monotonic() - began < 5.0
    moved.observe()
    assert isinstance(moved.answer(), Answer)
    own_store.start()
    until(lambda: store_up(two) == 1, "its return being seen")
    until(lambda: own_store.client.dbsize(), "sessions being written again")
    moved.close()


def test_a_gateway_starts_without_its_store(bare_stack):
    alone(bare_stack, "--redis-url", "redis://:secret@127.0.0.1:9/0")
    assert store_up(bare_stack) == 0
    robot = StreamRobot(bare_stack.url)
    robot.observe()
    assert isinstance(robot.answer(), Answer)
    assert "secret" not in bare_stack.log.read_text()
    robot.close()


def test_a_gateway_without_a_store_has_no_metric_of_one(shared_stack):
    assert UP not in shared_stack.http.get(f"{shared_stack.url}/metrics").text


def test_a_url_that_is_none_is_refused_at_start(tmp_path):
    (tmp_path / "routes.json").write_text('{"routes": []}')
    program = str(Path(sys.executable).parent / "taktline-gateway")
    command = [program, "serve", "--routes", str(tmp_path / "routes.json"), "--listen", "127.0.0.1:0"]
    done = subprocess.run([*command, "--redis-url", "http://nowhere"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "config_invalid" in done.stderr
