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
from taktline_kernels.triton_impl.launch import blocks_of, launch, power_of_two
from taktline_kernels.triton_impl.part_sums import activated, add_norm, rows_norm, sum_parts

_MAX_ROWS = 1024
_ROW_BLOCK = 128


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
    TALL: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of rows of one block of output channels over one part of the depth.

    SHARE: depth of a part, a multiple of BLOCK_K.
    AHEAD: pieces of each channel's share to ask for before waiting; 0 asks for none.
    COPY: read through the copy engine, from `x_blocks` and `weight_blocks`; there are zeros past their ends.
    TALL: more than one block of rows.
    """
    channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    above = 0
    if TALL:
        above = tl.program_id(2) * BLOCK_M
        row += above
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
        total = tl.dot(x_blocks.load([above, part * SHARE]), tl.trans(weight), total, input_precision="ieee")
    at_weight = weight_ptr + channel.to(tl.int64)[:, None] * DEPTH
    at_x = x_ptr + row[:, None] * DEPTH
    for start in tl.range(0, 0 if ONE else SHARE, BLOCK_K):
        depth = part * SHARE + start + tl.arange(0, BLOCK_K)
        if COPY:
            x = x_blocks.load([above, part * SHARE + start])
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
        total = activated(total, ACTIVATION)
        if GATE:
            total = total * tl.load(gate_ptr + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
        if RESIDUAL:
            total += tl.load(residual_ptr + at, mask=kept, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=kept)


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
    block_m = min(config.get("block_m", _ROW_BLOCK), max(16, power_of_two(rows)))
    blocks = triton.cdiv(rows, block_m)
    copied = bool(config.get("copy", 0)) and depth * x.element_size() % 16 == 0
    # One thread asks for one piece; pieces are multiples of 16 bytes.
    ahead = max(1, warps * 32 // block_n) if config.get("ahead", 1) else 0
    if split * share != depth or (ahead and share * x.element_size() % (16 * ahead)) or x.element_size() != 2:
        ahead = 0
    launch(
        _linear_kernel,
        (triton.cdiv(channels, block_n), split, blocks),
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
        TALL=blocks > 1,
        num_warps=warps,
        num_stages=config.get("num_stages", 4),
    )
    return out, split if parts else 0


def parts_of(x: Tensor, weight: Tensor, config: Mapping[str, int]) -> Tensor:
    """fp32 (parts, rows, n), whose sum is x @ weight.T; `config` as `linear` takes it."""
    return _product(x, weight, None, "none", None, None, config, keep_parts=True)[0]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    gate: Tensor | None,
    residual: Tensor | None,
    config: Mapping[str, int],
) -> Tensor:
    """Run `ops.linear` for up to 1024 rows; a row's result does not depend on the others.

    `config` may hold block_m, block_n, block_k, split (parts of the depth), ahead (0: ask for no weight before
    waiting), copy (1: read through Hopper's copy engine; the weight before waiting, where a part is one block),
    num_warps and num_stages.

    Raises:
        ValueError: too many rows; the table's rule is too wide.
    """
    product, parts = _product(x, weight, bias, activation, gate, residual, config, keep_parts=False)
    if not parts:
        return product
    return sum_parts(product, bias, activation, gate, residual, x)


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
    """Run `ops.linear_add_layer_norm` for up to 1024 rows; `config` as `linear` takes it.

    Raises:
        ValueError: too many rows; the table's rule is too wide.
    """
    return _add_norm(x, weight, bias, residual, norm_weight, norm_bias, eps, config)


def linear_on_rows(
    x: Tensor,
    weight: Tensor,
    table: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    config: Mapping[str, int],
) -> tuple[Tensor, Tensor]:
    """Run `ops.linear_on_rows` for up to 1024 rows; `config` as `linear` takes it.

    Raises:
        ValueError: too many rows; the table's rule is too wide.
    """
    parts, _ = _product(x, weight, None, "none", None, None, config, keep_parts=True)
    return rows_norm(parts, len(x), table, norm_weight, norm_bias, eps, x.dtype)


def linear_add_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, config: Mapping[str, int]
) -> tuple[Tensor, Tensor]:
    """Run `ops.linear_add_rms_norm` for up to 1024 rows; `config` as `linear` takes it.

    Raises:
        ValueError: too many rows; the table's rule is too wide.
    """
    return _add_norm(x, weight, None, residual, norm_weight, None, eps, config)


def _add_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    config: Mapping[str, int],
) -> tuple[Tensor, Tensor]:
    product, _ = _product(x, weight, bias, "none", None, None, config, keep_parts=True)
    return add_norm(product, bias, residual, norm_weight, norm_bias, eps, x.dtype, config.get("sum_warps", 8))
