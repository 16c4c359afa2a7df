"""The chunk reader reads what the library's own reader reads, however the bytes are cut."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_gateway.compat.fenced_connection import counted
from taktline_gateway.connections import ConnectionCounts
from taktline_gateway.frame_reader import LONG, MOST_AHEAD, ChunkReader, DirectReading, read_in_chunks
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.streams import StreamReader

REQUEST = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
CONNECTION = counted(ConnectionCounts(9, 9))


def run(reader, steps, chunks):
    """What each step of reading gives, with the chunks fed whenever a step waits."""
    given_out, waiting, ended = [], list(chunks), False
    for kind, size in steps:
        reading = getattr(reader, kind)(*([] if kind == "at_eof" else [size]))
        while True:
            try:
                next(reading)
            except StopIteration as done:
                value = done.value
                given_out.append(bytes(value) if not isinstance(value, bool) else value)
                break
            except (EOFError, RuntimeError) as error:
                given_out.append(type(error).__name__)
                return given_out
            if waiting:
                reader.feed_data(waiting.pop(0))
            elif not ended:
                reader.feed_eof()
                ended = True
    return given_out


STEPS = st.lists(
    st.tuples(st.sampled_from(["read_exact", "read_line", "read_to_eof", "at_eof"]), st.integers(0, 40)), max_size=8
)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.lists(st.binary(max_size=30) | st.sampled_from([b"\n", b"a\nb\n"]), max_size=8))
def test_the_same_as_the_librarys_own(steps, chunks):
    assert run(ChunkReader(), steps, chunks) == run(StreamReader(), steps, chunks)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_handshake_and_messages_come_whole_however_they_are_cut(data):
    payloads = data.draw(st.lists(st.binary(max_size=70_000), min_size=1, max_size=3))
    frames = [Frame(Opcode.BINARY, payload).serialize(mask=True) for payload in payloads]
    protocol = ServerProtocol(max_size=100_000)
    read_in_chunks(protocol)
    protocol.receive_data(REQUEST)
    (request,) = protocol.events_received()
    protocol.send_response(protocol.accept(request))
    wire = b"".join(frames)
    while wire:
        size = data.draw(st.integers(1, 65_536))
        protocol.receive_data(wire[:size])
        wire = wire[size:]
    assert [frame.data for frame in protocol.events_received()] == payloads


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_messages_come_whole_where_long_ones_are_read_directly(data):
    sizes = data.draw(st.lists(st.sampled_from([0, 5, LONG, LONG + 1, 3 * LONG, MOST_AHEAD + LONG]), max_size=4))
    payloads = [bytes([number]) * size for number, size in enumerate(sizes)]
    protocol = ServerProtocol(max_size=4 * MOST_AHEAD)
    received = []

    class Receiving(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            received.append(len(data))
            protocol.receive_data(data)

    reading = DirectReading(Receiving(), read_in_chunks(protocol))

    def feed(wire: bytes) -> None:
        while wire:
            room = reading.get_buffer(-1)
            size = min(len(room), len(wire), data.draw(st.sampled_from([1, 1000, 200_000, 1 << 22])))
            size = max(size, min(len(room), len(wire), len(wire) // 50))
            room[:size] = wire[:size]
            wire = wire[size:]
            reading.buffer_updated(size)

    feed(REQUEST)
    (request,) = protocol.events_received()
    protocol.send_response(protocol.accept(request))
    feed(b"".join(Frame(Opcode.BINARY, payload).serialize(mask=True) for payload in payloads))
    assert [frame.data for frame in protocol.events_received()] == payloads
    assert max(received, default=0) <= LONG, "long payloads do not pass the protocol"


FRAMES = st.one_of(
    st.builds(
        lambda size, opcode: [Frame(opcode, (b"\xc3\xa9" * size)[:size] if opcode is Opcode.BINARY else b"t" * size)],
        st.sampled_from([0, 5, LONG, LONG + 1, 65_535, 65_536, 100_000, 100_001]),
        st.sampled_from([Opcode.BINARY, Opcode.TEXT]),
    ),
    st.builds(lambda payload: [Frame(Opcode.PONG, payload)], st.sampled_from([b"", b"12345678", b"12345679", b"1"])),
    st.builds(lambda payload: [Frame(Opcode.PING, payload)], st.binary(max_size=8)),
    st.just(
        [
            Frame(Opcode.BINARY, b"a" * 2 * LONG, fin=False),
            Frame(Opcode.PONG, b"12345678"),
            Frame(Opcode.CONT, b"b" * 5000),
        ]
    ),
    st.just([Frame(Opcode.CONT, b"c" * 2 * LONG)]),
    st.just([Frame(Opcode.CLOSE, b"\x03\xe8")]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(FRAMES, max_size=5), st.data())
def test_frames_taken_past_the_library_are_those_it_would_have_read(groups, data):
    """The same frames in the same order and the same end, whether a recipient takes what it can or the library all."""
    wire = b"".join(frame.serialize(mask=True) for group in groups for frame in group)
    alone, beside = opened(100_000), ServerProtocol(max_size=100_000)
    alone.receive_data(wire)
    expected = [event for event in alone.events_received() if isinstance(event, Frame)]
    seen: list[Frame] = []

    class Taking(asyncio.Protocol):
        fragmented = behind = False
        patience = data.draw(st.sampled_from([0, 2, 100]))

        def data_received(self, data: bytes) -> None:
            beside.receive_data(data)
            for frame in beside.events_received():
                if isinstance(frame, Frame):
                    if frame.opcode in (Opcode.BINARY, Opcode.TEXT, Opcode.CONT):
                        self.fragmented = not frame.fin
                    seen.append(frame)

        def room(self) -> int:
            return 100_000 if beside.state is State.OPEN and not self.fragmented and not self.waits() else 0

        def waits(self) -> bool:
            return len(seen) > self.patience

        def rest_follows(self) -> None:
            self.behind = True

        def message_arrived(self, data: bytes) -> None:
            seen.append(Frame(Opcode.BINARY, data))

        def pong_arrived(self, number: int) -> bool:
            if number.to_bytes(8, "big") != b"12345678":
                return False
            seen.append(Frame(Opcode.PONG, b"12345678"))
            return True

    taking = Taking()
    reading = DirectReading(taking, read_in_chunks(beside), taking)
    beside.receive_data(REQUEST)
    (request,) = beside.events_received()
    beside.send_response(beside.accept(request))
    while wire:
        room = reading.get_buffer(-1)
        size = min(len(room), len(wire), data.draw(st.sampled_from([1, 8, 13, 14, 1000, 1 << 22])))
        size = max(size, min(len(room), len(wire), len(wire) // 50))
        room[:size] = wire[:size]
        wire = wire[size:]
        reading.buffer_updated(size)
        while taking.waits() or taking.behind:  # nothing is read meanwhile
            taking.patience, taking.behind = max(taking.patience, len(seen) + 2), False
            reading.go_on()
    assert [(f.opcode, bytes(f.data), f.fin) for f in seen] == [(f.opcode, bytes(f.data), f.fin) for f in expected]
    assert (beside.state, str(beside.parser_exc)) == (alone.state, str(alone.parser_exc))


def test_what_a_recipient_may_take_does_pass_the_library():
    payloads = [bytes([number]) * size for number, size in enumerate((8, 125, 126, 3000, LONG + 1, 65_535, 70_000))]
    protocol, taken = ServerProtocol(max_size=100_000), []

    class Taking(asyncio.Protocol):
        data_received = staticmethod(protocol.receive_data)
        message_arrived = staticmethod(lambda data: taken.append(data))
        room = staticmethod(lambda: 100_000 if protocol.state is State.OPEN else 0)
        waits = staticmethod(lambda: False)
        rest_follows = staticmethod(lambda: pytest.fail("nothing is left to the library"))
        pong_arrived = staticmethod(lambda number: taken.append(number) or True)

    reading = DirectReading(Taking(), read_in_chunks(protocol), Taking())
    pong = Frame(Opcode.PONG, (77).to_bytes(8, "big")).serialize(mask=True)
    for wire in (REQUEST, *(pong + Frame(Opcode.BINARY, one).serialize(mask=True) for one in payloads)):
        while wire:
            room = reading.get_buffer(-1)
            size = min(len(room), len(wire))
            room[:size], wire = wire[:size], wire[size:]
            reading.buffer_updated(size)
        for request in protocol.events_received():
            protocol.send_response(protocol.accept(request))
    assert taken == [thing for payload in payloads for thing in (77, payload)]


def opened(max_size):
    """A protocol after its handshake, which reads as the library does."""
    protocol = ServerProtocol(max_size=max_size)
    protocol.receive_data(REQUEST)
    (request,) = protocol.events_received()
    protocol.send_response(protocol.accept(request))
    return protocol


def test_a_long_payload_that_is_cut_off_ends_as_the_library_would_end_it():
    for after in (0, 3, LONG, 2 * LONG):
        protocols = [ServerProtocol(max_size=None), ServerProtocol(max_size=None)]
        read_in_chunks(protocols[0])
        wire = Frame(Opcode.BINARY, bytes(3 * LONG)).serialize(mask=True)[: 8 + after]
        for protocol in protocols:
            protocol.receive_data(REQUEST)
            (request,) = protocol.events_received()
            protocol.send_response(protocol.accept(request))
            protocol.receive_data(wire)
            protocol.receive_eof()
        assert protocols[0].events_received() == protocols[1].events_received() == []
        assert str(protocols[0].parser_exc) == str(protocols[1].parser_exc)


@pytest.mark.parametrize("longest", [0, 500_000])
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_real_connection_reads_long_messages_directly(run, longest):
    async def body():
        async def echo(connection):
            connection.longest = longest
            while True:
                await connection.answer(await connection.next_message())

        async with serve(echo, "127.0.0.1", 0, create_connection=CONNECTION, compression=None) as server:
            (connected,) = server.sockets
            host, port = connected.getsockname()
            async with connect(f"ws://{host}:{port}", compression=None) as client:
                (connection,) = server.connections
                assert connection.transport.get_protocol() is connection._reading
                for size in (0, 100, LONG, 300_000, 900_000):
                    await client.send(bytes(range(250)) * (size // 250))
                    assert await client.recv() == bytes(range(250)) * (size // 250)
                    await client.send("x" * size)
                    assert await client.recv() == "x" * size
                await client.send([b"a" * 5000, b"b" * 300_000])
                assert await client.recv() == b"a" * 5000 + b"b" * 300_000
                assert not connection.overtaken.done()

    run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_client_that_floods_waits_and_loses_nothing(run):
    """As much is read at once as its long messages have, but small ones are not all parsed before they are taken."""
    flood = [b"%d" % number for number in range(5000)]

    async def body():
        opened, go_on, read = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().create_future()

        async def handle(connection):
            connection.longest = 500_000
            for _ in range(3):
                await connection.answer(await connection.next_message())
            opened.set()
            await go_on.wait()
            read.set_result([await connection.next_message() for _ in range(2 + len(flood))])

        async with serve(handle, "127.0.0.1", 0, create_connection=CONNECTION, compression=None, max_queue=2) as server:
            host, port = server.sockets[0].getsockname()
            async with connect(f"ws://{host}:{port}", compression=None) as client:
                for _ in range(3):
                    await client.send(b"a" * 300_000)
                    await client.recv()
                await opened.wait()
                (connection,) = server.connections
                long = Frame(Opcode.BINARY, b"b" * 300_000).serialize(mask=True)
                small = b"".join(Frame(Opcode.BINARY, one).serialize(mask=True) for one in flood)
                client.transport.write(small + long)
                client.transport.write(long)
                while not connection.recv_messages.paused:  # noqa: ASYNC110 (nothing tells when it has been read)
                    await asyncio.sleep(0.01)
                assert len(connection.recv_messages.frames) < 1000
                go_on.set()
                assert await read == [*flood, b"b" * 300_000, b"b" * 300_000]

    run(asyncio.wait_for(body(), 60))


def test_what_was_read_at_once_is_not_parsed_at_once():
    """As much as a long message may be read, but that may also hold a hundred thousand frames: others want the loop."""
    protocol, parsed, rests = ServerProtocol(max_size=500_000), [], []

    class Taking(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            parsed.append(len(data))
            protocol.receive_data(data)

        message_arrived = staticmethod(lambda data: None)
        room = staticmethod(lambda: 500_000 if protocol.state is State.OPEN else 0)
        waits = staticmethod(lambda: False)
        rest_follows = staticmethod(lambda: rests.append(len(parsed)))

    reading = DirectReading(Taking(), read_in_chunks(protocol), Taking())

    def feed(wire: bytes) -> int:
        room = reading.get_buffer(-1)
        size = min(len(room), len(wire))
        room[:size] = wire[:size]
        reading.buffer_updated(size)
        return size

    feed(REQUEST)
    (request,) = protocol.events_received()
    protocol.send_response(protocol.accept(request))
    long = Frame(Opcode.BINARY, bytes(300_000)).serialize(mask=True)
    while long:
        long = long[feed(long) :]
    parsed.clear()
    flood = Frame(Opcode.PING, b"").serialize(mask=True) * 20_000
    assert feed(flood) == len(flood)
    assert parsed == [LONG]
    turns = 1
    while rests:
        rests.clear()
        assert len(parsed) == turns, "each turn of the loop is a small piece"
        reading.go_on()
        turns += 1
    assert sum(parsed) == len(flood)
    assert max(parsed) <= LONG
    assert len(protocol.events_received()) == 20_000


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_client_that_floods_with_pings_is_answered_each_and_heard_after_them(run):
    async def body():
        async def handle(connection):
            connection.longest = 500_000
            while True:
                await connection.answer(await connection.next_message())

        async with serve(handle, "127.0.0.1", 0, create_connection=CONNECTION, compression=None) as server:
            host, port = server.sockets[0].getsockname()
            async with connect(f"ws://{host}:{port}", compression=None) as client:
                await client.send(b"a" * 300_000)
                await client.recv()
                last = await client.ping(b"last")
                flood = Frame(Opcode.PING, b"").serialize(mask=True) * 10_000
                client.transport.write(flood + Frame(Opcode.TEXT, b"heard").serialize(mask=True))
                assert await client.recv() == "heard"
                await last

    run(asyncio.wait_for(body(), 60))


def test_nothing_comes_after_the_end():
    reader = ChunkReader()
    reader.feed_eof()
    with pytest.raises(EOFError):
        reader.feed_data(b"x")
    with pytest.raises(EOFError):
        reader.feed_eof()
