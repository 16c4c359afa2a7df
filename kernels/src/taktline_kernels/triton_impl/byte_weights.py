"""Triton kernels of products for few rows with weights of a byte a number, which become bf16 in the inner loop.

Such a product reads its weight once and is bound by that. The weight's rows are the first operand of the tensor cores,
so that converted numbers go from registers into them; the few rows of x are the second. A weight of few output channels
is cut along its depth, so that all multiprocessors read; the parts are added in a fixed order by a second kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.fp8_rows import ByteWeight
from taktline_kernels.triton_impl.activations import gelu_tanh
from taktline_kernels.triton_impl.launch import launch, power_of_two

# Programs that keep a large GPU's memory busy; more of them add rounds, fewer leave multiprocessors idle.
_PROGRAMS = 128
_MAX_SPLIT = 16


@triton.jit
def _scaled(product, scales_ptr, channel, inside, SCALED: tl.constexpr):
    if SCALED:
        product = product * tl.load(scales_ptr + channel, mask=inside, other=0.0)[:, None]
    return product


@triton.jit
def _product_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    out_ptr,
    rows,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARE: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of output channels for one block of rows over one part of the depth.

    CHANNELS: outputs, of which a gated weight has twice as many rows, the gates first.
    SHARE: depth of a part, a multiple of BLOCK_K.
    WHOLE: DEPTH is SPLIT * SHARE.
    """
    channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside, valid = channel < CHANNELS, row < rows
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    at_weight = weight_ptr + channel.to(tl.int64)[:, None] * DEPTH
    at_x = x_ptr + row.to(tl.int64)[None, :] * DEPTH
    for start in tl.range(0, SHARE, BLOCK_K):
        depth = part * SHARE + start + tl.arange(0, BLOCK_K)
        if WHOLE:
            weight_mask, x_mask = inside[:, None], valid[None, :]
        else:
            weight_mask = inside[:, None] & (depth < DEPTH)[None, :]
            x_mask = valid[None, :] & (depth < DEPTH)[:, None]
        x = tl.load(at_x + depth[:, None], mask=x_mask, other=0.0)
        weight = tl.load(at_weight + depth[None, :], mask=weight_mask, other=0.0)
        total = tl.dot(weight.to(x.dtype), x, total)
        if GATED:
            up = tl.load(at_weight + CHANNELS * DEPTH + depth[None, :], mask=weight_mask, other=0.0)
            ups = tl.dot(up.to(x.dtype), x, ups)
    total = _scaled(total, scales_ptr, channel, inside, SPLIT == 1)
    place = row.to(tl.int64)[None, :]
    kept = inside[:, None] & valid[None, :]
    if SPLIT == 1:
        if GATED:
            total = gelu_tanh(total) * _scaled(ups, scales_ptr + CHANNELS, channel, inside, True)
        tl.store(out_ptr + place * CHANNELS + channel[:, None], total.to(out_ptr.dtype.element_ty), mask=kept)
    else:
        WIDTH: tl.constexpr = 2 * CHANNELS if GATED else CHANNELS
        at = out_ptr + (part.to(tl.int64) * rows + place) * WIDTH + channel[:, None]
        tl.store(at, total, mask=kept)
        if GATED:
            tl.store(at + CHANNELS, ups, mask=kept)


@triton.jit
def _sum_kernel(
    parts_ptr,
    scales_ptr,
    out_ptr,
    rows,
    CHANNELS: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The parts of a block of one row's outputs, added from the first to the last, and what follows the product."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    WIDTH: tl.constexpr = 2 * CHANNELS if GATED else CHANNELS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    ups = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(SPLIT):
        at = parts_ptr + (part * rows + row) * WIDTH + channel
        total += tl.load(at, mask=inside, other=0.0)
        if GATED:
            ups += tl.load(at + CHANNELS, mask=inside, other=0.0)
    total = total * tl.load(scales_ptr + channel, mask=inside, other=0.0)
    if GATED:
        total = gelu_tanh(total) * (ups * tl.load(scales_ptr + CHANNELS + channel, mask=inside, other=0.0))
    tl.store(out_ptr + row * CHANNELS + channel, total.to(out_ptr.dtype.element_ty), mask=inside)


def linear(x: Tensor, weight: ByteWeight, config: Mapping[str, int], *, gated: bool = False) -> Tensor:
    """x @ weight.T with fp32 sums; with `gated`, gelu (tanh form) of its first half of channels times the second.

    Args:
        x: (..., k) bf16.
        weight: (n, k), or (2 n, k) with `gated`: the gates first, then the ups.
        config: block_m, block_n, block_k, split (parts of the depth), num_warps, num_stages; what is left out is
            chosen by the shape.

    Returns:
        (..., n) in the dtype of x. A row's result does not depend on the number of rows.
    """
    x = x.contiguous()
    depth = x.shape[-1]
    rows, channels = x.numel() // depth, weight.values.shape[0] // (2 if gated else 1)
    # A gated block has two sums: of 64 channels they would not fit the registers, and 32 need no parts of the depth.
    block_n = config.get("block_n", 32 if gated else 64)
    block_k = min(config.get("block_k", 128), power_of_two(depth))
    block_m = config.get("block_m", 64)
    split = config.get("split", 0) or _parts(channels, depth, block_n, block_k)
    share = triton.cdiv(triton.cdiv(depth, split), block_k) * block_k
    split = triton.cdiv(depth, share)
    out = torch.empty((*x.shape[:-1], channels), dtype=x.dtype, device=x.device)
    width = 2 * channels if gated else channels
    target = out if split == 1 else torch.empty((split, rows, width), dtype=torch.float32, device=x.device)
    launch(
        _product_kernel,
        (triton.cdiv(channels, block_n), split, triton.cdiv(rows, block_m)),
        x,
        weight.values,
        weight.scales,
        target,
        rows,
        CHANNELS=channels,
        DEPTH=depth,
        SHARE=share,
        GATED=gated,
        SPLIT=split,
        WHOLE=split * share == depth,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=config.get("num_warps", 4),
        num_stages=config.get("num_stages", 4),
    )
    if split > 1:
        block = min(1024, power_of_two(channels))
        launch(
            _sum_kernel,
            (rows, triton.cdiv(channels, block)),
            target,
            weight.scales,
            out,
            rows,
            CHANNELS=channels,
            GATED=gated,
            SPLIT=split,
            BLOCK=block,
            num_warps=4,
        )
    return out


def _parts(channels: int, depth: int, block_n: int, block_k: int) -> int:
    """Parts of the depth that give about `_PROGRAMS` programs, each at least two blocks deep.

    By the weight alone: another number of parts rounds otherwise, and a row's answer must not depend on its neighbours.
    """
    wanted = _PROGRAMS // -(-channels // block_n)
    return max(1, min(wanted, depth // (2 * block_k), _MAX_SPLIT))
