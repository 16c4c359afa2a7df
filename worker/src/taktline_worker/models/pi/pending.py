"""Rows in the making: an observation that has been checked, while its frames are decoded."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from taktline_worker.models.pi.rtc import RtcRow
from taktline_worker.models.pi.runner import PiRow
from taktline_worker.observation import EncodedImage

_BEGIN_LIMIT_S = 0.0005
"""Where there are fewer processors than frames, the last ones begin only when the first have ended."""


class BegunByOthers:
    """A frame that native threads have begun to decode, in the place of one that a thread here does."""

    def __init__(self, finish: Callable[[], tuple[Tensor, bytes]]) -> None:
        self.result = finish

    def cancel(self) -> bool:
        """It has begun."""
        return False


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A network row, and the state that its actions may be relative to: (D,), in the policy's joint space.

    It is kept until the network has run it: memory of its frames is used again once nobody refers to them.
    """

    row: PiRow
    state: NDArray[np.float64]
    images: tuple[EncodedImage, ...] = ()
    """Those of a `BegunPiRow`."""


@dataclass(frozen=True, slots=True)
class BegunPiRow:
    """An ordinary observation, checked, whose frames are being decoded by native threads or known.

    Attributes:
        again: the row of the same observation the long way, for frames that turn out to be none.
    """

    images: tuple[EncodedImage, ...]
    tokens: NDArray[np.int64]
    noise: Tensor
    state: NDArray[np.float64]
    again: Callable[[], PendingPiRow]
    rtc: ClassVar[None] = None
    raw: ClassVar[bool] = True

    def let_frames_begin(self) -> None:
        """They have."""

    def without_frames(self) -> PiRow:
        """As `PendingPiRow.without_frames`."""
        return PiRow(_no_pixels(len(self.images)), self.tokens, self.noise, None, raw=())

    def result(self) -> PreparedRow:
        """As `PendingPiRow.result`."""
        frames = []
        for image in self.images:
            if image.begun is None or not image.begun.decoded():
                return self.again().result()
            frames.append(image.begun.pixels)
        row = PiRow(_no_pixels(len(frames)), self.tokens, self.noise, None, raw=tuple(frames))
        return PreparedRow(row, self.state, self.images)


@dataclass(slots=True)
class PendingPiRow:
    """A checked observation whose images are still being decoded, in the checkpoint's camera order, and its prompt.

    `text` makes tokens and noise, which whoever waits for the images has the time for.
    """

    pixels: tuple[Future[tuple[Tensor, bytes]] | BegunByOthers, ...]
    decode: tuple[Callable[[], tuple[Tensor, bytes]], ...]
    text: Callable[[], tuple[NDArray[np.int64], Tensor]]
    model_state: Tensor | None
    state: NDArray[np.float64]
    rtc: RtcRow | None
    raw: bool = False
    begun: set[str] = field(default_factory=set)
    _own: dict[int, Future[tuple[Tensor, bytes]]] = field(default_factory=dict)
    _said: tuple[NDArray[np.int64], Tensor] | None = None

    def let_frames_begin(self) -> None:
        """Leaves the interpreter's lock to the threads that decode, until all need it no more; a moment at most.

        Waking to hear of it would take longer.
        """
        until = time.monotonic() + _BEGIN_LIMIT_S
        while len(self.begun) < len(self.pixels) and time.monotonic() < until:
            time.sleep(0)

    def without_frames(self) -> PiRow:
        """The row of a runner that resizes frames itself, but for these. Raises TaktlineError INSTRUCTION_INVALID."""
        tokens, noise = self._tokens_and_noise()
        return PiRow(_no_pixels(len(self.pixels)), tokens, noise, self.model_state, self.rtc, raw=())

    def result(self) -> PreparedRow:
        """The finished row. Raises TaktlineError where an image is corrupt or too large, or INSTRUCTION_INVALID."""
        tokens, noise = self._tokens_and_noise()
        while self._lend_a_hand():
            pass
        frames = [self._own.get(index, future).result() for index, future in enumerate(self.pixels)]
        images = tuple(pixels for pixels, _ in frames)
        row = PiRow(
            pixels=_no_pixels(len(frames)) if self.raw else torch.stack(images),
            tokens=tokens,
            noise=noise,
            state=self.model_state,
            rtc=self.rtc,
            frames=tuple(key for _, key in frames if key),
            raw=images if self.raw else None,
        )
        return PreparedRow(row, self.state)

    def _tokens_and_noise(self) -> tuple[NDArray[np.int64], Tensor]:
        if self._said is None:
            self._said = self.text()
        return self._said

    def _lend_a_hand(self) -> bool:
        """Decodes a frame that no thread has begun, the last one; whether there was one."""
        for index in reversed(range(len(self.pixels))):
            if index not in self._own and self.pixels[index].cancel():
                done = self._own[index] = Future()
                try:
                    done.set_result(self.decode[index]())
                except Exception as error:  # its turn to be told comes with `result`
                    done.set_exception(error)
                return True
        return False


@functools.cache
def _no_pixels(images: int) -> Tensor:
    """Of rows whose frames the runner resizes."""
    return torch.empty(images, 0)
