"""Triton kernels that add the parts of a product cut along its depth, in a fixed order, and do what follows it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.ops.linear import ACTIVATIONS
from taktline_kernels.triton_impl.activations import gelu_tanh
from taktline_kernels.triton_impl.launch import launch, power_of_two


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """x through the activation of this number in `ops.linear.ACTIVATIONS`; NaN stays NaN."""
    if ACTIVATION == 1:
        x = gelu_tanh(x)
    elif ACTIVATION == 2:
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == 3:
        x = x * tl.sigmoid(x)
    return x


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
    total = activated(total, ACTIVATION)
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
    RMS: tl.constexpr,
    LONG: tl.constexpr,
    FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: the parts of a product from the first to the last, its bias, the residual add, and the norm of the sum.

    RMS: the RMSNorm with multiplier 1 + weight instead of the layer norm.
    LONG: rows of a sequence, of which the first FIRST have no product, with one residual for all sequences; or 0.
    """
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.load(norm_weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if not RMS:
        shift = tl.load(norm_bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    source, own, held = row, row, inside
    if LONG > 0:
        own = row % LONG
        source = row // LONG * (LONG - FIRST) + own - FIRST
        held = inside & (own >= FIRST)
    residual = tl.load(residual_ptr + own * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts_ptr + (part * rows + source) * CHANNELS + channel, mask=held, other=0.0)
    if BIAS:
        total += bias
    rounded = (residual + total).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * CHANNELS + channel, rounded, mask=inside)
    x = rounded.to(tl.float32)
    if not RMS:
        x = tl.where(inside, x - tl.sum(x, axis=0) / CHANNELS, 0.0)
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / CHANNELS + eps)
    out = x * factor * (1.0 + scale) if RMS else x * factor * scale + shift
    tl.store(out_ptr + row * CHANNELS + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


def sum_parts(
    parts: Tensor, bias: Tensor | None, activation: str, gate: Tensor | None, residual: Tensor | None, like: Tensor
) -> Tensor:
    """The sum of parts (parts, rows, n) fp32, and what `ops.linear` puts behind it; `like` is its x."""
    count, rows, channels = parts.shape
    out = torch.empty((*like.shape[:-1], channels), dtype=like.dtype, device=like.device)
    block = min(1024, power_of_two(channels))
    launch(
        _sum_kernel,
        (rows, triton.cdiv(channels, block)),
        parts,
        parts if bias is None else bias,
        parts if gate is None else gate,
        parts if residual is None else residual.contiguous(),
        out,
        rows,
        CHANNELS=channels,
        SPLIT=count,
        BLOCK=block,
        BIAS=bias is not None,
        ACTIVATION=ACTIVATIONS.index(activation),
        GATE=gate is not None,
        RESIDUAL=residual is not None,
        num_warps=4,
    )
    return out


def add_norm(
    parts: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    num_warps: int = 8,
) -> tuple[Tensor, Tensor]:
    """residual + bias + the sum of parts (parts, rows, n) fp32, and its norm in `dtype`.

    The norm is a layer norm, or without `norm_bias` the RMSNorm with multiplier 1 + weight.
    """
    count, rows, channels = parts.shape
    residual = residual.contiguous()
    total, out = torch.empty_like(residual), torch.empty_like(residual, dtype=dtype)
    launch(
        _sum_norm_kernel,
        (rows,),
        parts,
        norm_weight if bias is None else bias,
        residual,
        norm_weight,
        norm_weight if norm_bias is None else norm_bias,
        total,
        out,
        rows,
        eps,
        CHANNELS=channels,
        SPLIT=count,
        BLOCK=power_of_two(channels),
        BIAS=bias is not None,
        RMS=norm_bias is None,
        LONG=0,
        FIRST=0,
        num_warps=num_warps,
    )
    return total, out


def rows_norm(
    parts: Tensor, sequences: int, table: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rows of constants, and the sum of parts on the last of them; with their layer norm, both in `dtype`.

    Args:
        parts: fp32 (parts, sequences * h, n).
        table: (long, n), a sequence's rows, long at least h.
    """
    count, rows, channels = parts.shape
    long = len(table)
    total, out = (torch.empty((sequences, long, channels), dtype=dtype, device=parts.device) for _ in range(2))
    launch(
        _sum_norm_kernel,
        (sequences * long,),
        parts,
        norm_weight,
        table,
        norm_weight,
        norm_bias,
        total,
        out,
        rows,
        eps,
        CHANNELS=channels,
        SPLIT=count,
        BLOCK=power_of_two(channels),
        BIAS=False,
        RMS=False,
        LONG=long,
        FIRST=long - rows // sequences,
        num_warps=8,
    )
    return total, out
