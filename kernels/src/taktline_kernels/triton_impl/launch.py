"""How the Triton kernels are launched: programmatic dependent launch, and the check that they can run here."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def pdl() -> bool:
    """Say whether kernels are launched with programmatic dependent launch: on Hopper and later, not interpreted."""
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 9


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Launch `kernel`; it waits for its predecessors by itself (argument PDL) where the GPU can overlap launches."""
    overlap = pdl()
    if overlap:
        settings["launch_pdl"] = True
    kernel[grid](*args, PDL=overlap, **settings)


def blocks_of(matrix: Tensor, block: tuple[int, int]) -> Any:
    """The contiguous `matrix` as the copy engine of Hopper and later reads it: in blocks, zeros past its end."""
    return TensorDescriptor.from_tensor(matrix, list(block))


def power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least `value`."""
    return int(triton.next_power_of_2(value))
