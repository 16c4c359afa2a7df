"""One WebSocket connection of a client protocol: what it may hold, and a fence behind every answer."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State

from taktline_gateway.compat.service import Caller
from taktline_gateway.connections import TOO_MANY, ConnectionCounts, probe
from taktline_gateway.frame_reader import FINAL_BINARY, DirectReading, frame_head, read_in_chunks
from taktline_gateway.logs import log

MESSAGE_TIMEOUT_S = 10.0
"""How long a message may take that has begun; looked at so often, so at most twice as long."""
DATA = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
_TEXT, _PING_OF_8 = 0x81, b"\x89\x08"  # of frames in one piece
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-type: text/plain\r\n\r\n" + TOO_MANY + b"\n"
)
_logger = logging.getLogger(__name__)


class FencedConnection(ServerConnection):
    """A connection whose client waits for each answer before it sends again, and which notices when one did not.

    Such protocols have no request id. A client that gave up on an answer and sends again would take the late answer
    for the new one's. Two marks show it: a message that arrives while another is unanswered, and one that arrives
    before the pong to the ping that went out just ahead of the last answer (pings are answered in order, so its
    sender had not yet seen that answer). In both cases `overtaken` is set, at the moment the message arrives.
    """

    counts: ConnectionCounts
    message_timeout_s = MESSAGE_TIMEOUT_S

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._address: str | None = None
        """Under which it is counted; None where it is not."""
        self.peer = ""
        """Address and port of the client, read while it is surely there."""
        self._look_out: asyncio.TimerHandle | None = None
        self._done = 0
        """Frames that came whole, but for those amid a message in pieces."""
        self._unfinished: int | None = None
        """Their number when a message was last seen under way; None where none was."""
        self._reading = DirectReading(self, read_in_chunks(self.protocol), self)
        self.caller: Caller | None = None
        """Who it is, once its handshake has been read."""
        self.longest = 0
        """The longest message that is taken without the library's parser."""
        self.overtaken: asyncio.Future[None] = self.loop.create_future()
        self._unanswered = False
        self._answers = 0
        self._fence: asyncio.Future[float] | None = None
        self._fragmented = False
        self._waiting: asyncio.Future[bytes | None] | None = None
        self._going_on: asyncio.Handle | None = None
        self._closing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected; one too many is refused, which the library is never told of."""
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if isinstance(peer, tuple) else ""
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer)
        if self.counts.full(address):
            log(_logger, logging.WARNING, "connection_refused", peer=address, connections=self.counts.total)
            assert isinstance(transport, asyncio.Transport)
            transport.set_protocol(asyncio.Protocol())
            transport.write(_REFUSAL)
            transport.close()
            return
        self._address = address
        self.counts.enter(address)
        probe(transport)
        self._look_out = self.loop.call_later(self.message_timeout_s, self._check_progress)
        super().connection_made(transport)
        self.recv_messages.resume = self._resume_reading
        transport.set_protocol(self._reading)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        if self._address is not None:
            self.counts.leave(self._address)
            self._address = None
        if self._look_out is not None:
            self._look_out.cancel()
        super().connection_lost(exc)
        self._look()

    def process_event(self, event: Any) -> None:
        """Looks at each frame in the order of arrival, before it is queued for `recv`."""
        if not isinstance(event, Frame) or event.opcode not in DATA:
            super().process_event(event)
            self._done += not self._fragmented
            return
        self._fragmented = not event.fin
        self._done += event.fin
        if event.opcode is not Opcode.CONT:
            self._message_began()
        super().process_event(event)
        self._look()

    def room(self) -> int:
        """The longest message that `message_arrived` may be told of now."""
        if self.protocol.state is not State.OPEN or self._fragmented or self.recv_messages.paused:
            return 0
        return self.longest

    def waits(self) -> bool:
        """Whether messages wait for the handler, so that no more are to be read."""
        return self.recv_messages.paused

    def message_arrived(self, data: bytes) -> None:
        """A whole message, past the library."""
        self._done += 1
        self._message_began()
        waiting = self._waiting
        if waiting is not None and not waiting.done():
            waiting.set_result(data)
        elif not self.recv_messages.closed:
            self.recv_messages.put(Frame(Opcode.BINARY, data))

    def pong_arrived(self, number: int) -> bool:
        """A pong, past the library; False where it does not answer the only ping under way."""
        if number != self._answers or self._fence is None or len(self.pending_pings) != 1:
            return False
        if self.pending_pings.pop(number.to_bytes(8, "big"), None) is None:
            return False
        self._fence = None
        self._done += 1
        return True

    async def next_message(self) -> bytes | str:
        """What `recv` gives, at less cost where a message came past the library. Raises ConnectionClosed."""
        if not self.recv_messages.frames and not self.recv_messages.closed:
            self._waiting = self.loop.create_future()
            try:
                message = await self._waiting
            finally:
                self._waiting = None
            if message is not None:
                return message
        return await self.recv()

    async def answer(self, message: bytes | str) -> None:
        """Sends the answer to the last message. Raises ConnectionClosed."""
        if self.protocol.state is not State.OPEN:
            await self.send(message)  # which waits for the end and says why
            return
        # As `ping` and `send` would, without two waits and two writes for one answer.
        self._answers += 1
        mark = self._answers.to_bytes(8, "big")
        self._fence = self.loop.create_future()
        self.pending_pings[mark] = (self._fence, self.loop.time())
        self._unanswered = False
        parts = [_PING_OF_8, mark]
        if not self.overtaken.done():
            data = message.encode() if isinstance(message, str) else message
            parts += (frame_head(_TEXT if isinstance(message, str) else FINAL_BINARY, len(data)), data)
        self.transport.write(b"".join(parts))
        if self.paused or self.transport.is_closing():
            await self.drain()

    def rest_follows(self) -> None:
        """Reads nothing until the next turn of the loop has gone on with what is held."""
        self.transport.pause_reading()
        if self._going_on is None:
            self._going_on = self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._going_on = None
        if not self.recv_messages.paused:  # else its handler goes on
            self._resume_reading()

    def _resume_reading(self) -> None:
        """The handler has taken messages that waited: on with what was read after them, then with the socket."""
        if self._reading.go_on() and not self.recv_messages.paused:
            self.transport.resume_reading()

    def _check_progress(self) -> None:
        """Closes the connection where the message that was under way at the last look still is."""
        self._look_out = self.loop.call_later(self.message_timeout_s, self._check_progress)
        under_way = self._fragmented or self._reading.within_frame
        if self.protocol.state is not State.OPEN or self.recv_messages.paused or not under_way:
            self._unfinished = None
        elif self._unfinished != self._done:
            self._unfinished = self._done
        else:
            self._unfinished = None
            log(_logger, logging.WARNING, "slow_message", peer=self._address, waited_s=self.message_timeout_s)
            reason = f"a message took over {self.message_timeout_s:g} s"
            self._closing = self.loop.create_task(self.close(CloseCode.POLICY_VIOLATION, reason))

    def _message_began(self) -> None:
        fenced = self._fence is not None and not self._fence.done()
        if (self._unanswered or fenced) and not self.overtaken.done():
            self.overtaken.set_result(None)
        self._unanswered = True

    def _look(self) -> None:
        """Something came, or the end: whoever waits for a message is to look for it where the library keeps it."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def counted(counts: ConnectionCounts, message_timeout_s: float = MESSAGE_TIMEOUT_S) -> type[FencedConnection]:
    """The class of one gateway's connections, with its bounds."""
    return type("CountedConnection", (FencedConnection,), {"counts": counts, "message_timeout_s": message_timeout_s})
