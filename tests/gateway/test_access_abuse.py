"""Clients that mean harm, or are broken: slow heads and bodies, endless heads, many connections, bombs, smuggling."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import re
import socket
import struct
import time
import zlib
from pathlib import Path

import grpc
import httpx
import msgspec
import pytest
import uvicorn
from taktline_gateway.connections import ConnectionCounts
from taktline_gateway.http_protocol import HEAD_BYTES, guarded_http
from taktline_protocol import Image
from taktline_protocol.codecs import MediaType, encode
from websockets.sync.client import connect

from tests.gateway.conftest import free_port, parse


async def echo(scope, receive, send):
    """Answers every request with the number of body bytes."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            pass
        return
    size = 0
    while True:
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    body = b"%d" % size
    head = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def server(counts: ConnectionCounts, head_timeout_s: float = 0.2):
    port = free_port()
    config = uvicorn.Config(
        echo, port=port, http=guarded_http(counts, head_timeout_s), lifespan="off", log_config=None, loop="uvloop"
    )
    running = uvicorn.Server(config)
    running.install_signal_handlers = lambda: None
    task = asyncio.create_task(running._serve())
    while not running.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    try:
        yield port
    finally:
        running.should_exit = True
        running.force_exit = True
        await task


async def until(condition, what: str) -> None:
    end = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen"
        await asyncio.sleep(0.01)


async def all_of(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(10):
        return await reader.read()


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_a_head_that_trickles_or_never_comes_is_cut_off():
    counts = ConnectionCounts(100, 100)
    async with server(counts) as port:
        for start in (b"", b"GET / HTTP/1.1\r\nHost:"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(start)
            assert (await all_of(reader)).startswith(b"HTTP/1.1 408 ")
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def trickle():
            for byte in GET * 3:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        feeding = asyncio.create_task(trickle())
        assert (await all_of(reader)).startswith(b"HTTP/1.1 408 ")
        feeding.cancel()
        writer.close()
        await until(lambda: counts.total == 0, "the end of its connections")


async def test_a_second_head_on_a_kept_connection_has_its_own_time():
    counts = ConnectionCounts(100, 100)
    async with server(counts, head_timeout_s=1.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(GET)
            assert b"200" in await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(1)
            await asyncio.sleep(1.1)  # idle for longer than a head may take: that is another limit
        writer.write(GET[:10])
        assert (await all_of(reader)).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_a_slow_body_is_not_taken_for_a_slow_head():
    async with server(ConnectionCounts(100, 100), head_timeout_s=1.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12345")
        await asyncio.sleep(1.1)
        writer.write(b"67890")
        assert b"200" in await reader.readuntil(b"\r\n\r\n")
        writer.close()


async def test_an_endless_head_is_refused_early():
    async with server(ConnectionCounts(100, 100), head_timeout_s=30.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 40 * HEAD_BYTES and not reader.at_eof():
                writer.write(b"X-Filler: " + b"a" * 4000 + b"\r\n")
                await writer.drain()
                sent += 4000
                await asyncio.sleep(0)
        assert sent < 40 * HEAD_BYTES
        writer.close()


async def test_one_address_cannot_take_every_connection():
    counts = ConnectionCounts(most=10, most_by_address=3)
    async with server(counts, head_timeout_s=30.0) as port:
        held = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET)
            await reader.readuntil(b"\r\n\r\n")
            held.append(writer)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert b"503" in await all_of(reader)
        held.pop().close()
        await until(lambda: counts.total == 2, "the end of one connection")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        assert b"200" in await reader.readuntil(b"\r\n\r\n")
        assert counts.total == 3
        for each in (*held, writer):
            each.close()
        await until(lambda: counts.total == 0, "the end of all connections")
        assert not counts.by_address


async def test_an_upgraded_connection_is_counted_until_it_ends():
    from websockets.asyncio.client import connect

    counts = ConnectionCounts(10, 10)
    async with server(counts, head_timeout_s=1.0) as port:
        async with connect(f"ws://127.0.0.1:{port}/") as client:
            await asyncio.sleep(1.1)
            assert counts.total == 1
            await client.send("still here")
        await until(lambda: counts.total == 0, "the end of the connection")


async def test_pipelined_requests_still_work():
    async with server(ConnectionCounts(10, 10), head_timeout_s=1.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET * 5)
        for _ in range(5):
            assert b"200" in await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(1)
        writer.close()


# ----- against the whole gateway


def raw(url: str, data: bytes) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        parts = []
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                parts.append(part)
    return b"".join(parts)


SMUGGLED = {
    "length and chunked": b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\n"
    b"\r\n",
    "two lengths": b"Content-Length: 4\r\nContent-Length: 60\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n",
    "a length that is none": b"Content-Length: +4\r\n\r\nabcd",
    "chunked, spelt otherwise": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "space before the colon": b"Content-Length : 4\r\n\r\nabcd",
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_a_request_within_a_request_is_not_answered(shared_stack, name):
    head = b"POST /v1/policies/scripted/act HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\n"
    answer = raw(shared_stack.url, head + SMUGGLED[name])
    assert b"taktline_requests_total" not in answer
    assert answer.startswith(b"HTTP/1.1 4")


def test_a_compressed_body_is_not_inflated(shared_stack):
    bomb = zlib.compress(bytes(50_000_000))
    for coding in ("gzip", "deflate", "br"):
        headers = {"content-type": "application/msgpack", "content-encoding": coding}
        answer = httpx.post(f"{shared_stack.url}/v1/policies/scripted/act", content=bomb, headers=headers)
        status, error = parse(answer)
        assert (status, error.code) == (415, "unsupported_media_type")


def png_of(width: int, height: int, pixels: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def test_a_picture_that_would_unfold_to_gigabytes_is_refused_by_its_header(shared_stack):
    bomb = Image("png", png_of(40_000, 40_000, bytes(3 << 20)))
    status, error = shared_stack.act(images={"front": bomb, "wrist": bomb})
    assert (status, error.code) == (422, "image_too_large")


def test_many_tiny_values_and_deep_nesting_are_refused_unbuilt(shared_stack):
    wide = msgspec.msgpack.encode([None] * 5_000_000)
    deep = b"\x91" * 1_000_000 + b"\xc0"
    for body in (wide, deep):
        status, error = shared_stack.post(body)
        assert (status, error.code) == (400, "invalid_body")
    json = b"[" * 1_000_000
    status, error = shared_stack.post(json, "application/json")
    assert (status, error.code) == (400, "invalid_body")


def test_a_body_over_the_limit_gets_its_answer_although_it_is_not_read(shared_stack):
    status, error = shared_stack.post(bytes(17 << 20))
    assert (status, error.code) == (413, "body_too_large")
    assert shared_stack.act()[0] == 200


def test_a_chunked_body_without_end_is_cut_at_the_limit(shared_stack):
    def endless():
        for _ in range(64):
            yield bytes(1 << 20)

    headers = {"content-type": "application/msgpack"}
    with contextlib.suppress(httpx.TransportError):
        answer = httpx.post(f"{shared_stack.url}/v1/policies/scripted/act", content=endless(), headers=headers)
        assert parse(answer)[1].code == "body_too_large"
    assert shared_stack.act()[0] == 200


def test_control_characters_do_not_reach_the_log_as_lines(shared_stack):
    forged = 'arm"\n{"level":"error","message":"forged"}\r\n'
    body = encode(shared_stack.observation(robot=forged, instruction=""), MediaType.MSGPACK)
    assert shared_stack.post(body)[0] in (400, 422)
    lines = shared_stack.log.read_text().splitlines()
    assert all(msgspec.json.decode(line)["message"] != "forged" for line in lines)


def test_a_compressed_message_to_lerobots_port_is_not_inflated_beyond_what_a_message_may_be(bare_stack):
    """gRPC inflates what says that it is compressed: 256 MiB of zeros come in 260 KB."""
    stack, port = bare_stack, free_port()
    stack.write_routes("127.0.0.1:1")
    stack.start_gateway("--lerobot-listen", f"127.0.0.1:{port}")
    options = [("grpc.max_send_message_length", -1)]
    bomb = bytes(256 << 20)

    def most_mib() -> float:
        status = Path(f"/proc/{stack.gateway.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024

    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        ready = channel.unary_unary("/transport.AsyncInference/Ready")
        assert ready(b"", timeout=60, compression=grpc.Compression.Gzip) == b""
        before = most_mib()
        instructions = channel.unary_unary("/transport.AsyncInference/SendPolicyInstructions")
        observations = channel.stream_unary("/transport.AsyncInference/SendObservations")
        for kind in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            for call, message in ((instructions, bomb), (observations, iter([bomb]))):
                with pytest.raises(grpc.RpcError) as caught:
                    call(message, timeout=60, compression=kind)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert most_mib() - before < 64, "it was not held whole"
        assert ready(b"", timeout=60) == b""


@pytest.mark.parametrize("protocol", ["openpi", "vla-eval", "stream"])
def test_no_websocket_takes_up_compression(bare_stack, protocol):
    """A message that inflates is a bomb, too; camera frames are compressed already."""
    stack, port = bare_stack, free_port()
    stack.write_routes("127.0.0.1:1")
    flags = [] if protocol == "stream" else [f"--{protocol}-listen", f"127.0.0.1:{port}"]
    stack.start_gateway(*flags)
    url = f"ws://127.0.0.1:{port}"
    if protocol == "stream":
        url = f"{stack.url.replace('http', 'ws', 1)}/v1/policies/scripted/stream"
    with connect(url, compression="deflate") as socket:
        assert not socket.protocol.extensions


@pytest.mark.parametrize("path", ["/v1/policies/scripted/act", "/v2/models/scripted/infer"])
def test_no_body_is_inflated(bare_stack, path):
    stack = bare_stack
    stack.write_routes("127.0.0.1:1")
    stack.start_gateway()
    for coding in ("gzip", "deflate", "br", "gzip, identity"):
        headers = {"content-encoding": coding, "content-type": "application/json"}
        answer = stack.http.post(stack.url + path, content=gzip.compress(bytes(1 << 20)), headers=headers)
        assert answer.status_code == 415, answer.text
