"""uvicorn's WebSocket with one addition: the application may cut a connection whose robot reads nothing.

ASGI knows only closes that wait until the robot has taken what was sent, which such a robot never does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from taktline_gateway.frame_reader import DirectReading, read_in_chunks
from taktline_gateway.logs import REFUSAL_SENT

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

ABORT = "taktline.abort"
"""Key of the ASGI scope under which the way to cut the connection is found."""


class StreamTransport(WebSocketsSansIOProtocol):
    """Reads no further message before the last one was taken, so that read-ahead is bounded too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reading = DirectReading(self, read_in_chunks(self.conn))
        """What the transport reads into, once it is upgraded."""

    async def run_asgi(self) -> None:
        """Runs the application for this connection."""
        scope: dict[str, object] = self.scope  # type: ignore[assignment]
        scope[ABORT] = self.transport.abort
        await super().run_asgi()

    async def send(self, message: ASGISendEvent) -> None:
        """Sends what the application says."""
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            REFUSAL_SENT.set(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over. Its parser holds the last message, whose cameras must not wait for the collector."""
        super().connection_lost(exc)
        self.conn.parser.close()
