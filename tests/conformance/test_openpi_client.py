"""The published openpi client, unmodified, against the gateway."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import httpx
import msgspec
import numpy as np
import pytest
import websockets.asyncio.client as ws
from taktline_gateway.compat.wire_arrays import decode, encode_openpi
from taktline_protocol.limits import Limits
from websockets.exceptions import ConnectionClosed, InvalidStatus

from .conftest import free_port, until

LIBERO = {
    "observation/state": np.arange(8, dtype=np.float32),
    "observation/image": np.full((8, 8, 3), 30, np.uint8),
    "observation/wrist_image": np.full((8, 8, 3), 40, np.uint8),
    "prompt": "go",
}


@pytest.fixture(scope="module")
def libero(shared_fleet):
    """One policy, spoken at `/` of its own port; tests that stop or reconfigure the gateway start their own."""
    shared_fleet.port = free_port()
    start_libero(shared_fleet, shared_fleet.port)
    return shared_fleet


def start_libero(fleet, port, *flags, **worker):
    fleet.route("libero", fleet.worker("libero", **worker), control_budget_ms=5000)
    fleet.start("--openpi-listen", f"127.0.0.1:{port}", *flags)
    fleet.wait_ready("libero")


def test_libero_observation_by_host_and_port(libero, openpi_client):
    got = openpi_client.run("openpi_robot.py", "act", f"127.0.0.1:{libero.port}", "libero", "3")
    assert got["metadata"]["action_horizon"] == 10
    assert got["metadata"]["cameras"] == ["image", "wrist_image"]
    for number, answer in enumerate(got["answers"]):
        assert answer["shape"] == [10, 16]
        assert answer["dtype"] == "float32"
        assert answer["first"][:11] == [*range(8), 30.0, 40.0, 2.0]
        assert answer["arrays"] == ["actions"]
        assert ("prev_total_ms" in answer["server_timing"]) == (number > 0)
        for timing in (answer["server_timing"], answer["policy_timing"]):
            assert timing["infer_ms"] > 0
            assert all(type(value) is float for value in timing.values())
    # The key is for the access layer; it never reaches the log.
    assert "secret-key-1" not in libero.log.read_text()


@pytest.mark.parametrize(
    ("kind", "cameras", "optional", "state", "pixels"),
    [
        ("droid", "exterior_image_1_left,wrist_image_left", "", [*range(7), 0.5], [10.0, 20.0]),
        ("droid", "base_0_rgb,left_wrist_0_rgb", "", [*range(7), 0.5], [10.0, 20.0]),
        ("aloha", "base_0_rgb", "left_wrist_0_rgb,right_wrist_0_rgb", [*range(14)], [50.0]),
        ("aloha", "cam_high,cam_left_wrist,cam_right_wrist", "", [*range(14)], [50.0, 70.0, 80.0]),
    ],
)
def test_conventions_by_uri(fleet, openpi_client, kind, cameras, optional, state, pixels):
    port = free_port()
    address = fleet.worker(kind, cameras=cameras, optional=optional, state_dim=len(state), action_dim=24)
    fleet.route(kind, address, control_budget_ms=5000)
    fleet.route("another", control_budget_ms=5000)
    fleet.start("--openpi-listen", f"127.0.0.1:{port}")
    fleet.wait_ready(kind)
    uri = f"ws://127.0.0.1:{port}/v1/policies/{kind}/openpi?robot=arm-7"
    first = openpi_client.run("openpi_robot.py", "act", uri, kind)["answers"][0]["first"]
    assert first[: len(state)] == state
    assert first[len(state) : len(state) + len(pixels) + 1] == [*pixels, 2.0]
    assert '"robot":"arm-7"' in fleet.log.read_text()


def test_mapping_of_the_route(fleet, openpi_client):
    port = free_port()
    mapping = {
        "images": {"observation/image": "front"},
        "state": ["observation/state", "observation/state"],
        "metadata": {"reset_pose": [0.0, 1.5]},
    }
    address = fleet.worker("mapped", cameras="front", state_dim=16, action_dim=20)
    fleet.route("mapped", address, clients={"openpi": mapping}, control_budget_ms=5000)
    fleet.start("--openpi-listen", f"mapped=127.0.0.1:{port}")
    fleet.wait_ready("mapped")
    got = openpi_client.run("openpi_robot.py", "act", f"127.0.0.1:{port}", "libero")
    assert got["metadata"]["reset_pose"] == [0.0, 1.5]
    assert got["answers"][0]["first"][:18] == [*range(8), *range(8), 30.0, 2.0]


def test_action_chunk_broker_plays_chunks_step_by_step(libero, openpi_client):
    steps = openpi_client.run("openpi_robot.py", "broker", f"127.0.0.1:{libero.port}", "12")
    assert [step[-1] for step in steps] == [*range(10), 0, 1]


def test_refusals_are_text_without_traceback_and_the_connection_goes_on(libero, openpi_client):
    got = openpi_client.run("openpi_robot.py", "errors", f"127.0.0.1:{libero.port}")
    codes = ["camera_missing", "state_invalid", "worker_failed", "image_corrupt"]
    for code, said in zip(codes, got["said"], strict=True):
        assert said.startswith(f"Error in inference server:\n{code}: ")
        assert "Traceback" not in said
        assert ".py" not in said
    assert got["after"][10] == len("fine")


def test_cold_start_withholds_metadata_and_refuses_nothing(fleet, openpi_client):
    port, address = free_port(), f"127.0.0.1:{free_port()}"
    fleet.route("libero", address, control_budget_ms=5000)
    fleet.start("--openpi-listen", f"libero=127.0.0.1:{port}")
    robot = openpi_client.start("openpi_robot.py", "waits", f"127.0.0.1:{port}")
    until(lambda: "client_connected" in fleet.log.read_text(), "the robot connecting")
    time.sleep(1.0)
    assert robot.poll() is None
    fleet.worker("libero", address)
    got = openpi_client.result(robot)
    assert got["waited_s"] > 1.0
    assert got["first"][:8] == [*range(8)]


def test_a_policy_that_is_applied_later_is_waited_for(fleet, openpi_client):
    port = free_port()
    fleet.routes.write_text('{"routes": []}')
    fleet.start("--openpi-listen", f"127.0.0.1:{port}")
    robot = openpi_client.start("openpi_robot.py", "waits", f"127.0.0.1:{port}")
    until(lambda: "client_connected" in fleet.log.read_text(), "the robot connecting")
    fleet.route("libero", fleet.worker("libero"), control_budget_ms=5000)
    assert openpi_client.result(robot)["first"][:8] == [*range(8)]


def test_cold_start_answers_pings(fleet):
    port = free_port()
    fleet.route("libero", f"127.0.0.1:{free_port()}")
    fleet.start("--openpi-listen", f"127.0.0.1:{port}")

    async def ping():
        async with ws.connect(f"ws://127.0.0.1:{port}", compression=None) as socket:
            await asyncio.wait_for(await socket.ping(), 5)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(socket.recv(), 0.3)

    asyncio.run(ping())


def test_an_abandoned_answer_never_becomes_the_next_ones(libero, openpi_client):
    """Fault of Positronic-Robotics/positronic#459: after a client's timeout it reads the old chunk."""
    got = openpi_client.run("openpi_robot.py", "gives_up", f"127.0.0.1:{libero.port}")
    assert "answer" not in got
    assert "superseded" in got["text"]
    until(lambda: "answer_overtaken" in libero.log.read_text(), "the log naming it")


def test_a_stream_shifted_by_one_is_closed(libero):
    """The answer was on its way when the client asked again: what it then reads would lag by one for ever."""

    def served() -> float:
        ok = 'taktline_requests_total{code="ok",policy="libero"} '
        lines = httpx.get(f"{libero.url}/metrics").text.splitlines()
        return sum(float(line.removeprefix(ok)) for line in lines if line.startswith(ok))

    def overtaken() -> int:
        return libero.log.read_text().count("answer_overtaken")

    async def shifted():
        answers, seen = served(), overtaken()
        async with ws.connect(f"ws://127.0.0.1:{libero.port}", compression=None) as socket:
            await socket.recv()
            socket.transport.pause_reading()  # so that neither the answer nor the ping before it is seen
            await socket.send(encode_openpi(LIBERO))
            until(lambda: served() > answers, "the answer")
            await asyncio.sleep(0.2)  # which leaves the gateway a moment after it was counted
            await socket.send(encode_openpi(LIBERO | {"prompt": "something else"}))
            until(lambda: overtaken() > seen, "the gateway seeing what happened")
            socket.transport.resume_reading()
            late = decode(await socket.recv(), Limits())
            assert late["actions"][0, 10] == 2
            assert "superseded" in await socket.recv()
            with pytest.raises(ConnectionClosed):
                await socket.recv()

    asyncio.run(shifted())


def test_hundreds_of_answers_in_order_are_never_taken_for_overtaken(libero, openpi_client):
    before = len(libero.log.read_text())
    times = openpi_client.run("openpi_robot.py", "many", f"127.0.0.1:{libero.port}", "300")
    assert len(times) == 300
    # Of clients that have connected since: an earlier test's may be noticed only now.
    lines = [json.loads(line) for line in libero.log.read_text()[before:].splitlines()]
    ours = {line["robot"] for line in lines if line["message"] == "client_connected"}
    assert ours
    assert not [line for line in lines if line["message"] == "answer_overtaken" and line["robot"] in ours]


def test_healthz_is_exact(libero):
    answer = httpx.get(f"http://127.0.0.1:{libero.port}/healthz")
    assert (answer.status_code, answer.content) == (200, b"OK\n")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


def test_handshake_offers_no_extension(libero):
    async def extensions():
        async with ws.connect(f"ws://127.0.0.1:{libero.port}", compression="deflate") as socket:
            return socket.response.headers.get("Sec-WebSocket-Extensions")

    assert asyncio.run(extensions()) is None


@pytest.mark.parametrize("path", ["/nothing", "/v1/policies/absent/openpi", "/v1/policies/libero/vla-eval"])
def test_unknown_paths_are_refused_with_the_right_ones_named(libero, path):
    async def refused():
        async with ws.connect(f"ws://127.0.0.1:{libero.port}{path}"):
            pass

    with pytest.raises(InvalidStatus) as caught:
        asyncio.run(refused())
    assert caught.value.response.status_code == 404
    assert b"/v1/policies/POLICY/openpi; policies: libero" in caught.value.response.body


def test_a_frame_over_the_limit_closes_with_1009(fleet):
    port = free_port()
    start_libero(fleet, port, "--max-body-mib", "0.5")

    async def send():
        async with ws.connect(f"ws://127.0.0.1:{port}", compression=None) as socket:
            await socket.recv()
            await socket.send(bytes(600_000))
            await socket.recv()

    with pytest.raises(ConnectionClosed) as caught:
        asyncio.run(send())
    assert caught.value.rcvd.code == 1009


HOSTILE = [
    b"",
    b"\xc1",
    b"\xdf\xff\xff\xff\xff",
    msgspec.msgpack.encode([1, 2]),
    msgspec.msgpack.encode({b"__ndarray__": True, b"data": bytes(8), b"dtype": "|O", b"shape": [1]}),
    encode_openpi(LIBERO | {"observation/image": np.zeros((8, 8), np.uint8)}),
    encode_openpi(LIBERO | {"observation/image": np.zeros((0, 8, 3), np.uint8)}),
    encode_openpi(LIBERO | {"observation/image": np.full((8, 8, 3), np.nan)}),
    encode_openpi(LIBERO | {"observation/other_image": np.zeros((8, 8, 3), np.uint8)}),
    encode_openpi(LIBERO | {"observation/state": np.zeros((2, 8))}),
    encode_openpi(LIBERO | {"observation/state": np.zeros(7)}),
    encode_openpi(LIBERO | {"observation/state": "zero"}),
    encode_openpi(LIBERO | {"prompt": ""}),
    encode_openpi(LIBERO | {"prompt": 3}),
    encode_openpi(LIBERO | {"prompt": "x" * 10_000}),
    "text",
]


def test_bad_frames_get_a_typed_error_and_a_good_one_after_each_succeeds(libero):
    async def talk():
        said = []
        async with ws.connect(f"ws://127.0.0.1:{libero.port}", compression=None) as socket:
            await socket.recv()
            for frame in HOSTILE:
                await socket.send(frame)
                said.append(await socket.recv())
                await socket.send(encode_openpi(LIBERO))
                assert isinstance(await socket.recv(), bytes), frame
        return said

    codes = [str(text).split(":")[0] for text in asyncio.run(talk())]
    assert codes == [
        *["invalid_body"] * 5,
        "camera_missing",
        "image_corrupt",
        "image_corrupt",
        "camera_unknown",
        *["state_invalid"] * 3,
        *["instruction_invalid"] * 3,
        "invalid_body",
    ]


def test_a_robot_that_leaves_frees_its_place(libero):
    async def leave():
        async with ws.connect(f"ws://127.0.0.1:{libero.port}", compression=None) as socket:
            await socket.recv()
            await socket.send(encode_openpi(LIBERO | {"prompt": "slow 300"}))

    asyncio.run(leave())

    gone = 'taktline_requests_total{code="client_gone",policy="libero"}'
    until(lambda: gone in httpx.get(f"{libero.url}/metrics").text, "the request being counted as gone")


def test_sigterm_answers_what_is_in_flight_then_closes(fleet):
    port = free_port()
    start_libero(fleet, port, says_ms=500)  # a slow batch of such a worker is no hung one

    async def talk():
        async with ws.connect(f"ws://127.0.0.1:{port}", compression=None) as socket:
            await socket.recv()
            await socket.send(encode_openpi(LIBERO | {"prompt": "slow 3000"}))
            on_worker = 'taktline_in_flight{policy="libero"} 1'
            until(lambda: on_worker in httpx.get(f"{fleet.url}/metrics").text, "the observation being on the worker")
            fleet.gateway.terminate()
            answer = decode(await socket.recv(), Limits())
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            return answer["actions"].shape, closed.value.rcvd.code

    assert asyncio.run(talk()) == ((10, 16), 1001)
    assert fleet.gateway.wait(timeout=20) == 0


def test_a_named_robot_may_reconnect_at_once_but_not_twice(libero):
    uri = f"ws://127.0.0.1:{libero.port}/?robot=arm-9"

    async def ask(socket):
        await socket.recv()
        await socket.send(encode_openpi(LIBERO))
        return await socket.recv()

    async def talk():
        for _ in range(3):
            async with ws.connect(uri, compression=None) as socket:
                assert isinstance(await ask(socket), bytes)
        async with ws.connect(uri, compression=None) as one, ws.connect(uri, compression=None) as other:
            assert isinstance(await ask(one), bytes)
            return await ask(other)

    assert asyncio.run(talk()).startswith("robot_conflict: ")


def test_half_a_handshake_does_not_stop_others(libero, openpi_client):
    with socket.create_connection(("127.0.0.1", libero.port)) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nUpgra")
        got = openpi_client.run("openpi_robot.py", "act", f"127.0.0.1:{libero.port}", "libero")
    assert got["answers"][0]["shape"] == [10, 16]


def test_log_lines_are_json_and_name_policy_and_robot(libero, openpi_client):
    openpi_client.run("openpi_robot.py", "errors", f"127.0.0.1:{libero.port}")
    lines = [json.loads(line) for line in libero.log.read_text().splitlines()]
    refused = [line for line in lines if line["message"] == "request_refused"]
    assert {line["policy"] for line in refused} == {"libero"}
    assert all(line["request_id"] and line["robot"].startswith(("openpi-", "arm-9")) for line in refused)
