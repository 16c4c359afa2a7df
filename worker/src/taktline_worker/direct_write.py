"""Answers from the thread that has them right to their socket, past the loop that owns the connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections import deque

from taktline_protocol.batch_frames import as_socket


class DirectWrite:
    """Writes of one connection, by its loop or past it: waking the loop for an answer takes longer than writing it.

    Bytes go past the loop only while it has none of its own to write, so that they keep their order. That needs a
    descriptor of its own: the transport's may have been closed by now, and its number be another connection's. With TLS
    everything goes through the loop.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._rests: deque[memoryview] = deque()
        """What the loop has yet to write, in order: nothing may overtake it."""
        self._past: socket.socket | None = None
        if transport.get_extra_info("sslcontext") is None:
            with contextlib.suppress(OSError):  # no descriptor is left: the loop writes everything
                self._past = socket.socket(fileno=os.dup(as_socket(transport).fileno()))
                self._past.setblocking(False)

    def now(self, data: bytes) -> bool:
        """Any thread: writes what the kernel takes at once; whether `rest` has more to write."""
        left = memoryview(data)
        with self._lock:
            if self._past is not None and not self._rests and not self._transport.get_write_buffer_size():
                try:
                    left = left[self._past.send(left) :]
                except (BlockingIOError, InterruptedError):
                    pass
                except OSError:  # it is lost, as the loop is about to hear
                    left = left[:0]
            if left:
                self._rests.append(left)
        return bool(left)

    def rest(self) -> None:
        """The loop: all that `now` has left, of whichever thread."""
        with self._lock:
            self._write_rests()

    def write(self, data: bytes) -> None:
        """The loop: something of its own, behind what `now` has left, which may be the end of a frame."""
        with self._lock:
            self._write_rests()
            self._write(data)

    def _write_rests(self) -> None:
        while self._rests:
            self._write(self._rests.popleft())

    def _write(self, data: bytes | memoryview) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """The connection is lost."""
        with self._lock:
            if self._past is not None:
                self._past.close()
                self._past = None
