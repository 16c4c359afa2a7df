"""How a robot's calls end where no answer comes: closed meanwhile, a stalled network, another event loop, a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import taktline
from taktline import http_client, stream_client
from taktline_protocol import ErrorCode, TaktlineError

from tests.client.cut_proxy import CutProxy
from tests.gateway.certificates import Authority
from tests.gateway.conftest import Stack

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


@pytest.mark.parametrize("transport", ["stream", "http"])
def test_a_robot_that_is_shed_is_told_what_is_safe(stack, transport):
    """By the gateway, whichever way it was asked; and by its own end where there is none."""
    with taktline.Robot(stack.url, "scripted", f"arm that is shed, {transport}", transport=transport) as robot:
        robot.act(IMAGES, STATE, "go", BUDGET_MS)
        with pytest.raises(TaktlineError) as late:
            robot.act(IMAGES, STATE, "go", 1.0)
        assert late.value.code in (ErrorCode.DEADLINE_UNREACHABLE, ErrorCode.DEADLINE_EXPIRED)
        assert late.value.safe_action == "hold", "less than one control period is nothing"
        assert late.value.buffer_ms is not None
        with pytest.raises(TaktlineError) as wrong:
            robot.act({}, STATE, "go", BUDGET_MS)
        assert wrong.value.safe_action is None, "a faulty request is no matter of time"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with taktline.Robot(f"http://127.0.0.1:{port}", "scripted", "arm", transport=transport) as robot:
        with pytest.raises(TaktlineError) as nobody:
            robot.act(IMAGES, STATE, "go", 300.0)
        assert nobody.value.code is ErrorCode.GATEWAY_UNREACHABLE
        # Over HTTP that is known at once; a stream is tried again until the budget is spent.
        assert nobody.value.safe_action == ("continue" if transport == "http" else "hold")


@pytest.mark.parametrize("transport", ["stream", "http"])
def test_a_wait_that_the_robots_own_timeout_ended_names_it(transport, stack):
    """The gateway may have been at work all the time, as at a long plan: to look for a dead one leads nowhere."""
    proxy = CutProxy(stack.url)
    proxy.swallow = True
    try:
        with taktline.Robot(proxy.url, "scripted", "arm", transport=transport, answer_timeout_s=0.5) as robot:
            with pytest.raises(TaktlineError) as said:
                robot.act(IMAGES, STATE, "go", BUDGET_MS)
            assert "answer_timeout_s is 0.5 s" in said.value.next_step
        with taktline.Robot(proxy.url, "scripted", "arm", transport=transport) as robot:
            with pytest.raises(TaktlineError) as said:
                robot.act(IMAGES, STATE, "go", 100.0)
            assert "answer_timeout_s" not in said.value.next_step
    finally:
        proxy.close()


def test_the_first_worker_is_waited_for(tmp_path):
    """A robot that is started before its policy finds sizes of nothing, unless it waits."""
    stack = Stack(tmp_path)
    try:
        stack.write_routes("127.0.0.1:9")
        stack.start_gateway()
        with taktline.Robot(stack.url, "scripted", "arm") as robot:
            info = robot.info()
            assert (info.ready, info.dt_s) == (False, 0.0)
            with pytest.raises(TaktlineError, match=r"robot\.info\(wait_s=60\)"):
                taktline.Player(robot.ask, info.dt_s)
            with pytest.raises(TaktlineError, match=r"within 0\.7 s") as said:
                robot.info(wait_s=0.7)
            assert said.value.code is ErrorCode.WORKER_UNAVAILABLE
            threading.Timer(1.0, lambda: stack.write_routes(stack.start_worker())).start()
            assert robot.info(wait_s=60.0).dt_s > 0.0
    finally:
        stack.stop()


@pytest.mark.parametrize("swallow", [False, True])
def test_a_gateway_that_comes_later_is_waited_for(stack, caplog, swallow):
    """A robot that is started before its gateway, as at the boot of a cell, must not end before it began."""
    proxy = CutProxy(stack.url)
    proxy.accepting, proxy.swallow = swallow, swallow
    try:
        with taktline.Robot(proxy.url, "scripted", "arm") as robot:
            began = time.monotonic()
            with pytest.raises(TaktlineError) as said:
                robot.info(wait_s=0.7)
            assert said.value.code is ErrorCode.GATEWAY_UNREACHABLE
            assert time.monotonic() - began < 5.0
            assert "waits up to 0.7 s for its gateway" in caplog.text

            def comes() -> None:
                proxy.accepting, proxy.swallow = True, False
                proxy.cut()

            threading.Timer(1.0, comes).start()
            assert robot.info(wait_s=60.0).ready
    finally:
        proxy.close()


def test_a_policy_of_another_name_is_not_waited_for(stack):
    with taktline.Robot(stack.url, "scribbled", "arm") as robot, pytest.raises(TaktlineError) as said:
        robot.info(wait_s=60.0)
    assert said.value.code is ErrorCode.UNKNOWN_POLICY


@contextlib.contextmanager
def speaks_tls(certificate: Path, key: Path) -> Iterator[int]:
    """The port of a server that shows this certificate, and hangs up."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def begin() -> asyncio.Server:
        return await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)

    server = asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)


@pytest.mark.parametrize("transport", ["stream", "http"])
def test_what_is_wrong_between_http_and_https_is_said_with_what_to_do(stack, transport, tmp_path):
    authority = Authority(tmp_path, "factory")
    trusted = taktline.Access(ca_file=str(authority.ca))

    def step(url: str, access: taktline.Access) -> str:
        with taktline.Robot(url, "scripted", "arm", transport=transport, access=access) as robot:
            with pytest.raises(TaktlineError) as said:
                robot.act(IMAGES, STATE, "go", 500.0)
            assert said.value.code is ErrorCode.GATEWAY_UNREACHABLE
            return said.value.next_step

    with speaks_tls(*authority.issue("gateway", "127.0.0.1")) as port:
        assert "TAKTLINE_CA_FILE" in step(f"https://127.0.0.1:{port}", taktline.Access())
        assert "TAKTLINE_CLIENT_CERT" in step(f"https://127.0.0.1:{port}", trusted)
        assert "use https://" in step(f"http://127.0.0.1:{port}", taktline.Access())
    with speaks_tls(*authority.issue("other", "elsewhere.example")) as port:
        assert "host that its certificate is for" in step(f"https://127.0.0.1:{port}", trusted)
    assert "use http://" in step(stack.url.replace("http:", "https:"), trusted)
