"""What is asked over HTTP once more, or after the stream: with the key of now and the time that is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
import numpy as np
import pytest
import taktline
from taktline.access import Access
from taktline.stream_link import NoStream
from taktline_protocol import Array, ErrorCode, TaktlineError
from taktline_protocol.codecs import MediaType, decode_observation, encode
from taktline_protocol.messages import ActionChunk, Timings

STATE = np.zeros(2)
BUDGET_MS = 20_000.0


async def over_http(robot: taktline.AsyncRobot, answers: Callable[[httpx.Request], httpx.Response]) -> None:
    """Lets `answers` answer the requests of a robot."""
    http = robot._over_http()
    await http._http.aclose()
    http._http = httpx.AsyncClient(
        base_url="http://gateway", headers=http._http.headers, transport=httpx.MockTransport(answers)
    )


def chunk_of(request: httpx.Request) -> httpx.Response:
    asked = decode_observation(request.content, MediaType.MSGPACK)
    made = ActionChunk(
        robot_id=asked.robot_id,
        policy="p",
        seq=asked.seq,
        captured_at=asked.captured_at,
        actions=Array.from_numpy(np.zeros((10, 2), np.float32)),
        dt_s=0.02,
        valid_until=asked.captured_at + 0.2,
        timings=Timings(observe_ms=0.0, transfer_ms=0.0, queue_ms=0.0, inference_ms=0.0, actuate_ms=0.0),
        margin_ms=1.0,
        batch_size=1,
        revision="r",
        worker="w",
        request_id="id",
    )
    body = encode(made, MediaType.MSGPACK)
    return httpx.Response(200, content=body, headers={"content-type": MediaType.MSGPACK.value})


def refused(code: ErrorCode, status: int) -> httpx.Response:
    return httpx.Response(status, json={"code": code.value, "message": "no such key", "next_step": "n"})


def test_a_key_that_was_rotated_is_shown_over_http(tmp_path):
    key = tmp_path / "key"
    key.write_text("one")
    shown = []

    def answers(request: httpx.Request) -> httpx.Response:
        shown.append(request.headers["authorization"])
        known = shown[-1] == "Bearer two"
        return chunk_of(request) if known else refused(ErrorCode.UNAUTHENTICATED, 401)

    async def scene():
        access = Access(api_key_file=str(key))
        async with taktline.AsyncRobot("http://gateway", "p", "arm", transport="http", access=access) as robot:
            await over_http(robot, answers)
            with pytest.raises(TaktlineError, match="no such key"):
                await robot.act({}, STATE, "go", BUDGET_MS)
            key.write_text("two\n")
            await robot.act({}, STATE, "go", BUDGET_MS)
            await robot.act({}, STATE, "go", BUDGET_MS)

    asyncio.run(scene())
    assert shown == ["Bearer one", "Bearer one", "Bearer two", "Bearer two"]


def test_what_an_idle_connection_lost_is_sent_again_with_the_time_that_is_left():
    asked = []

    def answers(request: httpx.Request) -> httpx.Response:
        asked.append(decode_observation(request.content, MediaType.MSGPACK))
        if len(asked) == 1:
            time.sleep(0.05)
            raise httpx.RemoteProtocolError("the server hung up")
        return chunk_of(request)

    async def scene():
        async with taktline.AsyncRobot("http://gateway", "p", "arm", transport="http") as robot:
            await over_http(robot, answers)
            await robot.act({}, STATE, "go", BUDGET_MS)
            assert robot.metrics.resent == 1

    asyncio.run(scene())
    assert asked[1].budget_ms <= asked[0].budget_ms - 50.0
    assert asked[1].sent_at - asked[0].sent_at == pytest.approx(1e-3 * (asked[0].budget_ms - asked[1].budget_ms))


def test_the_time_that_passed_until_there_was_no_stream_is_off_the_budget_over_http(monkeypatch):
    asked = []

    def answers(request: httpx.Request) -> httpx.Response:
        asked.append(decode_observation(request.content, MediaType.MSGPACK))
        return chunk_of(request)

    async def none_there(*_: object) -> None:
        await asyncio.sleep(0.05)
        raise NoStream("404")

    monkeypatch.setattr("taktline.stream_connecting.open_link", none_there)

    async def scene():
        async with taktline.AsyncRobot("http://gateway", "p", "arm") as robot:
            await over_http(robot, answers)
            await robot.act({}, STATE, "go", BUDGET_MS)
            assert robot.metrics.transport == "http"

    asyncio.run(scene())
    assert asked[0].budget_ms <= BUDGET_MS - 50.0
