"""Triton kernels of the frame-causal world model: norms with the residual add, rotation, GELU, energy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.ops.frames import CONDITIONING, FP8, FP8_MAX, Stream
from taktline_kernels.triton_impl.launch import launch, power_of_two


@triton.jit
def _norm_kernel(
    stream_ptr,
    lower_ptr,
    keep_ptr,
    keep_lower_ptr,
    update_ptr,
    second_ptr,
    offset_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    eps,
    inverse_unit,
    top,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    UPDATES: tl.constexpr,
    SPLIT: tl.constexpr,
    KEEP: tl.constexpr,
    KEEP_SPLIT: tl.constexpr,
    OFFSET: tl.constexpr,
    AFFINE: tl.constexpr,
    QUANTISE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (columns < WIDTH)[None, :]
    place = row[:, None] * WIDTH + columns[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if SPLIT:
        upper = tl.load(stream_ptr + place, mask=inside, other=0).to(tl.int32)
        lower = tl.load(lower_ptr + place, mask=inside, other=0).to(tl.int32)
        x = ((upper << 16) | (lower << 8)).to(tl.float32, bitcast=True)
    else:
        x = tl.load(stream_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if UPDATES >= 1:
        x += tl.load(update_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if UPDATES >= 2:
        x += tl.load(second_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if OFFSET:
        x += tl.load(offset_ptr + columns, mask=columns < WIDTH, other=0.0)[None, :]
    if KEEP:
        if KEEP_SPLIT:
            bits = x.to(tl.int32, bitcast=True)
            # Rounded to nearest; an infinity or NaN would become a number.
            bits += tl.where((bits & 0x7F800000) == 0x7F800000, 0, 128)
            tl.store(keep_ptr + place, (bits >> 16).to(tl.int16), mask=inside)
            tl.store(keep_lower_ptr + place, ((bits >> 8) & 255).to(tl.uint8), mask=inside)
        else:
            tl.store(keep_ptr + place, x, mask=inside)
    x = tl.where(inside, x - (tl.sum(x, axis=1) / WIDTH)[:, None], 0.0)
    out = x * tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
    if AFFINE:
        out = out * tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0)[None, :]
        out += tl.load(bias_ptr + columns, mask=columns < WIDTH, other=0.0)[None, :]
    if QUANTISE:
        # A NaN must reach the energies, where it is an error.
        out = tl.clamp(out * inverse_unit, -top, top, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside)


def norm(
    stream: Stream,
    updates: tuple[Tensor, ...],
    offset: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    keep: Stream | None,
    unit: float,
    config: Mapping[str, int],
) -> Tensor:
    """Run `ops.frames.frame_norm`.

    Raises:
        ValueError: a weight without a bias, or the reverse.
    """
    if (weight is None) != (bias is None):
        raise ValueError("this norm takes both a weight and a bias, or neither")
    first, lower = (stream, stream) if isinstance(stream, Tensor) else stream
    kept = stream if keep is None else keep
    kept_first, kept_lower = (kept, kept) if isinstance(kept, Tensor) else kept
    rows, width = first.shape
    out = torch.empty(rows, width, dtype=dtype, device=first.device)
    together = config.get("rows", 1)
    launch(
        _norm_kernel,
        (-(-rows // together),),
        first,
        lower,
        kept_first,
        kept_lower,
        *(*updates, first, first)[:2],
        first if offset is None else offset,
        first if weight is None else weight,
        first if bias is None else bias,
        out,
        rows,
        eps,
        1.0 / unit,
        FP8_MAX,
        WIDTH=width,
        BLOCK=power_of_two(width),
        ROWS=together,
        UPDATES=len(updates),
        SPLIT=not isinstance(stream, Tensor),
        KEEP=keep is not None,
        KEEP_SPLIT=not isinstance(kept, Tensor),
        OFFSET=offset is not None,
        AFFINE=weight is not None,
        QUANTISE=dtype == FP8,
        num_warps=config.get("num_warps", 4),
    )
    return out


@triton.jit
def _rotate_kernel(
    pairs_ptr,
    cos_ptr,
    sin_ptr,
    boundary,
    PATCHES: tl.constexpr,
    OTHERS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    # One row a program. Partners are neighbours, so a pair of bf16 is one 32-bit word: even in its low half.
    row = tl.program_id(0).to(tl.int64)
    token = tl.where(row < boundary, row % PATCHES, PATCHES + (row - boundary) % OTHERS)
    word = tl.arange(0, 2 * HEADS * HALF)
    angle = token * (2 * HALF) + 2 * (word % HALF)
    cos_even, cos_odd = tl.load(cos_ptr + angle), tl.load(cos_ptr + angle + 1)
    sin_even, sin_odd = tl.load(sin_ptr + angle), tl.load(sin_ptr + angle + 1)
    base = pairs_ptr + row * (3 * HEADS * HALF)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    even, odd = _unpacked(tl.load(base + word))
    tl.store(base + word, _packed(even * cos_even + odd * sin_even, odd * cos_odd + even * sin_odd))


@triton.jit
def _unpacked(word):
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _packed(even, odd):
    low = even.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (odd.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, candidates: int, config: Mapping[str, int]) -> None:
    """Run `ops.frames.frame_rotate` in bf16; heads and half the head width must be powers of two."""
    width = cos.shape[-1]
    patches = cos.shape[0] - CONDITIONING
    launch(
        _rotate_kernel,
        (qkv.shape[0],),
        qkv.view(torch.int32),
        cos,
        sin,
        candidates * patches,
        PATCHES=patches,
        OTHERS=CONDITIONING,
        HEADS=qkv.shape[1] // 3 // width,
        HALF=width // 2,
        num_warps=config.get("num_warps", 4),
    )


@triton.jit
def _gelu_kernel(
    x_ptr,
    offset_ptr,
    out_ptr,
    scale_ptr,
    top,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    QUANTISE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(offset_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if EXACT:
        out = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3); -2 u log2(e) is in the exponent.
        out = x / (1.0 + tl.exp2(x * (-2.302208198 - 0.1029432396 * x * x)))
    if QUANTISE:
        scale = tl.maximum(tl.max(tl.abs(out), axis=0), 1e-12) / top
        tl.store(scale_ptr + row, scale)
        out = out / scale
    tl.store(out_ptr + row * WIDTH + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def gelu(x: Tensor, offset: Tensor, dtype: torch.dtype, config: Mapping[str, int]) -> tuple[Tensor, Tensor | None]:
    """Run `ops.frames.frame_gelu`."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device) if dtype == FP8 else None
    launch(
        _gelu_kernel,
        (rows,),
        x,
        offset,
        out,
        offset if scales is None else scales,
        FP8_MAX,
        WIDTH=width,
        BLOCK=power_of_two(width),
        EXACT=dtype == torch.float32,
        QUANTISE=scales is not None,
        num_warps=config.get("num_warps", 8),
    )
    return out, scales


@triton.jit
def _energy_kernel(
    out_ptr,
    offset_ptr,
    goal_ptr,
    sum_ptr,
    eps,
    PATCHES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(out_ptr + row * WIDTH + columns, mask=inside, other=0.0)
    x += tl.load(offset_ptr + columns, mask=inside, other=0.0)
    x = tl.where(inside, x - tl.sum(x, axis=0) / WIDTH, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    goal = tl.load(goal_ptr + (row % PATCHES) * WIDTH + columns, mask=inside, other=0.0)
    tl.store(sum_ptr + row, tl.sum(tl.where(inside, tl.abs(x - goal), 0.0), axis=0))


def energy(out: Tensor, offset: Tensor, goal: Tensor, candidates: int, eps: float, config: Mapping[str, int]) -> Tensor:
    """Run `ops.frames.frame_energy`."""
    rows, width = out.shape
    sums = torch.empty(rows, dtype=torch.float32, device=out.device)
    launch(
        _energy_kernel,
        (rows,),
        out,
        offset,
        goal,
        sums,
        eps,
        PATCHES=rows // candidates,
        WIDTH=width,
        BLOCK=power_of_two(width),
        num_warps=config.get("num_warps", 4),
    )
    return sums.view(candidates, -1).sum(dim=1) / (rows // candidates * width)
