"""Connections that say nothing, too little or too slowly, and too many of them, on every port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import struct
import time

import grpc
import httpx
import pytest
import taktline_gateway.connections
from taktline_gateway.compat.fenced_connection import counted
from taktline_gateway.compat.lerobot import SERVICE
from taktline_gateway.connections import BoundedLoop, ConnectionCounts
from taktline_protocol.codecs import MediaType, encode
from taktline_protocol.stream import VERSIONS, Hello
from taktline_protocol.stream_codec import encode_frame
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.gateway.certificates import Authority
from tests.gateway.conftest import free_port, until

UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
LONG = b"\x82\xff" + struct.pack(">Q", 200_000) + b"\0\0\0\0"
"""The head of a message that is not to end."""
PIECE = b"\x02\x81\0\0\0\0x"
"""The first piece of a message, whole in itself."""
MORE = b"\x00\x81\0\0\0\0x"


@contextlib.asynccontextmanager
async def listener(counts: ConnectionCounts, message_timeout_s: float = 60.0):
    """A server whose connections are those of openpi's and vla-eval's ports; it sends every message back."""

    async def echo(connection) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await connection.send(await connection.next_message())

    made = counted(counts, message_timeout_s)
    async with serve(echo, "127.0.0.1", 0, create_connection=made, compression=None, close_timeout=0.2) as server:
        yield server.sockets[0].getsockname()[1]


async def became(condition, what: str) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.01)


async def test_one_connection_too_many_is_refused_and_another_comes_in_its_place():
    counts = ConnectionCounts(most=10, most_by_address=2)
    async with listener(counts) as port:
        url = f"ws://127.0.0.1:{port}"
        async with connect(url) as first, connect(url) as second:
            with pytest.raises(InvalidStatus) as refused:
                await connect(url)
            assert refused.value.response.status_code == 503
            assert b"--max-connections" in refused.value.response.body
            await second.close()
            await became(lambda: counts.total == 1, "the end of one connection")
            async with connect(url) as third:
                for client in (first, third):
                    await client.send("still served")
                    assert await client.recv() == "still served"
        await became(lambda: counts.total == 0, "the end of all connections")
        assert not counts.by_address


@pytest.mark.parametrize(
    ("begin", "trickle"), [(LONG, b"\0"), (PIECE, MORE), (PIECE, b"\x89\x80\0\0\0\0")], ids=["bytes", "pieces", "pings"]
)
async def test_a_message_that_does_not_end_ends_its_connection(begin, trickle, caplog):
    counts = ConnectionCounts(10, 10)
    async with listener(counts, message_timeout_s=0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(UPGRADE)
        assert b"101" in await reader.readuntil(b"\r\n\r\n")
        writer.write(begin)

        async def go_on() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(trickle)
                    await writer.drain()
                    await asyncio.sleep(0.02)

        going_on = asyncio.create_task(go_on())
        # What it says at the end may be lost, as the client goes on sending.
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                while await reader.read(65536):
                    pass
        await became(lambda: counts.total == 0, "the end of the connection")
        assert [record.message for record in caplog.records if "fenced" in record.name] == ["slow_message"]
        going_on.cancel()
        await asyncio.gather(going_on, return_exceptions=True)
        writer.close()


async def test_who_is_silent_between_messages_or_sends_many_is_left_alone():
    bounded = listener(ConnectionCounts(10, 10), message_timeout_s=1.0)
    async with bounded as port, connect(f"ws://127.0.0.1:{port}") as client:
        for _ in range(3):
            for size in (10, 100_000, 10):
                await client.send(b"x" * size)
                assert len(await client.recv()) == size
            await client.send([b"in ", b"pieces"])
            assert await client.recv() == b"in pieces"
            await asyncio.sleep(1.1)  # longer than a message may take


def test_a_tls_handshake_that_does_not_come_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(taktline_gateway.connections, "HANDSHAKE_TIMEOUT_S", 0.2)
    authority = Authority(tmp_path, "factory")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("gateway", "127.0.0.1"))

    async def wait_for_the_end() -> bytes:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=context)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            async with asyncio.timeout(50):  # uvloop's own limit is 60 s
                said = await reader.read()
            writer.close()
            return said

    with asyncio.Runner(loop_factory=BoundedLoop) as runner:
        assert runner.run(wait_for_the_end()) == b""


def test_all_ports_share_the_bound_and_none_waits_for_ever_for_a_first_word(bare_stack):
    stack = bare_stack
    ports = {name: free_port() for name in ("openpi", "vla-eval", "lerobot", "groot")}
    stack.write_routes(stack.start_worker())
    listens = [part for name, port in ports.items() for part in (f"--{name}-listen", f"127.0.0.1:{port}")]
    stack.start_gateway("--max-connections", "8", *listens)
    stack.wait_workers(1)
    ports["http"] = int(stack.url.rsplit(":", 1)[1])
    held = [socket.create_connection(("127.0.0.1", ports["openpi"]), timeout=120) for _ in range(8)]

    def status() -> int:
        with httpx.Client() as client:
            return client.get(f"{stack.url}/healthz").status_code

    def full() -> bool:
        if status() == 503:
            return True
        # The question itself may have taken the last place, and one of these have been refused for it.
        held.append(socket.create_connection(("127.0.0.1", ports["openpi"]), timeout=120))
        return False

    until(full, "the openpi port's connections being counted")
    for connection in held:
        connection.close()
    until(lambda: status() == 200, "the end of those connections")
    silent = [socket.create_connection(("127.0.0.1", port), timeout=120) for port in ports.values()]
    for connection in silent:
        with connection:
            while connection.recv(65536):  # some ports say something first, or why they close
                pass
    assert stack.act()[0] == 200


def test_groots_connections_are_counted_with_all_others_and_too_many_are_cut(bare_stack):
    stack = bare_stack
    port = free_port()
    stack.write_routes(stack.start_worker())
    stack.start_gateway("--max-connections", "8", "--groot-listen", f"127.0.0.1:{port}")
    http = int(stack.url.rsplit(":", 1)[1])

    def greeted(connection: socket.socket) -> bool:
        """Whether ZeroMQ's greeting has been exchanged on it and it is open still."""
        try:
            connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
            connection.settimeout(60)
            return bool(connection.recv(64))
        except OSError:
            return False

    def refused_by_http() -> bool:
        with httpx.Client() as client:
            return client.get(f"http://127.0.0.1:{http}/healthz").status_code == 503

    def cut(connection: socket.socket) -> bool:
        connection.settimeout(60)
        try:
            while connection.recv(65536):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True

    held = []

    def full() -> bool:
        held.append(socket.create_connection(("127.0.0.1", port), timeout=120))
        greeted(held[-1])
        return len(held) > 8 and refused_by_http()

    until(full, "groot's connections filling the bound")
    assert cut(socket.create_connection(("127.0.0.1", port), timeout=120)), "one more is cut"
    assert "connection_refused" in stack.log.read_text()
    for connection in held:
        connection.close()
    until(lambda: not refused_by_http(), "the end of those connections")
    stack.wait_workers(1)
    assert stack.act()[0] == 200


def test_lerobots_port_refuses_one_connection_too_many_and_serves_another_in_its_place(bare_stack):
    stack = bare_stack
    port = free_port()
    stack.write_routes(stack.start_worker())
    stack.start_gateway("--max-connections", "2", "--lerobot-listen", f"127.0.0.1:{port}")

    def ready(channel: grpc.Channel) -> bool:
        try:
            _, call = channel.unary_unary(f"/{SERVICE}/Ready").with_call(b"", timeout=60)
        except grpc.RpcError as error:
            return error.code() is not grpc.StatusCode.UNAVAILABLE
        return call.code() is grpc.StatusCode.OK

    def channel() -> grpc.Channel:
        # A connection of its own each, and tried again at once.
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100))
        return grpc.insecure_channel(f"127.0.0.1:{port}", (*options, ("grpc.max_reconnect_backoff_ms", 100)))

    first, second, third = channel(), channel(), channel()
    until(lambda: ready(first), "the port answering")
    assert ready(second)
    assert not ready(third)
    assert ready(first), "those who are in are not disturbed"
    second.close()
    until(lambda: ready(third), "the place being free")
    assert not ready(channel())
    for one in (first, third):
        one.close()


def end_in_order(connection: socket.socket) -> None:
    connection.close()


def end_at_once(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def census(stack) -> dict:
    """What the gateway holds at the moment."""
    seen = len(stack.log.read_text().splitlines())
    stack.gateway.send_signal(signal.SIGUSR1)

    def told() -> dict | None:
        whole = stack.log.read_text().rpartition("\n")[0]  # a line may be half written
        lines = [json.loads(line) for line in whole.splitlines()[seen:] if '"census"' in line]
        return lines[-1] if lines else None

    return until(told, "the census")


@pytest.mark.parametrize("end", [end_in_order, end_at_once])
def test_clients_that_go_amid_a_message_leave_nothing_behind(bare_stack, end):
    stack = bare_stack
    ports = {name: free_port() for name in ("openpi", "vla-eval", "lerobot", "groot")}
    stack.write_routes(stack.start_worker())
    listens = [part for name, port in ports.items() for part in (f"--{name}-listen", f"127.0.0.1:{port}")]
    stack.start_gateway(*listens)
    stack.wait_workers(1)
    http = int(stack.url.rsplit(":", 1)[1])
    assert stack.act()[0] == 200

    def holds() -> dict[str, int]:
        found = census(stack)
        return {
            "connections": found["connections"],
            "requests": found["requests"],
            "unanswered": sum(found["unanswered"].values()),
            "tasks": found["task_count"],
            "files": len(os.listdir(f"/proc/{stack.gateway.pid}/fd")),
        }

    before = holds()
    body = encode(stack.observation(), MediaType.MSGPACK)
    hello = encode_frame(Hello(VERSIONS, "arm", "session", 0, 0, b"", "test"))
    stream = UPGRADE.replace(b"GET / ", b"GET /v1/policies/scripted/stream ")
    post = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/%s\r\nContent-Length: %d\r\n\r\n"
    halves = [
        (http, post % (b"/v1/policies/scripted/act", b"msgpack", len(body)) + body[: len(body) // 2]),
        (http, post % (b"/v1/policies/scripted/act", b"msgpack", len(body)) + body),
        (http, post % (b"/v2/models/scripted/infer", b"json", 5_000) + b"{"),
        (http, stream + b"\x82" + bytes([0x80 | len(hello)]) + bytes(4) + hello + LONG + bytes(100_000)),
        (ports["openpi"], UPGRADE + LONG + bytes(100_000)),
        (ports["vla-eval"], UPGRADE + LONG + bytes(100_000)),
        (ports["lerobot"], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"),
        (ports["groot"], b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL"),
    ]
    for _ in range(10):
        for port, half in halves:
            connection = socket.create_connection(("127.0.0.1", port), timeout=60)
            connection.sendall(half)
            end(connection)

    def let_go() -> bool:
        # A few may come and go by themselves; each kind of client left ten.
        return all(held <= before[what] + 5 for what, held in holds().items())

    until(let_go, f"everything being let go: {before} before, {holds()} just after")
    assert stack.act()[0] == 200
    assert not [line for line in stack.log.read_text().splitlines() if '"level":"error"' in line]


def test_a_frame_that_does_not_end_ends_its_stream(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker())
    stack.start_gateway("--stream-idle-s", "1")
    stack.wait_workers(1)
    port = int(stack.url.rsplit(":", 1)[1])
    hello = encode_frame(Hello(VERSIONS, "arm", "session", 0, 0, b"", "test"))
    said = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(UPGRADE.replace(b"GET / ", b"GET /v1/policies/scripted/stream "))
        while b"\r\n\r\n" not in said:
            said += connection.recv(65536)
        connection.sendall(b"\x82" + bytes([0x80 | len(hello)]) + bytes(4) + hello + LONG)
        connection.settimeout(0.05)
        end = time.monotonic() + 120
        with contextlib.suppress(ConnectionError):
            while True:
                assert time.monotonic() < end, said
                connection.sendall(b"\0")
                try:
                    data = connection.recv(65536)
                except TimeoutError:
                    continue
                if not data:
                    break
                said += data
    assert b"stream_idle" in said
    assert stack.act()[0] == 200
