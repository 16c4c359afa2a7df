"""One observation as it reaches an adapter, whatever carried it, and the decoding of its images."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from taktline_protocol import ErrorCode, TaktlineError

from taktline_worker.jpeg_threads import BegunFrame

DEFAULT_MAX_PIXELS = 16_000_000
_FORMATS = {"jpeg": "JPEG", "png": "PNG"}
_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}
_PLAIN_JPEG = {"YCbCr", "Gray", "RGB"}
"""Colour spaces of a JPEG for which libjpeg-turbo gives the RGB that Pillow gives, to the bit."""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """One frame: JPEG or PNG bytes, or raw uint8 RGB of `shape` (H, W, 3); `begun` where it is being decoded."""

    encoding: str
    data: bytes | memoryview
    shape: tuple[int, ...] = ()
    begun: BegunFrame | None = None


@dataclass(frozen=True, slots=True)
class SearchInput:
    """What one request asks of a planner's search instead of the deployment's settings; None keeps them.

    Attributes:
        budget_ms: time that the search may take; the best plan found by then is the answer.
        anytime: whether the hand-off deadline ends the search in the same way.
        previous: (n, action width) the robot's last plan, whose tail is where the search begins.
        pending: (n, action width) actions under way, whose expected outcome is where the plan begins.
    """

    candidates: int | None = None
    rounds: int | None = None
    elites: int | None = None
    horizon: int | None = None
    budget_ms: float | None = None
    anytime: bool | None = None
    previous: NDArray[np.generic] | None = None
    pending: NDArray[np.generic] | None = None


@dataclass(frozen=True, slots=True)
class RtcInput:
    """What the robot still executes of its last chunk (protocol `Rtc`).

    Attributes:
        tail: (n, D) in robot units, the action due at the observation's capture first.
        delay: actions executed before the new chunk is there; None = not stated.
        execution_horizon: actions executed of each chunk; None = not stated.
        prefix_end: where guidance ends; None = not stated.
    """

    tail: NDArray[np.generic]
    delay: int | None = None
    execution_horizon: int | None = None
    prefix_end: int | None = None


@dataclass(frozen=True, slots=True)
class ImagineInput:
    """How the robot wants to see what a world-action model expects (protocol `Imagine`).

    Attributes:
        format: `mp4`, or `frames` as JPEGs.
        height: pixels that the frames are scaled down to; None keeps theirs.
    """

    format: str
    height: int | None = None


@dataclass(frozen=True, slots=True)
class RobotInput:
    """What a robot sent.

    Attributes:
        images: frames by camera name.
        state: (D,) in robot units.
        seed: fixes the noise; None draws it.
        search: for planners only.
        rtc: the tail of the last chunk; None without one.
        imagine: for world-action models: the video that is wanted with the actions; None without one.
        expires_at: monotonic instant of the hand-off deadline; None = none.
    """

    images: Mapping[str, EncodedImage]
    state: NDArray[np.generic]
    instruction: str
    seed: int | None = None
    search: SearchInput | None = None
    rtc: RtcInput | None = None
    imagine: ImagineInput | None = None
    expires_at: float | None = None


Memory = Callable[[tuple[int, int, int]], NDArray[np.uint8]]
"""Gives contiguous memory for a frame of (H, W, 3), with any content."""


def decode_image(
    name: str, image: EncodedImage, max_pixels: int = DEFAULT_MAX_PIXELS, memory: Memory | None = None
) -> NDArray[np.uint8]:
    """Decodes one frame, after checking its size in the header.

    Args:
        name: camera, for messages.
        max_pixels: larger frames are refused before any pixel is decoded.
        memory: where the pixels shall lie, such as pinned memory; None leaves that open.

    Returns:
        uint8 (H, W, 3), RGB, contiguous.

    Raises:
        TaktlineError: IMAGE_CORRUPT or IMAGE_TOO_LARGE.
    """
    if not image.data:
        raise _corrupt(name, "it is empty")
    if image.encoding == "jpeg" and (pixels := _plain_jpeg(name, image.data, max_pixels, memory)) is not None:
        return pixels
    pixels = _raw(name, image, max_pixels) if image.encoding == "raw" else _pillow(name, image, max_pixels)
    if memory is None:
        return pixels.copy() if image.encoding == "raw" else pixels  # what came over the wire is not kept for a frame
    kept = memory((pixels.shape[0], pixels.shape[1], 3))
    np.copyto(kept, pixels)
    return kept


def _pillow(name: str, image: EncodedImage, max_pixels: int) -> NDArray[np.uint8]:
    """Pixels of whatever Pillow can read, RGB."""
    if image.encoding not in _FORMATS:
        raise _corrupt(name, f"its encoding {image.encoding!r} is none of jpeg, png, raw")
    try:
        with warnings.catch_warnings():
            # Pillow's own bomb check warns at a size of its choosing; ours decides below.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(image.data), formats=(_FORMATS[image.encoding],)) as opened:
                _check_size(name, opened.height, opened.width, max_pixels)
                if opened.mode not in _MODES:
                    raise _corrupt(name, f"its pixel format {opened.mode} is not 8 bits a channel")
                return np.array(opened.convert("RGB"))
    except Image.DecompressionBombError as error:
        raise _too_large(name, str(error), max_pixels) from error
    except UnidentifiedImageError:
        raise _corrupt(name, f"its bytes are no {image.encoding}") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # what Pillow raises for damaged files
        raise _corrupt(name, str(error)) from error


def _plain_jpeg(
    name: str, data: bytes | memoryview, max_pixels: int, memory: Memory | None
) -> NDArray[np.uint8] | None:
    """The pixels of an ordinary JPEG; None for one that Pillow shall judge: damaged, odd, or no JPEG at all.

    Both decode with libjpeg-turbo, but Pillow copies the pixels with the interpreter locked, so that a batch's frames
    would be decoded hardly faster than one after another.
    """
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        _check_size(name, height, width, max_pixels)
        if colours not in _PLAIN_JPEG:
            return None
        buffer = None if memory is None else memory((height, width, 3))
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, colorspace="RGB", buffer=buffer)
        return pixels
    except ValueError:
        return None


def _raw(name: str, image: EncodedImage, max_pixels: int) -> NDArray[np.uint8]:
    if len(image.shape) != 3 or image.shape[2] != 3 or min(image.shape) < 1:
        raise _corrupt(name, f"raw frames have shape (H, W, 3), this one {image.shape}")
    height, width, _ = image.shape
    _check_size(name, height, width, max_pixels)
    if len(image.data) != height * width * 3:
        raise _corrupt(name, f"shape {image.shape} needs {height * width * 3} bytes, it has {len(image.data)}")
    return np.frombuffer(image.data, np.uint8).reshape(height, width, 3)


def _check_size(name: str, height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise _too_large(name, f"{width} x {height}", max_pixels)


def _too_large(name: str, what: str, max_pixels: int) -> TaktlineError:
    return TaktlineError(
        ErrorCode.IMAGE_TOO_LARGE,
        f"camera {name!r} sent a frame of {what}, over the limit of {max_pixels} pixels",
        "send frames near the policy's own resolution; they are scaled down anyway",
    )


def _corrupt(name: str, reason: str) -> TaktlineError:
    return TaktlineError(
        ErrorCode.IMAGE_CORRUPT,
        f"camera {name!r} sent a frame that cannot be decoded: {reason}",
        "send the frame again",
    )


def check_cameras(given: Collection[str], wanted: Sequence[str]) -> None:
    """Whether exactly the wanted cameras were sent.

    Raises:
        TaktlineError: CAMERA_UNKNOWN or CAMERA_MISSING.
    """
    named = ", ".join(wanted)
    unknown = sorted(set(given) - set(wanted))
    if unknown:
        raise TaktlineError(
            ErrorCode.CAMERA_UNKNOWN,
            f"the policy has no camera {', '.join(repr(name[:64]) for name in unknown[:4])}",
            f"send {named}; model.cameras maps names",
        )
    missing = [name for name in wanted if name not in given]
    if missing:
        raise TaktlineError(ErrorCode.CAMERA_MISSING, f"cameras are missing: {', '.join(missing)}", f"send {named}")
