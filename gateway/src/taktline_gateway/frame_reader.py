"""Reads WebSocket frames so that a message of hundreds of kilobytes goes from the kernel right to where it is unmasked.

`websockets` keeps one growing buffer, which copies what has come so far whenever it grows, and once more when the
frame is whole. For camera frames that was most of the time spent on a message. Here a frame's head is read through a
small buffer, and a long payload from the socket into a buffer of its own size.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator

import numpy as np
from websockets.protocol import Protocol
from websockets.streams import StreamReader

LONG = 4096
"""A payload of which more is missing is read into a buffer of its own; also the size of the buffer for all else."""
MOST_AHEAD = 1 << 20
"""Memory that is set aside for bytes that were announced and have not come."""
# Between a loop's question for a buffer and its word that bytes came nothing else runs, so one serves all connections.
_scratch = memoryview(bytearray(LONG))


def read_in_chunks(protocol: Protocol) -> ChunkReader:
    """Lets a protocol that has read nothing yet read from the `ChunkReader` that is returned."""
    protocol.reader = reader = ChunkReader()
    protocol.parser = protocol.parse()
    next(protocol.parser)  # it waits for bytes of its reader, the new one
    return reader


class DirectReading(asyncio.BufferedProtocol):
    """What a transport reads into on behalf of a protocol that takes chunks: long payloads past that protocol."""

    def __init__(self, protocol: asyncio.Protocol, reader: ChunkReader) -> None:
        self._reader = reader
        self._data_received = protocol.data_received
        self.eof_received = protocol.eof_received  # type: ignore[method-assign]
        self.connection_lost = protocol.connection_lost  # type: ignore[method-assign]
        self.pause_writing = protocol.pause_writing  # type: ignore[method-assign]
        self.resume_writing = protocol.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._reader.missing or _scratch

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        if self._reader.missing is None:
            self._data_received(bytes(_scratch[:nbytes]))
        elif self._reader.filled(nbytes):
            self._data_received(b"")  # its parser goes on


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
            yield

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
