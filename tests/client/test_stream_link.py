"""The SDK's WebSocket hands over the same messages whether they pass the library's parser or not; and what is said
where none comes."""

from __future__ import annotations

import asyncio
import contextlib
import random

import numpy as np
import pytest
import taktline
from taktline.stream_link import _Connection
from taktline_protocol import TaktlineError
from taktline_protocol.limits import DEFAULT_LIMITS
from taktline_protocol.messages import PolicyInfo
from taktline_protocol.stream import Cancel, Observe, StreamLimits, Welcome
from taktline_protocol.stream_codec import decode_from_robot, encode_frame
from websockets.asyncio.server import serve
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed
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


async def test_an_observation_that_is_given_up_is_cancelled():
    limits = StreamLimits(
        **{name: getattr(DEFAULT_LIMITS, name, 1 << 24) for name in StreamLimits.__struct_fields__},
    )
    info = PolicyInfo(policy="p", family="f", revision="r", ready=True, cameras=("c",), state_dim=2, action_dim=2)
    said, cancelled = [], asyncio.Event()

    async def gateway(connection) -> None:
        """Takes everything and answers nothing."""
        with contextlib.suppress(ConnectionClosed):
            await connection.recv()
            await connection.send(encode_frame(Welcome(1, b"t" * 16, False, {}, (), limits, info, 0.0)))
            while True:
                frame = decode_from_robot(await connection.recv(), DEFAULT_LIMITS)
                if isinstance(frame, Observe | Cancel):
                    said.append((type(frame), frame.seq))
                if isinstance(frame, Cancel):
                    cancelled.set()

    async with serve(gateway, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        async with taktline.AsyncRobot(url, "p", "arm", transport="stream", answer_timeout_s=0.2) as arm:
            with pytest.raises(TaktlineError, match="did not answer in time"):
                await arm.act({"c": np.zeros((8, 8, 3), np.uint8)}, [0.0, 0.0], "go", 3000.0)
            await asyncio.wait_for(cancelled.wait(), 10)
    assert said == [(Observe, 1), (Cancel, 1)]
