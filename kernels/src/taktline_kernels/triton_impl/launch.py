"""How the Triton kernels are launched: programmatic dependent launch, and the check that they can run here."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from taktline_kernels import compiling
from taktline_kernels.triton_impl import kept

kept.use()


def pdl() -> bool:
    """Say whether kernels are launched with programmatic dependent launch: on Hopper and later, not interpreted."""
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 9


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Launch `kernel`; it waits for its predecessors by itself (argument PDL) where the GPU can overlap launches.

    In a dry batch it is only compiled.
    """
    overlap = pdl()
    if overlap:
        settings["launch_pdl"] = True
    batch = compiling.current()
    if batch is None or not batch.dry:
        kernel[grid](*args, PDL=overlap, **settings)
    elif batch.first((kernel, tuple(settings.items()), *map(_told_apart, args))):
        kernel.warmup(*args, grid=grid, PDL=overlap, **settings)


def _told_apart(value: Any) -> Any:
    """What Triton compiles a kernel anew for, or more."""
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    return (value.dtype, value.data_ptr() % 16) if isinstance(value, Tensor) else value


def blocks_of(matrix: Tensor, block: tuple[int, int]) -> Any:
    """The contiguous `matrix` as the copy engine of Hopper and later reads it: in blocks, zeros past its end."""
    return TensorDescriptor.from_tensor(matrix, list(block))


def power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least `value`."""
    return int(triton.next_power_of_2(value))
