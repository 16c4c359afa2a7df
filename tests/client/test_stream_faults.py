"""The SDK's stream where the other side reads nothing, leaves, or is overtaken: on connections that a test scripts."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import taktline
from taktline import stream_client
from taktline.access import Access
from taktline.encoding import FrameEncoder
from taktline.robot_metrics import RobotMetrics
from taktline.stream_client import StreamClient
from taktline.stream_link import NoStream
from taktline_protocol import Array, ErrorCode, Observation, TaktlineError
from taktline_protocol.limits import DEFAULT_LIMITS
from taktline_protocol.stream import Answer, Clock, Goodbye, Hello, Observe, Ping, Pong, Refusal
from taktline_protocol.stream_codec import decode_from_robot, encode_frame
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosedError

from tests.example_messages import WELCOME

STATE = np.zeros(2)
BUDGET_MS = 20_000.0


def answer(frame: Observe, off_s: float = 0.0) -> Answer:
    now = time.monotonic() + off_s
    rows = np.full((10, 2), frame.seq, np.float32).tobytes()
    times = (0.0, 0.0, 0.0, 0.0, 0.0)
    return Answer(
        frame.seq,
        now,
        now,
        frame.captured_at,
        0.02,
        frame.captured_at + 0.2,
        10,
        2,
        rows,
        times,
        1.0,
        1,
        "r",
        "w",
        "id",
    )


class SlowLink:
    """A connection on which what `waits` for says so waits until `free`, having been written."""

    def __init__(self, waits: Callable[[object], bool] = lambda frame: False) -> None:
        self.welcome = SimpleNamespace(
            resumed=False, token=b"t", held={}, pending=(), limits=SimpleNamespace(frame_bytes=2**24)
        )
        self.shown = {"authorization": "Bearer one"}
        self.gone = self.leaving = False
        self.goodbye: TaktlineError | None = None
        self.heard_at = time.monotonic()
        self.sent: list[Any] = []
        self.free = asyncio.Event()
        self._waits = waits
        self._cut = asyncio.Event()

    def listen(self, hear: Callable[[bytes], None]) -> None:
        """What is said comes by `StreamClient._hear`."""

    async def send(self, body: bytes, timeout_s: float = 0.0) -> None:
        frame = decode_from_robot(body, DEFAULT_LIMITS)
        if not isinstance(frame, Ping):
            self.sent.append(frame)
        if self._waits(frame):
            await self.free.wait()

    async def receive(self) -> bytes:
        await self._cut.wait()
        raise ConnectionClosedError(None, None)

    async def close(self) -> None:
        """Nothing to close."""

    def abort(self) -> None:
        self._cut.set()

    def observed(self) -> list[Observe]:
        return [frame for frame in self.sent if isinstance(frame, Observe)]


def stream(monkeypatch, *links: object, access: Access | None = None) -> StreamClient:
    """A client whose attempts to connect give these."""
    left = list(links)

    async def open_link(uri, access, hello):
        return left.pop(0)

    monkeypatch.setattr("taktline.stream_connecting.open_link", open_link)
    return StreamClient("http://nowhere", "p", "arm", "s", access or Access(), RobotMetrics())


async def ask(client: StreamClient, seq: int, instruction: str, shade: int = 0) -> asyncio.Task:
    frames = FrameEncoder().encode({"front": np.full((8, 8, 3), shade, np.uint8)})
    observation = Observation(
        robot_id="arm",
        session_id="s",
        seq=seq,
        captured_at=1.0,
        budget_ms=60_000.0,
        images={},
        state=Array.from_numpy(STATE),
        instruction=instruction,
    )
    asking = asyncio.create_task(client.ask(observation, frames, 60.0))
    await asyncio.sleep(0.02)
    return asking


@pytest.mark.parametrize("cancelled", [True, False])
def test_an_instruction_that_did_not_go_out_is_not_referred_to(monkeypatch, cancelled):
    """The second observation waits while the clock is told, and is cancelled there, or overtaken by the third."""

    async def scene():
        link = SlowLink(lambda frame: isinstance(frame, Clock))
        client = stream(monkeypatch, link)
        first = await ask(client, 1, "the red one")
        now = time.monotonic()
        client.clock.note(now - 0.002, now + 5.0, now + 5.0, now)
        second = await ask(client, 2, "the blue one", 1)
        assert [frame.seq for frame in link.observed()] == [1], "the clock is told first, and that waits"
        if cancelled:
            second.cancel()
        third = await ask(client, 3, "the blue one", 1)
        link.free.set()
        await asyncio.sleep(0.02)
        sent = link.observed()
        assert [frame.seq for frame in sent] == [1, 3], "of one that is late the gateway would hold nothing either"
        assert sent[1].instruction == "the blue one"
        assert list(sent[1].images) == ["front"], "nor is a frame"
        if not cancelled:
            with pytest.raises(TaktlineError) as caught:
                await second
            assert caught.value.code is ErrorCode.SUPERSEDED
        for asking in (first, second, third):
            asking.cancel()
        await client.close()

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_an_instruction_is_said_again_until_the_gateway_took_it(monkeypatch):
    """One that is refused for its key or its rate is not held, and the next one may be on its way by then."""

    async def scene():
        link = SlowLink()
        client = stream(monkeypatch, link)
        waits = [await ask(client, seq, "the red one" if seq == 1 else "the blue one") for seq in (1, 2, 3)]
        assert [frame.instruction for frame in link.observed()] == ["the red one", "the blue one", "the blue one"]
        client._hear(link, answer(link.observed()[2]), time.monotonic())
        waits.append(await ask(client, 4, "the blue one"))
        assert link.observed()[3].instruction is None
        for asking in waits:
            asking.cancel()
        await client.close()

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_an_observation_that_waited_while_its_gateway_began_to_leave_goes_to_the_next_one(monkeypatch):
    async def scene():
        first, second = SlowLink(lambda frame: isinstance(frame, Clock)), SlowLink()
        client = stream(monkeypatch, first, second)
        await client.connect(10.0)
        now = time.monotonic()
        client.clock.note(now - 0.002, now + 5.0, now + 5.0, now)
        asking = await ask(client, 1, "go")
        client._leave(first)
        await asyncio.sleep(0.02)
        first.free.set()
        await asyncio.sleep(0.02)
        assert first.observed() == []
        assert [frame.instruction for frame in second.observed()] == ["go"]
        asking.cancel()
        await client.close()

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_the_clock_of_a_gateway_that_leaves_is_not_taken_for_that_of_the_next_one(monkeypatch):
    async def scene():
        first, second = SlowLink(), SlowLink()
        client = stream(monkeypatch, first, second)
        asking = await ask(client, 1, "go")
        client._leave(first)
        await asyncio.sleep(0.02)
        assert client._connector.link is second
        now = time.monotonic()
        client._hear(first, Pong(now - 0.001, now, now), now)
        assert client.clock.estimate(now) is None
        client._hear(first, answer(first.observed()[0]), time.monotonic())
        assert client.clock.estimate(now) is None
        client._hear(second, Pong(now - 0.001, now + 1000.0, now + 1000.0), now)
        assert client.clock.estimate(now).offset_s == pytest.approx(1000.0, abs=0.01)
        await asking
        await client.close()

    asyncio.run(asyncio.wait_for(scene(), 30))


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("key", ["one", "two", "", None])
def test_a_key_that_was_rotated_is_shown_before_anybody_hears_that_the_old_one_is_unknown(
    monkeypatch, tmp_path, key, ends
):
    """By a refusal, or by the end of the connection; `None`: the file is away."""

    async def scene():
        first, second = SlowLink(), SlowLink()
        client = stream(monkeypatch, first, second, access=Access(api_key_file=str(tmp_path / "key")))
        asking = await ask(client, 1, "go")
        if key is not None:
            (tmp_path / "key").write_text(key)
        said = {"code": "unauthenticated", "message": "no such key", "next_step": "ask for one"}
        if ends:
            client._hear(first, Goodbye(**said), time.monotonic())
            first.abort()
        else:
            client._hear(first, Refusal(1, 0.0, 0.0, **said, held=True), time.monotonic())
        await asyncio.sleep(0.05)
        if key == "two":
            assert [frame.seq for frame in second.observed()] == [1]
            client._hear(second, answer(second.observed()[0]), time.monotonic())
            await asking
        else:
            with pytest.raises(TaktlineError, match="no such key"):
                await asking
        await client.close()

    asyncio.run(asyncio.wait_for(scene(), 30))


@pytest.mark.parametrize("transport", ["auto", "stream"])
def test_a_stream_that_was_there_is_not_given_up_for_ever(monkeypatch, transport):
    """A proxy without a route for a moment answers 404, too."""

    async def none_there(*_: object) -> None:
        raise NoStream("404")

    async def scene():
        links = [SlowLink(), none_there, SlowLink()]

        async def open_link(*given: object) -> SlowLink:
            link = links.pop(0)
            return await link(*given) if callable(link) else link

        monkeypatch.setattr("taktline.stream_connecting.open_link", open_link)
        robot = taktline.AsyncRobot("http://gateway", "p", "arm", transport=transport)
        await robot.connect()
        robot._stream._connector.link.gone = True
        with pytest.raises(TaktlineError, match="404") as caught:
            await robot.act({}, STATE, "go", BUDGET_MS)
        assert caught.value.code is ErrorCode.GATEWAY_UNREACHABLE
        await robot.connect()
        assert (robot.metrics.connects, robot.metrics.transport, robot.metrics.fallback) == (2, "stream", "")
        await robot.close()

    asyncio.run(asyncio.wait_for(scene(), 30))


class Gateway:
    """Reads nothing after the welcome of its first `deaf` connections; the others it serves."""

    def __init__(self, deaf: int) -> None:
        self.connections = 0
        self._deaf = deaf
        self._over = asyncio.Event()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    async def __aenter__(self) -> Gateway:
        self._server = await serve(self._serve, sock=self._listener, max_size=None, ping_interval=None)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        self._server.close()

    async def _serve(self, connection: ServerConnection) -> None:
        self.connections += 1
        assert isinstance(decode_from_robot(await connection.recv(), DEFAULT_LIMITS), Hello)
        await connection.send(encode_frame(WELCOME))
        if self.connections <= self._deaf:
            connection.transport.pause_reading()
            await self._over.wait()
            connection.transport.abort()
            return
        async for body in connection:
            frame = decode_from_robot(body, DEFAULT_LIMITS)
            if isinstance(frame, Ping):
                now = time.monotonic()
                await connection.send(encode_frame(Pong(frame.sent_at, now, now)))
            elif isinstance(frame, Observe):
                await connection.send(encode_frame(answer(frame)))


BIG = {"front": np.zeros((1700, 1700, 3), np.uint8)}
"""More than the two ends of a connection hold."""


def test_a_gateway_that_stops_reading_holds_up_neither_an_observation_nor_the_end():
    async def scene():
        async with Gateway(deaf=9) as gateway:
            robot = taktline.AsyncRobot(gateway.url, "p", "arm", transport="stream", answer_timeout_s=0.5)
            with pytest.raises(TaktlineError, match="in time") as caught:
                await asyncio.wait_for(robot.act(BIG, STATE, "go", BUDGET_MS), 10)
            assert caught.value.code is ErrorCode.GATEWAY_UNREACHABLE
            await asyncio.wait_for(robot.close(), 10)

    asyncio.run(scene())


def test_a_connection_that_takes_nothing_is_given_up_and_what_it_carried_sent_again(monkeypatch):
    monkeypatch.setattr(stream_client, "DEAD_S", 0.5)

    async def scene():
        async with (
            Gateway(deaf=1) as gateway,
            taktline.AsyncRobot(gateway.url, "p", "arm", transport="stream") as robot,
        ):
            chunk = await asyncio.wait_for(robot.act(BIG, STATE, "go", BUDGET_MS), 20)
            assert np.all(chunk.actions == 1.0)
            assert robot.metrics.connects == gateway.connections == 2

    asyncio.run(scene())
