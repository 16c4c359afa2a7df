"""Where an observation is whose robot waits for a video: said on its stream until the answer comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from taktline_protocol.stream import Progress
from taktline_protocol.stream_codec import encode_frame

from taktline_gateway.stream.sessions import Flight, Session


async def report(session: Session, flight: Flight, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Sends a `Progress` every `every_s` over whatever connection the session has; ends by being cancelled."""
    while True:
        await asyncio.sleep(every_s)
        link = session.link
        if link is not None:
            await link.deliver(encode_frame(progress(flight, clock())))


def progress(flight: Flight, now: float) -> Progress:
    """Of an observation at the instant `now`."""
    running = flight.under_way is not None and flight.under_way()
    return Progress(flight.seq, "running" if running else "queued", round(1e3 * (now - flight.received_at), 1))
