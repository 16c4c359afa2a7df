"""Camera frames at a policy's own image size, where that is made in whole 8-bit pixels: by a worker, or by its robot.

Both call this, so a frame that was fitted on the robot is what the worker would have made of it, bit for bit, and the
worker leaves it as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_protocol.messages import ImageFit

if TYPE_CHECKING:
    from types import ModuleType


def fitted_size(height: int, width: int, to_height: int, to_width: int) -> tuple[int, int]:
    """(height, width): the largest size with the frame's own ratio, truncated as the training codes of π do it."""
    ratio = max(width / to_width, height / to_height)
    return int(height / ratio), int(width / ratio)


def fit_frame(frame: NDArray[np.uint8], rule: ImageFit) -> NDArray[np.uint8]:
    """One RGB frame (H, W, 3) at the size of `rule`, uint8 (height, width, 3), resized by Pillow, which antialiases.

    Raises:
        TaktlineError: IMAGE_CORRUPT for a frame so long that nothing would be left of its other side, CONFIG_INVALID
            where Pillow is not installed.
    """
    size = rule.height, rule.width
    if frame.shape[:2] == size:
        return np.array(frame)
    height, width = fitted_size(frame.shape[0], frame.shape[1], *size) if rule.letterbox else size
    if min(height, width) < 1:
        raise TaktlineError(
            ErrorCode.IMAGE_CORRUPT,
            f"a frame of {frame.shape[1]} x {frame.shape[0]} has no pixel left at {size[1]} x {size[0]}",
            "send what the camera sees, not a strip of it",
        )
    image = pillow()
    resized = np.asarray(image.fromarray(frame).resize((width, height), _filter(image, rule.filter)))
    if not rule.letterbox:
        return resized
    square = np.zeros((*size, 3), np.uint8)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    square[top : top + height, left : left + width] = resized
    return square


def pillow() -> ModuleType:
    """Pillow's images. Raises TaktlineError CONFIG_INVALID where it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            "frames are to be fitted here, but Pillow is not installed",
            "pip install 'taktline[fit]', or leave fit_frames out: the worker then fits them",
        ) from error
    return Image


def _filter(image: Any, name: str) -> Any:
    return {"bilinear": image.Resampling.BILINEAR, "bicubic": image.Resampling.BICUBIC}[name]
