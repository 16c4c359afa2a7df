"""Camera frames on a GPU: static buffers for a batch's bytes, and the resize tables of each frame size seen."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from taktline_kernels.triton_impl import camera
from taktline_protocol.image_fit import fitted_size
from torch import Tensor

from taktline_worker.devices import Staged, send
from taktline_worker.models.pi.resize import Resize, to_model_input

_TAPS = 48
"""Inputs of one output along an axis; Pillow's filter needs 2 * ceil(scale) + 1, which 48 covers up to 5000 pixels."""

_FRACTION_BITS = 22
_TARGETS = 1024

Axis = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.number]]
"""First input, number of inputs and weights (outputs, taps) of each output along one axis."""


@functools.lru_cache(maxsize=256)
def axis_table(length: int, fitted_length: int, size: int, method: Resize) -> Axis:
    """Resize tables of one axis.

    Args:
        length: pixels of the frame.
        fitted_length: pixels that the frame gets in the square.
        size: side of the square; what the frame leaves of it is letterbox, one pixel more at the end where it is odd.
        method: as `resize.to_model_input` takes it.
    """
    starts, counts = np.zeros(size, np.int32), np.zeros(size, np.int32)
    weights = np.zeros((size, _TAPS), np.int32 if method == "pil" else np.float32)
    margin = (size - fitted_length) // 2
    inner = slice(margin, margin + fitted_length)
    if length == fitted_length:
        starts[inner] = np.arange(length)
        counts[inner] = 1
        weights[inner, 0] = 1 << _FRACTION_BITS if method == "pil" else 1.0
    elif method == "pil":
        _pillow(length, fitted_length, starts[inner], counts[inner], weights[inner])
    else:
        _bilinear(length, fitted_length, starts[inner], counts[inner], weights[inner])
    return starts, counts, weights


def _pillow(
    length: int, target: int, starts: NDArray[np.int32], counts: NDArray[np.int32], weights: NDArray[np.number]
) -> None:
    """Pillow's bilinear filter: a triangle as wide as the reduction, in double, rounded to 22 fractional bits."""
    scale = length / target
    support = max(scale, 1.0)
    for out in range(target):
        centre = (out + 0.5) * scale
        first = max(int(centre - support + 0.5), 0)
        last = min(int(centre + support + 0.5), length)
        values = [max(1.0 - abs((i + first - centre + 0.5) * (1.0 / support)), 0.0) for i in range(last - first)]
        total = 0.0
        for value in values:
            total += value
        rounded = [int(0.5 + value / total * (1 << _FRACTION_BITS)) for value in values]
        starts[out], counts[out] = first, last - first
        weights[out, : last - first] = rounded


def _bilinear(
    length: int, target: int, starts: NDArray[np.int32], counts: NDArray[np.int32], weights: NDArray[np.number]
) -> None:
    """PyTorch's bilinear interpolation without antialiasing, align_corners False: two inputs, in fp32."""
    one = np.float32(1.0)
    scale = np.float32(length) / np.float32(target)
    for out in range(target):
        # One rounding, as compiled code multiplies and subtracts at once.
        real = np.float32(np.float64(scale) * (out + 0.5) - 0.5)
        real = max(real, np.float32(0.0))
        first = min(int(real), length - 1)
        share = np.float32(min(max(real - np.float32(first), np.float32(0.0)), one))
        starts[out], counts[out] = first, 2 if first + 1 < length else 1
        weights[out, :2] = (one - share, share)
        if first + 1 == length:
            weights[out, 0] = one


class CameraBuffers:
    """The frames of one batch on the device, and what turns them into patches inside a captured graph.

    Nothing is allocated on the device after construction. A batch is loaded behind the one that runs, without waiting
    for it; frames that lie in pinned memory are copied from there, and must stay until the batch has run.

    Args:
        images: most images of a batch.
        frame_bytes: memory for each one's frame.
        size: side of the square.
        patch: side of a patch.
        method: how frames are resized.
        device: a CUDA device.
    """

    def __init__(
        self, images: int, frame_bytes: int, size: int, patch: int, method: Resize, device: torch.device
    ) -> None:
        self._size, self._patch, self._method = size, patch, method
        self.frame_bytes = frame_bytes
        kind = torch.int32 if method == "pil" else torch.float32
        self._frames = torch.zeros(images * frame_bytes, dtype=torch.uint8, device=device)
        self._staged = Staged({"places": ((2, images), torch.int64), "slots": ((images,), torch.int32)}, device)
        self._places, self._slots = self._staged.tensors["places"], self._staged.tensors["slots"]
        self._slots.fill_(-1)
        self._told: list[tuple[int, int, int]] | None = None
        """Slot, begin and row bytes of each frame, as the device knows them; None where it knows of pixels."""
        self._shapes: list[torch.Size] = []
        """Those of the frames that it knows of; empty where it has others."""
        self._starts = torch.zeros(images, 2, size, dtype=torch.int32, device=device)
        self._counts = torch.zeros(images, 2, size, dtype=torch.int32, device=device)
        self._weights = torch.zeros(images, 2, size, _TAPS, dtype=kind, device=device)
        self._pixels = torch.zeros(images, 3, size, size, device=device)
        self._scaled = (torch.arange(256, dtype=torch.float32) / 255.0).to(device)
        tokens = (size // patch) ** 2
        self._out = torch.zeros(images, tokens, 3 * patch * patch, device=device)
        self._geometries: dict[tuple[int, int], int] = {}
        self._targets: dict[tuple[int, torch.Size], Tensor] = {}
        """Where an image's frames of a shape go: each view costs as much as the copy itself."""

    def load_pixels(self, pixels: Tensor) -> None:
        """Take images that are ready: fp32 (n, 3, size, size) in [-1, 1]."""
        send(self._pixels[: len(pixels)], pixels)
        self._slots.fill_(-1)
        self._told, self._shapes = None, []

    def load_frames(self, frames: Sequence[Tensor]) -> None:
        """Take frames, (H, W, 3) uint8 on the CPU, of any sizes.

        A frame that its tables or its memory cannot hold is resized on the CPU instead, whatever the others are: to the
        same values for Pillow's resize, and within rounding for the others.

        Raises:
            ValueError: there are more frames than images in a batch.
        """
        if len(frames) > len(self._slots):
            raise ValueError(f"{len(frames)} frames, the buffers hold {len(self._slots)}")
        sizes = {(frame.shape[0], frame.shape[1]) for frame in frames}
        if len(sizes | self._geometries.keys()) > len(self._slots):
            self._geometries, self._targets = {}, {}  # sizes come and go: start over with those of this batch
        told = []
        for index, frame in enumerate(frames):
            height, width = frame.shape[:2]
            at, taken = index * self.frame_bytes, frame.numel()
            slot = self._geometry(height, width) if taken <= self.frame_bytes else -1
            told.append((slot, at, width * 3))
            if slot < 0:
                send(self._pixels[index], to_model_input(frame.numpy(), self._size, self._method))
                continue
            target = self._targets.get((index, frame.shape))
            if target is None:
                if len(self._targets) == _TARGETS:
                    self._targets = {}
                target = self._targets[index, frame.shape] = self._frames[at : at + taken].view(frame.shape)
            send(target, frame)
        if told != self._told:  # one camera sends frames of one size
            self._tell(told)
        self._shapes = [] if any(slot < 0 for slot, _, _ in told) else [frame.shape for frame in frames]

    def targets(self, frames: Sequence[Tensor]) -> list[int] | None:
        """Addresses that these frames, which may follow those loaded last, are to be copied to, and that is all.

        None where `load_frames` has more to do: their sizes are others.
        """
        if [frame.shape for frame in frames] != self._shapes:
            return None
        begin = self._frames.data_ptr()
        return [begin + index * self.frame_bytes for index in range(len(frames))]

    def _tell(self, frames: list[tuple[int, int, int]]) -> None:
        letter = self._staged.letter()
        letter.arrays["slots"].fill(-1)  # of images that the batch does not have: bytes of none are to be looked for
        for index, (slot, *place) in enumerate(frames):
            letter.arrays["slots"][index], letter.arrays["places"][:, index] = slot, place
        letter.send()
        self._told = frames

    def _geometry(self, height: int, width: int) -> int:
        """The slot of a frame size, with its tables copied where it is new; -1 where the tables cannot express it."""
        slot = self._geometries.get((height, width))
        if slot is not None:
            return slot
        square = (height, width) == (self._size, self._size)
        inner = (height, width) if square else fitted_size(height, width, self._size, self._size)
        # Pillow resizes the height of tall images first, with bytes between; the kernel always does the width first.
        tall = self._method == "pil" and height > 2 * width
        if tall or min(inner) < 1 or max(height / inner[0], width / inner[1]) > (_TAPS - 1) // 2:
            self._geometries[height, width] = -1
            return -1
        slot = sum(1 for other in self._geometries.values() if other >= 0)
        self._geometries[height, width] = slot
        for axis, (length, target) in enumerate(zip((height, width), inner, strict=True)):
            tables = axis_table(length, target, self._size, self._method)
            for own, table in zip((self._starts, self._counts, self._weights), tables, strict=True):
                send(own[slot, axis], torch.from_numpy(table))
        return slot

    def patches(self, images: int) -> Tensor:
        """Patches of the first images, fp32 (images, tokens, 3 * patch * patch); (channel, row, column) inside."""
        out = self._out[:images]
        camera.patches(
            self._frames,
            self._places[0],
            self._places[1],
            self._slots,
            self._starts,
            self._counts,
            self._weights,
            self._pixels,
            self._scaled,
            out,
            band=-3.0 if self._method == "bilinear_legacy" else -1.0,
            patch=self._patch,
        )
        return out
