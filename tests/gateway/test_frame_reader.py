"""The chunk reader reads what the library's own reader reads, however the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_gateway.frame_reader import ChunkReader, read_in_chunks
from websockets.frames import Frame, Opcode
from websockets.server import ServerProtocol
from websockets.streams import StreamReader

REQUEST = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


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


def test_nothing_comes_after_the_end():
    reader = ChunkReader()
    reader.feed_eof()
    with pytest.raises(EOFError):
        reader.feed_data(b"x")
    with pytest.raises(EOFError):
        reader.feed_eof()
