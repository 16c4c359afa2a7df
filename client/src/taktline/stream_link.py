"""One WebSocket connection of a stream, from its opening to the gateway's welcome."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, cast

from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.codecs import ANSWER_LIMITS, MediaType, decode_error, error_from_body
from taktline_protocol.messages import ErrorBody
from taktline_protocol.stream import Frame, Goodbye, Hello, Refusal, Welcome
from taktline_protocol.stream_codec import decode_from_gateway, encode_frame
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.frames import Frame as WebSocketFrame
from websockets.frames import Opcode
from websockets.protocol import State
from websockets.streams import StreamReader

try:
    from websockets.speedups import apply_mask
except ImportError:  # the library was installed without its C extension
    from websockets.utils import apply_mask

from taktline.access import Access
from taktline.address import unreachable
from taktline.observing import TOO_LARGE_STEP

# Heads of a message in one piece, by the length of its length (RFC 6455, section 5.2).
_SHORT, _MEDIUM, _LONG = struct.Struct(">BB4s"), struct.Struct(">BBH4s"), struct.Struct(">BBQ4s")
_FINAL_BINARY, _MASKED = 0x82, 0x80
Timeout = asyncio.TimeoutError
"""What asyncio raises; a class of its own on Python 3.10."""
OPEN_S = 5.0
CLOSE_S = 1.0


class NoStream(Exception):
    """What answers at the address does not speak streams."""


class _Reader(StreamReader):
    """Knows whether the library's parser waits for a frame to begin."""

    between_frames = False

    def at_eof(self) -> Generator[None, None, bool]:
        """Asked before each frame."""
        self.between_frames = True
        ended = yield from super().at_eof()
        self.between_frames = False
        return ended


class _Connection(ClientConnection):
    """Hands messages over as they come, where somebody listens: past the library's queue, and a turn of the loop, and
    those that come by themselves past its parser, too; and takes messages without its contexts, where there is nothing
    to wait for."""

    hear: Callable[[bytes], None] | None = None
    _amid_pieces = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.protocol.reader = self._reader = _Reader()
        self.protocol.parser = self.protocol.parse()
        next(self.protocol.parser)  # it waits for bytes of the new reader

    def data_received(self, data: bytes) -> None:
        """Bytes have come, mostly one message."""
        past = self.hear is not None and self._reader.between_frames and not self._amid_pieces
        if past and self.protocol.state is State.OPEN and (begin := _message_begins(data)):
            self.hear(data[begin:])  # type: ignore[misc]
        else:
            super().data_received(data)

    def send_at_once(self, body: bytes) -> bool:
        """Whether a message has been written: not where the connection is closed or closing."""
        protocol = self.protocol
        if protocol.state is not State.OPEN or protocol.close_expected():
            return False
        mask, size = os.urandom(4), len(body)
        if size < 126:
            head = _SHORT.pack(_FINAL_BINARY, _MASKED | size, mask)
        elif size < 65_536:
            head = _MEDIUM.pack(_FINAL_BINARY, _MASKED | 126, size, mask)
        else:
            head = _LONG.pack(_FINAL_BINARY, _MASKED | 127, size, mask)
        self.transport.write(head + apply_mask(body, mask))
        return True

    def process_event(self, event: object) -> None:
        """One frame, or the answer to the handshake."""
        heard = self.hear
        if isinstance(event, WebSocketFrame) and event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            self._amid_pieces = not event.fin
        whole = isinstance(event, WebSocketFrame) and event.opcode is Opcode.BINARY and event.fin
        if heard is not None and whole:
            heard(bytes(event.data))  # type: ignore[attr-defined]
        else:
            super().process_event(event)  # type: ignore[arg-type]


class Link:
    """An open connection.

    Attributes:
        welcome: what the gateway said at its start.
        shown: the headers that let it in.
        leaving: the gateway takes no more observations here.
        goodbye: why.
        gone: the connection is lost or closed.
        heard_at: when the last frame came.
    """

    def __init__(self, connection: _Connection, welcome: Welcome, shown: Mapping[str, str]) -> None:
        self._connection = connection
        self.welcome = welcome
        self.shown = shown
        self.leaving = False
        self.goodbye: TaktlineError | None = None
        self.gone = False
        self.heard_at = time.monotonic()
        self._fault: TaktlineError | None = None

    async def send(self, body: bytes, timeout_s: float) -> None:
        """Writes one frame, and only then waits where too much that was written is still to be taken.

        Raises ConnectionClosed; Timeout where too little of it is taken in time.
        """
        connection = self._connection
        if not connection.send_at_once(body):
            await connection.send(body)  # raises: within CLOSE_S it is closed
        elif connection.paused:
            await asyncio.wait_for(connection.drain(), timeout_s)

    def listen(self, hear: Callable[[bytes], None]) -> None:
        """From now on `hear` gets each frame at once, but for those that have come already or come in pieces.

        A TaktlineError that it raises ends the connection, and `receive` raises it.
        """

        def heard(body: bytes) -> None:
            try:
                hear(body)
            except TaktlineError as error:
                self._fault = error
                self.abort()

        self._connection.hear = heard

    async def receive(self) -> bytes:
        """The next frame that nobody heard. Raises ConnectionClosed, or TaktlineError `invalid_body` for a text."""
        try:
            return _binary(await self._connection.recv())
        except ConnectionClosed:
            if self._fault is not None:
                raise self._fault from None
            raise

    async def close(self) -> None:
        """Closes the connection, without waiting long for the other side."""
        self.gone = True
        try:
            await asyncio.wait_for(self._connection.close(), 2 * CLOSE_S)
        except Timeout:  # not even that it is closed is taken
            self.abort()

    def abort(self) -> None:
        """Cuts a connection whose other side is silent."""
        self._connection.transport.abort()


async def open_link(uri: str, access: Access, hello: Hello) -> Link:
    """Connects and says hello.

    Raises:
        TaktlineError: why the gateway refused, or `gateway_unreachable`.
        NoStream: there is no stream at this address.
    """
    shown = access.headers()
    try:
        connection = await connect(
            uri,
            additional_headers=shown,
            ssl=access.tls() if uri.startswith("wss:") else None,
            compression=None,
            max_size=ANSWER_LIMITS.body_bytes,
            ping_interval=None,  # the stream has its own
            open_timeout=OPEN_S,
            close_timeout=CLOSE_S,
            create_connection=_Connection,
        )
    except InvalidStatus as error:
        raise _refused(uri, error) from error
    except (OSError, InvalidHandshake, InvalidURI, Timeout, EOFError) as error:
        raise unreachable(uri, "cannot be reached", error) from error
    try:
        await connection.send(encode_frame(hello))
        first = decode_from_gateway(_binary(await asyncio.wait_for(connection.recv(), OPEN_S)))
    except (ConnectionClosed, OSError, Timeout) as error:
        await _drop(connection)
        raise unreachable(uri, "broke the connection", error) from error
    except BaseException:
        await _drop(connection)
        raise
    if isinstance(first, Welcome):
        return Link(cast(_Connection, connection), first, shown)
    await _drop(connection)
    if isinstance(first, Goodbye):
        raise typed(first)
    raise unreachable(uri, f"said {type(first).__name__} instead of Welcome")


def _message_begins(data: bytes) -> int:
    """Where the payload begins of the binary message that these bytes are, in one piece, without a mask; 0 if none."""
    if len(data) < 10 or data[0] != 0x82:  # shorter ones are left to the library
        return 0
    size, begin = data[1], 2
    if size >= 126:
        begin = 4 if size == 126 else 10
        size = int.from_bytes(data[2:begin], "big") if size <= 127 else -1
    return begin if len(data) == begin + size else 0


@contextlib.contextmanager
def noticing_loss(link: Link) -> Iterator[None]:
    """Marks a connection that is found lost as gone: its reader notices, too, but may have had no turn yet."""
    try:
        yield
    except Timeout:  # is an OSError, too, but no loss
        raise
    except (ConnectionClosed, OSError):
        link.gone = True


def check_fits(link: Link, body_bytes: int, whole: Mapping[str, Frame]) -> None:
    """Raises TaktlineError `body_too_large` for a message over the gateway's limit, for which it would hang up.

    `whole` are the camera frames in the message.
    """
    limit = link.welcome.limits.frame_bytes
    if body_bytes <= limit:
        return
    largest = sorted(whole, key=lambda camera: -len(whole[camera].data))[:3]
    sizes = ", ".join(f"{camera!r} {len(whole[camera].data) / 2**20:.1f} MiB" for camera in largest)
    raise TaktlineError(
        ErrorCode.BODY_TOO_LARGE,
        f"the observation has {body_bytes / 2**20:.1f} MiB, the gateway takes {limit / 2**20:g}; its cameras: {sizes}",
        TOO_LARGE_STEP,
    )


async def _drop(connection: ClientConnection) -> None:
    with contextlib.suppress(ConnectionClosed, OSError):
        await connection.close()


def _binary(message: str | bytes) -> bytes:
    if isinstance(message, bytes):
        return message
    raise TaktlineError(
        ErrorCode.INVALID_BODY, "a text message came over the stream", "check that the address is a Taktline gateway"
    )


def _refused(uri: str, error: InvalidStatus) -> TaktlineError | NoStream:
    """The typed error in a refused handshake; else whether it means that there is no stream."""
    response = error.response
    with contextlib.suppress(TaktlineError, ValueError):
        media = MediaType(response.headers.get("content-type", ""))
        said = error_from_body(decode_error(bytes(response.body or b""), media))
        if said.code is not ErrorCode.NOT_FOUND:
            return said
    if response.status_code < 500 or response.status_code == 501:
        return NoStream(f"{uri} answered {response.status_code} to a WebSocket")
    return unreachable(uri, f"answered {response.status_code}")


def typed(frame: Refusal | Goodbye) -> TaktlineError:
    """The exception of an error that came over the stream."""
    shed = frame if isinstance(frame, Refusal) else None
    return error_from_body(
        ErrorBody(
            code=frame.code,
            message=frame.message,
            next_step=frame.next_step,
            retry_after_ms=frame.retry_after_ms,
            safe_action=None if shed is None else shed.safe_action,
            buffer_ms=None if shed is None else shed.buffer_ms,
        )
    )
