"""The frames of the timed stream: one msgpack array each, its first element the frame's number; see docs/stream.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from taktline_protocol.messages import (
    ActionChunk,
    AdmissionAnswer,
    AdmissionQuestion,
    Name,
    Observation,
    PolicyInfo,
)

VERSION = 1
"""The stream version of this release; a frame of one version only ever gets new elements at its end."""
VERSIONS = (VERSION,)
TOKEN_BYTES = 16

Seq = Annotated[int, Meta(ge=0, le=2**63 - 1)]
FrameName = Annotated[bytes, Meta(min_length=8, max_length=32)]
"""A content hash of a camera frame, of the robot's choice; equal names mean equal frames within a session."""


def _rest(name: str, message: type[msgspec.Struct], positional: tuple[str, ...], **options: Any) -> Any:
    """A struct of all fields of `message` that have no place of their own in the frame, under their REST names."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(message):
        if field.name in positional:
            continue
        if field.default is not msgspec.NODEFAULT:
            fields.append((field.encode_name, field.type, field.default))
        elif field.default_factory is not msgspec.NODEFAULT:
            fields.append((field.encode_name, field.type, msgspec.field(default_factory=field.default_factory)))
        else:
            fields.append((field.encode_name, field.type))
    return msgspec.defstruct(name, fields, frozen=True, kw_only=True, omit_defaults=True, module=__name__, **options)


_OBSERVED = (
    "robot_id",
    "session_id",
    "seq",
    "captured_at",
    "sent_at",
    "budget_ms",
    "images",
    "state",
    "instruction",
)
_ANSWERED = (
    "request_id",
    "policy",
    "revision",
    "robot_id",
    "seq",
    "actions",
    "dt_s",
    "captured_at",
    "valid_until",
    "timings",
    "margin_ms",
    "batch_size",
    "worker",
)

if TYPE_CHECKING:

    class ObservationDetails(msgspec.Struct):
        """The other fields of an Observation, so that whatever REST takes the stream takes too."""

    class ChunkDetails(msgspec.Struct):
        """The other fields of an ActionChunk."""
else:
    ObservationDetails = _rest("ObservationDetails", Observation, _OBSERVED, forbid_unknown_fields=True)
    ChunkDetails = _rest("ChunkDetails", ActionChunk, _ANSWERED)


class Vector(msgspec.Struct, frozen=True, array_like=True):
    """A flat little-endian vector; its length follows from the bytes."""

    dtype: Literal["float32", "float64"]
    data: bytes


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One whole camera frame; height and width are for `raw` only, uint8 RGB."""

    encoding: Literal["jpeg", "png", "raw"]
    data: bytes
    name: FrameName
    height: Annotated[int, Meta(ge=0)] = 0
    width: Annotated[int, Meta(ge=0)] = 0


# ----- robot to gateway


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Opens a session, or takes one up again.

    Attributes:
        versions: stream versions that the robot speaks.
        seq: highest sequence number that this session has used; 0 at first.
        answered: highest sequence number whose answer the robot has got.
        token: of the session to resume; empty for a new one.
        client: name and version of the client, for the log.
        asks: what the robot will ask for, where it wants to know whether there is room for it.
    """

    versions: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31)], ...], Meta(min_length=1, max_length=16)]
    robot_id: Name
    session_id: Name
    seq: Seq = 0
    answered: Seq = 0
    token: Annotated[bytes, Meta(max_length=64)] = b""
    client: Annotated[str, Meta(max_length=128)] = ""
    asks: AdmissionQuestion | None = None


class Observe(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """One observation: a keyframe where it holds every camera and the instruction, else a delta.

    Attributes:
        images: cameras sent whole.
        unchanged: camera -> name of the frame that the gateway holds from an earlier observation.
        instruction: None means as before.
        details: everything else that an Observation has, under its REST name.
    """

    seq: Seq
    captured_at: float
    sent_at: float
    budget_ms: float
    state: Vector
    images: dict[Name, Frame] = {}
    unchanged: dict[Name, FrameName] = {}
    instruction: str | None = None
    details: ObservationDetails | None = None


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Takes one observation out of the queue; too late for one that a worker has."""

    seq: Seq


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Robot clock, s, at sending."""

    sent_at: float


class Clock(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The robot's estimate of gateway clock minus robot clock, s, and the bound of its error, s."""

    offset_s: float
    error_s: Annotated[float, Meta(ge=0)]


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The session ends; its robot id is free at once."""


FromRobot = Hello | Observe | Cancel | Ping | Clock | Bye


# ----- gateway to robot


class StreamLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the robot must keep to, told in the welcome.

    Attributes:
        frame_bytes: one WebSocket message.
        window: observations that may be unanswered at once.
        idle_s: a stream on which nothing came for so long is closed; ping before.
        resume_s: how long a session can be resumed after its connection is gone.
    """

    frame_bytes: int
    window: int
    idle_s: float
    resume_s: float
    items: int
    depth: int
    image_bytes: int
    image_pixels: int
    cameras: int
    state_length: int
    instruction_chars: int
    budget_ms: float


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """The answer to Hello.

    Attributes:
        token: resumes this session after a dropped connection; a new one with each welcome.
        resumed: the session goes on; else it is new, and the first observation must be a keyframe.
        held: camera -> name of the frame that the gateway holds.
        pending: observations of before the drop that are still being served: their answers will come on this stream.
        sent_at: gateway clock, s.
        admission: the answer to what Hello asked; the stream is open whatever it says.
    """

    version: int
    token: bytes
    resumed: bool
    held: dict[str, bytes]
    pending: tuple[int, ...]
    limits: StreamLimits
    policy: PolicyInfo
    sent_at: float
    admission: AdmissionAnswer | None = None


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """The action chunk of one observation.

    Attributes:
        received_at, sent_at: gateway clock, s, for the clock estimate.
        valid_until: robot clock, s; row i is meant for captured_at + i * dt_s.
        actions: horizon x width float32, little-endian, row by row.
        timings: observe, transfer, queue, inference, actuate in ms.
        details: everything else that an ActionChunk has, under its REST name.
    """

    seq: int
    received_at: float
    sent_at: float
    captured_at: float
    dt_s: float
    valid_until: float
    horizon: Annotated[int, Meta(ge=0)]
    width: Annotated[int, Meta(ge=0)]
    actions: bytes
    timings: tuple[float, float, float, float, float]
    margin_ms: float
    batch_size: int
    revision: str
    worker: str
    request_id: str
    details: ChunkDetails | None = None


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """A typed error instead of a chunk; the codes are those of REST.

    `held`: the gateway holds the frames of this observation, so that the next one may refer to them. `safe_action` and
    `buffer_ms`: see `ErrorBody`.
    """

    seq: int
    received_at: float
    sent_at: float
    code: str
    message: str
    next_step: str
    held: bool
    retry_after_ms: float | None = None
    request_id: str = ""
    safe_action: Literal["continue", "hold"] | None = None
    buffer_ms: float | None = None


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """All observations up to `seq` have come and their frames are held; sent where the answers dally."""

    seq: int


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Echo of a ping with the gateway's clock, s, on receiving it and on sending this."""

    ping_sent_at: float
    received_at: float
    sent_at: float


class Backpressure(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Send nothing for `pause_ms`, or, where it is 0, until an answer comes.

    `reason`: `window` (too many unanswered) or `queue` (the policy's workers cannot keep up).
    """

    reason: str
    pause_ms: float
    unanswered: int


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """The gateway takes no more observations on this connection; it closes once the unanswered ones are answered."""

    code: str
    message: str
    next_step: str
    retry_after_ms: float | None = None


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """Where an observation is whose robot waits for an imagined video; sent every half second until it is answered.

    Attributes:
        stage: `queued`, or `running` on a worker.
        elapsed_ms: since the observation came.
    """

    seq: int
    stage: Literal["queued", "running"]
    elapsed_ms: float


FromGateway = Welcome | Answer | Refusal | Ack | Pong | Backpressure | Goodbye | Progress
