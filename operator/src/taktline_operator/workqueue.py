"""A queue of keys to reconcile: a key waits once, is handled by one worker at a time, and backs off on errors."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

COALESCE_S = 0.05  # events of one change arrive in bursts; one reconciliation serves the burst
FIRST_RETRY_S = 0.5
LAST_RETRY_S = 60.0


class WorkQueue(Generic[Key]):
    """Keys to handle. A key added while it is handled is handled once more afterwards."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: set[Key] = set()  # in _ready, or to be put there when its worker is done
        self._active: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def add(self, key: Key, delay_s: float = COALESCE_S) -> None:
        """Have `key` handled after `delay_s`; an earlier appointment stands."""
        loop = asyncio.get_running_loop()
        due = loop.time() + delay_s
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= due:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(due, self._fire, key)

    def _fire(self, key: Key) -> None:
        self._timers.pop(key, None)
        if key not in self._waiting:
            self._waiting.add(key)
            if key not in self._active:
                self._ready.put_nowait(key)

    async def get(self) -> Key:
        """The next key; call `done` with it afterwards."""
        key = await self._ready.get()
        self._waiting.discard(key)
        self._active.add(key)
        return key

    def done(self, key: Key, *, failed: bool = False, delay_s: float | None = None) -> None:
        """Say that `key` has been handled. After a failure it comes back, later each time.

        Args:
            delay_s: when to come back after a failure; None grows from half a second to a minute.
        """
        self._active.discard(key)
        if key in self._waiting:
            self._ready.put_nowait(key)
        if not failed:
            self._failures.pop(key, None)
            return
        count = self._failures[key] = self._failures.get(key, 0) + 1
        growing = min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(count - 1, 10))
        self.add(key, growing if delay_s is None else delay_s)

    @property
    def depth(self) -> int:
        """Keys that wait to be handled now; keys with a later appointment do not count."""
        return len(self._waiting)
