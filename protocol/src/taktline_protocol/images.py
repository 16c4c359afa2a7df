"""Image headers read without decoding: size, completeness and the pixel bound of JPEG, PNG and raw frames."""

from __future__ import annotations

import struct
from typing import NamedTuple

from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_protocol.limits import Limits
from taktline_protocol.messages import Image


class ImageSize(NamedTuple):
    """Pixels and channels that an image's header declares."""

    height: int
    width: int
    channels: int


_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_JPEG_START = b"\xff\xd8"
_JPEG_END = b"\xff\xd9"
_SOF_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Markers without a length: TEM, RST0-7.
_BARE_MARKERS = frozenset({0x01, *range(0xD0, 0xD8)})
# Of a segment: 0xFF, marker, length; of a frame header what follows these: precision, height, width, components.
_SEGMENT, _FRAME = struct.Struct(">BBH"), struct.Struct(">BHHB")
_MOST_SEGMENTS = 4096
"""And fill bytes, before a scan, each a step: a camera's file has a dozen, one with a large profile some hundred."""


def sniff_encoding(data: bytes) -> str | None:
    """`jpeg` or `png` by the first bytes of `data`, else None."""
    if data.startswith(_JPEG_START):
        return "jpeg"
    if data.startswith(_PNG_SIGNATURE):
        return "png"
    return None


def check_image(camera: str, image: Image, limits: Limits) -> ImageSize:
    """Checks one frame without decoding it: bytes, header, completeness, pixels, and raw shape against byte count.

    Raises:
        TaktlineError: `image_corrupt` or `image_too_large`, with the camera's name.
    """
    data = image.data
    if not data:
        raise _corrupt(camera, "it has 0 bytes")
    if len(data) > limits.image_bytes:
        raise TaktlineError(
            ErrorCode.IMAGE_TOO_LARGE,
            f"the image of camera {camera!r} has {len(data)} bytes; the limit is {limits.image_bytes}",
            "send JPEG, or a smaller image",
        )
    if image.encoding == "raw":
        size = _raw_size(camera, image)
    else:
        if image.shape is not None:
            raise _corrupt(camera, f"`shape` belongs to raw images only, not to {image.encoding}")
        size = jpeg_size(data, camera) if image.encoding == "jpeg" else png_size(data, camera)
    if size.height * size.width > limits.image_pixels:
        raise TaktlineError(
            ErrorCode.IMAGE_TOO_LARGE,
            f"the image of camera {camera!r} is {size.width}x{size.height}; the limit is {limits.image_pixels} pixels",
            "downscale on the robot: policies look at a few hundred pixels a side",
        )
    return size


def png_size(data: bytes, camera: str = "") -> ImageSize:
    """Size from the PNG header chunk. Raises TaktlineError `image_corrupt`, also where the end chunk is missing."""
    if not data.startswith(_PNG_SIGNATURE):
        raise _corrupt(camera, "it does not begin as a PNG")
    if len(data) < 33 or data[8:16] != b"\x00\x00\x00\x0dIHDR":
        raise _corrupt(camera, "its PNG header is cut short")
    width = int.from_bytes(data[16:20], "big")
    height = int.from_bytes(data[20:24], "big")
    depth, color = data[24], data[25]
    if not (0 < width < 2**31 and 0 < height < 2**31) or depth not in _PNG_DEPTHS.get(color, ()):
        raise _corrupt(camera, f"its PNG header declares {width}x{height}, depth {depth}, colour type {color}")
    if data.rfind(_PNG_END, 33) < 0:
        raise _corrupt(camera, "the PNG is truncated: its end is missing")
    return ImageSize(height, width, _PNG_CHANNELS[color])


def jpeg_size(data: bytes, camera: str = "") -> ImageSize:
    """Size from the JPEG frame header. Raises TaktlineError `image_corrupt`, also where the end marker is missing."""
    if not data.startswith(_JPEG_START):
        raise _corrupt(camera, "it does not begin as a JPEG")
    position = 2
    end = len(data)
    size: ImageSize | None = None
    for _ in range(_MOST_SEGMENTS):
        if position + 4 > end:
            raise _corrupt(camera, f"the JPEG is cut short or damaged at byte {position}")
        lead, marker, length = _SEGMENT.unpack_from(data, position)
        if lead != 0xFF:
            raise _corrupt(camera, f"the JPEG is cut short or damaged at byte {position}")
        if marker == 0xFF:  # fill byte
            position += 1
            continue
        if marker in _BARE_MARKERS:
            position += 2
            continue
        if length < 2 or position + 2 + length > end:
            raise _corrupt(camera, f"the JPEG is cut short or damaged at byte {position}")
        if marker in _SOF_MARKERS:
            if size is not None or length < 8:
                raise _corrupt(camera, "the JPEG has a second or damaged frame header")
            _, height, width, channels = _FRAME.unpack_from(data, position + 4)
            if height == 0 or width == 0 or channels not in (1, 3, 4):
                raise _corrupt(camera, f"the JPEG declares {width}x{height} with {channels} components")
            size = ImageSize(height, width, channels)
        position += 2 + length
        if marker == 0xDA:  # the scan follows; inside it 0xFF is always stuffed, so an end marker is an end marker
            break
    else:
        raise _corrupt(camera, f"the JPEG has more than {_MOST_SEGMENTS:,} segments and fill bytes before its scan")
    if size is None:
        raise _corrupt(camera, "the JPEG has no frame header")
    if data.rfind(_JPEG_END, position) < 0:  # from behind, where it is in every whole image
        raise _corrupt(camera, "the JPEG is truncated: its end marker is missing")
    return size


def _raw_size(camera: str, image: Image) -> ImageSize:
    if image.shape is None:
        raise _corrupt(camera, "a raw image needs `shape` (height, width, 3)")
    height, width, channels = image.shape
    if height <= 0 or width <= 0 or channels != 3:
        raise _corrupt(camera, f"its shape {image.shape} is not (height, width, 3)")
    if height * width * channels != len(image.data):
        raise _corrupt(
            camera, f"its shape {image.shape} needs {height * width * channels} bytes, not {len(image.data)}"
        )
    return ImageSize(height, width, channels)


def _corrupt(camera: str, reason: str) -> TaktlineError:
    where = f"the image of camera {camera!r}" if camera else "the image"
    return TaktlineError(
        ErrorCode.IMAGE_CORRUPT,
        f"{where} cannot be read: {reason}",
        "send a whole JPEG or PNG, or raw uint8 RGB with its shape",
    )
