"""Reads WebSocket frames so that a message of hundreds of kilobytes goes from the kernel right to where it is unmasked.

`websockets` keeps one growing buffer, which copies what has come so far whenever it grows, and once more when the
frame is whole. For camera frames that was most of the time spent on a message. Here a frame's head is read through a
small buffer, and a long payload from the socket into a buffer of its own size.

Most of what a robot sends are two kinds of frames: a binary message in one piece, and the answer to a ping of eight
bytes. A connection may take these past the library's parser (`Recipient`), in most cases with one read of the socket;
everything else goes through it. More is read ahead of the parser only while nothing else comes, and no more than such a
message has.
"""

from __future__ import annotations

import asyncio
import struct
import typing
from collections import deque
from collections.abc import Generator

import numpy as np
from websockets.protocol import Protocol
from websockets.streams import StreamReader

try:
    from websockets.speedups import apply_mask
except ImportError:  # the library was installed without its C extension
    from websockets.utils import apply_mask

LONG = 4096
"""A payload of which more is missing is read into a buffer of its own; also the size of the buffer for all else."""
MOST_AHEAD = 1 << 20
"""Memory that is set aside for bytes that were announced and have not come."""
FINAL_BINARY, _FINAL_PONG, _MASKED = 0x82, 0x8A, 0x80
# Heads of masked frames by what their second byte says of the length, and a masked pong of eight bytes.
_SMALL, _MEDIUM, _LARGE = struct.Struct(">BB4s"), struct.Struct(">BBH4s"), struct.Struct(">BBQ4s")
_PONG = struct.Struct(">BBIQ")
# Between a loop's question for a buffer and its word that bytes came nothing else runs, so they serve all connections.
_scratch = memoryview(bytearray(LONG))
_wide = memoryview(bytearray(MOST_AHEAD))


def frame_head(first: int, size: int) -> bytes:
    """The head of a frame that begins with this byte, without a mask."""
    if size < 126:
        return bytes((first, size))
    return struct.pack("!BBH", first, 126, size) if size < 65_536 else struct.pack("!BBQ", first, 127, size)


def read_in_chunks(protocol: Protocol) -> ChunkReader:
    """Lets a protocol that has read nothing yet read from the `ChunkReader` that is returned."""
    protocol.reader = reader = ChunkReader()
    protocol.parser = protocol.parse()
    next(protocol.parser)  # it waits for bytes of its reader, the new one
    return reader


class Recipient(typing.Protocol):
    """A connection that takes whole frames."""

    def room(self) -> int:
        """The longest message that it takes now; 0 while the library must see every byte, and while it waits."""

    def waits(self) -> bool:
        """Whether it has been given so much that nothing more is to be read for now."""

    def rest_follows(self) -> None:
        """More was read than the library is to parse at once: nothing is to be read until `go_on`, a turn later."""

    def message_arrived(self, data: bytes) -> None:
        """One whole binary message."""

    def pong_arrived(self, number: int) -> bool:
        """A pong with these eight bytes, big-endian; False where the library is to look at it."""


class DirectReading(asyncio.BufferedProtocol):
    """What a transport reads into on behalf of a protocol that takes chunks: long payloads past that protocol."""

    def __init__(self, protocol: asyncio.Protocol, reader: ChunkReader, recipient: Recipient | None = None) -> None:
        self._reader = reader
        self._recipient = recipient
        self._data_received = protocol.data_received
        self.eof_received = protocol.eof_received  # type: ignore[method-assign]
        self.connection_lost = protocol.connection_lost  # type: ignore[method-assign]
        self.pause_writing = protocol.pause_writing  # type: ignore[method-assign]
        self.resume_writing = protocol.resume_writing  # type: ignore[method-assign]
        self._payload = memoryview(b"")
        self._missing: memoryview | None = None
        """The part of the recipient's payload that has not come; None while the library's parser reads."""
        self._mask = b""
        self._usual = 0
        """So many bytes are read ahead of the parser: as many as the last message had, while such messages come."""
        self._ahead = False
        """Whether the bytes that come next were asked for so."""
        self._held = b""
        """What was read and has to wait with the recipient."""

    @property
    def within_frame(self) -> bool:
        """Whether a frame has begun and is not whole, of what has been read."""
        return self._missing is not None or not (self._reader.between_frames or self._held)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        if self._missing is not None:
            return self._missing
        self._ahead = self._usual > 0 and not self._held and self._reader.between_frames
        if self._ahead:
            return _wide[: self._usual]
        return _scratch if self._held else self._reader.missing or _scratch

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        if self._missing is not None:
            if nbytes < len(self._missing):
                self._missing = self._missing[nbytes:]
                return
            assert self._recipient is not None
            payload, self._payload, self._missing = self._payload, memoryview(b""), None
            self._recipient.message_arrived(apply_mask(payload, self._mask))
        elif self._held:
            self._held += _scratch[:nbytes]
        elif self._ahead or self._reader.missing is None:
            came = (_wide if self._ahead else _scratch)[:nbytes]
            between = self._recipient is not None and self._reader.between_frames
            left = came[self._take(came) :] if between else came
            if left:
                self._usual = 0
                self._feed(left)
        elif self._reader.filled(nbytes):
            self._data_received(b"")  # its parser goes on

    @property
    def holds(self) -> bool:
        """Whether something was read that waits with the recipient."""
        return bool(self._held)

    def go_on(self) -> bool:
        """What was held goes on, since the recipient waits no more or a turn has passed; whether that was all."""
        held, self._held = self._held, b""
        self._feed(held)
        return not self._held

    def _feed(self, data: bytes | memoryview) -> None:
        """Gives bytes to the library, a few at a time: each may hold a thousand frames, and others want the loop, too.

        What goes into a long payload is only copied, so that may be more.
        """
        at = 0
        while at < len(data) and not self._reader.eof:
            waits = self._recipient is not None and self._recipient.waits()
            if self._recipient is not None and (waits or (at and self._reader.missing is None)):
                self._held = bytes(data[at:])
                if not waits:
                    self._recipient.rest_follows()
                return
            self._data_received(bytes(data[at : at + LONG]))
            at += LONG

    def _take(self, came: memoryview) -> int:
        """Takes the recipient's frames from the beginning of what came; how many bytes they were."""
        recipient = self._recipient
        assert recipient is not None
        at = 0
        while len(came) - at >= _LARGE.size and (room := recipient.room()):  # shorter ones are left to the library
            first, second = came[at], came[at + 1]
            if first == _FINAL_PONG and second == _MASKED | 8:
                mask, masked = _PONG.unpack_from(came, at)[2:]
                if not recipient.pong_arrived(masked ^ (mask << 32 | mask)):
                    break
                at += _PONG.size
                continue
            if first != FINAL_BINARY or second < _MASKED:
                break
            if second == _MASKED | 127:
                begin = at + _LARGE.size
                _, _, size, mask = _LARGE.unpack_from(came, at)
            elif second == _MASKED | 126:
                begin = at + _MEDIUM.size
                _, _, size, mask = _MEDIUM.unpack_from(came, at)
            else:
                begin = at + _SMALL.size
                size, mask = second & ~_MASKED, _SMALL.unpack_from(came, at)[2]
            if size > room:
                break
            end = begin + size
            if end > len(came):
                if not LONG < size <= MOST_AHEAD:
                    break
                self._payload, self._mask = np.empty(size, np.uint8).data, mask
                self._payload[: len(came) - begin] = came[begin:]
                self._missing = self._payload[len(came) - begin :]
                # A little more than one of them, so that a read which brings it whole also finds the end.
                self._usual = min(MOST_AHEAD, size + LONG)
                return len(came)
            recipient.message_arrived(apply_mask(came[begin:end], mask))
            at = end
        return at


class ChunkReader(StreamReader):
    """`StreamReader` over a queue of chunks."""

    def __init__(self) -> None:
        super().__init__()
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._start = 0
        """Bytes of the first chunk that have been read."""
        self.missing: memoryview | None = None
        """The part of a long payload that has not come; None while none is awaited."""
        self.between_frames = False
        """Whether what is read next begins a frame."""

    def feed_data(self, data: bytes | bytearray) -> None:
        """Takes what came from the socket. Raises EOFError after the end."""
        if self.eof:
            raise EOFError("stream ended")
        if data and self.missing is not None:
            size = min(len(data), len(self.missing))
            self.missing[:size] = data[:size]
            self.filled(size)
            data = data[size:]
        if data:
            self._chunks.append(bytes(data))
            self._held += len(data)

    def filled(self, count: int) -> bool:
        """So many bytes have been written to `missing`; whether the payload is whole."""
        assert self.missing is not None
        self.missing = self.missing[count:] if count < len(self.missing) else None
        return self.missing is None

    def read_exact(self, n: int) -> Generator[None, None, bytearray]:
        """Reads `n` bytes. Raises EOFError where the stream ends before."""
        if n - self._held > LONG and not self.eof:
            payload = yield from self._read_long(n)
            return payload  # type: ignore[return-value]
        while self._held < n:
            if self.eof:
                raise EOFError(f"stream ends after {self._held} bytes, expected {n} bytes")
            yield
        # Whatever reads this takes bytes as well as the bytearray that the base class returns.
        return self._take(n)  # type: ignore[return-value]

    def _read_long(self, n: int) -> Generator[None, None, bytes | memoryview]:
        parts: list[memoryview] = []
        wanted = n
        while wanted:
            part = np.empty(min(wanted, MOST_AHEAD), np.uint8).data
            came = min(self._held, len(part))
            part[:came] = self._take(came)
            self.missing = part[came:] if came < len(part) else None
            while self.missing is not None:
                if self.eof:
                    came = n - wanted + len(part) - len(self.missing)
                    self.missing = None
                    raise EOFError(f"stream ends after {came} bytes, expected {n} bytes")
                yield
            parts.append(part)
            wanted -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_line(self, m: int, too_long_exc_type: type[Exception] = RuntimeError) -> Generator[None, None, bytearray]:
        """Reads a line of at most `m` bytes; only handshakes have lines, so they may cost a copy."""
        seen = 0
        while True:
            held = self._joined()
            end = held.find(b"\n", seen) + 1
            if end or len(held) > m:
                break
            if self.eof:
                raise EOFError(f"stream ends after {len(held)} bytes, before end of line")
            seen = len(held)
            yield
        if not 0 < end <= m:
            raise too_long_exc_type(f"read {end or len(held)} bytes, expected no more than {m} bytes")
        return self._take(end)  # type: ignore[return-value]

    def read_to_eof(
        self, m: int, too_long_exc_type: type[Exception] = RuntimeError
    ) -> Generator[None, None, bytearray]:
        """Reads what is left, at most `m` bytes."""
        while not self.eof:
            if self._held > m:
                raise too_long_exc_type(f"read {self._held} bytes, expected no more than {m} bytes")
            yield
        return self._take(self._held)  # type: ignore[return-value]

    def at_eof(self) -> Generator[None, None, bool]:
        """Whether the stream has ended and everything was read."""
        while True:
            if self._held:
                return False
            if self.eof:
                return True
            self.between_frames = True
            yield
            self.between_frames = False

    def discard(self) -> None:
        """Throws away what has come."""
        self._chunks.clear()
        self._held = self._start = 0
        self.missing = None

    def _joined(self) -> bytes:
        whole = self._take(self._held)
        self._chunks.append(whole)
        self._held = len(whole)
        return whole

    def _take(self, n: int) -> bytes:
        first = self._chunks[0] if self._chunks else b""
        left = len(first) - self._start
        self._held -= n
        if n < left:
            start = self._start
            self._start += n
            return first[start : start + n]
        parts: list[bytes | memoryview] = []
        wanted = n
        while wanted:
            chunk = self._chunks[0]
            left = len(chunk) - self._start
            if left <= wanted:
                self._chunks.popleft()
                parts.append(memoryview(chunk)[self._start :] if self._start else chunk)
                self._start = 0
                wanted -= left
            else:
                parts.append(memoryview(chunk)[self._start : self._start + wanted])
                self._start += wanted
                wanted = 0
        return b"".join(parts)
