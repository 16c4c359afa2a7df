"""Stream frames to and from bytes and the messages of REST; every failure to decode is a TaktlineError."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from taktline_protocol.codecs import ANSWER_LIMITS
from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_protocol.limits import Limits, check_body_size, check_structure_msgpack
from taktline_protocol.messages import ActionChunk, Array, Image, Observation, Timings
from taktline_protocol.stream import (
    Answer,
    ChunkDetails,
    Frame,
    FromGateway,
    FromRobot,
    ObservationDetails,
    Observe,
    Refusal,
    Vector,
)

_encode = msgspec.msgpack.Encoder().encode
_from_robot: msgspec.msgpack.Decoder[FromRobot] = msgspec.msgpack.Decoder(FromRobot)
_from_gateway: msgspec.msgpack.Decoder[FromGateway] = msgspec.msgpack.Decoder(FromGateway)
_ITEM_BYTES = {"float32": 4, "float64": 8}
_OBSERVATION_DETAILS = tuple(field.name for field in msgspec.structs.fields(ObservationDetails))
_CHUNK_DETAILS = tuple(field.name for field in msgspec.structs.fields(ChunkDetails))
_observation_details, _chunk_details = attrgetter(*_OBSERVATION_DETAILS), attrgetter(*_CHUNK_DETAILS)
_NO_DETAILS, _NO_CHUNK_DETAILS = _observation_details(ObservationDetails()), _chunk_details(ChunkDetails())


def _outline(kind: type[msgspec.Struct], left_out: Mapping[str, bytes]) -> msgspec.msgpack.Decoder[Any]:
    """Reads frames of one kind but for some values, which it skips; left out they are these bytes."""
    fields: list[tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(kind):
        raw = left_out.get(field.name)
        default = field.default_factory if field.default is msgspec.NODEFAULT else field.default
        fields.append((field.name, field.type, default) if raw is None else (field.name, msgspec.Raw, msgspec.Raw(raw)))
    tag = kind.__struct_config__.tag
    return msgspec.msgpack.Decoder(msgspec.defstruct(kind.__name__, fields, array_like=True, tag=tag))


_EMPTY, _NIL = b"\x80", b"\xc0"
_OBSERVE = _outline(Observe, {"state": _NIL, "images": _EMPTY, "unchanged": _EMPTY, "details": _NIL})
_CAMERAS: msgspec.msgpack.Decoder[dict[str, msgspec.Raw]] = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_ANSWER = _outline(Answer, {"details": _NIL})
_USUAL_ITEMS, _USUAL_DEPTH, _USUAL_BYTES = 256, 3, 1 << 20
# How the frames begin, as the shortest of msgpack's forms has it: that many values, and the kind of frame.
_OBSERVE_BEGINS, _ANSWER_BEGINS = b"\x9a\x02", b"\xdc\x00\x11\x11"
# How a vector and a camera's frame begin: with no values but the known ones, as whoever decodes them skips all others.
_VECTOR_BEGINS, _FRAME_BEGINS = 0x92, range(0x90, 0x96)


def _is_usual(body: bytes) -> bool:
    """Whether this is an observation of at most fifteen cameras, or an answer, without details.

    Such a frame is shallow and has few values, and seeing that takes a fraction of what walking through it takes. Not
    in a body of many bytes: skipping values is slower than refusing it at the first that is too many.
    """
    if len(body) > _USUAL_BYTES:
        return False
    try:
        if body.startswith(_ANSWER_BEGINS):
            return bytes(_ANSWER.decode(body).details) == _NIL
        if not body.startswith(_OBSERVE_BEGINS):
            return False
        seen = _OBSERVE.decode(body)
        few = memoryview(seen.images)[0] & 0xF0 == 0x80 and memoryview(seen.unchanged)[0] & 0xF0 == 0x80
        if not few or memoryview(seen.state)[0] != _VECTOR_BEGINS or bytes(seen.details) != _NIL:
            return False
        return all(memoryview(frame)[0] in _FRAME_BEGINS for frame in _CAMERAS.decode(seen.images).values())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def encode_frame(frame: FromRobot | FromGateway) -> bytes:
    """One frame as the payload of one binary WebSocket message."""
    return _encode(frame)


def decode_from_robot(body: bytes, limits: Limits) -> FromRobot:
    """Decodes what a robot sent. Raises TaktlineError `body_too_large` or `invalid_body`, nothing else."""
    frame: FromRobot = _decoded(_from_robot, body, limits)
    return frame


def decode_from_gateway(body: bytes) -> FromGateway:
    """Decodes what a gateway sent, the actions checked. Raises TaktlineError `body_too_large` or `invalid_body`."""
    frame: FromGateway = _decoded(_from_gateway, body, ANSWER_LIMITS)
    if isinstance(frame, Answer) and len(frame.actions) != 4 * frame.horizon * frame.width:
        raise TaktlineError(
            ErrorCode.INVALID_BODY,
            f"an answer has {len(frame.actions)} bytes of actions, not {frame.horizon} x {frame.width} float32",
            "check that the address is a Taktline gateway",
        )
    return frame


def _decoded(decoder: msgspec.msgpack.Decoder[Any], body: bytes, limits: Limits) -> Any:
    check_body_size(len(body), limits)
    try:
        if limits.items < _USUAL_ITEMS or limits.depth < _USUAL_DEPTH or not _is_usual(body):
            check_structure_msgpack(body, limits)
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TaktlineError(
            ErrorCode.INVALID_BODY,
            f"the message is no frame of the stream: {str(error)[:300]}",
            "compare it with docs/stream.md; each binary message is one msgpack array",
        ) from error


# ----- observations


def to_observe(
    observation: Observation, images: Mapping[str, Frame], unchanged: Mapping[str, bytes], *, instruction: bool
) -> Observe:
    """The frame of an observation; `instruction` says whether to send it or leave it as before.

    Robot and session id are the stream's own, said once in Hello.
    """
    found = _observation_details(observation)
    details = (
        None if found == _NO_DETAILS else ObservationDetails(**dict(zip(_OBSERVATION_DETAILS, found, strict=True)))
    )
    return Observe(
        seq=observation.seq,
        captured_at=observation.captured_at,
        sent_at=observation.captured_at if observation.sent_at is None else observation.sent_at,
        budget_ms=observation.budget_ms,
        state=_vector(observation.state),
        images=dict(images),
        unchanged=dict(unchanged),
        instruction=observation.instruction if instruction else None,
        details=details,
    )


def to_observation(
    frame: Observe, robot_id: str, session_id: str, images: dict[str, Image], instruction: str
) -> Observation:
    """The observation of a frame, its cameras and instruction resolved. Raises TaktlineError `state_invalid`."""
    state = frame.state
    size = _ITEM_BYTES[state.dtype]
    if len(state.data) % size:
        raise TaktlineError(
            ErrorCode.STATE_INVALID,
            f"the state has {len(state.data)} bytes, which are no {state.dtype} numbers",
            "send little-endian float32 or float64",
        )
    details = {} if frame.details is None else msgspec.structs.asdict(frame.details)
    return Observation(
        robot_id=robot_id,
        session_id=session_id,
        seq=frame.seq,
        captured_at=frame.captured_at,
        sent_at=frame.sent_at,
        budget_ms=frame.budget_ms,
        images=images,
        state=Array(state.dtype, (len(state.data) // size,), state.data),
        instruction=instruction,
        **details,
    )


def to_image(frame: Frame) -> Image:
    """The REST form of a whole camera frame."""
    return Image(frame.encoding, frame.data, (frame.height, frame.width, 3) if frame.encoding == "raw" else None)


def to_frame(image: Image, name: bytes) -> Frame:
    """The stream form of a camera frame."""
    if image.shape is None:
        return Frame(image.encoding, image.data, name)
    return Frame(image.encoding, image.data, name, image.shape[0], image.shape[1])


def _vector(state: list[float] | Array) -> Vector:
    if isinstance(state, Array) and state.dtype in ("float32", "float64"):
        return Vector(state.dtype, state.data)
    values = state.to_numpy() if isinstance(state, Array) else state
    return Vector("float64", np.asarray(values, dtype="<f8").tobytes())


# ----- answers


def to_answer(chunk: ActionChunk, received_at: float, sent_at: float) -> Answer:
    """The frame of a chunk; the instants are the gateway's clock, s."""
    horizon, width = chunk.actions.shape
    times = chunk.timings
    found = _chunk_details(chunk)
    details = None if found == _NO_CHUNK_DETAILS else ChunkDetails(**dict(zip(_CHUNK_DETAILS, found, strict=True)))
    return Answer(
        seq=chunk.seq,
        received_at=received_at,
        sent_at=sent_at,
        captured_at=chunk.captured_at,
        dt_s=chunk.dt_s,
        valid_until=chunk.valid_until,
        horizon=horizon,
        width=width,
        actions=chunk.actions.data,
        timings=(times.observe_ms, times.transfer_ms, times.queue_ms, times.inference_ms, times.actuate_ms),
        margin_ms=chunk.margin_ms,
        batch_size=chunk.batch_size,
        revision=chunk.revision,
        worker=chunk.worker,
        request_id=chunk.request_id,
        details=details,
    )


def to_chunk(answer: Answer, policy: str, robot_id: str) -> ActionChunk:
    """The REST form of an answer. Raises TaktlineError `invalid_body` where a time in it is not finite."""
    if not all(map(math.isfinite, (answer.dt_s, answer.valid_until, answer.margin_ms, *answer.timings))):
        raise TaktlineError(
            ErrorCode.INVALID_BODY, "a time of the answer is not finite", "check that the address is a Taktline gateway"
        )
    observe, transfer, queue, inference, actuate = answer.timings
    details = {} if answer.details is None else msgspec.structs.asdict(answer.details)
    return ActionChunk(
        request_id=answer.request_id,
        policy=policy,
        revision=answer.revision,
        robot_id=robot_id,
        seq=answer.seq,
        actions=Array("float32", (answer.horizon, answer.width), answer.actions),
        dt_s=answer.dt_s,
        captured_at=answer.captured_at,
        valid_until=answer.valid_until,
        timings=Timings(
            observe_ms=observe,
            transfer_ms=transfer,
            queue_ms=queue,
            inference_ms=inference,
            actuate_ms=actuate,
        ),
        margin_ms=answer.margin_ms,
        batch_size=answer.batch_size,
        worker=answer.worker,
        **details,
    )


def to_refusal(
    seq: int, error: TaktlineError, received_at: float, sent_at: float, *, held: bool, request_id: str = ""
) -> Refusal:
    """The frame of a typed error."""
    return Refusal(
        seq=seq,
        received_at=received_at,
        sent_at=sent_at,
        code=error.code.value,
        message=error.message,
        next_step=error.next_step,
        held=held,
        retry_after_ms=error.retry_after_ms,
        request_id=request_id,
        safe_action=error.safe_action,
        buffer_ms=error.buffer_ms,
    )
