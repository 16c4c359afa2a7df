"""The first frame of a connection: which version is spoken, who is at the other end, and which session goes on."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING

from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.messages import PolicyInfo
from taktline_protocol.stream import VERSIONS, Hello, Welcome
from taktline_protocol.stream_codec import decode_from_robot

from taktline_gateway.access.rights import Principal
from taktline_gateway.http_io import Exchange
from taktline_gateway.logs import log
from taktline_gateway.stream.sessions import Session
from taktline_gateway.stream.settings import told_limits

if TYPE_CHECKING:
    from taktline_gateway.stream.endpoint import Caller, Streams

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """A robot that may open a stream, and its session; `found` is how that counts: new, resumed, moved or lost."""

    hello: Hello
    version: int
    principal: Principal
    session: Session
    found: str
    info: PolicyInfo


async def arrive(streams: Streams, policy: str, caller: Caller, body: bytes, now: float) -> Arrival:
    """Who says `body` at `now`. Whoever is refused has changed nothing: the session stays with the connection it has.

    Raises:
        TaktlineError: `invalid_body`, `stream_version`, or why this robot may open no stream.
    """
    hello = decode_from_robot(body, streams.limits)
    if not isinstance(hello, Hello):
        raise TaktlineError(
            ErrorCode.INVALID_BODY, f"the first frame is {type(hello).__name__}, not Hello", "send hello first"
        )
    chosen = max((v for v in hello.versions if v in VERSIONS), default=None)
    if chosen is None:
        raise TaktlineError(
            ErrorCode.STREAM_VERSION,
            f"the robot speaks stream versions {list(hello.versions)}, this gateway {list(VERSIONS)}",
            "use an SDK of this gateway's release, or POST /v1/policies/{policy}/act",
        )
    request_id = Exchange({"headers": ()}).request_id
    principal = await streams.principal(caller, policy, hello.robot_id, request_id)
    robot = principal.robot(hello.robot_id)
    session, found = await streams.find(policy, robot, hello)
    seq = hello.seq if session is None else max(hello.seq, session.seq)
    info = streams.admit(policy, principal, hello, seq, now)
    if session is None:
        session = streams.sessions.open(policy, robot, hello)
    return Arrival(hello, chosen, principal, session, found, info)


def welcome(streams: Streams, policy: str, arrival: Arrival) -> tuple[Welcome, bytes | None]:
    """What a robot is told whose connection has its session now, and the answer that was kept for it."""
    hello, session = arrival.hello, arrival.session
    kept, session.kept = session.kept, None
    if kept is not None and kept[0] <= hello.answered:
        kept = None
    streams.telemetry.session(policy, arrival.found)
    log(
        _logger,
        logging.INFO,
        "stream_opened",
        policy=policy,
        robot=hello.robot_id,
        session=arrival.found,
        client=hello.client,
        seq=session.seq,
    )
    told = Welcome(
        version=arrival.version,
        token=session.token,
        resumed=arrival.found in ("resumed", "moved"),
        held={camera: frame.name for camera, frame in session.held.items()},
        pending=(*session.coming(), *(() if kept is None else kept[:1])),
        limits=told_limits(streams.limits, streams.settings),
        policy=arrival.info,
        sent_at=time.monotonic(),
        admission=streams.admission(policy, arrival.principal, hello),
    )
    return told, None if kept is None else kept[1]
