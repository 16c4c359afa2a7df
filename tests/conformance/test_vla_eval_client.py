"""The published vla-eval harness's connection, unmodified, against the gateway."""

from __future__ import annotations

import asyncio
import time

import httpx
import msgspec
import numpy as np
import pytest
import websockets.asyncio.client as ws
from taktline_gateway.compat.wire_arrays import encode_vla_eval

from .conftest import free_port, until


@pytest.fixture(scope="module")
def harness(shared_fleet):
    """Policy `whole` plays its chunk to the end, `four` asks anew after four steps; both on one port."""
    shared_fleet.port = free_port()
    shared_fleet.route("whole", shared_fleet.worker("whole"), control_budget_ms=5000)
    mapping = {"execute_steps": 4, "metadata": {"send_wrist_image": True, "send_state": True}}
    shared_fleet.route("four", shared_fleet.worker("four"), control_budget_ms=5000, clients={"vla-eval": mapping})
    shared_fleet.start("--vla-eval-listen", f"whole=127.0.0.1:{shared_fleet.port}")
    shared_fleet.wait_ready("whole")
    shared_fleet.wait_ready("four")
    return shared_fleet


@pytest.mark.parametrize(("image_format", "wrist"), [("png", 1000 + 0x89), ("jpeg", 1000 + 0xFF), ("raw", 40)])
def test_episode_gets_one_action_a_step_from_a_held_chunk(harness, vla_eval_client, image_format, wrist):
    got = vla_eval_client.run("vla_eval_harness.py", "episode", f"ws://127.0.0.1:{harness.port}", image_format, "12")
    assert got["server"]["protocol_version"] == 1
    assert got["server"]["model_server"] == "taktline/whole"
    assert got["server"]["observation_params"] == {}
    assert [action[-1] for action in got["actions"]] == [*range(10), 0, 1]
    assert got["actions"][0][:8] == [*range(8)]
    assert got["actions"][0][9:11] == [wrist, 2]
    # A new episode never plays what is left of the last one's chunk.
    assert got["again"][10] == len("other words")
    assert got["again"][-1] == 0


def test_execute_steps_and_observation_parameters_of_the_route(harness, vla_eval_client):
    url = f"ws://127.0.0.1:{harness.port}/v1/policies/four/vla-eval"
    got = vla_eval_client.run("vla_eval_harness.py", "episode", url, "raw", "6")
    assert got["server"]["observation_params"] == {"send_wrist_image": True, "send_state": True}
    assert [action[-1] for action in got["actions"]] == [0, 1, 2, 3, 0, 1]


def test_errors_do_not_end_the_connection(harness, vla_eval_client):
    got = vla_eval_client.run("vla_eval_harness.py", "errors", f"ws://127.0.0.1:{harness.port}")
    codes = ["camera_missing", "worker_failed", "image_corrupt", "instruction_invalid"]
    for code, said in zip(codes, got["said"], strict=True):
        assert f"observation_failed: {code}: " in said
    assert got["after"][10] == len("fine")


def test_real_time_client_gets_answers_while_it_sends_on(harness, vla_eval_client):
    got = vla_eval_client.run("vla_eval_harness.py", "live", f"ws://127.0.0.1:{harness.port}", "40")
    assert len(got) > 10  # the chunk of the first answer is played for the newest observations
    assert [action[-1] for action in got][:10] == [*range(10)]


def test_health_and_no_configuration_over_http(harness):
    """GET /config?key=value changes the reference server without any authentication; here it does not exist."""
    answer = httpx.get(f"http://127.0.0.1:{harness.port}/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert answer.headers["content-type"] == "application/json"
    for path in ("/config", "/config?max_batch_size=8"):
        assert httpx.get(f"http://127.0.0.1:{harness.port}{path}").status_code >= 400


def message(kind, payload, seq):
    return encode_vla_eval({"type": kind, "payload": payload, "seq": seq, "timestamp": 1.0})


def test_bad_messages_get_an_error_and_the_connection_goes_on(harness):
    frames = [
        b"\xc1",
        "text",
        msgspec.msgpack.encode({"type": "hello", "payload": {}}),
        message("shutdown", {}, 1),
        message("hello", {}, "1"),
        message("observation", [], 1),
        message("observation", {"images": {"agentview": {"__image__": True, "format": "bmp", "data": b"BM"}}}, 1),
    ]

    async def talk():
        async with ws.connect(f"ws://127.0.0.1:{harness.port}", compression=None) as socket:
            answers = []
            for frame in frames:
                await socket.send(frame)
                answers.append(msgspec.msgpack.decode(await socket.recv()))
            await socket.send(message("hello", {}, 9))
            return answers, msgspec.msgpack.decode(await socket.recv())

    answers, hello = asyncio.run(talk())
    assert [answer["type"] for answer in answers] == ["error"] * len(frames)
    assert all("invalid_body" in answer["payload"]["error"] for answer in answers)
    assert (hello["type"], hello["seq"]) == ("hello", 9)


def test_a_png_bomb_is_refused_by_its_header(harness):
    header = b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR" + (50_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    bomb = {"__image__": True, "format": "png", "data": header + bytes(4) + b"\x00\x00\x00\x00IEND\xaeB`\x82"}
    payload = {
        "images": {"agentview": bomb, "wrist": np.zeros((8, 8, 3), np.uint8)},
        "task_description": "go",
        "state": np.zeros(8),
    }

    async def talk():
        async with ws.connect(f"ws://127.0.0.1:{harness.port}", compression=None) as socket:
            await socket.send(message("observation", payload, 1))
            return msgspec.msgpack.decode(await socket.recv())

    answer = asyncio.run(talk())
    assert answer["seq"] == 1
    assert "image_too_large" in answer["payload"]["error"]


def test_cold_start_holds_the_hello(fleet, vla_eval_client):
    port, address = free_port(), f"127.0.0.1:{free_port()}"
    fleet.route("whole", address, control_budget_ms=5000)
    fleet.start("--vla-eval-listen", f"127.0.0.1:{port}")
    client = vla_eval_client.start("vla_eval_harness.py", "episode", f"ws://127.0.0.1:{port}", "raw", "1")
    until(lambda: "client_connected" in fleet.log.read_text(), "the harness connecting")
    time.sleep(0.5)
    fleet.worker("whole", address)
    assert len(vla_eval_client.result(client)["actions"]) == 1
