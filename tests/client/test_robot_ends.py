"""How a robot's calls end where no answer comes: closed meanwhile, a stalled network, another event loop, a proxy."""

from __future__ import annotations

import asyncio
import gc
import socket
import time

import numpy as np
import pytest
import taktline
from taktline import http_client, stream_client
from taktline_protocol import ErrorCode, TaktlineError

from tests.client.cut_proxy import CutProxy

FRAME = np.zeros((8, 8, 3), dtype=np.uint8)
IMAGES = {"front": FRAME, "wrist": FRAME}
STATE = np.zeros(6)
BUDGET_MS = 20_000.0


@pytest.mark.parametrize("transport", ["auto", "http"])
def test_who_waits_while_the_robot_is_closed_is_told_that(transport, caplog):
    """No connection comes, as nobody answers at the address; what was said of it twice is nobody's fault to log."""
    caplog.set_level("ERROR", logger="asyncio")

    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            robot = taktline.AsyncRobot(url, "scripted", "arm", transport=transport)
            asked = asyncio.create_task(robot.act(IMAGES, STATE, "go", 60_000.0))
            await asyncio.sleep(0.2)
            await robot.close()
            with pytest.raises(TaktlineError, match="was closed") as said:
                await asyncio.wait_for(asked, 10)
            assert said.value.code is ErrorCode.CANCELLED

    asyncio.run(scene())
    gc.collect()
    assert [record.message for record in caplog.records] == []


@pytest.mark.parametrize("transport", ["stream", "http"])
def test_an_answer_is_waited_for_no_longer_than_it_is_of_use(transport, stack, monkeypatch):
    """A network that swallows everything, with the usual half a minute for an answer and a budget of 0.3 s."""
    for module in (http_client, stream_client):
        monkeypatch.setattr(module, "LATE_S", 1.0)
    monkeypatch.setattr(stream_client, "DEAD_S", 20.0)
    proxy = CutProxy(stack.url)
    with taktline.Robot(proxy.url, "scripted", f"arm at {transport}", transport=transport) as robot:
        robot.act(IMAGES, STATE, "go", BUDGET_MS)
        proxy.swallow = True
        began = time.monotonic()
        with pytest.raises(TaktlineError, match="in time") as said:
            robot.act(IMAGES, STATE, "go", 300.0)
        assert said.value.code is ErrorCode.GATEWAY_UNREACHABLE
        assert 1.0 < time.monotonic() - began < 15
        proxy.swallow = False
        proxy.cut()
    proxy.close()


@pytest.mark.parametrize("transport", ["auto", "http"])
def test_an_async_robot_on_a_second_event_loop_says_what_to_do(stack, transport):
    robot = taktline.AsyncRobot(stack.url, "scripted", f"arm of two loops, {transport}", transport=transport)

    async def ask() -> None:
        await robot.act(IMAGES, STATE, "go", BUDGET_MS)

    asyncio.run(ask())
    with pytest.raises(TaktlineError, match="another event loop") as said:
        asyncio.run(ask())
    assert said.value.code is ErrorCode.CONFIG_INVALID
    robot._open.clear()  # its loops are closed; nobody need hear that it was not


def test_a_proxy_of_the_environment_that_cannot_be_used_is_said(monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")  # its kind needs a package that the SDK does not bring
    robot = taktline.Robot("http://gateway:8080", "scripted", "arm", transport="http")
    for ask in (robot.info, lambda: robot.act(IMAGES, STATE, "go", BUDGET_MS)):
        with pytest.raises(TaktlineError, match="proxy") as said:
            ask()
        assert said.value.code is ErrorCode.CONFIG_INVALID
        assert "NO_PROXY" in said.value.next_step
