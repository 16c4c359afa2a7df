"""Counts the connections of a ZeroMQ socket with all others of the gateway, and cuts those that are too many.

ZeroMQ accepts whoever comes and offers no bound. Its monitor tells of each connection by the number of its file, by
which the kernel says whose it is, and ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from taktline_gateway.connections import ConnectionCounts, copy_of
from taktline_gateway.logs import log

_logger = logging.getLogger(__name__)


class CountedClients:
    """The connections of one listening socket."""

    def __init__(
        self, listener: zmq.asyncio.Socket, counts: ConnectionCounts, gone: Callable[[int], None] = lambda _: None
    ) -> None:
        """`listener` is bound afterwards, so that nobody comes unseen; `gone` hears the number of each that ended."""
        self._listener = listener
        self._counts = counts
        self._gone = gone
        self._held: dict[int, str] = {}
        self._events: zmq.asyncio.Socket = listener.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._watching: asyncio.Task[None] | None = None
        self._port = 0

    def watch(self, port: int) -> None:
        """Begins to count, where the socket is bound to this port."""
        self._port = port
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stops counting; what is still open counts no more."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self._listener.disable_monitor()
        # The context waits for every socket that is open when it ends.
        self._events.close(linger=0)
        for address in self._held.values():
            self._counts.leave(address)
        self._held.clear()

    async def _watch(self) -> None:
        while True:
            event = parse_monitor_message(await self._events.recv_multipart())
            file = int(event["value"])
            # The kernel gives a number away again as soon as it is free, so a new one may stand for an old one's end.
            if (left := self._held.pop(file, None)) is not None:
                self._counts.leave(left)
                self._gone(file)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._accepted(file)

    def _accepted(self, file: int) -> None:
        # One that has ended since cannot be had, or is another file by now, of another port or of nobody.
        with contextlib.suppress(OSError), copy_of(file) as connection:
            if connection.getsockname()[1] != self._port:
                return
            address = str(connection.getpeername()[0])
            if self._counts.full(address):
                log(_logger, logging.WARNING, "connection_refused", peer=address, connections=self._counts.total)
                connection.shutdown(socket.SHUT_RDWR)
                return
            self._counts.enter(address)
            self._held[file] = address
