"""The SDK's WebSocket hands over the same messages whether they pass the library's parser or not."""

from __future__ import annotations

import asyncio
import random

import pytest
from taktline.stream_link import _Connection
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.server import ServerProtocol
from websockets.uri import parse_uri


class Wire(asyncio.Transport):
    """Takes what is written."""

    def write(self, data) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high=None, low=None) -> None:
        pass


def opened():
    """A connection after its handshake."""
    protocol, gateway = ClientProtocol(parse_uri("ws://gateway/stream")), ServerProtocol()
    made = _Connection(protocol)
    made.connection_made(Wire())
    protocol.send_request(protocol.connect())
    gateway.receive_data(b"".join(protocol.data_to_send()))
    (request,) = gateway.events_received()
    gateway.send_response(gateway.accept(request))
    made.data_received(b"".join(gateway.data_to_send()))
    return made


@pytest.mark.parametrize("seed", range(60))
async def test_messages_are_heard_whole_and_in_order_however_they_come(seed):
    draw = random.Random(seed)
    payloads = [draw.randbytes(draw.choice([0, 1, 5, 8, 125, 126, 700, 65_535, 65_536])) for _ in range(12)]
    pieces = []
    for payload in payloads:
        if draw.random() < 0.2:  # a message amid a ping's way, as a peer may send it
            pieces.append(Frame(Opcode.PING, b"are you there").serialize(mask=False))
        pieces.append(Frame(Opcode.BINARY, payload).serialize(mask=False))
    made, heard = opened(), []
    made.hear = heard.append
    if draw.random() < 0.5:
        for piece in pieces:
            made.data_received(piece)
    else:
        wire = b"".join(pieces)
        while wire:
            size = draw.choice([1, 2, 3, 9, 10, 130, 800, 70_000])
            made.data_received(wire[:size])
            wire = wire[size:]
    assert heard == payloads


async def test_a_message_within_one_in_pieces_is_the_librarys_to_refuse():
    made, heard = opened(), []
    made.hear = heard.append
    made.data_received(Frame(Opcode.BINARY, b"the first half of it", fin=False).serialize(mask=False))
    made.data_received(Frame(Opcode.BINARY, b"another message").serialize(mask=False))
    assert not heard
    assert made.protocol.parser_exc is not None
