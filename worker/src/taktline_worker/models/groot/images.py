"""Frames to patches: the checkpoint's scaling and centre crop, then the backbone's own preprocessor."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from taktline_worker.models.groot.embodiment import ImageTransform

MIN_PIXELS = 65_536
MAX_PIXELS = 16_777_216
"""Bounds of the backbone's preprocessor for one image."""


def scaled(frame: NDArray[np.uint8], transform: ImageTransform) -> NDArray[np.uint8]:
    """uint8 (H, W, 3) as the official evaluation transform leaves it: resized by areas, cropped, resized again."""
    frame = _resized(frame, transform)
    height, width = frame.shape[:2]
    kept_height, kept_width = int(height * transform.crop), int(width * transform.crop)
    top, left = (height - kept_height) // 2, (width - kept_width) // 2
    return _resized(frame[top : top + kept_height, left : left + kept_width], transform)


def _resized(frame: NDArray[np.uint8], transform: ImageTransform) -> NDArray[np.uint8]:
    import cv2

    height, width = frame.shape[:2]
    if transform.edge is None:
        wanted = transform.target
    elif height <= width:
        wanted = transform.edge, max(1, round(width * transform.edge / height))
    else:
        wanted = max(1, round(height * transform.edge / width)), transform.edge
    if wanted == (height, width):
        return frame
    resized = cv2.resize(np.ascontiguousarray(frame), (wanted[1], wanted[0]), interpolation=cv2.INTER_AREA)
    return resized.astype(np.uint8, copy=False)


def backbone_size(height: int, width: int, factor: int) -> tuple[int, int]:
    """Height and width that the backbone reads: multiples of `factor` near the frame's own, within the pixel bounds."""
    rounded = round(height / factor) * factor, round(width / factor) * factor
    if rounded[0] * rounded[1] > MAX_PIXELS:
        shrink = math.sqrt(height * width / MAX_PIXELS)
        return tuple(max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))  # type: ignore[return-value]
    if rounded[0] * rounded[1] < MIN_PIXELS:
        grow = math.sqrt(MIN_PIXELS / (height * width))
        return tuple(math.ceil(side * grow / factor) * factor for side in (height, width))  # type: ignore[return-value]
    return rounded


def to_patches(frame: NDArray[np.uint8], patch: int, merge: int, temporal: int) -> tuple[Tensor, tuple[int, int]]:
    """fp32 (patches, 3 * temporal * patch^2) in [-1, 1], merge blocks together, and the grid (rows, columns).

    The one frame stands for every tap of the temporal patch.
    """
    pixels = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)
    size = backbone_size(frame.shape[0], frame.shape[1], patch * merge)
    if size != tuple(frame.shape[:2]):
        wide = functional.interpolate(pixels[None].float(), size, mode="bicubic", antialias=True)[0]
        pixels = wide.round().clamp(0, 255).to(torch.uint8)
    values = (pixels.float() / 255.0 - 0.5) / 0.5
    rows, columns = size[0] // patch, size[1] // patch
    blocks = values.view(3, rows // merge, merge, patch, columns // merge, merge, patch)
    blocks = blocks.permute(1, 4, 2, 5, 0, 3, 6)  # block row, block column, row, column, channel, y, x
    taps = blocks[:, :, :, :, :, None].expand(*blocks.shape[:5], temporal, patch, patch)
    return taps.reshape(rows * columns, -1), (rows, columns)
