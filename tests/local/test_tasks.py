"""A task that swallows a cancellation still ends."""

from __future__ import annotations

import asyncio
import contextlib

from taktline_local.tasks import end_task


async def test_lost_cancellation_is_repeated() -> None:
    lost = 0

    async def forgetful() -> None:
        nonlocal lost
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
        lost += 1
        await asyncio.sleep(600)

    task = asyncio.create_task(forgetful())
    await asyncio.sleep(0)
    await end_task(task)
    assert lost == 1
    assert task.cancelled()


async def test_finished_task_keeps_its_result() -> None:
    async def answer() -> int:
        return 7

    task = asyncio.create_task(answer())
    await asyncio.wait([task])
    await end_task(task)
    assert task.result() == 7
