"""The queue of keys: bursts coalesce, one worker per key, failures back off."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from taktline_operator.workqueue import WorkQueue


async def drained(queue: WorkQueue[str], delay_s: float = 0.02) -> list[str]:
    """Keys that are ready after a moment, all marked done."""
    await asyncio.sleep(delay_s)
    found = []
    for _ in range(queue.depth):
        key = await queue.get()
        queue.done(key)
        found.append(key)
    return found


async def test_a_burst_is_handled_once() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for _ in range(10):
        queue.add("a", 0.0)
        queue.add("b", 0.0)
    assert await drained(queue) == ["a", "b"]
    assert await drained(queue) == []


async def test_the_earlier_of_two_appointments_stands() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a", 30.0)
    queue.add("a", 0.0)
    queue.add("a", 30.0)
    assert await drained(queue) == ["a"]
    assert queue._timers == {}


async def test_a_key_is_with_one_worker_at_a_time_and_comes_back_when_it_changed_meanwhile() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a", 0.0)
    await queue.get()
    queue.add("a", 0.0)
    await asyncio.sleep(0.02)
    second = asyncio.create_task(queue.get())
    await asyncio.sleep(0.02)
    assert not second.done()
    queue.done("a")
    assert await second == "a"
    queue.done("a")
    assert await drained(queue) == []


async def test_failures_come_back_ever_later_and_success_resets() -> None:
    queue: WorkQueue[str] = WorkQueue()
    loop = asyncio.get_running_loop()
    delays = []
    for _ in range(10):
        queue._active.add("a")
        queue.done("a", failed=True)
        delays.append(round(queue._timers.pop("a").when() - loop.time(), 1))
    assert all(second >= first for first, second in pairwise(delays))
    assert delays[-1] == 60.0
    queue._active.add("a")
    queue.done("a")
    queue._active.add("a")
    queue.done("a", failed=True)
    assert queue._timers["a"].when() - loop.time() < 1.0


async def test_the_servers_wish_decides_when_a_failure_comes_back() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue._active.add("a")
    queue.done("a", failed=True, delay_s=7.0)
    assert 6.0 < queue._timers["a"].when() - asyncio.get_running_loop().time() <= 7.0
