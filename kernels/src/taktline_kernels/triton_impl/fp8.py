"""Triton kernels that turn rows into FP8 (e4m3) with a scale a row: as they are, or after an activation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.activations import gelu_tanh
from taktline_kernels.triton_impl.launch import launch, power_of_two

PLAIN, GELU, GEGLU, SWIGLU, RELU2 = 0, 1, 2, 3, 4
_GATED = (GEGLU, SWIGLU)


@triton.jit
def to_fp8(x, inside, values_ptr, scale_ptr, columns):
    """Store x * 448 / max|x| as FP8 and max|x| / 448 as the row's scale; a row of zeros gets a scale of almost none."""
    top = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-30)
    tl.store(values_ptr + columns, (x * (448.0 / top)).to(values_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr, top / 448.0)


@triton.jit
def _gelu_fast(x):
    """gelu(x), tanh form, with the hardware's tanh: right to 11 bits, of which e4m3 keeps 4."""
    u = x * (0.7978845608028654 + 0.035677408136300125 * x * x)
    tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1)
    half = 0.5 * x
    return half + half * tanh


@triton.jit
def _rows_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = x_ptr + row * (2 * WIDTH if GATED else WIDTH)
    x = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    if KIND == 3:
        x = x * tl.sigmoid(x)
    elif KIND == 4:
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif KIND != 0:
        if FAST:  # noqa: SIM108
            x = _gelu_fast(x)
        else:
            x = gelu_tanh(x)
    if GATED:
        x = x * tl.load(source + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    to_fp8(x, inside, values_ptr + row * WIDTH, scales_ptr + row, columns)


def quantise_rows(x: Tensor, kind: int = PLAIN, num_warps: int = 0) -> tuple[Tensor, Tensor]:
    """Quantise each row.

    Args:
        x: (..., width) contiguous; for `GEGLU` and `SWIGLU` (..., 2 * width), the gates first, then the ups.
        kind: `PLAIN`, `GELU` (tanh form), `GEGLU`, `SWIGLU` or `RELU2` (squared ReLU): what is done before.
        num_warps: warps a row; 0 chooses.

    Returns:
        values (..., width) e4m3, scales (rows, 1) fp32; values * scales is the row.
    """
    x = x.contiguous()
    width = x.shape[-1] // 2 if kind in _GATED else x.shape[-1]
    rows = x.numel() // x.shape[-1]
    values = torch.empty((*x.shape[:-1], width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = power_of_two(width)
    launch(
        _rows_kernel,
        (rows,),
        x,
        values,
        scales,
        WIDTH=width,
        BLOCK=block,
        KIND=kind,
        GATED=kind in _GATED,
        FAST=x.is_cuda,
        # 6186 rows of 12288 gated: 91 us with 8 warps, 107 with 16.
        num_warps=num_warps or (16 if width >= 16384 else 8 if block >= 16384 else 4),
    )
    return values, scales
