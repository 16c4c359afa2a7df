"""Gathers the heap of a process in pages of two megabytes, where the kernel does that on request (Linux 6.1 and later).

After some milliseconds of rest a request finds the processor's tables of pages cold, too, and touches some hundred
pages of 4 KiB once each.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

OFF = "TAKTLINE_LARGE_PAGES"
"""Environment variable; `0` leaves the heap as it is."""
_LARGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE


def gather_heap() -> int:
    """Gathers what is in use by now; how many pages were made. Where the kernel knows no such call it is 0."""
    if os.environ.get(OFF) == "0":
        return 0
    try:
        madvise = ctypes.CDLL(None).madvise
        spans = list(_heap())
    except (OSError, AttributeError):  # another system
        return 0
    return sum(
        madvise(ctypes.c_void_p(at), ctypes.c_size_t(_LARGE), _COLLAPSE) == 0
        for begin, end in spans
        for at in range(-(-begin // _LARGE) * _LARGE, end // _LARGE * _LARGE, _LARGE)
    )


def _heap() -> Iterator[tuple[int, int]]:
    """The process's own writable memory, without stacks, files and devices."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, _, *name = line.split(maxsplit=5)
        if rights == "rw-p" and (not name or name[0] == "[heap]"):
            begin, end = span.split("-")
            yield int(begin, 16), int(end, 16)
