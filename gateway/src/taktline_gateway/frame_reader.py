"""Reads WebSocket frames from the chunks that the socket gave: a message of hundreds of kilobytes is copied once.

`websockets` keeps one growing buffer, which copies what has come so far whenever it grows, and once more when the
frame is whole. For camera frames that was most of the time spent on a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

from websockets.protocol import Protocol
from websockets.streams import StreamReader


def read_in_chunks(protocol: Protocol) -> None:
    """Lets a protocol that has read nothing yet read from a `ChunkReader`."""
    protocol.reader = ChunkReader()
    protocol.parser = protocol.parse()
    next(protocol.parser)  # it waits for bytes of its reader, the new one


class ChunkReader(StreamReader):
    """`StreamReader` over a queue of chunks."""

    def __init__(self) -> None:
        super().__init__()
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._start = 0
        """Bytes of the first chunk that have been read."""

    def feed_data(self, data: bytes | bytearray) -> None:
        """Takes what came from the socket. Raises EOFError after the end."""
        if self.eof:
            raise EOFError("stream ended")
        if data:
            self._chunks.append(bytes(data))
            self._held += len(data)

    def read_exact(self, n: int) -> Generator[None, None, bytearray]:
        """Reads `n` bytes. Raises EOFError where the stream ends before."""
        while self._held < n:
            if self.eof:
                raise EOFError(f"stream ends after {self._held} bytes, expected {n} bytes")
            yield
        # Whatever reads this takes bytes as well as the bytearray that the base class returns.
        return self._take(n)  # type: ignore[return-value]

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
