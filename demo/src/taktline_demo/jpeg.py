"""The JPEG frames that robots send; the demonstrations pass through the same encoder before training."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

JPEG_QUALITY = 92


def encode_jpeg(frame: NDArray[np.uint8], quality: int = JPEG_QUALITY) -> bytes:
    """The JPEG bytes of `frame` (uint8 RGB, shape (H, W, 3)); no chroma subsampling, as the frames are small."""
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "JPEG", quality=quality, subsampling=0)
    return buffer.getvalue()


def decode_jpeg(data: bytes) -> NDArray[np.uint8]:
    """The uint8 RGB frame, shape (H, W, 3), in `data`."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))
