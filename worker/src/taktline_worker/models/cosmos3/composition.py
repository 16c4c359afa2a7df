"""Camera frames to the one picture that the policy sees, and that picture to padded pixels."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from torch import Tensor
from torch.nn import functional

WRIST = "wrist_image_left"
EXTERIOR = ("exterior_image_1_left", "exterior_image_2_left")
VIEWS = (WRIST, *EXTERIOR)
COMPOSED = "image"
"""One picture that the robot has composed itself."""


def compose(wrist: NDArray[np.uint8], first: NDArray[np.uint8], second: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The wrist view above the two exterior views, which get half its height and width each.

    Args:
        wrist: uint8 (H, W, 3), W even; the others of any size.

    Returns:
        uint8 (H + H // 2, W, 3).

    Raises:
        TaktlineError: IMAGE_CORRUPT where the wrist view cannot be halved.
    """
    height, width = wrist.shape[:2]
    if width % 2 or height < 2:
        raise TaktlineError(
            ErrorCode.IMAGE_CORRUPT,
            f"the wrist view is {width} x {height}: two views of half its width cannot stand below it",
            "send a wrist view of even width, as the cameras of the training data have",
        )
    half = height // 2, width // 2
    return np.concatenate([wrist, np.concatenate([resized(first, half), resized(second, half)], axis=1)], axis=0)


def resized(frame: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """uint8 (H, W, 3) at `size` (height, width): bilinear without antialiasing, fractions cut off."""
    if frame.shape[:2] == size:
        return frame
    pixels = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None].float()
    wide = functional.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
    return wide[0].permute(1, 2, 0).to(torch.uint8).numpy()


def to_frames(picture: NDArray[np.uint8], content: tuple[int, int], padded: tuple[int, int], frames: int) -> Tensor:
    """The VAE's input of a picture, whose own size does not matter.

    Args:
        content: (height, width) that the picture is brought to.
        padded: (height, width) of the result: mirrored to the right and to the bottom, or its last pixels repeated
            where there are not enough to mirror.
        frames: of the video; those after the first are black, as in the official request, and are not observed.

    Returns:
        fp32 (3, frames, *padded) in [-1, 1].
    """
    pixels = torch.from_numpy(np.ascontiguousarray(resized(picture, content))).permute(2, 0, 1).float()
    right, bottom = padded[1] - content[1], padded[0] - content[0]
    if right or bottom:
        mode = "replicate" if right >= content[1] or bottom >= content[0] else "reflect"
        pixels = functional.pad(pixels[None], (0, right, 0, bottom), mode=mode)[0]
    out = torch.full((3, frames, *padded), -1.0)
    out[:, 0] = pixels / 127.5 - 1.0
    return out
