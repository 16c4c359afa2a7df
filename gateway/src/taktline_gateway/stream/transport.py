"""uvicorn's WebSocket with two additions: the application may cut a connection whose robot reads nothing, and the usual
messages go past the library, both ways.

ASGI knows only closes that wait until the robot has taken what was sent, which such a robot never does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State

from taktline_gateway.frame_reader import FINAL_BINARY, DirectReading, frame_head, read_in_chunks
from taktline_gateway.logs import REFUSAL_SENT

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent

ABORT = "taktline.abort"
"""Key of the ASGI scope under which the way to cut the connection is found."""
SEND_AT_ONCE = "taktline.send_at_once"
"""Likewise `StreamTransport.send_at_once`."""
HEAR_AT_ONCE = "taktline.hear_at_once"
"""Likewise `StreamTransport.hear_at_once`."""
Hear = Callable[[bytes], bool]
"""Takes a message in the turn that read it; False leaves it for `receive`. Raises nothing."""


class StreamTransport(WebSocketsSansIOProtocol):
    """Reads no further message before the last one was taken, so that read-ahead is bounded too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reading = DirectReading(self, read_in_chunks(self.conn), self)
        """What the transport reads into, once it is upgraded."""
        self._going_on: asyncio.Handle | None = None
        self._hear: Hear | None = None

    async def run_asgi(self) -> None:
        """Runs the application for this connection."""
        scope: dict[str, object] = self.scope  # type: ignore[assignment]
        scope[ABORT] = self.transport.abort
        scope[SEND_AT_ONCE] = self.send_at_once
        scope[HEAR_AT_ONCE] = self.hear_at_once
        await super().run_asgi()

    # ----- what comes

    def room(self) -> int:
        """The longest message that `message_arrived` may be told of now."""
        if self.read_paused or self.frames or self.close_sent or self.conn.state is not State.OPEN:
            return 0
        return self.config.ws_max_size

    def waits(self) -> bool:
        """Whether a message waits for the application, so that no more are to be read; after a close nobody waits."""
        return self.read_paused and not self.close_sent

    def message_arrived(self, data: bytes) -> None:
        """A whole message, past the library, and past the queue where the application takes it at once."""
        if self.close_sent or (self._hear is not None and self._hear(data)):
            return
        self.queue.put_nowait({"type": "websocket.receive", "bytes": data})
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def hear_at_once(self, hear: Hear) -> None:
        """From now on `hear` is asked first, while no other message waits."""
        self._hear = hear

    def pong_arrived(self, number: int) -> bool:
        """uvicorn's own pings are of four bytes: whatever this answers, the library looks at it."""
        return False

    def rest_follows(self) -> None:
        """Reads nothing until the next turn of the loop has gone on with what is held."""
        self.transport.pause_reading()
        if self._going_on is None:
            self._going_on = self.loop.call_soon(self._go_on)

    async def receive(self) -> ASGIReceiveEvent:
        """The next message: then on with what was read after it, and with the socket."""
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._resume()
        return message

    def _go_on(self) -> None:
        self._going_on = None
        if not self.waits():  # else the application goes on
            self._resume()

    def _resume(self) -> None:
        if self.reading.go_on() and not self.waits() and not self.transport.is_closing():
            self.transport.resume_reading()

    # ----- what goes

    async def send(self, message: ASGISendEvent) -> None:
        """Sends what the application says."""
        await super().send(message)
        if self.close_sent and self.reading.holds:
            self._resume()  # the answer to the close may be among it
        if self.initial_response is not None and self.close_sent:
            REFUSAL_SENT.set(True)

    def send_at_once(self, body: bytes) -> bool:
        """Whether a binary message has been written: not one that would have to wait, or has no connection."""
        gone = self.conn.state is not State.OPEN or self.close_sent or self.transport.is_closing()
        if gone or not self.writable.is_set():
            return False
        self.transport.write(frame_head(FINAL_BINARY, len(body)) + body)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over. Its parser holds the last message, whose cameras must not wait for the collector."""
        super().connection_lost(exc)
        self.conn.parser.close()
