"""Camera frames to the network's square: LeRobot's and openpi's letterboxes, which differ by more than rounding."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image

Resize = Literal["bilinear", "bilinear_legacy", "pil"]


def to_model_input(frame: NDArray[np.uint8], size: int, method: Resize) -> torch.Tensor:
    """One RGB frame -> the vision tower's input.

    Args:
        frame: uint8 (H, W, 3).
        size: side of the square.
        method: `bilinear` and `bilinear_legacy` sample without antialiasing, `pil` antialiases in uint8.

    Returns:
        float32 (3, size, size) in [-1, 1]; letterbox bands are -1 (`bilinear_legacy`: -3).
    """
    if method == "pil":
        square = torch.from_numpy(_letterbox_pil(frame, size)).permute(2, 0, 1).to(torch.float32)
        return (square / 255.0 * 2.0 - 1.0).contiguous()
    image = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1).to(torch.float32) / 255.0
    legacy = method == "bilinear_legacy"
    low, band = (-1.0, -1.0) if legacy else (0.0, 0.0)
    if image.shape[1:] != (size, size):
        height, width = fitted(image.shape[1], image.shape[2], size)
        image = F.interpolate(image[None], size=(height, width), mode="bilinear", align_corners=False)[0]
        image = image.clamp(low, 1.0)
        top, left = (size - height) // 2, (size - width) // 2
        image = F.pad(image, (left, size - width - left, top, size - height - top), value=band)
    return image * 2.0 - 1.0


def fitted(height: int, width: int, size: int) -> tuple[int, int]:
    """(height, width): the largest size with the frame's own ratio, truncated as both training codes truncate it."""
    ratio = max(width / size, height / size)
    return int(height / ratio), int(width / ratio)


def _letterbox_pil(frame: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    if frame.shape[:2] == (size, size):
        return np.array(frame)
    height, width = fitted(frame.shape[0], frame.shape[1], size)
    resized = Image.fromarray(frame).resize((width, height), resample=Image.Resampling.BILINEAR)
    square = np.zeros((size, size, 3), np.uint8)
    top, left = (size - height) // 2, (size - width) // 2
    square[top : top + height, left : left + width] = np.asarray(resized)
    return square
