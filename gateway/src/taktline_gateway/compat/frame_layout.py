"""Frames of a client that repeats itself: what was read of one is used for the next that differs in nothing but pixels.

A robot sends the same map again and again: the same keys, shapes and instruction, other pixels, another state.
Reading it anew each time (bounds, msgpack, arrays, names, checks) cost more than all that the gateway decides. So one
frame is read in full, and where its raw pixels and its state lay is remembered with everything between them. A later
frame of the same length with the same bytes there means the same, by construction: msgpack is read from left to right,
and the bytes that may differ are contents of binary values whose lengths are among the bytes that do not. Anything else
is read in full.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import numpy as np
from taktline_protocol import Array, Image, PolicyInfo
from taktline_protocol.deployment import ClientMapping
from taktline_protocol.limits import Limits, check_structure_msgpack

from taktline_gateway.compat.observations import STATE_KEYS, ClientInput

FEW_BYTES = 256
MIN_PAYLOAD = 16
"""Shorter contents are compared like the rest."""
PATIENCE = 4
"""Layouts that fitted no later frame, after which a connection's frames are no longer studied (JPEG, for one)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Where one frame has what.

    Attributes:
        fixed: (begin, end, bytes) of all that must be the same.
        images: camera -> (begin, end, shape) of raw pixels.
        state: (begin, end) of a float64 vector.
        info, mapping: what the frame was read for.
    """

    size: int
    fixed: tuple[tuple[int, int, bytes], ...]
    images: tuple[tuple[str, int, int, tuple[int, int, int]], ...]
    state: tuple[int, int]
    instruction: str
    info: tuple[tuple[str, ...], tuple[str, ...]]
    mapping: ClientMapping


class FrameLayouts:
    """The layout of one connection's frames."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._unused = 0

    def read(self, frame: bytes, info: PolicyInfo, mapping: ClientMapping) -> ClientInput | None:
        """What the frame says, its bounds and images checked; None where it must be read in full.

        Pixels are views on the frame.
        """
        layout = self._layout
        if layout is None or len(frame) != layout.size:
            return None
        for begin, end, fixed in layout.fixed:
            if frame[begin:end] != fixed:
                return None
        if layout.mapping is not mapping and layout.mapping != mapping:
            return None
        if layout.info != (info.cameras, info.optional_cameras):
            return None
        begin, end = layout.state
        state = frame[begin:end]
        # NumPy's sum costs more than all else here where there are only a few numbers.
        few = len(state) <= FEW_BYTES
        total = sum(memoryview(state).cast("d")) if few else np.add.reduce(np.frombuffer(state, np.float64))
        if not math.isfinite(total):
            return None  # a number that is not finite, or numbers that are out of all proportion
        self._unused = 0
        pixels = memoryview(frame)
        images = {
            # `Image.data` is whatever reads like bytes.
            camera: Image("raw", cast(bytes, pixels[begin:end]), shape)
            for camera, begin, end, shape in layout.images
        }
        return ClientInput(images, Array("float64", (len(state) // 8,), state), layout.instruction)

    def study(
        self, frame: bytes, value: Any, read: ClientInput, info: PolicyInfo, mapping: ClientMapping, limits: Limits
    ) -> None:
        """Remembers the layout of a frame that was read in full and found good.

        Args:
            value: the frame as msgpack decodes it, its arrays not rebuilt.
        """
        if self._unused >= PATIENCE:
            return
        self._layout = layout = layout_of(frame, value, read, info, mapping, limits)
        self._unused = PATIENCE if layout is None else self._unused + 1


def layout_of(
    frame: bytes, value: Any, read: ClientInput, info: PolicyInfo, mapping: ClientMapping, limits: Limits
) -> Layout | None:
    """The layout of a flat map of raw pixels and one float64 vector as the state; None of any other frame."""
    if not isinstance(value, dict) or any(
        isinstance(element, dict) and not _array(element) for element in value.values()
    ):
        return None
    spans: list[tuple[int, int]] = []
    check_structure_msgpack(frame, limits, spans)
    spans = [(begin, end) for begin, end in spans if end - begin >= MIN_PAYLOAD]
    contents = list(_contents(value))
    if len(spans) != len(contents) or msgspec.msgpack.encode(value) != frame:
        return None  # a key that came twice, say, whose contents would be taken for one another
    places = {id(content): span for span, content in zip(spans, contents, strict=True)}
    images = []
    for camera, image in read.images.items():
        place = places.get(id(image.data))
        if image.encoding != "raw" or image.shape is None or place is None:
            return None
        images.append((camera, *place, image.shape))
    state = _state_place(value, mapping, places)
    if state is None or frame[slice(*state)] != read.state.data:
        return None
    free = sorted([state, *((begin, end) for _, begin, end, _ in images)])
    fixed: list[tuple[int, int, bytes]] = []
    at = 0
    for begin, end in free:
        if begin < at:
            return None  # one content stands for two cameras
        fixed.append((at, begin, frame[at:begin]))
        at = end
    fixed.append((at, len(frame), frame[at:]))
    return Layout(
        len(frame),
        tuple(fixed),
        tuple(images),
        state,
        read.instruction,
        (info.cameras, info.optional_cameras),
        mapping,
    )


def _state_place(value: Any, mapping: ClientMapping, places: dict[int, tuple[int, int]]) -> tuple[int, int] | None:
    """Where the only state array of a flat map lies, if it is float64 and a vector."""
    keys = mapping.state or next((keys for keys in STATE_KEYS if all(key in value for key in keys)), ())
    array = value.get(keys[0]) if len(keys) == 1 else None
    if not isinstance(array, dict):
        return None
    entries = {key.decode() if isinstance(key, bytes) else key: element for key, element in array.items()}
    shape = entries.get("shape")
    if entries.get("dtype") not in ("<f8", b"<f8") or not isinstance(shape, list) or len(shape) != 1:
        return None
    return places.get(id(entries.get("data")))


def _array(entries: dict[Any, Any]) -> bool:
    return "__ndarray__" in entries or b"__ndarray__" in entries


def _contents(value: Any) -> Iterator[bytes]:
    """The binary values of a decoded frame in the order of the wire, keys among them."""
    if isinstance(value, bytes):
        if len(value) >= MIN_PAYLOAD:
            yield value
    elif isinstance(value, dict):
        for key, element in value.items():
            yield from _contents(key)
            yield from _contents(element)
    elif isinstance(value, list):
        for element in value:
            yield from _contents(element)
