"""A gateway's heap is gathered in large pages where the kernel does that; elsewhere nothing changes."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
from taktline_gateway import large_pages
from taktline_gateway.large_pages import OFF, gather_heap

LARGE = 2 << 20


def large_kb() -> int:
    """Kilobytes of this process in large pages."""
    return sum(map(int, re.findall(r"^AnonHugePages: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.MULTILINE)))


def test_what_is_in_use_is_gathered_and_stays_what_it_was():
    held = mmap.mmap(-1, 4 * LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held[:] = bytes(range(256)) * (4 * LARGE // 256)
    before = large_kb()
    if not gather_heap():
        pytest.skip("this kernel gathers no pages on request")
    assert large_kb() - before >= 2 * LARGE // 1024
    assert held[:] == bytes(range(256)) * (4 * LARGE // 256)


def test_it_can_be_left_out(monkeypatch):
    monkeypatch.setenv(OFF, "0")
    monkeypatch.setattr(large_pages, "_heap", lambda: pytest.fail("the heap was looked at"))
    assert gather_heap() == 0


def test_a_system_without_such_a_list_is_left_alone(monkeypatch):
    def lacking():
        raise FileNotFoundError("/proc/self/maps")

    monkeypatch.setattr(large_pages, "_heap", lacking)
    assert gather_heap() == 0
