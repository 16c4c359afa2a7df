"""Progress of requests for a video: what the gateway says on the stream, and what the robot's client makes of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from taktline.access import Access
from taktline.robot_metrics import RobotMetrics
from taktline.stream_client import StreamClient
from taktline_gateway.stream.progress import report
from taktline_gateway.stream.sessions import Flight
from taktline_protocol.stream import Progress
from taktline_protocol.stream_codec import decode_from_gateway


class Link:
    def __init__(self, enough: int) -> None:
        self.heard: list[Progress] = []
        self.enough = asyncio.Event()
        self._count = enough

    async def deliver(self, body: bytes) -> bool:
        frame = decode_from_gateway(body)
        assert isinstance(frame, Progress)
        self.heard.append(frame)
        if len(self.heard) >= self._count:
            self.enough.set()
        return True


async def test_a_robot_hears_where_its_observation_is_until_it_is_answered() -> None:
    flight = Flight(7, 100.0, "r")
    first, second = Link(2), Link(1)
    session: Any = SimpleNamespace(link=first)
    told = asyncio.ensure_future(report(session, flight, 0.01, clock=lambda: 100.25))
    await asyncio.wait_for(first.enough.wait(), 60)
    assert {(frame.seq, frame.stage, frame.elapsed_ms) for frame in first.heard} == {(7, "queued", 250.0)}
    flight.admitted(lambda _: True, lambda: True)
    # The session goes on over another connection.
    session.link = second
    await asyncio.wait_for(second.enough.wait(), 60)
    assert second.heard[0].stage == "running"
    session.link = None
    told.cancel()
    with pytest.raises(asyncio.CancelledError):
        await told


async def test_the_client_shows_progress_of_what_it_waits_for() -> None:
    metrics = RobotMetrics()
    client = StreamClient("http://127.0.0.1:1", "p", "arm", "s", Access(), metrics)
    link: Any = SimpleNamespace(heard_at=0.0)
    client._hear(link, Progress(3, "queued", 500.0), 1.0)
    assert metrics.progress is None, "nobody waits for that one"
    client._waiting[3] = SimpleNamespace(seq=3)  # type: ignore[assignment]
    client._hear(link, Progress(3, "running", 1000.0), 2.0)
    assert metrics.progress == Progress(3, "running", 1000.0)
    assert "progress" not in metrics.as_dict()
