"""Which device an engine runs on, and how a batch gets to it and back without holding up the one that runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from torch import Tensor

_ALIGNMENT = 256


def choose_device(wanted: str) -> torch.device:
    """`auto`, `cpu` or `cuda` as a device.

    Raises:
        TaktlineError: CONFIG_INVALID where cuda is wanted and absent.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            "engine.device is cuda, and no CUDA device is visible",
            "check the pool's accelerator",
        )
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def send(target: Tensor, source: Tensor) -> None:
    """Copies `source`, on the CPU, into `target` behind all that its device has to do, without waiting for any of it.

    A GPU copies by itself only from pinned memory; what lies elsewhere is copied there first, and PyTorch keeps that
    memory until the GPU has read it.
    """
    if target.is_cuda and not source.is_pinned():
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)


def sent(source: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`source` on `device`, in `dtype` where that is given, without waiting for either; see `send`."""
    source = source.to(dtype or source.dtype)
    if source.device.type != "cpu" or device.type == "cpu":
        return source.to(device)
    target = torch.empty_like(source, device=device)
    send(target, source)
    return target


class Staged:
    """The small tensors of a batch, side by side on the device, so that one copy brings all of them.

    Each copy of its own would cost the CPU as much as all of them together while the device waits for the batch.

    Attributes:
        tensors: by name, where a graph reads them; their addresses never change.
    """

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        """Everything is zero at first."""
        self._places: dict[str, tuple[slice, torch.dtype, tuple[int, ...]]] = {}
        at = 0
        for name, (shape, dtype) in shapes.items():
            size = int(np.prod(shape)) * dtype.itemsize
            self._places[name] = slice(at, at + size), dtype, shape
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._buffer = torch.zeros(at, dtype=torch.uint8, device=device)
        self.tensors = {
            name: self._buffer[place].view(dtype).view(shape) for name, (place, dtype, shape) in self._places.items()
        }

    def letter(self) -> Letter:
        """A new one to be filled and sent. PyTorch keeps its memory until the device has read it."""
        return Letter(self._buffer, self._places)


class Letter:
    """What a batch puts into `Staged`: `arrays` have the shapes of its tensors, and any content until it is filled."""

    def __init__(self, buffer: Tensor, places: Mapping[str, tuple[slice, torch.dtype, tuple[int, ...]]]) -> None:
        self._buffer = buffer
        self._own = torch.empty(buffer.shape, dtype=torch.uint8, pin_memory=buffer.is_cuda)
        flat = self._own.numpy()
        self.arrays: dict[str, NDArray[np.generic]] = {
            name: flat[place].view(_NUMPY[dtype]).reshape(shape) for name, (place, dtype, shape) in places.items()
        }

    def send(self) -> None:
        """Copies it behind all that the device has to do, without waiting."""
        self._buffer.copy_(self._own, non_blocking=True)

    @property
    def copy(self) -> tuple[int, int, int]:
        """What `send` copies, for whoever does that and keeps the letter meanwhile: to where, from where, bytes."""
        return self._buffer.data_ptr(), self._own.data_ptr(), self._own.numel()


_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}


class Running:
    """A batch that a GPU runs, or will once it has ended the one before."""

    def __init__(self, began: torch.cuda.Event, answers: Tensor, kept: object = None) -> None:
        """Call it when all work of the batch has been launched on the current stream; `began` lies before that work.

        Args:
            kept: what the GPU reads meanwhile, unless PyTorch knows that it does.
        """
        self._kept = kept
        self._began, self._ended = began, torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._answers = torch.empty(answers.shape, dtype=answers.dtype, pin_memory=True)
        self._answers.copy_(answers, non_blocking=True)
        self._ended.record()

    def __del__(self) -> None:
        """Who forgets it without `wait` gives nothing back that the GPU still reads."""
        if self._kept is not None:
            self._ended.synchronize()

    def wait(self) -> Tensor:
        """The answers, on the CPU."""
        self._ended.synchronize()
        return self._answers

    @property
    def seconds(self) -> float:
        """How long the GPU ran it; known once `wait` has returned."""
        return float(self._began.elapsed_time(self._ended)) / 1e3
