"""What a robot programmer gets wrong first is said at once, in words, and disturbs nothing else."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import msgspec
import numpy as np
import pytest
import taktline
from taktline import stream_connecting
from taktline.access import Access
from taktline.address import gateway_url, websocket
from taktline.observing import Sender
from taktline.robot_metrics import RobotMetrics
from taktline.stream_client import StreamClient
from taktline_protocol import ErrorCode, TaktlineError

FRAME = np.zeros((8, 8, 3), dtype=np.uint8)
IMAGES = {"front": FRAME, "wrist": FRAME}
STATE = np.zeros(6)
BUDGET_MS = 20_000.0


@pytest.mark.parametrize(
    "url",
    [
        "gateway:8080",
        "127.0.0.1:8080",
        "",
        "http://",
        "http://gateway:80800",
        "http://gateway:x",
        "ftp://gateway",
        None,
    ],
)
@pytest.mark.parametrize("transport", ["auto", "http"])
def test_what_is_no_address_is_said_when_the_robot_is_made(url, transport):
    with pytest.raises(TaktlineError) as said:
        taktline.Robot(url, "scripted", "arm", transport=transport)
    assert said.value.code is ErrorCode.CONFIG_INVALID
    assert "http://gateway:8080" in str(said.value)


def test_addresses_that_mean_a_gateway_are_taken():
    assert gateway_url(" http://gateway:8080/ ") == "http://gateway:8080"
    assert gateway_url("wss://gateway/robots/") == "https://gateway/robots"
    assert websocket("https://[::1]:8443") == "wss://[::1]:8443"


@pytest.mark.parametrize(("policy", "robot_id"), [("", "arm"), ("scripted", ""), ("scripted", 7)])
def test_names_that_are_none_are_said_when_the_robot_is_made(policy, robot_id):
    with pytest.raises(TaktlineError) as said:
        taktline.Robot("http://gateway:8080", policy, robot_id)
    assert said.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"instruction": None}, "instruction_invalid"),
        ({"instruction": b"go"}, "instruction_invalid"),
        ({"budget_ms": float("nan")}, "budget_invalid"),
        ({"budget_ms": "200"}, "budget_invalid"),
        ({"priority": "urgent"}, "invalid_body"),
        ({"instruction": "\ud800"}, "instruction_invalid"),
        ({"captured_at": "now"}, "invalid_body"),
        ({"actuate_ms": "5"}, "invalid_body"),
        ({"actuate_ms": -1.0}, "invalid_body"),
        ({"seed": 1.5}, "invalid_body"),
        ({"seed": -1}, "invalid_body"),
        ({"seed": 2**70}, "invalid_body"),
        ({"rtc": "tail"}, "invalid_body"),
        ({"rtc": taktline.Rtc(tail=[1.0, 2.0])}, "invalid_body"),
        ({"search": taktline.Search(candidates=0)}, "invalid_body"),
        ({"images": {1: FRAME, "wrist": FRAME}}, "camera_unknown"),
        ({"images": {"": FRAME}}, "camera_unknown"),
        ({"images": {"\ud800": FRAME}}, "camera_unknown"),
    ],
)
def test_values_that_are_no_part_of_an_observation_are_refused_here_and_the_stream_goes_on(stack, changes, code):
    sent = {"images": IMAGES, "instruction": "go", "budget_ms": BUDGET_MS, **changes}
    with taktline.Robot(stack.url, "scripted", f"arm of {code} {list(changes)} {time.monotonic()}") as robot:
        robot.act(IMAGES, STATE, "go", BUDGET_MS)
        with pytest.raises(TaktlineError) as said:
            robot.act(state=STATE, **sent)
        assert said.value.code.value == code
        robot.act(IMAGES, STATE, "go", BUDGET_MS)
        assert robot.metrics.connects == 1


def test_numbers_of_numpy_are_numbers(stack):
    with taktline.Robot(stack.url, "scripted", "arm of numpy") as robot:
        seen_at = np.float64(time.monotonic())
        chunk = robot.act(
            IMAGES,
            STATE,
            "go",
            np.float32(BUDGET_MS),
            captured_at=seen_at,
            actuate_ms=np.float32(1.0),
            seed=np.random.default_rng(1).integers(100),
        )
        assert chunk.captured_at == float(seen_at)
        assert robot.metrics.connects == 1


@pytest.mark.parametrize("transport", ["auto", "http"])
def test_a_closed_robot_says_so_at_once(stack, transport):
    robot = taktline.Robot(stack.url, "scripted", f"arm that is closed, {transport}", transport=transport)
    robot.act(IMAGES, STATE, "go", BUDGET_MS)
    robot.close()
    for ask in (lambda: robot.act(IMAGES, STATE, "go", BUDGET_MS), robot.info, robot.connect):
        began = time.monotonic()
        with pytest.raises(TaktlineError, match="was closed") as said:
            ask()
        assert said.value.code is ErrorCode.CANCELLED
        assert time.monotonic() - began < 10, "not when a connection that nobody makes is given up"


@pytest.mark.parametrize("transport", ["stream", "http"])
def test_why_a_gateway_was_not_reached_is_in_the_error(transport):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    robot = taktline.Robot(f"http://127.0.0.1:{port}", "scripted", "arm", transport=transport)
    with robot, pytest.raises(TaktlineError, match=r"refused|failed") as said:
        robot.act(IMAGES, STATE, "go", 2_000.0)
    assert said.value.code is ErrorCode.GATEWAY_UNREACHABLE


def client(url: str, robot_id: str) -> tuple[StreamClient, Sender]:
    sender = Sender(robot_id)
    made = StreamClient(url, "scripted", robot_id, sender.session_id, Access(), RobotMetrics())
    return made, sender


def test_an_attempt_to_connect_that_breaks_is_told_and_not_repeated_for_ever(monkeypatch):
    attempts = []

    async def broken(*_) -> None:
        attempts.append(time.monotonic())
        raise ValueError("this was not foreseen")

    monkeypatch.setattr(stream_connecting, "open_link", broken)

    async def ask() -> None:
        stream, sender = client("http://gateway:8080", "arm")
        observation = sender.observe({}, STATE, "go", BUDGET_MS)
        with pytest.raises(TaktlineError, match="not foreseen"):
            await stream.ask(observation, {}, 30.0)
        await stream.close()

    asyncio.run(ask())
    assert len(attempts) == 1


def test_what_the_gateway_cannot_read_is_told_to_who_sent_it_and_the_next_is_served(stack):
    async def ask() -> None:
        stream, sender = client(stack.url, "arm of another make")
        whole = sender.observe(IMAGES, STATE, "go", BUDGET_MS)
        broken = msgspec.structs.replace(whole, priority="urgent")
        with pytest.raises(TaktlineError, match="no frame") as said:
            await stream.ask(broken, {}, 60.0)
        assert said.value.code is ErrorCode.INVALID_BODY
        encoder = taktline.encoding.FrameEncoder(None)
        frames = await encoder.encode_async(IMAGES)
        chunk, *_ = await stream.ask(sender.observe(IMAGES, STATE, "go", BUDGET_MS), frames, 60.0)
        assert chunk.actions.shape == (10, 6)
        await stream.close()

    asyncio.run(ask())


def test_the_first_refusal_of_a_kind_is_logged_and_the_others_are_counted(caplog):
    def ask(*_, **__) -> Future:
        answer: Future = Future()
        answer.set_exception(TaktlineError(ErrorCode.ROBOT_CONFLICT, "another session is live", "stop it"))
        return answer

    now = [0.0]
    player = taktline.Player(ask, 0.1, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING, logger="taktline"):
        for _ in range(3):
            assert player.wants_observation()
            player.observe(IMAGES, STATE, "go")
            player.next_action()
            now[0] += 1.0
    assert player.errors == {"robot_conflict": 3}
    assert len(caplog.records) == 1
    assert "another session is live" in caplog.text


@pytest.mark.parametrize(("transport", "rows"), [("stream", 2048), ("http", 2048), ("http", 6000)])
def test_an_observation_over_the_gateways_limit_is_said_at_once_and_sent_once(stack, transport, rows):
    huge = np.zeros((rows, 2900, 3), dtype=np.uint8)
    with taktline.Robot(
        stack.url, "scripted", f"arm with a camera of {rows} rows over {transport}", transport=transport
    ) as robot:
        robot.act(IMAGES, STATE, "go", BUDGET_MS)
        with pytest.raises(TaktlineError, match="JPEG") as said:
            robot.act({**IMAGES, "wrist": huge}, STATE, "go", BUDGET_MS)
        # Of a body far over its limit a gateway does not read so much that its answer always arrives.
        hung_up = {ErrorCode.GATEWAY_UNREACHABLE} if transport == "http" else set()
        assert said.value.code in {ErrorCode.BODY_TOO_LARGE} | hung_up
        robot.act(IMAGES, STATE, "go", BUDGET_MS)
        if transport == "stream":
            assert "'wrist' 17.0 MiB" in str(said.value)
            assert robot.metrics.connects == 1
            assert robot.metrics.bytes_sent < huge.nbytes


def hang_up_on_all(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # the test has closed it
            return
        with connection:
            connection.recv(65536)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize(("rows", "said"), [(100, False), (2500, True)])
def test_a_gateway_that_went_away_under_a_large_observation_ends_no_players_loop(rows, said):
    """It may take that much, and be back in a second."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=hang_up_on_all, args=(server,), daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with taktline.Robot(url, "scripted", "arm", transport="http") as robot:
            asked = []
            player = taktline.Player(lambda *args, **named: asked.append(robot.ask(*args, **named)) or asked[-1], 0.1)
            player.observe({"front": np.zeros((rows, 2900, 3), np.uint8)}, STATE, "go")
            error = asked[0].exception(timeout=60.0)
            assert player.next_action() is None
        server.shutdown(socket.SHUT_RDWR)
    assert player.errors == {"gateway_unreachable": 1}
    assert ("JPEG" in str(error) and "20.7 MiB" in str(error)) is said


def test_an_observation_over_the_limit_ends_a_players_loop():
    def ask(*_, **__) -> Future:
        answer: Future = Future()
        answer.set_exception(TaktlineError(ErrorCode.BODY_TOO_LARGE, "48 MiB", "send JPEG"))
        return answer

    player = taktline.Player(ask, 0.1)
    player.observe(IMAGES, STATE, "go")
    with pytest.raises(TaktlineError, match="48 MiB"):
        player.next_action()


@pytest.mark.parametrize(
    ("frame", "advice"),
    [
        (np.zeros((8, 8, 3), np.float32), r"255 \* frame"),
        (np.zeros((3, 8, 8), np.uint8), "transpose"),
        (np.zeros((8, 8, 4), np.uint8), r"\[\.\.\., :3\]"),
        (np.zeros((8, 8), np.uint8), "uint8 RGB"),
        ("scene.jpg", "read_bytes"),
        (None, "uint8 RGB"),
    ],
)
@pytest.mark.parametrize("jpeg_quality", [None, 90])
def test_what_is_no_frame_is_said_by_ask_itself_with_what_to_pass(frame, advice, jpeg_quality):
    with taktline.Robot("http://127.0.0.1:9", "scripted", "arm", jpeg_quality=jpeg_quality) as robot:
        with pytest.raises(TaktlineError, match=advice) as said:
            robot.ask({"front": frame}, STATE, "go", BUDGET_MS)
        assert said.value.code is ErrorCode.IMAGE_CORRUPT
        assert "'front'" in str(said.value)


PIECES = [[[1], [1, 2]]]
"""Rows of several lengths, of which NumPy makes nothing."""


@pytest.mark.parametrize(
    ("frame", "advice"), [(PIECES, "gives no array"), (bytearray(b"jpeg"), r"pass bytes\(frame\)")]
)
@pytest.mark.parametrize("ask", ["act", "ask"])
def test_what_gives_no_picture_is_said_with_what_to_pass(frame, advice, ask):
    with taktline.Robot("http://127.0.0.1:9", "scripted", "arm") as robot:
        with pytest.raises(TaktlineError, match=advice) as said:
            getattr(robot, ask)({"front": frame}, STATE, "go", BUDGET_MS)
        assert said.value.code is ErrorCode.IMAGE_CORRUPT


@pytest.mark.parametrize("images", [[FRAME, FRAME], FRAME, b"jpeg", None])
@pytest.mark.parametrize("ask", ["act", "ask"])
@pytest.mark.parametrize("jpeg_quality", [None, 90])
def test_frames_that_are_not_by_camera_are_said_at_once(images, ask, jpeg_quality):
    with taktline.Robot("http://127.0.0.1:9", "scripted", "arm", jpeg_quality=jpeg_quality) as robot:
        with pytest.raises(TaktlineError, match="from each camera's name to its frame") as said:
            getattr(robot, ask)(images, STATE, "go", BUDGET_MS)
        assert said.value.code is ErrorCode.CAMERA_MISSING


@pytest.mark.parametrize("state", [None, 1.0, np.zeros((2, 3)), ["a"] * 6])
@pytest.mark.parametrize("ask", ["act", "ask"])
def test_what_is_no_state_vector_is_said_at_once(state, ask):
    with taktline.Robot("http://127.0.0.1:9", "scripted", "arm") as robot:
        with pytest.raises(TaktlineError, match="the state") as said:
            getattr(robot, ask)(IMAGES, state, "go", BUDGET_MS)
        assert said.value.code is ErrorCode.STATE_INVALID


@pytest.mark.parametrize(
    "changes",
    [
        {"transport": "tcp"},
        {"robot_id": "x" * 129},
        {"session_id": ""},
        {"session_id": 5},
        {"answer_timeout_s": 0},
        {"answer_timeout_s": None},
        {"answer_timeout_s": float("nan")},
        {"jpeg_quality": "90"},
    ],
)
def test_arguments_that_no_gateway_takes_are_said_when_the_robot_is_made(changes):
    with pytest.raises(TaktlineError) as said:
        taktline.Robot("http://gateway:8080", **{"policy": "scripted", "robot_id": "arm", **changes})
    assert said.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize(
    "changes",
    [
        {"dt_s": None},
        {"dt_s": 0.0},
        {"replan_rows": -1},
        {"in_flight": 0},
        {"standing_budget_ms": 0},
        {"standing_budget_ms": "5"},
        {"actuate_ms": float("nan")},
        {"ensemble": float("nan")},
        {"ensemble": "0.01"},
        {"ensemble": -1000.0},
    ],
)
def test_arguments_with_which_no_robot_would_move_as_meant_are_said_when_the_player_is_made(changes):
    """Of an ensemble's weight that is no number the actions would be none either."""
    taktline.Player(lambda *_, **__: Future(), np.float32(0.05), ensemble=-0.01, replan_rows=np.int64(2))
    with pytest.raises(TaktlineError) as said:
        taktline.Player(lambda *_, **__: Future(), **{"dt_s": 0.05, **changes})
    assert said.value.code is ErrorCode.CONFIG_INVALID


ENCODED_BEFORE = """
import os, signal, sys
import numpy as np
from taktline.encoding import FrameEncoder
frames = {name: np.zeros((16, 16, 3), np.uint8) for name in ("front", "wrist")}
FrameEncoder(90).encode(frames)
child = os.fork()
if not child:
    signal.alarm(20)
    print(len(FrameEncoder(90).encode({name: frame + 1 for name, frame in frames.items()})), flush=True)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_forked_child_encodes_frames_though_its_parent_did():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ENCODED_BEFORE], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == ["2", "0"], done.stderr


FORKED = """
import os, signal, sys
import numpy as np, taktline
def ask(robot):
    return robot.act({name: np.zeros((8, 8, 3), np.uint8) for name in ("front", "wrist")}, [0.0] * 6, "go", 5000.0)
inherited = taktline.Robot(sys.argv[1], "scripted", "made-before")
ask(inherited)
child = os.fork()
if not child:
    signal.alarm(30)
    try:
        ask(inherited)
    except taktline.TaktlineError as error:
        print(error.code.value, error.next_step, flush=True)
    with inherited, taktline.Robot(sys.argv[1], "scripted", "of-the-child") as own:
        print(len(ask(own).actions), flush=True)
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print(len(ask(inherited).actions), flush=True)
"""


def test_a_robot_that_a_forked_child_inherits_says_so_instead_of_waiting_for_ever(stack):
    """A child has no thread that would answer; the parent's session is neither used nor ended by it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, stack.url], capture_output=True, text=True, timeout=90
    )
    advice = "config_invalid make a robot in the child, or start children with multiprocessing's spawn"
    assert done.stdout.splitlines() == [advice, "10", "0", "10"], done.stderr
