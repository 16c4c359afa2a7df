"""From a frame of the stream to an observation: references resolved, and the instant from which its budget runs."""

from __future__ import annotations

import msgspec
from taktline_protocol import ErrorCode, Observation, TaktlineError
from taktline_protocol.messages import Image
from taktline_protocol.stream import Clock, Observe
from taktline_protocol.stream_codec import to_image, to_observation

from taktline_gateway.stream.sessions import Session


def resolve(session: Session, frame: Observe) -> Observation:
    """The observation, with the frames and the instruction that the session holds in place of references.

    Raises:
        TaktlineError: `keyframe_needed` where something is not held, `superseded` where a newer one has come,
            `invalid_body` or `state_invalid` where the frame contradicts itself.
    """
    if frame.seq in session.flights or frame.seq < session.seq:
        raise TaktlineError(
            ErrorCode.SUPERSEDED,
            f"observation {frame.seq} came after observation {session.seq} of this session",
            "use the chunk of the newer observation; seq must grow within a session",
        )
    twice = frame.images.keys() & frame.unchanged.keys()
    if twice:
        raise TaktlineError(
            ErrorCode.INVALID_BODY,
            f"camera {min(twice)[:64]!r} is sent whole and by reference",
            "send each camera once",
        )
    images: dict[str, Image] = {camera: to_image(whole) for camera, whole in frame.images.items()}
    lacking = []
    for camera, name in frame.unchanged.items():
        held = session.held.get(camera)
        if held is None or held.name != name:
            lacking.append(camera[:64])
        else:
            images[camera] = held.image
    instruction = session.instruction if frame.instruction is None else frame.instruction
    if lacking or instruction is None:
        what = [f"camera {camera!r}" for camera in lacking[:8]]
        what += ["the instruction"] if instruction is None else []
        raise TaktlineError(
            ErrorCode.KEYFRAME_NEEDED,
            f"this gateway does not hold {', '.join(what)}",
            "send the observation again with every camera whole and the instruction",
            retry_after_ms=0.0,
        )
    return to_observation(frame, session.robot_id, session.session_id, images, instruction)


def budget_from(observation: Observation, now: float, clock: Clock | None) -> tuple[float, Observation]:
    """When the budget began to run, gateway clock, and the observation with what is left to reserve for the network.

    `now` is when it came. With a clock estimate, the part of the way here that has surely passed is taken off the
    budget and off the network reserve; half of the reserve stays for the way back. Without one it begins on arrival.
    """
    if clock is None or observation.sent_at is None:
        return now, observation
    passed_s = now - (observation.sent_at + clock.offset_s) - clock.error_s
    # A clock that jumped says nothing sensible; an observation older than its budget is refused as that and no more.
    passed_s = min(max(passed_s, 0.0), observation.budget_ms / 1e3)
    if passed_s == 0.0:
        return now, observation
    reserve = observation.network_ms
    left: Observation = msgspec.structs.replace(observation, network_ms=max(reserve - 1e3 * passed_s, 0.5 * reserve))
    return now - passed_s, left
