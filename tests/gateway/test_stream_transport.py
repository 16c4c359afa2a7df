"""The stream's WebSocket under uvicorn: what comes arrives whole, in order and one by one, however it is cut."""

from __future__ import annotations

import asyncio
import random

import pytest
from taktline_gateway.frame_reader import LONG
from taktline_gateway.stream.transport import HEAR_AT_ONCE, SEND_AT_ONCE, StreamTransport
from uvicorn.config import Config
from uvicorn.server import ServerState
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri


class Wire(asyncio.Transport):
    """Takes what is written; its reading may be paused."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.paused, self.closing = b"", False, False

    def write(self, data) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


async def opened(app):
    """A transport after its handshake, its wire and the robot's end."""
    config = Config(app=app, lifespan="off", log_config=None, ws_max_size=1 << 22)
    config.load()
    made = StreamTransport(config=config, server_state=ServerState(), app_state={}, _loop=asyncio.get_running_loop())
    made.connection_made(wire := Wire())
    robot = ClientProtocol(parse_uri("ws://gateway/stream"))
    robot.send_request(robot.connect())
    made.data_received(b"".join(robot.data_to_send()))
    async with asyncio.timeout(10):
        while not wire.sent:  # noqa: ASYNC110
            await asyncio.sleep(0)
    robot.receive_data(wire.sent)
    robot.events_received()
    wire.sent = b""
    return made, wire, robot


async def feed(made, wire, data, draw) -> None:
    """Reads as a loop does: nothing while it is paused."""
    while data:
        if wire.paused:
            waiting = [len(message["bytes"]) for message in list(made.queue._queue)]
            assert sum(waiting[1:]) <= LONG, "hardly more is read before the last message was taken"
            await asyncio.sleep(0)
            continue
        room = made.reading.get_buffer(-1)
        size = min(len(room), len(data), draw.choice([1, 13, 1000, LONG, 1 << 20]))
        size = max(size, min(len(room), len(data), len(data) // 50))
        room[:size], data = data[:size], data[size:]
        made.reading.buffer_updated(size)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("seed", range(40))
async def test_messages_come_whole_in_order_and_one_by_one(seed, at_once):
    draw = random.Random(seed)
    payloads = [draw.randbytes(draw.choice([0, 1, 5, 125, 126, 700, LONG, 70_000, 200_000])) for _ in range(12)]
    pieces = []
    for payload in payloads:
        if draw.random() < 0.2:
            half = len(payload) // 2
            pieces.append(Frame(Opcode.BINARY, payload[:half], fin=False))
            pieces.append(Frame(Opcode.PING, b"amid"))
            pieces.append(Frame(Opcode.CONT, payload[half:]))
        else:
            pieces.append(Frame(Opcode.BINARY, payload))
    heard, asked = [], []
    busy = False

    def hear(body: bytes) -> bool:
        asked.append(body)
        if busy or draw.random() < 0.3:
            return False
        heard.append(body)
        return True

    async def app(scope, receive, send) -> None:
        nonlocal busy
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        if at_once:
            scope[HEAR_AT_ONCE](hear)
        while (message := await receive())["type"] == "websocket.receive":
            busy = True
            heard.append(message["bytes"])
            for _ in range(draw.choice([0, 0, 3])):
                await asyncio.sleep(0)
            busy = False

    made, wire, _ = await opened(app)
    await feed(made, wire, b"".join(piece.serialize(mask=True) for piece in pieces), draw)
    await feed(made, wire, Frame(Opcode.PING, b"").serialize(mask=True), draw)  # the last one was taken
    made.connection_lost(None)
    await asyncio.gather(*made.tasks)
    assert heard == payloads
    assert at_once or not asked


@pytest.mark.parametrize("takes", [False, True])
async def test_a_message_that_is_taken_at_once_waits_for_nobody(takes):
    heard, received = [], []

    async def app(scope, receive, send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        scope[HEAR_AT_ONCE](lambda body: heard.append(body) is None and takes)
        received.append(await receive())

    made, wire, _ = await opened(app)
    await feed(made, wire, Frame(Opcode.BINARY, b"a whole message").serialize(mask=True), random.Random(0))
    assert heard == [b"a whole message"]
    assert wire.paused is not takes
    await asyncio.sleep(0)
    made.connection_lost(None)
    await asyncio.gather(*made.tasks)
    assert received[0].get("bytes") == (None if takes else b"a whole message")


async def test_what_was_read_behind_a_message_is_looked_at_after_a_close():
    """The application leaves with the robot's next message and its close already read."""

    async def app(scope, receive, send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        assert (await receive())["bytes"] == b"first message"
        await send({"type": "websocket.close", "code": 1000})

    made, wire, robot = await opened(app)
    robot.send_binary(b"first message")
    robot.send_binary(b"one that nobody takes")
    robot.send_close(1000)
    await feed(made, wire, b"".join(robot.data_to_send()), random.Random(0))
    await asyncio.gather(*made.tasks)
    assert made.conn.close_rcvd is not None
    assert wire.closing


async def test_a_message_is_sent_at_once_where_it_need_not_wait():
    told = []

    async def app(scope, receive, send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        told.append(scope[SEND_AT_ONCE])
        await receive()

    made, wire, robot = await opened(app)
    (send_at_once,) = told
    payloads = [bytes([size % 251]) * size for size in (0, 125, 126, 65_535, 65_536)]
    assert all(map(send_at_once, payloads))
    robot.receive_data(wire.sent)
    assert [bytes(frame.data) for frame in robot.events_received()] == payloads
    wire.sent = b""
    made.pause_writing()
    assert not send_at_once(b"the robot reads nothing")
    made.resume_writing()
    wire.closing = True
    assert not send_at_once(b"it is gone")
    wire.closing = False
    robot.send_close(1000)
    made.data_received(b"".join(robot.data_to_send()))
    wire.sent = b""
    assert not send_at_once(b"it has said goodbye")
    assert not wire.sent
    made.connection_lost(None)
    await asyncio.gather(*made.tasks)
