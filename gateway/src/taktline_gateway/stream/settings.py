"""How the gateway keeps its streams, as flags of `taktline-gateway serve`."""

from __future__ import annotations

import argparse
import dataclasses
import os

from taktline_protocol.limits import MIB, Limits
from taktline_protocol.stream import StreamLimits


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """Bounds of a stream and of what is kept for it.

    Attributes:
        window: observations of one robot that may be unanswered at once.
        max_streams: connections at once.
        resume_s: how long a session can be resumed after its connection is gone.
        held_bytes: camera frames held for all sessions; beyond it the sessions idle longest lose theirs.
        hello_s: a connection that says no hello within this time is closed.
        idle_s: so is one on which nothing came for so long.
        stall_s: so is one whose robot takes no bytes for so long.
        redis_url: store through which sessions move to other gateways; empty keeps them in this process.
        store_every_s: how often changed sessions are written there.
        progress_every_s: how often a robot that waits for a video is told where its observation is.
        ack_after_s: an observation that has no answer after this time is acknowledged.
    """

    window: int = 4
    max_streams: int = 10_000
    resume_s: float = 30.0
    held_bytes: int = 512 * MIB
    hello_s: float = 5.0
    idle_s: float = 30.0
    stall_s: float = 5.0
    ack_after_s: float = 0.02
    progress_every_s: float = 0.5
    redis_url: str = dataclasses.field(default="", repr=False)
    store_every_s: float = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the stream's flags."""
    group = parser.add_argument_group("timed stream", "see docs/stream.md")
    group.add_argument("--stream-window", type=int, default=4, metavar="N", help="unanswered observations a robot")
    group.add_argument("--stream-max", type=int, default=10_000, metavar="N", help="streams at once")
    group.add_argument("--stream-resume-s", type=float, default=30.0, metavar="S", help="keep a dropped session")
    group.add_argument("--stream-idle-s", type=float, default=30.0, metavar="S", help="close a silent stream")
    group.add_argument("--stream-stall-s", type=float, default=5.0, metavar="S", help="close one that takes nothing")
    group.add_argument(
        "--redis-url",
        default="",
        metavar="URL",
        help="redis:// or rediss:// through which sessions move to other gateways; TAKTLINE_REDIS_URL where not given",
    )
    group.add_argument(
        "--redis-every-s", type=float, default=0.5, metavar="S", help="write changed sessions there so often"
    )
    group.add_argument(
        "--stream-held-mib", type=float, default=512.0, metavar="MIB", help="camera frames held for all sessions"
    )


def settings_of(arguments: argparse.Namespace) -> StreamSettings:
    """The settings that the flags say."""
    return StreamSettings(
        window=max(1, arguments.stream_window),
        max_streams=arguments.stream_max,
        resume_s=arguments.stream_resume_s,
        idle_s=arguments.stream_idle_s,
        stall_s=arguments.stream_stall_s,
        held_bytes=int(arguments.stream_held_mib * MIB),
        redis_url=arguments.redis_url or os.environ.get("TAKTLINE_REDIS_URL", ""),
        store_every_s=max(0.05, arguments.redis_every_s),
    )


def told_limits(limits: Limits, settings: StreamSettings) -> StreamLimits:
    """What a robot is told at the welcome."""
    return StreamLimits(
        frame_bytes=limits.body_bytes,
        window=settings.window,
        idle_s=settings.idle_s,
        resume_s=settings.resume_s,
        items=limits.items,
        depth=limits.depth,
        image_bytes=limits.image_bytes,
        image_pixels=limits.image_pixels,
        cameras=limits.cameras,
        state_length=limits.state_length,
        instruction_chars=limits.instruction_chars,
        budget_ms=limits.budget_ms,
    )
