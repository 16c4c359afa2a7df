"""The SDK against a real gateway: chunks, completed terms, typed errors, reconnects."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import taktline
from taktline.dropped import let_go
from taktline.observing import Sender, as_image
from taktline_protocol.messages import Image

FRAME = np.zeros((8, 8, 3), dtype=np.uint8)
IMAGES = {"front": FRAME, "wrist": FRAME}
STATE = np.zeros(6)


@pytest.fixture(params=["stream", "http"])
def robot(stack, request):
    with taktline.Robot(stack.url, "scripted", f"arm-{request.node.name}", transport=request.param) as made:
        yield made
        assert made.metrics.transport == request.param
        assert made.metrics.fallback == ""


def test_act_returns_actions_with_all_five_terms(robot):
    captured = time.monotonic() - 0.010
    began = time.monotonic()
    chunk = robot.act(IMAGES, STATE, "go", 5_000.0, captured_at=captured, actuate_ms=4.0)
    round_trip_ms = 1e3 * (time.monotonic() - began)
    assert chunk.actions.shape == (10, 6)
    assert chunk.actions.dtype == np.float32
    assert np.all(chunk.actions == 1.0), "the scripted worker answers with the sequence number"
    times = chunk.timings
    assert times.observe_ms >= 10.0
    assert times.actuate_ms == 4.0
    measured = times.transfer_ms + times.queue_ms + times.inference_ms
    assert measured <= round_trip_ms
    # What the gateway has not stamped of the round trip is transfer; this thread's own wake-up is no part of it.
    assert measured == pytest.approx(robot.metrics.round_trips_ms[-1], abs=0.01)
    # The budget counts from when the connection's thread takes up the call, which is within the round trip seen here;
    # what passed until the observation was on its way is part of L_observe.
    taken_up_ms = chunk.margin_ms - (5_000.0 + 1e3 * (began - captured) - times.critical_ms)
    assert -0.1 <= taken_up_ms <= round_trip_ms
    assert chunk.valid_until == pytest.approx(captured + 0.5)
    assert np.all(robot.act(IMAGES, STATE, "go", 5_000.0).actions == 2.0)


def test_errors_are_typed(robot):
    with pytest.raises(taktline.TaktlineError) as caught:
        robot.act({"front": FRAME}, STATE, "go", 5_000.0)
    assert caught.value.code is taktline.ErrorCode.CAMERA_MISSING
    with pytest.raises(taktline.TaktlineError) as caught:
        robot.act(IMAGES, [float("nan")] * 6, "go", 5_000.0)
    assert caught.value.code is taktline.ErrorCode.STATE_INVALID
    assert robot.act(IMAGES, STATE, "go", 5_000.0).seq == 3


@pytest.mark.parametrize("frame", [b"GIF89a", np.zeros((8, 8), np.uint8), np.zeros((8, 8, 3), np.float32)])
def test_frames_that_cannot_be_sent_are_refused_here(frame):
    with pytest.raises(taktline.TaktlineError) as caught:
        as_image("front", frame)
    assert caught.value.code is taktline.ErrorCode.IMAGE_CORRUPT


def test_a_view_of_a_frame_is_sent_as_it_looks():
    frame = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)[:, ::2]
    image = as_image("front", frame)
    assert image == Image("raw", frame.tobytes(), (2, 2, 3))


def test_info(robot):
    info = robot.info()
    assert info.cameras == ("front", "wrist")
    assert info.state_dim == 6


@pytest.mark.parametrize("transport", ["auto", "http"])
def test_unreachable_gateway_is_typed(transport):
    with taktline.Robot("http://127.0.0.1:9", "p", "arm", transport=transport) as robot:
        with pytest.raises(taktline.TaktlineError) as caught:
            robot.act(IMAGES, STATE, "go", 100.0)
        assert robot.metrics.errors == {"gateway_unreachable": 1}
    assert caught.value.code is taktline.ErrorCode.GATEWAY_UNREACHABLE


def test_async_robots_run_side_by_side(stack):
    async def fleet():
        async def one(name):
            async with taktline.AsyncRobot(stack.url, "scripted", name) as robot:
                return [(await robot.act(IMAGES, STATE, "go", 5_000.0)).seq for _ in range(3)]

        return await asyncio.gather(*(one(f"async-{n}") for n in range(4)))

    assert asyncio.run(fleet()) == [[1, 2, 3]] * 4


def test_network_estimate_is_reserved_but_never_eats_the_budget():
    sender = Sender("arm")
    for value in (1.0, 2.0, 3.0, 50.0):
        sender.note_network(value)
    observation = sender.observe(IMAGES, STATE, "go", 1_000.0)
    assert observation.network_ms == 3.0
    assert sender.observe(IMAGES, STATE, "go", 4.0).network_ms == 2.0


class OneShotServer:
    """Answers each connection's first request with the given bytes, then closes it."""

    def __init__(self, answers):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.requests = []
        threading.Thread(target=self._serve, args=(list(answers),), daemon=True).start()

    def _serve(self, answers):
        for answer in answers:
            connection, _ = self.listener.accept()
            with connection:
                self.requests.append(_read_request(connection))
                connection.sendall(answer)
        self.listener.close()


def _read_request(connection):
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return body


def _http(status, body, media="application/json"):
    return f"HTTP/1.1 {status}\r\nContent-Type: {media}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def asking_over_http(url, policy="p"):
    return taktline.Robot(url, policy, "arm", transport="http")


DRAINING = _http("503 x", b'{"code":"draining","message":"m","next_step":"n"}')


def test_a_draining_gateway_is_asked_once_more_with_the_time_that_is_left():
    from taktline_protocol.codecs import MediaType, decode_observation

    server = OneShotServer([DRAINING, DRAINING])
    with (
        taktline.Robot(server.url, "p", "arm", transport="http") as robot,
        pytest.raises(taktline.TaktlineError) as caught,
    ):
        robot.act(IMAGES, STATE, "go", 500.0)
    assert caught.value.code is taktline.ErrorCode.DRAINING
    first, second = (decode_observation(body, MediaType.MSGPACK) for body in server.requests)
    assert second.seq == first.seq
    assert second.budget_ms < first.budget_ms
    assert second.captured_at == first.captured_at


def test_an_answer_that_is_not_taktlines_is_named():
    server = OneShotServer([_http("502 x", b"<html>", "text/html")])
    with (
        taktline.Robot(server.url, "p", "arm", transport="http") as robot,
        pytest.raises(taktline.TaktlineError) as caught,
    ):
        robot.act(IMAGES, STATE, "go", 500.0)
    assert caught.value.code is taktline.ErrorCode.GATEWAY_UNREACHABLE
    assert "502" in caught.value.message


def test_the_answer_to_another_observation_is_refused(stack):
    import httpx
    from taktline_protocol.codecs import MediaType, encode

    other = httpx.post(
        f"{stack.url}/v1/policies/scripted/act",
        content=encode(stack.observation(robot="other"), MediaType.MSGPACK),
        headers={"content-type": MediaType.MSGPACK.value},
    )
    server = OneShotServer([_http("200 OK", other.content, MediaType.MSGPACK.value)])
    with (
        taktline.Robot(server.url, "scripted", "arm", transport="http") as robot,
        pytest.raises(taktline.TaktlineError) as caught,
    ):
        robot.act(IMAGES, STATE, "go", 500.0)
    assert "got the answer to 'other'" in caught.value.message


def test_a_connection_closed_while_idle_is_opened_again(stack):
    body = stack.http.post(
        f"{stack.url}/v1/policies/scripted/act",
        content=b"{}",
        headers={"content-type": "application/json"},
    ).content
    server = OneShotServer([_http("400 x", body), _http("400 x", body)])
    with taktline.Robot(server.url, "p", "arm", transport="http") as robot:
        for _ in range(2):
            with pytest.raises(taktline.TaktlineError) as caught:
                robot.act(IMAGES, STATE, "go", 500.0)
            assert caught.value.code is taktline.ErrorCode.INVALID_BODY


async def test_a_dropped_robot_lets_go_also_where_warnings_are_errors():
    closed = asyncio.Event()

    async def close() -> None:
        closed.set()

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        with pytest.raises(ResourceWarning):
            let_go("arm", [(asyncio.get_running_loop(), close)])
    async with asyncio.timeout(10):
        await closed.wait()


@pytest.mark.parametrize("transport", ["stream", "http"])
def test_an_async_robot_that_is_dropped_says_so_and_its_connection_ends(stack, transport):
    """It kept its connection for as long as the program ran, and the gateway its session."""

    def here() -> int:
        port = int(stack.url.rsplit(":", 1)[1])
        mine = Path("/proc/self/net/tcp").read_text().splitlines()
        return sum(line.split()[2].endswith(f":{port:04X}") and line.split()[3] == "01" for line in mine[1:])

    async def scene() -> None:
        before = here()
        robots = [taktline.AsyncRobot(stack.url, "scripted", "dropped", transport=transport)]
        await robots[0].act(IMAGES, STATE, "go", 20_000.0)
        assert here() == before + 1
        with pytest.warns(ResourceWarning, match="robot dropped was dropped without `close`"):
            robots.clear()
        async with asyncio.timeout(30):
            while here() > before:  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(0.05)

    asyncio.run(scene())


def test_an_event_loop_that_ends_before_its_robot_is_closed_opens_no_other_connection(stack):
    """`asyncio.run` cancelled the stream's tasks, whose end opened a connection that nobody was left to close."""
    program = f"""
import asyncio, numpy as np, taktline

async def scene():
    robot = taktline.AsyncRobot({stack.url!r}, "scripted", "left-open")
    frame = np.zeros((8, 8, 3), np.uint8)
    await robot.act({{"front": frame, "wrist": frame}}, [0.0] * 6, "go", 20_000.0)

asyncio.run(scene())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
