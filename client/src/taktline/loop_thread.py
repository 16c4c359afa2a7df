"""One event loop on a thread of its own, shared by all blocking robots of a process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from taktline_protocol.errors import ErrorCode, TaktlineError

T = TypeVar("T")


class LoopThread:
    """A daemon thread that runs coroutines for threads that block."""

    _shared: LoopThread | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="taktline", daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> LoopThread:
        """The one of this process; a forked child gets its own, as threads do not survive a fork."""
        with cls._lock:
            if cls._shared is None or cls._shared.forked:
                cls._shared = cls()
            return cls._shared

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made it."""
        return self._process != os.getpid()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts `work`; cancelling the future cancels it.

        Raises:
            TaktlineError: `config_invalid` in a child that the process has forked: it has no such thread, and what was
                connected is the parent's.
        """
        if self.forked:
            work.close()
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                "this robot was made before the process forked, and its connection is the parent's",
                "make a robot in the child, or start children with multiprocessing's spawn",
            )
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a blocking robot was used on its own event loop; use AsyncRobot there")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def start_from_anywhere(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """Starts what `make` makes, where nobody waits for it; also from the thread itself, as the collector may.

        In a forked child it does nothing.
        """
        if not self.forked:
            asyncio.run_coroutine_threadsafe(make(), self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end; an interrupted wait cancels it."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, make: Callable[[], T]) -> T:
        """Calls `make` on the loop's thread, for objects that belong to an event loop."""

        async def made() -> T:
            return make()

        return self.run(made())
