"""Triton kernels of linear layers for few rows: the weight is read once, by all multiprocessors, ahead of its turn.

Such a product is bound by the way of its weight from memory. That does not depend on the kernel before, so each block
asks for its share of the weight before it waits for that kernel, which then runs while the weight moves into the cache.
Weights, biases and norm weights must therefore be there before: x, a gate or a residual may be what that kernel writes.

A weight of few output channels is cut along its depth, so that all multiprocessors read; the parts are added in a fixed
order by a second kernel, which the norm behind a residual add can be.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.ops.linear import ACTIVATIONS
from taktline_kernels.triton_impl.activations import gelu_tanh
from taktline_kernels.triton_impl.launch import blocks_of, launch, power_of_two

_MAX_ROWS = 128


@triton.jit
def _prefetch(at, size):
    """Ask for `size` bytes at each address to be brought into the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [at, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        x = gelu_tanh(x)
    elif ACTIVATION == 2:
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == 3:
        x = x * tl.sigmoid(x)
    return x


@triton.jit
def _linear_kernel(
    x_ptr,
    x_blocks,
    weight_ptr,
    weight_blocks,
    bias_ptr,
    gate_ptr,
    residual_ptr,
    out_ptr,
    rows,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    AHEAD: tl.constexpr,
    COPY: tl.constexpr,
    PDL: tl.constexpr,
):
    """All rows of one block of output channels over one part of the depth.

    SHARE: depth of a part, a multiple of BLOCK_K.
    AHEAD: pieces of each channel's share to ask for before waiting; 0 asks for none.
    COPY: read through the copy engine, from `x_blocks` and `weight_blocks`; there are zeros past their ends.
    """
    channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    inside, valid = channel < CHANNELS, row < rows
    WHOLE: tl.constexpr = SPLIT * SHARE == DEPTH
    EVEN: tl.constexpr = CHANNELS % BLOCK_N == 0
    ONE: tl.constexpr = COPY and SHARE == BLOCK_K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if AHEAD > 0:
            piece = tl.arange(0, BLOCK_N * AHEAD)
            asked = tl.minimum(tl.program_id(0) * BLOCK_N + piece // AHEAD, CHANNELS - 1).to(tl.int64)
            first = weight_ptr + asked * DEPTH + part * SHARE + (piece % AHEAD) * (SHARE // AHEAD)
            _prefetch(first.to(tl.int64), tl.full((BLOCK_N * AHEAD,), SHARE // AHEAD * 2, dtype=tl.int32))
    if BIAS:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if ONE:
        weight = weight_blocks.load([tl.program_id(0) * BLOCK_N, part * SHARE])
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if ONE:
        total = tl.dot(x_blocks.load([0, part * SHARE]), tl.trans(weight), total, input_precision="ieee")
    at_weight = weight_ptr + channel.to(tl.int64)[:, None] * DEPTH
    at_x = x_ptr + row[:, None] * DEPTH
    for start in tl.range(0, 0 if ONE else SHARE, BLOCK_K):
        depth = part * SHARE + start + tl.arange(0, BLOCK_K)
        if COPY:
            x = x_blocks.load([0, part * SHARE + start])
            weight = weight_blocks.load([tl.program_id(0) * BLOCK_N, part * SHARE + start])
        elif WHOLE:
            x = tl.load(at_x + depth[None, :], mask=valid[:, None], other=0.0)
            if EVEN:
                weight = tl.load(at_weight + depth[None, :])
            else:
                weight = tl.load(at_weight + depth[None, :], mask=inside[:, None], other=0.0)
        else:
            x = tl.load(at_x + depth[None, :], mask=valid[:, None] & (depth < DEPTH)[None, :], other=0.0)
            weight = tl.load(at_weight + depth[None, :], mask=inside[:, None] & (depth < DEPTH)[None, :], other=0.0)
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    kept = valid[:, None] & inside[None, :]
    at = row[:, None] * CHANNELS + channel[None, :]
    if SPLIT > 1:
        tl.store(out_ptr + part * rows * CHANNELS + at, total, mask=kept)
    else:
        if BIAS:
            total += bias[None, :]
        total = _activated(total, ACTIVATION)
        if GATE:
            total = total * tl.load(gate_ptr + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
        if RESIDUAL:
            total += tl.load(residual_ptr + at, mask=kept, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit
def _sum_kernel(
    parts_ptr,
    bias_ptr,
    gate_ptr,
    residual_ptr,
    out_ptr,
    rows,
    CHANNELS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """The parts of a block of one row's outputs, added from the first to the last, and what follows the product."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if BIAS:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts_ptr + (part * rows + row) * CHANNELS + channel, mask=inside, other=0.0)
    if BIAS:
        total += bias
    total = _activated(total, ACTIVATION)
    if GATE:
        total = total * tl.load(gate_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual_ptr + row * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * CHANNELS + channel, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum_norm_kernel(
    parts_ptr,
    bias_ptr,
    residual_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    sum_ptr,
    out_ptr,
    rows,
    eps,
    CHANNELS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: the parts of a product from the first to the last, its bias, the residual add, and the layer norm."""
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.load(norm_weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(norm_bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    residual = tl.load(residual_ptr + row * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts_ptr + (part * rows + row) * CHANNELS + channel, mask=inside, other=0.0)
    if BIAS:
        total += bias
    rounded = (residual + total).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * CHANNELS + channel, rounded, mask=inside)
    x = rounded.to(tl.float32)
    x = tl.where(inside, x - tl.sum(x, axis=0) / CHANNELS, 0.0)
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / CHANNELS + eps)
    tl.store(out_ptr + row * CHANNELS + channel, (x * factor * scale + shift).to(out_ptr.dtype.element_ty), mask=inside)


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    gate: Tensor | None,
    residual: Tensor | None,
    config: Mapping[str, int],
    keep_parts: bool,
) -> tuple[Tensor, int]:
    """The finished product and 0, or parts (parts, rows, n) fp32 of it and their number."""
    x = x.contiguous()
    weight = weight.contiguous()
    channels, depth = weight.shape
    rows = x.numel() // depth
    if rows > _MAX_ROWS:
        raise ValueError(f"the kernel for few rows takes at most {_MAX_ROWS}, not {rows}; the table's rule is too wide")
    block_k = min(config.get("block_k", 128), max(16, power_of_two(depth)))
    block_n = config.get("block_n", 64)
    share = triton.cdiv(triton.cdiv(depth, config.get("split", 1)), block_k) * block_k
    split = triton.cdiv(depth, share)
    parts = keep_parts or split > 1
    shape = (split, rows, channels) if parts else (*x.shape[:-1], channels)
    out = torch.empty(shape, dtype=torch.float32 if parts else x.dtype, device=x.device)
    warps = config.get("num_warps", 4)
    block_m = max(16, power_of_two(rows))
    copied = bool(config.get("copy", 0)) and depth * x.element_size() % 16 == 0
    # One thread asks for one piece; pieces are multiples of 16 bytes.
    ahead = max(1, warps * 32 // block_n) if config.get("ahead", 1) else 0
    if split * share != depth or (ahead and share * x.element_size() % (16 * ahead)) or x.element_size() != 2:
        ahead = 0
    launch(
        _linear_kernel,
        (triton.cdiv(channels, block_n), split),
        x,
        blocks_of(x.view(rows, depth), (block_m, block_k)) if copied else x,
        weight,
        blocks_of(weight, (block_n, block_k)) if copied else weight,
        x if bias is None else bias,
        x if gate is None else gate,
        x if residual is None else residual.contiguous(),
        out,
        rows,
        CHANNELS=channels,
        DEPTH=depth,
        SHARE=share,
        # The kernel writes parts where there is more than one; a single part is kept as such by its fp32 output.
        SPLIT=split,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BIAS=bias is not None and not parts,
        ACTIVATION=0 if parts else ACTIVATIONS.index(activation),
        GATE=gate is not None and not parts,
        RESIDUAL=residual is not None and not parts,
        AHEAD=ahead,
        COPY=copied,
        num_warps=warps,
        num_stages=config.get("num_stages", 4),
    )
    return out, split if parts else 0


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    gate: Tensor | None,
    residual: Tensor | None,
    config: Mapping[str, int],
) -> Tensor:
    """Run `ops.linear` for up to 128 rows; a row's result does not depend on the others.

    `config` may hold block_n, block_k, split (parts of the depth), ahead (0: ask for no weight before waiting), copy
    (1: read through Hopper's copy engine; the weight before waiting, where a part is one block), num_warps and
    num_stages.

    Raises:
        ValueError: too many rows; the table's rule is too wide.
    """
    product, parts = _product(x, weight, bias, activation, gate, residual, config, keep_parts=False)
    if not parts:
        return product
    rows, channels = product.shape[1:]
    out = torch.empty((*x.shape[:-1], channels), dtype=x.dtype, device=x.device)
    block = min(1024, power_of_two(channels))
    launch(
        _sum_kernel,
        (rows, triton.cdiv(channels, block)),
        product,
        product if bias is None else bias,
        product if gate is None else gate,
        product if residual is None else residual.contiguous(),
        out,
        rows,
        CHANNELS=channels,
        SPLIT=parts,
        BLOCK=block,
        BIAS=bias is not None,
        ACTIVATION=ACTIVATIONS.index(activation),
        GATE=gate is not None,
        RESIDUAL=residual is not None,
        num_warps=4,
    )
    return out


def linear_add_layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    config: Mapping[str, int],
) -> tuple[Tensor, Tensor]:
    """Run `ops.linear_add_layer_norm` for up to 128 rows; `config` as `linear` takes it.

    Raises:
        ValueError: too many rows; the table's rule is too wide.
    """
    product, parts = _product(x, weight, bias, "none", None, None, config, keep_parts=True)
    rows, channels = product.shape[1:]
    residual = residual.contiguous()
    total, out = torch.empty_like(residual), torch.empty_like(residual, dtype=x.dtype)
    launch(
        _sum_norm_kernel,
        (rows,),
        product,
        norm_weight if bias is None else bias,
        residual,
        norm_weight,
        norm_bias,
        total,
        out,
        rows,
        eps,
        CHANNELS=channels,
        SPLIT=parts,
        BLOCK=power_of_two(channels),
        BIAS=bias is not None,
        num_warps=config.get("sum_warps", 8),
    )
    return total, out
