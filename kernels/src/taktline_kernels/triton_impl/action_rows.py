"""Triton kernel of what the blocks of action_block.cu begin with: a product's parts on rows of constants."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import launch, power_of_two


@triton.jit
def _rows_kernel(
    parts_ptr,
    table_ptr,
    scale_ptr,
    stream_ptr,
    scaled_ptr,
    squares_ptr,
    rows,
    first,
    CHANNELS: tl.constexpr,
    SPLIT: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.load(scale_ptr + channel, mask=inside, other=0.0)
    total = tl.load(table_ptr + row * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    held = inside & (row >= first)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts_ptr + (part * rows + row - first) * CHANNELS + channel, mask=held, other=0.0)
    rounded = total.to(stream_ptr.dtype.element_ty)
    tl.store(stream_ptr + row * CHANNELS + channel, rounded, mask=inside)
    x = rounded.to(tl.float32)
    at = ((channel >> 5) * 64 + row) * 32 + ((channel ^ ((row << 2) & 24)) & 31)
    tl.store(scaled_ptr + at, (x * scale).to(scaled_ptr.dtype.element_ty), mask=inside)
    part = tl.arange(0, SQUARES)
    tl.store(squares_ptr + part * 64 + row, tl.where(part == 0, tl.sum(x * x, axis=0), 0.0))


def rows_scaled(parts: Tensor, table: Tensor, scale: Tensor, stream: Tensor, scaled: Tensor, squares: Tensor) -> None:
    """The stream of one sequence, the table plus `parts` in its last rows, and what its first product reads.

    Args:
        parts: fp32 (parts, rows, width).
        table: fp32 (tokens, width), tokens at most 64, at least `rows`.
        scale: fp32 (width,), the next norm's multiplier.
        stream: bf16 (64, width), written.
        scaled: bf16 (64 * width,), stream times scale in panels of action_block.cu, written.
        squares: fp32 (a power of two, 64), written: each row's sum of squares in the first part, zeros in the others.
    """
    count, rows, channels = parts.shape
    tokens = len(table)
    launch(
        _rows_kernel,
        (tokens,),
        parts,
        table,
        scale,
        stream,
        scaled,
        squares,
        rows,
        tokens - rows,
        CHANNELS=channels,
        SPLIT=count,
        SQUARES=len(squares),
        BLOCK=power_of_two(channels),
        num_warps=4,
    )
