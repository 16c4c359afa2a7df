"""Camera frames to the network's square: LeRobot's and openpi's letterboxes, which differ by more than rounding."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from taktline_protocol.image_fit import fit_frame, fitted_size
from taktline_protocol.messages import ImageFit

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
        square = torch.from_numpy(fit_frame(frame, pillow_fit(size))).permute(2, 0, 1).to(torch.float32)
        return (square / 255.0 * 2.0 - 1.0).contiguous()
    image = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1).to(torch.float32) / 255.0
    legacy = method == "bilinear_legacy"
    low, band = (-1.0, -1.0) if legacy else (0.0, 0.0)
    if image.shape[1:] != (size, size):
        height, width = fitted_size(image.shape[1], image.shape[2], size, size)
        image = F.interpolate(image[None], size=(height, width), mode="bilinear", align_corners=False)[0]
        image = image.clamp(low, 1.0)
        top, left = (size - height) // 2, (size - width) // 2
        image = F.pad(image, (left, size - width - left, top, size - height - top), value=band)
    return image * 2.0 - 1.0


def pillow_fit(size: int) -> ImageFit:
    """What `pil` does, as robots are told it."""
    return ImageFit(height=size, width=size, filter="bilinear", letterbox=True)
