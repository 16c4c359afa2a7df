"""The frames of an observation that was answered go at once, not when the collector of cycles comes by."""

from __future__ import annotations

import asyncio
import gc
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
from taktline_gateway.compat.gateway_service import GatewayService, _Asked
from taktline_gateway.pending import Pending


class Frames:
    """Stands for an observation with its images."""


@pytest.mark.parametrize("told", [False, True])
async def test_who_is_told_of_a_result_is_let_go_of_with_it(told):
    """The request held who was to be told, and that the request: 7 MiB a second of frames waited for the collector."""
    service = object.__new__(GatewayService)
    service._gateway = SimpleNamespace(requests=1, robots=SimpleNamespace(touch=lambda *_: None))
    service._books = SimpleNamespace(chunk=lambda *_: "chunk")
    pending, frames = Pending("arm", 1, 10.0, 0.0, policy="p"), Frames()
    lane = SimpleNamespace(leave=lambda _: None)
    asked = _Asked("p", frames, SimpleNamespace(request_id="r"), None, "arm", lane, None, pending, 0.0)
    pending.tell = partial(service._tell, asked, lambda chunk: None)
    gone = weakref.ref(frames)
    gc.disable()
    try:
        answer = asyncio.ensure_future(service._chunk(asked))
        await asyncio.sleep(0)
        if told:
            pending.tell("served")
        pending.result.set_result("served")
        assert await answer == "chunk"
        del asked, pending, frames, answer
        await asyncio.sleep(0)
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("told", [False, True])
async def test_a_wait_that_is_cancelled_after_its_chunk_was_told_stays_answered(told):
    service = object.__new__(GatewayService)
    books = []
    service._gateway = SimpleNamespace(
        requests=1,
        robots=SimpleNamespace(touch=lambda *_: None),
        books=SimpleNamespace(gone=lambda *_: books.append("gone")),
    )
    service._books = SimpleNamespace(chunk=lambda *_: books.append("answered") or "chunk")
    pending = Pending("arm", 1, 10.0, 0.0, policy="p")
    lane = SimpleNamespace(leave=lambda _: None)
    asked = _Asked("p", Frames(), SimpleNamespace(request_id="r"), None, "arm", lane, None, pending, 0.0)
    pending.tell = partial(service._tell, asked, lambda chunk: None)
    answer = asyncio.ensure_future(service._chunk(asked))
    await asyncio.sleep(0)
    if told:
        pending.tell("served")
        pending.result.set_result("served")
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    assert books == ["answered" if told else "gone"]
    assert service._gateway.requests == 0
