"""An imagined video as the client asked for it: MP4 or JPEG frames, scaled down, within a size."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from torch import Tensor

from taktline_worker.observation import ImagineInput

MAX_VIDEO_BYTES = 16 * 1024 * 1024
"""Of one answer; a policy's two seconds are a hundredth of it as MP4."""
MIN_HEIGHT = 16
_JPEG_QUALITY = 90
_CRF = "20"


def to_pixels(frames: Tensor) -> NDArray[np.uint8]:
    """uint8 (T, H, W, 3) of decoded frames (3, T, H, W) in [-1, 1]; fractions are cut off as officially."""
    scaled = ((frames.float().clamp(-1.0, 1.0) + 1.0) * 127.5).to(torch.uint8)
    return np.ascontiguousarray(scaled.permute(1, 2, 3, 0).cpu().numpy())


def check(asked: ImagineInput, height: int) -> None:
    """Refuses what cannot be made of frames of `height` pixels, before anything is computed.

    Raises:
        TaktlineError: IMAGINE_INVALID.
    """
    if asked.format not in ("mp4", "frames"):
        raise _error(f"imagine.format is {asked.format[:32]!r}", "ask for mp4 or frames")
    if asked.height is not None and not MIN_HEIGHT <= asked.height <= height:
        raise _error(
            f"imagine.height is {asked.height}", f"ask for {MIN_HEIGHT} to {height} pixels, the policy's own height"
        )
    if asked.format == "mp4":
        _av()


def encode_video(pixels: NDArray[np.uint8], asked: ImagineInput, fps: float) -> tuple[bytes, ...]:
    """One MP4 file, or a JPEG for each frame.

    Args:
        pixels: uint8 (T, H, W, 3).

    Raises:
        TaktlineError: IMAGINE_INVALID where the result is over `MAX_VIDEO_BYTES`.
    """
    if asked.height is not None and asked.height < pixels.shape[1]:
        pixels = _scaled(pixels, asked.height)
    found = (_mp4(pixels, fps),) if asked.format == "mp4" else tuple(_jpeg(frame) for frame in pixels)
    size = sum(map(len, found))
    if size > MAX_VIDEO_BYTES:
        raise _error(
            f"the video of {len(pixels)} frames of {pixels.shape[2]} x {pixels.shape[1]} has {size} bytes, the limit is"
            f" {MAX_VIDEO_BYTES}",
            "ask for mp4, or for a smaller imagine.height",
        )
    return found


def _scaled(pixels: NDArray[np.uint8], height: int) -> NDArray[np.uint8]:
    width = max(1, round(pixels.shape[2] * height / pixels.shape[1]))
    return np.stack([cv2.resize(frame, (width, height), interpolation=cv2.INTER_AREA) for frame in pixels]).astype(
        np.uint8, copy=False
    )


def _jpeg(frame: NDArray[np.uint8]) -> bytes:
    done, data = cv2.imencode(".jpg", cv2.cvtColor(frame, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])
    assert done, "OpenCV encodes any uint8 frame"
    return data.tobytes()


def _mp4(pixels: NDArray[np.uint8], fps: float) -> bytes:
    """H.264 in MP4; odd sides lose a pixel."""
    av = _av()
    _, height, width, _ = pixels.shape
    height, width = height - height % 2, width - width % 2
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream(
            "libx264", rate=Fraction(fps).limit_denominator(1000), options={"crf": _CRF, "preset": "veryfast"}
        )
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in pixels:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame[:height, :width]), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return out.getvalue()


def _av() -> Any:
    """The encoder's module, which only this feature needs."""
    try:
        import av
    except ImportError:
        raise _error(
            "this worker has no MP4 encoder", "ask for frames, or build the worker's image with its extra `video`"
        ) from None
    return av


def _error(message: str, next_step: str) -> TaktlineError:
    return TaktlineError(ErrorCode.IMAGINE_INVALID, message, next_step)
