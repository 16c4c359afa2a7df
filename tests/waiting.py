"""Waiting for what another process or thread brings about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def until(condition: Callable[[], Found], what: str, timeout_s: float = 120.0) -> Found:
    """Asks until the answer is true, and returns it; fails naming `what` where that never comes."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {timeout_s:g} s")
