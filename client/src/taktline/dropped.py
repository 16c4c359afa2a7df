"""What becomes of the connections of a robot that nobody holds any more."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

Connection = tuple[asyncio.AbstractEventLoop, Callable[[], Coroutine[Any, Any, None]]]
"""The loop that a connection belongs to, and what ends it."""


def let_go(robot_id: str, held: list[Connection]) -> None:
    """A robot was dropped with its connection open: that is said, and the connection ends on its own loop."""
    if not held:
        return
    for loop, close in held:
        if not loop.is_closed():
            asyncio.run_coroutine_threadsafe(close(), loop)
    warnings.warn(f"robot {robot_id} was dropped without `close`", ResourceWarning, stacklevel=2)  # last: it may raise
