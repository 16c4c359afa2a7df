"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

INSIST_S = 0.5


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and wait for it. Its result or exception is left in the task.

    A cancellation can get lost where it meets the end of what the task waits for (`wait_for` before Python 3.12 is one
    place), so it is repeated until the task is done.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=INSIST_S)
