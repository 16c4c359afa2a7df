"""From what a robot holds (arrays, encoded frames, numbers) to the wire's Observation."""

from __future__ import annotations

import math
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.images import sniff_encoding
from taktline_protocol.messages import Array, Image, Imagine, Observation, PriorityName, Rtc, Search

from taktline.tracing import current_traceparent

Frame = bytes | NDArray[np.uint8] | Image
"""One camera frame: JPEG or PNG bytes, or a uint8 RGB array (H, W, 3)."""
State = Sequence[float] | NDArray[np.floating] | Array
"""A state vector (D,) in robot units, or its wire form."""
LATE_S = 5.0
"""How long an answer is waited for once its budget is spent: what it says by then is of no use to any controller."""
NETWORK_WINDOW = 32
NAME_CHARS = 128
TOO_LARGE_STEP = "send JPEG (jpeg_quality=95) or smaller frames: policies read a few hundred pixels a side"
"""What to do about an observation that no gateway takes."""


class _Options(msgspec.Struct, frozen=True, kw_only=True):
    """What of an observation passes on as the caller gave it, as `Observation` takes it."""

    captured_at: float
    actuate_ms: Annotated[float, msgspec.Meta(ge=0)]
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None
    search: Search | None
    rtc: Rtc | None
    imagine: Imagine | None


class Sender:
    """Numbers, stamps and budgets the observations of one robot session. Knows no transport."""

    def __init__(self, robot_id: str, session_id: str | None = None) -> None:
        self.robot_id = robot_id
        self.session_id = uuid.uuid4().hex if session_id is None else session_id
        self._seq = 0
        self._network_ms: deque[float] = deque(maxlen=NETWORK_WINDOW)

    def observe(
        self,
        images: Mapping[str, Frame],
        state: State,
        instruction: str,
        budget_ms: float,
        *,
        spent_s: float = 0.0,
        captured_at: float | None = None,
        actuate_ms: float = 0.0,
        seed: int | None = None,
        search: Search | None = None,
        rtc: Rtc | None = None,
        imagine: Imagine | None = None,
        priority: PriorityName = "production",
    ) -> Observation:
        """The next observation of this session, stamped now on the monotonic clock.

        Args:
            spent_s: how long ago the budget began; the rest is as of `AsyncRobot.act`.

        Raises:
            TaktlineError: `image_corrupt`, `state_invalid`, `instruction_invalid`, `budget_invalid` or `invalid_body`
                where a value cannot be put on the wire: a gateway would end the stream for it.
        """
        check_asked(instruction, budget_ms, priority)
        now = time.monotonic()
        options = _plain(
            captured_at=now if captured_at is None else captured_at,
            actuate_ms=actuate_ms,
            seed=seed,
            search=search,
            rtc=rtc,
            imagine=imagine,
        )
        left_ms = max(0.0, float(budget_ms) - 1e3 * spent_s)
        self._seq += 1
        return Observation(
            robot_id=self.robot_id,
            session_id=self.session_id,
            seq=self._seq,
            captured_at=options.captured_at,
            sent_at=now,
            budget_ms=left_ms,
            actuate_ms=options.actuate_ms,
            network_ms=min(self.network_ms, max(0.0, left_ms - options.actuate_ms) / 2),
            images={camera: as_image(camera, frame) for camera, frame in images.items()},
            state=as_state(state),
            instruction=instruction,
            seed=options.seed,
            search=options.search,
            rtc=options.rtc,
            imagine=options.imagine,
            priority=priority,
            traceparent=current_traceparent(),
        )

    @property
    def network_ms(self) -> float:
        """What recent round trips cost beyond the gateway's own time: their 90th percentile; 0 before the first."""
        recent = sorted(self._network_ms)
        return recent[int(0.9 * (len(recent) - 1))] if recent else 0.0

    def note_network(self, unseen_ms: float) -> None:
        """Takes in one round trip."""
        self._network_ms.append(unseen_ms)


def restamped(observation: Observation) -> Observation:
    """An observation to be sent later than it was made: as of now, with what is left of its budget."""
    now = time.monotonic()
    spent_ms = 0.0 if observation.sent_at is None else 1e3 * (now - observation.sent_at)
    later: Observation = msgspec.structs.replace(
        observation, sent_at=now, budget_ms=max(0.0, observation.budget_ms - spent_ms)
    )
    return later


def check_names(policy: str, robot_id: str, session_id: str | None = None) -> None:
    """Raises TaktlineError `config_invalid` for names that no gateway takes."""
    session = () if session_id is None else (("session id", session_id),)
    for what, name in (("policy", policy), ("robot id", robot_id), *session):
        if not isinstance(name, str) or not name:
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID, f"the {what} is {name!r}", f"give the {what} as a text that is not empty"
            )
        if len(name) > NAME_CHARS:
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"the {what} has {len(name)} characters",
                f"give a {what} of at most {NAME_CHARS} characters",
            )


def check_number(what: str, value: object, least: float) -> None:
    """Raises TaktlineError `config_invalid` for what is no finite number from `least` on."""
    if not isinstance(value, (int, float, np.integer, np.floating)) or not least <= value < math.inf:
        raise TaktlineError(ErrorCode.CONFIG_INVALID, f"{what} is {value!r}", f"give a number from {least:g} on")


def check_asked(instruction: str, budget_ms: float, priority: str) -> None:
    """Raises TaktlineError where one of these is no part of an observation."""
    if not isinstance(instruction, str):
        raise TaktlineError(
            ErrorCode.INSTRUCTION_INVALID,
            f"the instruction is of type {type(instruction).__name__}",
            "say the task in words, as a str",
        )
    if not _encodes(instruction):
        raise TaktlineError(
            ErrorCode.INSTRUCTION_INVALID, f"the instruction {instruction!r:.200} is no text", "say the task in words"
        )
    try:
        usable = not isinstance(budget_ms, str) and not math.isnan(float(budget_ms))
    except (TypeError, ValueError):
        usable = False
    if not usable:
        raise TaktlineError(
            ErrorCode.BUDGET_INVALID, f"the budget is {budget_ms!r}", "give the time until the buffer runs dry, in ms"
        )
    if priority not in get_args(PriorityName):
        raise TaktlineError(
            ErrorCode.INVALID_BODY,
            f"there is no priority {priority!r}",
            f"take one of {', '.join(get_args(PriorityName))}",
        )


def _plain(**options: Any) -> _Options:
    """The options as they go on the wire, numbers of NumPy as Python's. Raises TaktlineError `invalid_body`."""
    try:
        made: _Options = msgspec.convert(
            msgspec.to_builtins(options, builtin_types=(bytes,), enc_hook=_plain_number), _Options
        )
    except (msgspec.ValidationError, TypeError, OverflowError) as error:
        raise TaktlineError(
            ErrorCode.INVALID_BODY,
            f"an argument does not fit an observation: {error}",
            "compare it with what `help(taktline.AsyncRobot.act)` says of it",
        ) from error
    return made


def _plain_number(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"a {type(value).__name__}")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def as_image(camera: str, frame: Frame) -> Image:
    """Wire form of a frame. Raises TaktlineError `image_corrupt`."""
    if isinstance(frame, Image):
        return frame
    if isinstance(frame, bytes):
        encoding = sniff_encoding(frame)
        if encoding is None:
            raise TaktlineError(
                ErrorCode.IMAGE_CORRUPT,
                f"the image of camera {camera!r} is neither JPEG nor PNG ({len(frame)} bytes)",
                "pass JPEG or PNG bytes, or a uint8 array (height, width, 3)",
            )
        return Image("jpeg" if encoding == "jpeg" else "png", frame)
    array = checked_pixels(camera, frame)
    height, width, _ = array.shape
    return Image("raw", np.ascontiguousarray(array).tobytes(), (height, width, 3))


def check_named(images: object) -> None:
    """Raises TaktlineError `camera_missing` or `camera_unknown` where frames do not come by the names of cameras."""
    if not isinstance(images, Mapping):
        raise TaktlineError(
            ErrorCode.CAMERA_MISSING,
            f"the frames are of type {type(images).__name__}",
            "pass a dict from each camera's name to its frame; `taktline policies` lists the names",
        )
    for camera in images:
        if not isinstance(camera, str) or not 1 <= len(camera) <= NAME_CHARS or not _encodes(camera):
            raise TaktlineError(
                ErrorCode.CAMERA_UNKNOWN,
                f"no camera is called {camera!r:.200}",
                f"name each frame's camera by 1 to {NAME_CHARS} characters; `taktline policies` lists the names",
            )


def copied(images: Mapping[str, Frame]) -> dict[str, Frame]:
    """The frames, arrays copied: a camera may write into its own while they are still being encoded.

    Raises TaktlineError `image_corrupt` for what is no frame: the next one would be none either; `camera_missing` where
    frames do not come by camera.
    """
    check_named(images)
    return {
        camera: frame if isinstance(frame, (bytes, Image)) else checked_pixels(camera, frame).copy()
        for camera, frame in images.items()
    }


def checked_pixels(camera: str, frame: object) -> NDArray[np.uint8]:
    """`frame` as uint8 RGB (H, W, 3). Raises TaktlineError `image_corrupt` for anything else, and says what to do."""
    try:
        array = np.asarray(frame)
    except Exception as error:  # what is no array says why in its own way, as rows of several lengths or a GPU's tensor
        raise TaktlineError(
            ErrorCode.IMAGE_CORRUPT,
            f"the image of camera {camera!r} is a {type(frame).__name__} that gives no array: {error}",
            "pass uint8 RGB of shape (height, width, 3), or JPEG or PNG bytes",
        ) from error
    if array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3 and 0 not in array.shape:
        return array
    next_step = "pass uint8 RGB of shape (height, width, 3), or JPEG or PNG bytes"
    if array.ndim == 3 and array.shape[2] != 3 and array.shape[0] == 3:
        next_step += "; of (3, height, width) pass frame.transpose(1, 2, 0)"
    elif array.dtype.kind == "f":
        next_step += "; of floats in [0, 1] pass (255 * frame).round().astype(np.uint8)"
    elif array.ndim == 3 and array.shape[2] == 4:
        next_step += "; of RGBA pass frame[..., :3]"
    elif array.dtype == np.uint8 and array.ndim == 1:
        next_step += "; of an encoded picture in a bytearray or array pass bytes(frame)"
    elif array.dtype.kind == "U":
        next_step += "; of a file pass pathlib.Path(name).read_bytes()"
    raise TaktlineError(
        ErrorCode.IMAGE_CORRUPT,
        f"the image of camera {camera!r} is {array.dtype} of shape {array.shape}",
        next_step,
    )


def as_state(state: State) -> Array:
    """Wire form of a state vector: float64 (D,). Raises TaktlineError `state_invalid`."""
    if isinstance(state, Array):
        return state
    try:
        values = np.asarray(state, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TaktlineError(
            ErrorCode.STATE_INVALID, f"the state is not numeric: {error}", "pass a flat vector of numbers"
        ) from error
    if values.ndim != 1:
        raise TaktlineError(
            ErrorCode.STATE_INVALID,
            "the state is None" if state is None else f"the state has the shape {values.shape}",
            "pass a flat vector of numbers, in the order that the policy was trained on",
        )
    return Array.from_numpy(values)
