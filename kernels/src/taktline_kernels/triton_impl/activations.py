"""Triton kernels of the activations: gated gelu and silu, squared ReLU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import launch, power_of_two


@triton.jit
def gelu_tanh(x):
    """gelu(x), tanh form: 0.5 x (1 + tanh(u)) = x sigmoid(2u)."""
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2.0 * u)


@triton.jit
def _gated_kernel(
    source_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRED: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Paired: eight gates, then their eight ups, and so on.
    first = (columns // 8) * 16 + columns % 8 if PAIRED else columns
    distance = 8 if PAIRED else WIDTH
    gate = tl.load(source_ptr + row * 2 * WIDTH + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source_ptr + row * 2 * WIDTH + first + distance, mask=inside, other=0.0).to(tl.float32)
    active = gate * tl.sigmoid(gate) if SILU else gelu_tanh(gate)
    tl.store(out_ptr + row * WIDTH + columns, (active * up).to(out_ptr.dtype.element_ty), mask=inside)


def geglu(gate_up: Tensor, config: Mapping[str, int], *, paired: bool = False) -> Tensor:
    """Run `ops.geglu`; with `paired`, gates and ups alternate by eights."""
    return _gated(gate_up, config, paired=paired, silu=False)


def swiglu(gate_up: Tensor, config: Mapping[str, int], *, paired: bool = False) -> Tensor:
    """Run `ops.swiglu`; with `paired`, gates and ups alternate by eights."""
    return _gated(gate_up, config, paired=paired, silu=True)


def _gated(gate_up: Tensor, config: Mapping[str, int], *, paired: bool, silu: bool) -> Tensor:
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(config.get("block", 2048), power_of_two(width))
    grid = (gate_up.numel() // (2 * width), triton.cdiv(width, block))
    launch(
        _gated_kernel,
        grid,
        gate_up,
        out,
        WIDTH=width,
        BLOCK=block,
        PAIRED=paired,
        SILU=silu,
        num_warps=config.get("num_warps", 8),
    )
    return out


@triton.jit
def _relu2_kernel(source_ptr, out_ptr, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(source_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out_ptr + at, (x * x).to(out_ptr.dtype.element_ty), mask=inside)


def relu2(x: Tensor, config: Mapping[str, int]) -> Tensor:
    """Run `ops.relu2`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    block = config.get("block", 2048)
    grid = (triton.cdiv(x.numel(), block),)
    launch(_relu2_kernel, grid, x, out, x.numel(), BLOCK=block, num_warps=config.get("num_warps", 4))
    return out
