"""Keep-alive pings under load: they end the connection of a client that is gone, and of nobody who waits for an answer.

A speech server lost 16 of its 20 clients to a ping timeout of 20 s while its GPU was busy (modelscope/FunASR#3533), an
openpi server those whose first inference compiled (XPolicyLab/XPolicyLab#77). Here pings go both ways every few seconds
while one batch takes several times as long and others ask on.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import numpy as np
import pytest
from taktline_gateway.compat.wire_arrays import encode_openpi
from taktline_protocol.stream import Ack, Answer, Backpressure, Hello, Observe, Welcome
from taktline_protocol.stream_codec import decode_from_gateway, encode_frame
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.gateway.stream_robot import STATE, raw_frame
from tests.ports import free_port

PING_S = 2.0
INFERENCE_S = 7.0
ROBOTS = 4
"""Over each protocol; all of them fit one batch."""
PROGRAM = f"""
import sys
from taktline_gateway import server
from taktline_gateway.compat import openpi
server.PING_S = openpi.KEEPALIVE_S = {PING_S}
from taktline_gateway.cli import main
sys.exit(main())
"""
PIXELS = np.zeros((8, 8, 3), np.uint8)


@pytest.fixture
def stack(bare_stack, monkeypatch):
    """A gateway whose own pings are as frequent as the clients', with a port for openpi."""
    made = bare_stack
    made.openpi = free_port()
    run = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **rest: run([sys.executable, "-c", PROGRAM, *command[1:]], **rest)
    )
    made.write_routes("127.0.0.1:1")
    made.start_gateway("--openpi-listen", f"127.0.0.1:{made.openpi}")
    monkeypatch.undo()
    worker = made.start_worker(t_sync=f"1:{1e3 * INFERENCE_S:g},8:{1e3 * INFERENCE_S:g}")
    made.write_routes(worker, clients={"openpi": {"control_hz": 0.1}})  # whose deadlines are inferred from that
    made.wait_workers(1)
    return made


def openpi_frame() -> bytes:
    return encode_openpi({"front": PIXELS, "wrist": PIXELS, "state": np.zeros(6), "prompt": "go"})


async def openpi_robot(stack) -> bool:
    async with connect(
        f"ws://127.0.0.1:{stack.openpi}", ping_interval=PING_S, ping_timeout=PING_S, compression=None
    ) as socket:
        await socket.recv()
        await socket.send(openpi_frame())
        return isinstance(await socket.recv(), bytes)


async def stream_robot(stack, name: str) -> bool:
    url = f"{stack.url.replace('http', 'ws', 1)}/v1/policies/scripted/stream"
    async with connect(url, ping_interval=PING_S, ping_timeout=PING_S, compression=None) as socket:
        await socket.send(encode_frame(Hello((1,), name, f"session of {name}")))
        assert isinstance(decode_from_gateway(await socket.recv()), Welcome)
        now = time.monotonic()
        images = {"front": raw_frame(b"front--0"), "wrist": raw_frame(b"wrist--0")}
        budget_ms = 20e3 * INFERENCE_S
        await socket.send(encode_frame(Observe(1, now, now, budget_ms, STATE, images, instruction="go")))
        while isinstance(frame := decode_from_gateway(await socket.recv()), Ack | Backpressure):
            pass
        return isinstance(frame, Answer)


def test_keep_alive_closes_no_connection_whose_inference_is_long(stack):
    async def all_at_once() -> tuple[list, float]:
        began = time.monotonic()
        robots = [openpi_robot(stack) for _ in range(ROBOTS)] + [stream_robot(stack, f"arm{n}") for n in range(ROBOTS)]
        return await asyncio.gather(*robots, return_exceptions=True), time.monotonic() - began

    said, took_s = asyncio.run(all_at_once())
    assert said == [True] * (2 * ROBOTS), "everybody waited for a long batch and got its answer on its connection"
    assert took_s > 3 * PING_S


def test_keep_alive_ends_a_client_that_answers_no_ping(stack):
    """So the pings above were there, and would have closed what they must."""

    async def silent(url: str) -> bool:
        async with connect(url, ping_interval=None, compression=None) as socket:
            socket.transport.pause_reading()
            await asyncio.sleep(4 * PING_S)
            socket.transport.resume_reading()
            try:
                while True:
                    await socket.recv()
            except ConnectionClosed as closed:
                return closed.rcvd is None or closed.rcvd.code == 1011

    for url in (f"ws://127.0.0.1:{stack.openpi}", f"{stack.url.replace('http', 'ws', 1)}/v1/policies/scripted/stream"):
        assert asyncio.run(silent(url))
