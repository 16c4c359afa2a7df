"""Camera frames on their way out: fitted and encoded in threads, named by their content, kept while nothing changes."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.image_fit import fit_frame
from taktline_protocol.messages import Image, ImageFit

from taktline.observing import Frame, as_image, check_named, checked_pixels

NAME_BYTES = 16
_threads: tuple[int, ThreadPoolExecutor] | None = None
"""Those of the process of that id: a forked child has none of them."""


class NamedFrame(NamedTuple):
    """A frame in its wire form, and the name under which the gateway may hold it."""

    name: bytes
    image: Image


class FrameEncoder:
    """Encodes one robot's frames; a camera that shows what it showed last time is not encoded again.

    Args:
        jpeg_quality: uint8 arrays are sent as JPEG of this quality; as raw pixels where None.

    Attributes:
        fit: uint8 arrays are brought to this size first; None leaves that to the worker.
    """

    def __init__(self, jpeg_quality: int | None = None) -> None:
        if jpeg_quality is not None:
            if not isinstance(jpeg_quality, (int, float)) or not 1 <= jpeg_quality <= 100:
                raise TaktlineError(
                    ErrorCode.CONFIG_INVALID, f"jpeg_quality is {jpeg_quality!r}", "use 1 to 100; 90 to 95 for policies"
                )
            _jpeg_encoder()
        self._quality = jpeg_quality
        self.fit: ImageFit | None = None
        self._last: dict[str, NamedFrame] = {}

    def encode(self, images: Mapping[str, Frame]) -> dict[str, NamedFrame]:
        """The frames in their wire form, several cameras at once.

        Raises TaktlineError `image_corrupt`, and `camera_missing` where they are not by camera.
        """
        check_named(images)
        if not self._works(images) or len(images) < 2:
            return {camera: self._encode(camera, frame) for camera, frame in images.items()}
        made = list(_pool().map(self._encode, images.keys(), images.values()))
        return dict(zip(images, made, strict=True))

    async def encode_async(self, images: Mapping[str, Frame]) -> dict[str, NamedFrame]:
        """As `encode`, without holding up the event loop."""
        check_named(images)
        if not self._works(images):
            return {camera: self._encode(camera, frame) for camera, frame in images.items()}
        loop = asyncio.get_running_loop()
        work = [loop.run_in_executor(_pool(), self._encode, camera, frame) for camera, frame in images.items()]
        return dict(zip(images, await asyncio.gather(*work), strict=True))

    def _works(self, images: Mapping[str, Frame]) -> bool:
        """Whether there is more to do than to take what is there."""
        asked = self._quality is not None or self.fit is not None
        return asked and any(isinstance(frame, np.ndarray) for frame in images.values())

    def _encode(self, camera: str, frame: Frame) -> NamedFrame:
        if self.fit is not None and isinstance(frame, np.ndarray):
            frame = fit_frame(checked_pixels(camera, frame), self.fit)
        if self._quality is None or not isinstance(frame, np.ndarray):
            image = as_image(camera, frame)
            return NamedFrame(_name(image.encoding, image.shape, image.data), image)
        pixels = np.ascontiguousarray(checked_pixels(camera, frame))
        name = _name(f"jpeg{self._quality}", pixels.shape, pixels.data)
        last = self._last.get(camera)
        if last is not None and last.name == name:
            return last
        made = self._last[camera] = NamedFrame(name, Image("jpeg", encode_jpeg(pixels, self._quality)))
        return made


def encode_jpeg(pixels: NDArray[np.uint8], quality: int) -> bytes:
    """JPEG of uint8 RGB (H, W, 3) without chroma subsampling: policies look at small, coloured things."""
    return _jpeg_encoder()(pixels, quality=quality, colorspace="RGB", colorsubsampling="444")


def _name(encoding: str, shape: tuple[int, ...] | None, data: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(f"{encoding} {shape} ".encode(), digest_size=NAME_BYTES)
    digest.update(data)
    return digest.digest()


def _jpeg_encoder() -> Callable[..., bytes]:
    try:
        import simplejpeg
    except ImportError as error:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            "jpeg_quality is given, but simplejpeg is not installed",
            "pip install 'taktline[jpeg]', or pass JPEG bytes, or leave jpeg_quality out to send raw pixels",
        ) from error
    encode: Callable[..., bytes] = simplejpeg.encode_jpeg
    return encode


def _pool() -> ThreadPoolExecutor:
    global _threads
    process = os.getpid()
    if _threads is None or _threads[0] != process:
        # Encoding releases the interpreter lock; more threads than cameras of one robot help nobody.
        made = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="taktline-encode")
        _threads = (process, made)
    return _threads[1]
