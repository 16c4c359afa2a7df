"""Triton kernel of what a chain of products begins with: rows times a norm's multiplier, and their sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import launch, power_of_two

_ROOM = 64
"""Rows that there is room for in a table of sums."""


@triton.jit
def _rows_kernel(
    x_ptr,
    multiplier_ptr,
    scaled_ptr,
    sums_ptr,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row; its sums are the first part, and the others are zero. Past the last row all are."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = (column < WIDTH) & (row < rows)
    multiplier = tl.load(multiplier_ptr + column, mask=inside, other=0.0)
    if PDL:
        # The next kernels may read before they wait what was written before this one: they start behind all of that.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled_ptr + row * WIDTH + column, (x * multiplier).to(scaled_ptr.dtype.element_ty), mask=inside)
    part = tl.arange(0, PARTS)
    at = sums_ptr + (part * ROOM + row) * 2
    tl.store(at, tl.where(part == 0, tl.sum(x, axis=0), 0.0))
    tl.store(at + 1, tl.where(part == 0, tl.sum(x * x, axis=0), 0.0))


def rows_and_sums(x: Tensor, multiplier: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """x (rows, n) times `multiplier` (n,), and each row's sum and sum of squares as the first of fp32 (parts, 64, 2).

    `parts` is a power of two. Kernels behind it start when all that its predecessors wrote is there.
    """
    rows, width = x.shape
    x = x.contiguous()
    scaled = torch.empty_like(x)
    sums = torch.empty((parts, _ROOM, 2), dtype=torch.float32, device=x.device)
    launch(
        _rows_kernel,
        (_ROOM,),
        x,
        multiplier,
        scaled,
        sums,
        rows,
        WIDTH=width,
        BLOCK=power_of_two(width),
        PARTS=parts,
        ROOM=_ROOM,
        num_warps=8,
    )
    return scaled, sums
