"""Answers that threads write past the loop: whole, in order, and never to another connection's descriptor."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import uvloop
from taktline_gateway.batch_channel import BatchChannel, WorkerCallError
from taktline_protocol import worker_pb2
from taktline_worker.batch_connection import InThreads
from taktline_worker.batch_port import listen
from taktline_worker.direct_write import DirectWrite

LONG = 3 << 20
"""More than a socket's buffers hold."""


async def answers(wanted: int, size: int) -> list[worker_pb2.InferResponse]:
    def infer(request: Any, frames: Any, context: Any, answered: Any) -> None:
        number = int(request.policy)
        body = bytes([number % 256]) * size
        answered(worker_pb2.InferResponse(results=[worker_pb2.InferResult(request_id=body.hex()[: 2 * size])]))

    with ThreadPoolExecutor(8) as pool:
        port = await listen("127.0.0.1", InThreads(infer, lambda _, frames: list(frames), pool))
        channel = await BatchChannel.connect("127.0.0.1", port.port, port.token)
        try:
            asked = (channel.infer(worker_pb2.InferRequest(policy=str(n)), [], 60.0, ()) for n in range(wanted))
            return list(await asyncio.gather(*asked))
        finally:
            channel.close()
            await port.close(5.0)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize(("wanted", "size"), [(200, 40), (12, LONG)])
def test_answers_of_several_threads_come_whole(loop: Any, wanted: int, size: int) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        came = runner.run(answers(wanted, size))
    for number, response in enumerate(came):
        assert response.results[0].request_id == f"{number % 256:02x}" * size


def test_a_call_that_is_alone_begins_on_the_loop_and_waits_in_a_thread() -> None:
    began: list[tuple[str, int]] = []
    waiting = threading.Event()

    def whole(request: Any, frames: Any, context: Any, answered: Any) -> None:
        began.append((request.policy, threading.get_ident()))
        answered(worker_pb2.InferResponse(revision="thread"))

    def begin(request: Any, frames: Any, context: Any) -> Any:
        if request.policy == "later":
            return None
        began.append((request.policy, threading.get_ident()))
        if request.policy == "broken":
            raise ValueError("no such thing")

        def rest(answered: Any) -> None:
            assert threading.get_ident() != loop_thread
            if request.policy == "long":
                assert waiting.wait(60.0)
            answered(worker_pb2.InferResponse(revision="loop"))

        return rest

    async def body() -> None:
        port = await listen("127.0.0.1", InThreads(whole, lambda _, frames: list(frames), pool, begin))
        channel = await BatchChannel.connect("127.0.0.1", port.port, port.token)

        async def ask(policy: str) -> str:
            while any(connection.running() for connection in port._connections) and policy != "beside":  # noqa: ASYNC110
                await asyncio.sleep(0.001)  # an answer may come before its call has ended
            return str((await channel.infer(worker_pb2.InferRequest(policy=policy), [], 60.0, ())).revision)

        try:
            assert await ask("alone") == "loop"
            assert await ask("later") == "thread"
            with pytest.raises(WorkerCallError, match="no such thing"):
                await ask("broken")
            long = asyncio.ensure_future(ask("long"))
            while "long" not in dict(began):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert await ask("beside") == "thread"
            waiting.set()
            assert await long == "loop"
        finally:
            channel.close()
            await port.close(5.0)

    loop_thread = threading.get_ident()
    with ThreadPoolExecutor(4) as pool:
        asyncio.run(body())
    places = {policy: thread == loop_thread for policy, thread in began}
    assert places == {"alone": True, "later": False, "broken": True, "long": True, "beside": False}


class Transport:
    """A transport whose loop has `queued` bytes to write."""

    def __init__(self, own: socket.socket) -> None:
        self.own, self.queued, self.written = own, 0, b""

    def get_extra_info(self, name: str) -> Any:
        return self.own if name == "socket" else None

    def get_write_buffer_size(self) -> int:
        return self.queued

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        self.written += bytes(data)


@pytest.fixture
def pair() -> Any:
    here, there = socket.socketpair()
    here.setblocking(False)
    yield here, there
    here.close()
    there.close()


def test_nothing_overtakes_what_the_loop_has_to_write(pair: Any) -> None:
    transport = Transport(pair[0])
    writing = DirectWrite(transport)  # type: ignore[arg-type]
    assert not writing.now(b"first")
    assert pair[1].recv(10) == b"first"
    transport.queued = 5
    assert writing.now(b"second")
    transport.queued = 0
    assert writing.now(b"third")  # the loop has not written the second yet
    writing.rest()
    assert transport.written == b"secondthird"
    writing.rest()  # the turn of the third
    assert transport.written == b"secondthird"
    assert not writing.now(b"fourth")
    assert pair[1].recv(10) == b"fourth"
    writing.close()


def test_what_the_kernel_does_not_take_is_left_for_the_loop(pair: Any) -> None:
    transport = Transport(pair[0])
    writing = DirectWrite(transport)  # type: ignore[arg-type]
    assert writing.now(bytes(LONG))
    assert writing.now(b"behind")
    writing.rest()
    assert transport.written.endswith(bytes(1) + b"behind")
    assert 0 < len(transport.written) - len(b"behind") < LONG
    writing.close()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_the_loop_writes_of_its_own_falls_into_no_frame(loop: Any, pair: Any) -> None:
    """The kernel takes a part of an answer, and the loop refuses a call before it hears of the rest."""

    async def run() -> bytes:
        transport, _ = await asyncio.get_running_loop().create_unix_connection(asyncio.Protocol, sock=pair[0])
        writing = DirectWrite(transport)
        assert writing.now(b"A" * LONG)
        writing.write(b"refused")
        assert writing.now(b"B")
        writing.rest()  # the turn of B, before that of A
        writing.rest()
        pair[1].setblocking(False)
        came = b""
        while len(came) < LONG + len(b"refusedB"):
            came += await asyncio.get_running_loop().sock_recv(pair[1], 1 << 20)
        writing.close()
        transport.abort()
        return came

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(run()) == b"A" * LONG + b"refusedB"


def test_a_closed_connection_s_descriptor_is_never_written_to(pair: Any) -> None:
    writing = DirectWrite(Transport(pair[0]))  # type: ignore[arg-type]
    number = writing._past.fileno()  # type: ignore[union-attr]
    other, its_end = socket.socketpair()
    writing.close()
    try:
        os.dup2(other.fileno(), number)  # the number is another connection's now
        assert writing.now(b"late")
        its_end.setblocking(False)
        with pytest.raises(BlockingIOError):
            its_end.recv(1)
    finally:
        os.close(number)
        other.close()
        its_end.close()


def test_a_peer_that_is_gone_leaves_nothing_to_write(pair: Any) -> None:
    writing = DirectWrite(Transport(pair[0]))  # type: ignore[arg-type]
    pair[1].close()
    assert not writing.now(b"nobody reads it")
    writing.close()
