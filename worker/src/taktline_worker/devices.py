"""Which device an engine runs on, and how a batch gets to it and back without holding up the one that runs."""

from __future__ import annotations

import torch
from taktline_protocol import ErrorCode, TaktlineError
from torch import Tensor


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


class Running:
    """A batch that a GPU runs, or will once it has ended the one before."""

    def __init__(self, began: torch.cuda.Event, answers: Tensor) -> None:
        """Call it when all work of the batch has been launched on the current stream; `began` lies before that work."""
        self._began, self._ended = began, torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._answers = torch.empty(answers.shape, dtype=answers.dtype, pin_memory=True)
        self._answers.copy_(answers, non_blocking=True)
        self._ended.record()

    def wait(self) -> Tensor:
        """The answers, on the CPU."""
        self._ended.synchronize()
        return self._answers

    @property
    def seconds(self) -> float:
        """How long the GPU ran it; known once `wait` has returned."""
        return float(self._began.elapsed_time(self._ended)) / 1e3
