"""Triton kernels of gates on what attention or the delta rule gave: a norm with a SiLU gate, and a sigmoid gate."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import launch, power_of_two


@triton.jit
def _gate_kernel(
    x_ptr,
    weight_ptr,
    gate_ptr,
    out_ptr,
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    held = (heads < HEADS)[:, None] & inside[None, :]
    places = heads[:, None] * WIDTH + columns[None, :]
    x = tl.load(x_ptr + token * HEADS * WIDTH + places, mask=held, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + places, mask=held, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    out = x * factor[:, None] * weight[None, :] * gate * tl.sigmoid(gate)
    tl.store(out_ptr + token * HEADS * WIDTH + places, out.to(out_ptr.dtype.element_ty), mask=held)


def rms_norm_silu_gate(x: Tensor, weight: Tensor, gate: Tensor, eps: float, *, config: Mapping[str, int]) -> Tensor:
    """See `ops.delta.rms_norm_silu_gate`. The tokens of the gate may lie further apart than its heads."""
    heads, width = (x.shape[-2], x.shape[-1]) if x.dim() > 2 else (1, x.shape[-1])
    x = x.contiguous()
    tokens = x.numel() // (heads * width)
    apart = _token_stride(gate, heads, width)
    if apart is None:
        gate, apart = gate.contiguous(), heads * width
    out = torch.empty_like(x)
    together = min(config.get("heads", 8), power_of_two(heads))
    launch(
        _gate_kernel,
        (tokens, triton.cdiv(heads, together)),
        x,
        weight,
        gate,
        out,
        apart,
        eps,
        HEADS=heads,
        HEAD_BLOCK=together,
        WIDTH=width,
        BLOCK=power_of_two(width),
        num_warps=config.get("num_warps", 4),
    )
    return out


@triton.jit
def _sigmoid_kernel(x_ptr, gate_ptr, out_ptr, gate_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, (x * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty), mask=inside)


def sigmoid_gate(x: Tensor, gate: Tensor, *, config: Mapping[str, int]) -> Tensor:
    """See `ops.delta.sigmoid_gate`."""
    width = x.shape[-1]
    x = x.contiguous()
    apart = _token_stride(gate.unsqueeze(-2), 1, width)
    if apart is None:
        gate, apart = gate.contiguous(), width
    out = torch.empty_like(x)
    block = min(config.get("block", 1024), power_of_two(width))
    launch(
        _sigmoid_kernel,
        (x.numel() // width, triton.cdiv(width, block)),
        x,
        gate,
        out,
        apart,
        WIDTH=width,
        BLOCK=block,
        num_warps=config.get("num_warps", 4),
    )
    return out


def _token_stride(x: Tensor, heads: int, width: int) -> int | None:
    """How far apart the tokens of (..., heads, width) lie, where that is one number and a token is in one piece."""
    if x.dim() < 3 or x.stride(-1) != 1 or (heads > 1 and x.stride(-2) != width):
        return None
    shape, strides = x.shape[:-2], x.stride()[:-2]
    if any(strides[i] != shape[i + 1] * strides[i + 1] for i in range(len(shape) - 1) if shape[i] > 1):
        return None
    return strides[-1]
