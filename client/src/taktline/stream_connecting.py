"""Keeps one connection to the gateway: made when it is asked for, and tried again, later each time, where it fails."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.stream import Hello

from taktline.access import Access
from taktline.address import unreachable
from taktline.stream_errors import closed_meanwhile
from taktline.stream_link import Link, NoStream, Timeout, open_link

BACKOFF_S = 0.05
BACKOFF_MAX_S = 2.0
RETRIED = frozenset(
    {
        ErrorCode.DRAINING,
        ErrorCode.OVERLOADED,
        ErrorCode.STREAM_IDLE,
        ErrorCode.SLOW_READER,
        ErrorCode.GATEWAY_UNREACHABLE,
        ErrorCode.INTERNAL,
    }
)
"""Errors of a hello, or ends of a connection, that another attempt can change; the others the caller hears."""


class Connector:
    """The connection of one stream. All of it runs on one event loop.

    Attributes:
        link: the connection that is open, or was last.
        failure: why there is none.
    """

    def __init__(
        self,
        uri: str,
        access: Access,
        hello: Callable[[], Hello],
        begin: Callable[[Link], None],
        give_up: Callable[[Exception], None],
    ) -> None:
        """`hello()` is said first, `begin(link)` told of each connection, `give_up(error)` that none will come."""
        self.link: Link | None = None
        self.failure: Exception | None = None
        self._uri = uri
        self._access = access
        self._hello = hello
        self._begin = begin
        self._give_up = give_up
        self._linked = asyncio.Event()
        self._connecting: asyncio.Task[None] | None = None
        self._closed = False

    async def wait(self, timeout_s: float) -> Link:
        """A connection that takes observations. Raises TaktlineError or NoStream where none comes in time."""
        link = self.link
        if link is not None and not link.gone and not link.leaving:
            return link
        self.start()
        end = time.monotonic() + timeout_s
        while True:
            if self._closed:
                raise closed_meanwhile()
            try:
                await asyncio.wait_for(self._linked.wait(), max(0.0, end - time.monotonic()))
            except Timeout as error:
                raise self.failure or unreachable(self._uri, "cannot be reached") from error
            if self.link is not None and not self.link.gone and not self.link.leaving:
                return self.link
            if self._closed:
                continue
            failure = self.failure
            self._linked.clear()
            if failure is not None and self._connecting is None:
                raise failure
            self.start()

    def start(self) -> None:
        """Makes one, unless that is under way."""
        if self._connecting is None and not self._closed:
            self.failure = None
            self._linked.clear()
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def lost(self, link: Link) -> None:
        """A connection is gone."""
        if self.link is link:
            self.link = None

    def close(self) -> Link | None:
        """Makes no more; the connection that is open is the caller's to close."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        self._linked.set()
        link, self.link = self.link, None
        return link

    async def _connect(self) -> None:
        backoff_s = BACKOFF_S
        try:
            while True:
                try:
                    link = await open_link(self._uri, self._access, self._hello())
                except TaktlineError as error:
                    self.failure = error
                    if error.code not in RETRIED:
                        self._give_up(error)
                        return
                    hint_s = (error.retry_after_ms or 0.0) / 1e3
                    # Many robots lose one gateway at one moment; they must not come back at one moment.
                    await asyncio.sleep(max(hint_s, backoff_s) * random.uniform(0.5, 1.0))
                    backoff_s = min(BACKOFF_MAX_S, 2 * backoff_s)
                except NoStream as error:
                    self.failure = error
                    self._give_up(error)
                    return
                except Exception as error:
                    # Whatever it is, trying again at once and for ever would not help, and nobody would hear of it.
                    self.failure = unreachable(self._uri, "cannot be spoken to", error)
                    self._give_up(self.failure)
                    return
                else:
                    self.failure = None
                    self.link = link
                    self._begin(link)
                    return
        finally:
            self._connecting = None
            self._linked.set()
