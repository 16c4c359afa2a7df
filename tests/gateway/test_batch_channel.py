"""The batch port from the gateway's side: frames whole in whatever pieces, failures typed, gRPC where there is none."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time

import grpc
import numpy as np
import pytest
from taktline_gateway import batch_channel, worker_link
from taktline_gateway.batch_channel import BatchChannel, WorkerCallError
from taktline_gateway.worker_link import WorkerLink
from taktline_protocol import Image, metrics, worker_pb2
from taktline_protocol.batch_frames import (
    PREFIX,
    VERSION,
    Answer,
    Call,
    Cancel,
    FrameProtocol,
    ImageHead,
    Open,
    frame,
    local_name,
)
from taktline_protocol.deployment import Target
from taktline_worker import batch_connection, batch_port
from taktline_worker.batch_port import BatchConnection, BatchPort, listen

from tests.gateway.conftest import FRAME, Stack


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A machine that is busy with other tests is no fault of the port."""
    monkeypatch.setattr(batch_channel, "CONNECT_TIMEOUT_S", 60.0)
    monkeypatch.setattr(batch_port, "OPEN_TIMEOUT_S", 60.0)


@pytest.fixture(params=["beside", "over TCP"])
def way(request, monkeypatch):
    """A worker beside the gateway is reached through a Unix socket; one that has none, or is elsewhere, over TCP."""
    if request.param == "over TCP":
        monkeypatch.setattr(batch_port, "_bind_locally", lambda port, token: None)
    return socket.AF_UNIX if request.param == "beside" else socket.AF_INET


both_ways = pytest.mark.usefixtures("way")


class Collecting(FrameProtocol):
    def __init__(self) -> None:
        super().__init__()
        self.frames = []

    def frame_received(self, head, body) -> None:
        self.frames.append((head, bytes(body)))


class Transport:
    aborted = False

    def is_closing(self) -> bool:
        return self.aborted

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


def feed(reader: FrameProtocol, data: bytes, sizes) -> None:
    while data:
        room = reader.get_buffer(-1)
        assert len(room), "a reader that takes nothing would never be asked again"
        size = min(next(sizes), len(room), len(data))
        room[:size] = data[:size]
        data = data[size:]
        reader.buffer_updated(size)


@pytest.mark.parametrize("most", [1, 7, 1000, 100_000, 10_000_000])
def test_frames_are_whole_whatever_pieces_they_come_in(most):
    rng = random.Random(most)
    bodies = [
        b"",
        b"x",
        rng.randbytes(65_536),
        rng.randbytes(300_000 if most > 1 else 3000),
        b"",
        rng.randbytes(70_000),
    ]
    heads = [Open(1, b"t"), Answer(1), Cancel(2), Answer(3), Call(4, 1.0, 0, [], {"k": "v" * 100_000}), Answer(5)]
    data = b"".join(b"".join(frame(head, (body,))) for head, body in zip(heads, bodies, strict=True))
    reader = Collecting()
    feed(reader, data, iter(lambda: rng.randint(1, most), None))
    assert reader.frames == list(zip(heads, bodies, strict=True))


@pytest.mark.parametrize(
    "bad", [PREFIX.pack(4, 0) + b"\xc1\xc1\xc1\xc1", PREFIX.pack(2**31, 0), PREFIX.pack(1, 2**62) + b"\x90"]
)
def test_what_is_no_frame_ends_the_connection_and_reserves_nothing(bad):
    reader, transport = Collecting(), Transport()
    reader.connection_made(transport)
    feed(reader, bad, iter(lambda: 1 << 20, None))
    assert transport.aborted
    assert not reader.frames


def batch(*words: str):
    """A request and its members, each with two raw frames of its own."""
    request = worker_pb2.InferRequest(policy="p", revision="r")
    members = []
    for index, word in enumerate(words):
        frames = {
            camera: Image("raw", bytes([index, at]) * (96 * 112 * 3 // 2), (96, 112, 3))
            for at, camera in enumerate(("front", "wrist"))
        }
        members.append((worker_pb2.InferItem(request_id=str(index), instruction=word), frames))
    return request, members


async def serve(infer):
    port = await listen("127.0.0.1", infer)
    channel = await BatchChannel.connect("127.0.0.1", port.port, port.token)
    return port, channel


def run(body) -> None:
    asyncio.run(asyncio.wait_for(body(), 60))


@both_ways
def test_a_batch_arrives_as_it_was_and_its_results_come_back():
    seen = {}

    async def infer(request, frames, context):
        seen.update(
            request=request, frames=frames, metadata=context.invocation_metadata(), left=context.time_remaining()
        )
        return worker_pb2.InferResponse(
            results=[worker_pb2.InferResult(request_id=i.request_id) for i in request.items]
        )

    async def body():
        port, channel = await serve(infer)
        request, members = batch("a", "b", "c")
        answer = await channel.infer(request, members, 30.0, (("traceparent", "00-1"),))
        assert [result.request_id for result in answer.results] == ["0", "1", "2"]
        assert [item.instruction for item in seen["request"].items] == ["a", "b", "c"]
        for (_, sent), got in zip(members, seen["frames"], strict=True):
            assert {name: (i.encoding, i.shape, i.data) for name, i in sent.items()} == {
                name: (encoding, shape, bytes(data)) for name, (encoding, shape, data) in got.items()
            }
        assert seen["metadata"] == (("traceparent", "00-1"),)
        assert 0 < seen["left"] <= 30.0
        channel.close()
        await port.close(1.0)

    run(body)


def test_the_way_to_a_worker_beside_the_gateway_leads_past_tcp(way):
    async def body():
        async def infer(request, frames, context):
            return worker_pb2.InferResponse(revision="served")

        port, channel = await serve(infer)
        assert channel.transport.get_extra_info("socket").family == way
        assert (await channel.infer(*batch("a"), 30.0, ())).revision == "served"
        channel.close()
        await port.close(0.0)

    run(body)


def test_only_who_knows_the_token_finds_the_socket_of_a_worker():
    names = {local_name(port, token) for port in (1, 2) for token in (b"a", b"b")}
    assert len(names) == 4
    assert all(name.startswith("\0") and len(name) < 100 for name in names)


@both_ways
def test_frames_are_handed_to_the_engine_without_a_copy():
    async def infer(request, frames, context):
        one, other = (np.frombuffer(frames[0][camera][2], np.uint8) for camera in ("front", "wrist"))
        assert other.ctypes.data - one.ctypes.data == one.nbytes, "both lie in the buffer that the socket was read into"
        return worker_pb2.InferResponse(revision="seen")

    async def body():
        port, channel = await serve(infer)
        assert (await channel.infer(*batch("a"), 30.0, ())).revision == "seen"
        channel.close()
        await port.close(1.0)

    run(body)


@both_ways
def test_each_way_to_fail_has_its_code_and_harms_no_other_call():
    cancelled = asyncio.Event()

    async def infer(request, frames, context):
        word = request.items[0].instruction
        if word == "abort":
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "too late here")
        if word == "raise":
            raise ValueError("broken")
        while word == "hang":
            if not context.is_active():
                cancelled.set()
                break
            await asyncio.sleep(0.01)
        return worker_pb2.InferResponse(revision=word)

    async def body():
        port, channel = await serve(infer)

        async def code_of(word: str, timeout_s: float = 30.0) -> tuple[str, str]:
            with pytest.raises(WorkerCallError) as caught:
                await channel.infer(*batch(word), timeout_s, ())
            return caught.value.code, caught.value.details

        assert await code_of("abort") == ("DEADLINE_EXCEEDED", "too late here")
        assert await code_of("raise") == ("UNKNOWN", "ValueError: broken")
        hanging = asyncio.create_task(code_of("hang", 0.2))
        assert (await channel.infer(*batch("good"), 30.0, ())).revision == "good"
        assert (await hanging)[0] == "DEADLINE_EXCEEDED"
        await cancelled.wait()
        await port.close(1.0)
        assert (await code_of("late"))[0] == "UNAVAILABLE"

    run(body)


@both_ways
def test_a_worker_that_is_gone_fails_what_it_held():
    async def body():
        async def infer(request, frames, context):
            entered.set()
            await asyncio.sleep(3600)

        entered = asyncio.Event()
        port, channel = await serve(infer)
        call = asyncio.ensure_future(channel.infer(*batch("a"), 30.0, ()))
        await entered.wait()
        for connection in list(port._connections):
            connection.transport.abort()
        with pytest.raises(WorkerCallError, match="UNAVAILABLE"):
            await call
        assert not channel.open
        await port.close(0.0)

    run(body)


def test_a_port_that_is_another_workers_by_now_is_left():
    async def body():
        async def infer(request, frames, context):
            raise AssertionError("this batch is not for this worker")

        port = await listen("127.0.0.1", infer)
        with pytest.raises(OSError, match="not this worker's"):
            await BatchChannel.connect("127.0.0.1", port.port, b"of the process before")
        await port.close(0.0)

    run(body)


def test_whoever_has_not_opened_makes_the_worker_reserve_nothing():
    async def infer(request, frames, context):
        raise AssertionError("this is no worker's caller")

    connection, transport = BatchConnection(b"t", infer, set()), Transport()
    connection.transport = transport
    head = frame(Open(VERSION, b"t"))[0][PREFIX.size :]
    feed(connection, PREFIX.pack(len(head), 1 << 29) + head, iter(lambda: 1 << 20, None))
    assert transport.aborted

    connection, transport = BatchConnection(b"t", infer, set()), Transport()
    connection.transport = transport
    opening = b"".join(frame(Open(VERSION, b"t")))
    head = frame(Call(1, 1.0, 0, [[]]))[0][PREFIX.size :]
    feed(connection, opening + PREFIX.pack(len(head), 1 << 20) + head, iter(lambda: 1 << 20, None))
    assert not transport.aborted
    assert connection.opened


def test_a_gateway_of_another_version_is_told_so(monkeypatch):
    async def body():
        async def infer(request, frames, context):
            raise AssertionError("nothing is sent")

        port = await listen("127.0.0.1", infer)
        monkeypatch.setattr("taktline_gateway.batch_channel.VERSION", VERSION + 1)
        with pytest.raises(OSError, match=f"speaks version {VERSION}, not {VERSION + 1}"):
            await BatchChannel.connect("127.0.0.1", port.port, port.token)
        await port.close(0.0)

    run(body)


def test_whoever_says_nothing_is_disconnected(monkeypatch):
    monkeypatch.setattr(batch_port, "OPEN_TIMEOUT_S", 0.05)

    async def body():
        async def infer(request, frames, context):
            raise AssertionError("nothing is sent")

        port = await listen("127.0.0.1", infer)
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        assert await ends(reader)
        writer.close()
        await port.close(0.0)
        assert not port._connections

    run(body)


def test_connections_without_an_opening_keep_no_gateway_out(monkeypatch):
    """The oldest of them goes for each that comes beyond the limit; a gateway that opens at once stays."""
    monkeypatch.setattr(batch_port, "MAX_ENTERING", 3)

    async def body():
        async def infer(request, frames, context):
            return worker_pb2.InferResponse(revision="served")

        port, channel = await serve(infer)
        silent = [await asyncio.open_connection("127.0.0.1", port.port) for _ in range(5)]
        assert await ends(silent[0][0])
        assert await ends(silent[1][0])
        other = await BatchChannel.connect("127.0.0.1", port.port, port.token)
        for one in (channel, other):
            assert (await one.infer(*batch("a"), 30.0, ())).revision == "served"
            one.close()
        for _, writer in silent:
            writer.close()
        await port.close(0.0)

    run(body)


@both_ways
def test_more_gateways_than_the_port_takes_are_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(batch_connection, "MAX_CONNECTIONS", 2)

    async def body():
        async def infer(request, frames, context):
            return worker_pb2.InferResponse(revision="served")

        port, first = await serve(infer)
        (gone,) = port._connections
        second = await BatchChannel.connect("127.0.0.1", port.port, port.token)
        with pytest.raises(OSError, match="2 connections are open"):
            await BatchChannel.connect("127.0.0.1", port.port, port.token)
        assert (await second.infer(*batch("a"), 30.0, ())).revision == "served"
        first.close()
        await gone.gone.wait()
        third = await BatchChannel.connect("127.0.0.1", port.port, port.token)
        assert (await third.infer(*batch("a"), 30.0, ())).revision == "served"
        for channel in (second, third):
            channel.close()
        await port.close(0.0)

    run(body)


def test_closing_ends_connections_that_have_not_opened():
    async def body():
        async def infer(request, frames, context):
            raise AssertionError("nothing is sent")

        port = await listen("127.0.0.1", infer)
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        while not port._entering:  # noqa: ASYNC110 (nothing tells when the kernel's queue has been read)
            await asyncio.sleep(0.01)
        await port.close(30.0)
        assert await ends(reader)
        assert not port._entering
        writer.close()

    run(body)


async def ends(reader: asyncio.StreamReader) -> bool:
    """Waits until the other side has closed."""
    try:
        return await reader.read(1) == b""
    except ConnectionResetError:
        return True


def test_a_connection_that_is_given_up_as_it_opens_is_not_left_behind(monkeypatch):
    """Whoever is cancelled in the very turn in which the worker has agreed has no channel that it could close."""

    async def body():
        async def infer(request, frames, context):
            raise AssertionError("nothing is sent")

        port = await listen("127.0.0.1", infer)
        connecting = asyncio.create_task(BatchChannel.connect("127.0.0.1", port.port, port.token))
        ends = BatchChannel._opening_ends

        def agreed(channel, error) -> None:
            ends(channel, error)
            connecting.cancel()

        monkeypatch.setattr(BatchChannel, "_opening_ends", agreed)
        with pytest.raises(asyncio.CancelledError):
            await connecting
        for connection in list(port._connections):
            await connection.gone.wait()
        await port.close(0.0)

    run(body)


def test_a_port_that_closes_at_once_cannot_be_reached(monkeypatch):
    """The connection may go between its being made and the first word on it."""

    async def body():
        async def infer(request, frames, context):
            raise AssertionError("nothing is sent")

        port = await listen("127.0.0.1", infer)
        monkeypatch.setattr(BatchChannel, "connection_made", closing)
        with pytest.raises(OSError, match="closed the connection"):
            await BatchChannel.connect("127.0.0.1", port.port, port.token)
        await port.close(0.0)

    def closing(channel, transport) -> None:
        channel.transport = transport
        transport.close()

    run(body)


def test_a_channel_that_is_being_closed_takes_no_calls():
    async def body():
        async def infer(request, frames, context):
            return worker_pb2.InferResponse()

        port, channel = await serve(infer)
        assert channel.open
        channel.transport.close()  # as it does itself where the worker's end has come
        assert not channel.open
        await port.close(0.0)

    run(body)


@both_ways
def test_a_long_answer_is_sent_whole_before_the_port_is_closed():
    """A slow reader gets all of it; a new call is refused meanwhile."""
    size = 32 << 20

    async def body():
        entered, leave = asyncio.Event(), asyncio.Event()

        async def infer(request, frames, context):
            entered.set()
            await leave.wait()
            result = worker_pb2.InferResult(imagined=worker_pb2.ImaginedVideo(parts=[bytes(size)]))
            return worker_pb2.InferResponse(results=[result])

        port, channel = await serve(infer)
        call = asyncio.ensure_future(channel.infer(*batch("a"), 60.0, ()))
        await entered.wait()
        closing = asyncio.create_task(port.close(60.0))
        await asyncio.sleep(0)
        with pytest.raises(WorkerCallError, match="going away"):
            await channel.infer(*batch("b"), 30.0, ())
        leave.set()
        await closing
        assert not port._connections
        assert len((await call).results[0].imagined.parts[0]) == size

    run(body)


def test_a_port_with_a_loop_of_its_own_stops_it_only_after_the_last_answer():
    size, entered = 32 << 20, threading.Event()

    def infer(request, frames, context, answered):
        entered.set()
        answered(worker_pb2.InferResponse(results=[{"imagined": {"parts": [bytes(size)]}}]))

    port = BatchPort("127.0.0.1", infer, lambda _, frames: list(frames), 1)
    closing = threading.Thread(target=port.close, args=(120.0,))
    with socket.create_connection(("127.0.0.1", port.port), timeout=120.0) as robot:
        small = worker_pb2.InferRequest(items=[worker_pb2.InferItem()]).SerializeToString()
        for head, body in ((Open(VERSION, port.token), b""), (Call(1, 60.0, len(small), [[]]), small)):
            robot.sendall(b"".join(frame(head, (body,))))
        assert entered.wait(120.0)
        closing.start()
        closing.join(0.1)  # nothing has been read so far: it cannot be done
        came = 0
        while part := robot.recv(1 << 20):
            came += len(part)
    closing.join(120.0)
    assert came > size


def test_a_call_in_a_thread_is_answered_once_whatever_comes_after():
    recorded = []

    def infer(request, frames, context, answered):
        word = request.policy
        if word == "abort":
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "too late")
        if word == "raise":
            raise ValueError("before the answer")
        if word == "nothing":
            return
        answered(worker_pb2.InferResponse(revision="first"))
        recorded.append(word)
        if word == "raise behind it":
            raise ValueError("behind the answer")
        if word == "twice":
            answered(worker_pb2.InferResponse(revision="second"))

    port = BatchPort("127.0.0.1", infer, lambda _, frames: list(frames), 2)

    async def body():
        channel = await BatchChannel.connect("127.0.0.1", port.port, port.token)
        for word, code in (("abort", "DEADLINE_EXCEEDED"), ("raise", "UNKNOWN"), ("nothing", "UNKNOWN")):
            with pytest.raises(WorkerCallError) as caught:
                await channel.infer(worker_pb2.InferRequest(policy=word), [], 30.0, ())
            assert caught.value.code == code
        for word in ("good", "raise behind it", "twice", "good"):
            answer = await channel.infer(worker_pb2.InferRequest(policy=word), [], 30.0, ())
            assert answer.revision == "first"
        channel.close()

    run(body)
    port.close(30.0)
    ends_at = time.monotonic() + 60.0
    while len(recorded) < 4 and time.monotonic() < ends_at:  # what follows an answer may take its time
        time.sleep(0.001)
    assert sorted(recorded) == ["good", "good", "raise behind it", "twice"]


@pytest.mark.parametrize(
    "call",
    [
        Call(1, 1.0, 0, [[ImageHead("front", "raw", (1, 1, 3), 3)]]),
        Call(1, 1.0, 0, []),
        Call(1, 1.0, 99, [[]]),
        Call(1, 1.0, 2, [[ImageHead("front", "raw", (1, 1, 3), -1)]]),
    ],
)
def test_a_call_that_contradicts_itself_ends_the_connection(call):
    async def body():
        async def infer(request, frames, context):
            raise AssertionError("this is no batch")

        port, channel = await serve(infer)
        channel.transport.writelines(frame(call, (b"\x1a\x00",)))
        with pytest.raises(WorkerCallError, match="UNAVAILABLE"):
            await channel.infer(*batch("after it"), 30.0, ())
        assert not channel.open
        await port.close(0.0)

    run(body)


@pytest.mark.parametrize(
    ("median_ms", "p99_ms", "batch", "usable"),
    [
        (5.0, 6.0, 1, True),
        (0.0, 6.0, 1, False),
        (float("nan"), 6.0, 1, False),
        (5.0, 0.0, 1, True),
        (5.0, float("inf"), 1, False),
        (5.0, 6.0, 0, False),
    ],
)
def test_a_worker_whose_times_are_none_is_not_used(median_ms, p99_ms, batch, usable):
    """A decision divides by them: one such worker would end those of its whole policy."""

    class Telling:
        async def Info(self, request, **options):
            times = [worker_pb2.BucketTime(batch=batch, median_ms=median_ms, p99_ms=p99_ms)]
            return worker_pb2.InfoResponse(policy="p", revision="r", t_sync=times)

    async def body():
        up = []
        link = WorkerLink("p", Target(address="127.0.0.1:1"), up.append, lambda _: None)
        link._worker = Telling()
        await link._come_up()
        assert bool(up) is usable
        await link.close()

    run(body)


def test_a_worker_that_is_never_reached_is_told_of_with_the_reason(monkeypatch, caplog):
    """Its watch waits for a connection for ever: without this line no log says why ready pods get nothing."""
    monkeypatch.setattr(worker_link, "UNREACHED_S", 0.05)

    async def body():
        link = WorkerLink("p", Target(address="127.0.0.1:1"), lambda _: None, lambda _: None)
        link.start()
        assert link._teller is not None
        await asyncio.wait_for(link._teller, 20)
        await link.close()

    run(body)
    (told,) = [record for record in caplog.records if record.msg == "worker_unreachable"]
    assert "refused" in json.dumps(told.__dict__, default=str)


def test_a_fault_does_not_end_the_watch_of_a_worker(monkeypatch, caplog):
    """What an Info or a listener does not expect: the worker is taken for gone, and looked at again."""
    monkeypatch.setattr(worker_link, "FAULT_RETRY_S", 0.01)
    monkeypatch.setattr(worker_link, "RETRY_S", 0.01)

    async def body():
        heard = []
        link = WorkerLink("p", Target(address="127.0.0.1:1"), heard.append, heard.append)
        rounds = iter(["up", ValueError("an Info of a later release"), "up", RuntimeError("a listener's"), "up"])
        over = asyncio.Event()

        async def once():
            word = next(rounds, None)
            if word is None:
                over.set()
                await asyncio.Event().wait()
            if isinstance(word, Exception):
                raise word
            link.up = True

        monkeypatch.setattr(link, "_watch_once", once)
        link.start()
        await over.wait()
        assert link.up
        assert heard == [link, link], "each fault took it down once"
        await link.close()

    run(body)
    ours = [record for record in caplog.records if record.name == worker_link.__name__]  # gRPC's loops are others'
    assert [record.exc_info[0] for record in ours if record.exc_info] == [ValueError, RuntimeError]


def test_a_fault_while_a_worker_is_taken_down_does_not_end_its_watch_either(monkeypatch):
    monkeypatch.setattr(worker_link, "FAULT_RETRY_S", 0.01)
    monkeypatch.setattr(worker_link, "RETRY_S", 0.01)

    async def body():
        over = asyncio.Event()
        rounds = 0

        def down(link):
            raise RuntimeError("a fault of the lane")

        link = WorkerLink("p", Target(address="127.0.0.1:1"), lambda link: None, down)

        async def once():
            nonlocal rounds
            rounds += 1
            link.up = True
            if rounds == 4:
                over.set()
                await asyncio.Event().wait()
            link._go_down("not serving")

        monkeypatch.setattr(link, "_watch_once", once)
        link.start()
        await over.wait()
        await link.close()

    run(body)


def test_batches_come_through_grpc_where_there_is_no_batch_port(tmp_path):
    stack = Stack(tmp_path)
    try:
        address = stack.start_worker(grpc_only=1)
        stack.write_routes(address)
        stack.start_gateway()
        stack.wait_workers(1)
        status, chunk = stack.act(images={"front": FRAME, "wrist": FRAME})
        assert status == 200, chunk
        assert stack.batches()[0]["way"] == "grpc"
    finally:
        stack.stop()


def test_a_worker_of_another_version_is_sent_its_batches_through_grpc_and_that_is_said(tmp_path):
    stack = Stack(tmp_path)
    try:
        address = stack.start_worker(batch_version=VERSION + 1)
        stack.write_routes(address)
        stack.start_gateway()
        stack.wait_workers(1)
        assert stack.act()[0] == 200
        assert stack.batches()[0]["way"] == "grpc"
        lines = [json.loads(line) for line in stack.log.read_text().splitlines()]
        said = [line for line in lines if line["message"] == "batch_port_version"]
        assert len(said) == 1
        assert f"it speaks version {VERSION + 1}, this gateway {VERSION}" in said[0]["reason"]
        counts = {
            state: stack.metric(metrics.WORKERS_BY_BATCH_PORT, policy="scripted", state=state)
            for state in metrics.BATCH_PORT_STATES
        }
        assert counts == {"open": 0, "none": 0, "version": 1, "unreachable": 0}
    finally:
        stack.stop()


def test_batches_go_to_the_batch_port_and_through_grpc_once_it_is_lost(tmp_path):
    stack = Stack(tmp_path)
    try:
        address = stack.start_worker()
        stack.write_routes(address)
        stack.start_gateway()
        stack.wait_workers(1)
        stack.wait_batch_ports(1)
        assert stack.act()[0] == 200
        # The scripted worker closes its batch port for good on this word; the answer still comes.
        assert stack.act(instruction="close-batch-port")[0] == 200
        ways = [line["way"] for line in stack.batches()]
        assert ways == ["batch", "batch"]
        status, chunk = stack.act()
        for _ in range(50):  # the batch that finds the connection closing may fail; it is then worker_failed at once
            if status == 200:
                break
            status, chunk = stack.act()
        assert status == 200, chunk
        assert stack.batches()[-1]["way"] == "grpc"
    finally:
        stack.stop()
