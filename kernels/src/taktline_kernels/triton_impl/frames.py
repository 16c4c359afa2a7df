"""Triton kernels of the frame-causal world model: norms with the residual add, rotation, attention, GELU, energy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.ops.frames import CONDITIONING, FP8, FP8_MAX
from taktline_kernels.triton_impl.launch import launch, power_of_two

_LOG2E = 1.4426950408889634
_OTHERS = 16
"""Conditioning tokens of eight frames: the smallest tile of a matrix instruction."""


@triton.jit
def _norm_kernel(
    stream_ptr,
    update_ptr,
    offset_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    scale_ptr,
    rows,
    eps,
    top,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    UPDATE: tl.constexpr,
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
    x = tl.load(stream_ptr + place, mask=inside, other=0.0)
    if UPDATE:
        x += tl.load(update_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if OFFSET:
        x += tl.load(offset_ptr + columns, mask=columns < WIDTH, other=0.0)[None, :]
    if UPDATE:
        tl.store(stream_ptr + place, x, mask=inside)
    x = tl.where(inside, x - (tl.sum(x, axis=1) / WIDTH)[:, None], 0.0)
    out = x * tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
    if AFFINE:
        out = out * tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0)[None, :]
        out += tl.load(bias_ptr + columns, mask=columns < WIDTH, other=0.0)[None, :]
    if QUANTISE:
        scale = tl.maximum(tl.max(tl.abs(tl.where(inside, out, 0.0)), axis=1), 1e-12) / top
        tl.store(scale_ptr + row, scale, mask=row < rows)
        out = out / scale[:, None]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside)


def norm(
    stream: Tensor,
    update: Tensor | None,
    offset: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    config: Mapping[str, int],
) -> tuple[Tensor, Tensor | None]:
    """Run `ops.frames.frame_norm`."""
    rows, width = stream.shape
    out = torch.empty(rows, width, dtype=dtype, device=stream.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=stream.device) if dtype == FP8 else None
    together = config.get("rows", 1)
    launch(
        _norm_kernel,
        (-(-rows // together),),
        stream,
        stream if update is None else update,
        stream if offset is None else offset,
        stream if weight is None else weight,
        stream if bias is None else bias,
        out,
        stream if scales is None else scales,
        rows,
        eps,
        FP8_MAX,
        WIDTH=width,
        BLOCK=power_of_two(width),
        ROWS=together,
        UPDATE=update is not None,
        OFFSET=offset is not None,
        AFFINE=weight is not None,
        QUANTISE=scales is not None,
        num_warps=config.get("num_warps", 4),
    )
    return out, scales


@triton.jit
def _rotate_kernel(
    pairs_ptr,
    offset_ptr,
    cos_ptr,
    sin_ptr,
    boundary,
    PATCHES: tl.constexpr,
    OTHERS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    OFFSET: tl.constexpr,
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
    if OFFSET:
        even += tl.load(offset_ptr + 2 * word).to(tl.float32)
        odd += tl.load(offset_ptr + 2 * word + 1).to(tl.float32)
    tl.store(base + word, _packed(even * cos_even + odd * sin_even, odd * cos_odd + even * sin_odd))
    if OFFSET:
        value = 2 * HEADS * HALF + tl.arange(0, HEADS * HALF)
        even, odd = _unpacked(tl.load(base + value))
        even += tl.load(offset_ptr + 2 * value).to(tl.float32)
        odd += tl.load(offset_ptr + 2 * value + 1).to(tl.float32)
        tl.store(base + value, _packed(even, odd))


@triton.jit
def _unpacked(word):
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _packed(even, odd):
    low = even.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (odd.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


def rotate(
    qkv: Tensor, offset: Tensor | None, cos: Tensor, sin: Tensor, candidates: int, config: Mapping[str, int]
) -> None:
    """Run `ops.frames.frame_rotate` in bf16; heads and half the head width must be powers of two."""
    width = cos.shape[-1]
    patches = cos.shape[0] - CONDITIONING
    launch(
        _rotate_kernel,
        (qkv.shape[0],),
        qkv.view(torch.int32),
        qkv if offset is None else offset,
        cos,
        sin,
        candidates * patches,
        PATCHES=patches,
        OTHERS=CONDITIONING,
        HEADS=qkv.shape[1] // 3 // width,
        HALF=width // 2,
        OFFSET=offset is not None,
        num_warps=config.get("num_warps", 4),
    )


@triton.jit
def _attend(q, k, v, out, top, total, scale_log2, seen, MASKED: tl.constexpr):
    logits = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        logits = tl.where(seen[None, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, axis=1))
    weights = tl.exp2(logits * scale_log2 - (new_top * scale_log2)[:, None])
    decay = tl.exp2((top - new_top) * scale_log2)
    total = total * decay + tl.sum(weights, axis=1)
    out = out * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return out, new_top, total


@triton.jit
def _tile(
    qkv_ptr,
    out_ptr,
    frame_stride,
    candidate,
    head,
    first_row,
    count,
    first_other,
    scale_log2,
    FRAMES: tl.constexpr,
    PATCHES: tl.constexpr,
    OTHERS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAD: tl.constexpr,
):
    """Queries first_row .. first_row + count of the last frame against every key of their candidate."""
    stride: tl.constexpr = 3 * HEADS * WIDTH
    column = head * WIDTH + tl.arange(0, WIDTH)
    query = tl.arange(0, BLOCK_M)
    inside = query < count
    row = (first_row + query).to(tl.int64)
    last = qkv_ptr + (FRAMES - 1) * frame_stride.to(tl.int64)
    q = tl.load(last + row[:, None] * stride + column[None, :], mask=inside[:, None], other=0.0)
    out = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    # The conditioning tokens of all frames first: one small masked tile, so that the rest needs no mask.
    other = tl.arange(0, PAD)
    seen = other < OTHERS * FRAMES
    place = (other // OTHERS).to(tl.int64) * frame_stride + (first_other + other % OTHERS).to(tl.int64) * stride
    few_k = tl.load(qkv_ptr + place[:, None] + (HEADS * WIDTH + column)[None, :], mask=seen[:, None], other=0.0)
    few_v = tl.load(qkv_ptr + place[:, None] + (2 * HEADS * WIDTH + column)[None, :], mask=seen[:, None], other=0.0)
    out, top, total = _attend(q, few_k, few_v, out, top, total, scale_log2, seen, True)
    blocks: tl.constexpr = PATCHES // BLOCK_N
    keys = tl.arange(0, BLOCK_N)
    for index in tl.range(0, FRAMES * blocks):
        key_row = candidate * PATCHES + (index % blocks) * BLOCK_N + keys
        start = (index // blocks) * frame_stride.to(tl.int64) + key_row.to(tl.int64) * stride
        k = tl.load(qkv_ptr + start[:, None] + (HEADS * WIDTH + column)[None, :])
        v = tl.load(qkv_ptr + start[:, None] + (2 * HEADS * WIDTH + column)[None, :])
        out, top, total = _attend(q, k, v, out, top, total, scale_log2, keys < 0, False)
    target = row[:, None] * (HEADS * WIDTH) + column[None, :]
    tl.store(out_ptr + target, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _attention_kernel(
    qkv_ptr,
    out_ptr,
    frame_stride,
    boundary,
    scale_log2,
    FRAMES: tl.constexpr,
    PATCHES: tl.constexpr,
    OTHERS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAD: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    # The conditioning queries get a program of their own with the smallest tile; in the patches' tiles they would
    # waste a third of the work.
    tile = tl.program_id(0)
    candidate = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    first_other = boundary + candidate * OTHERS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if tile < TILES:
        _tile(
            qkv_ptr, out_ptr, frame_stride, candidate, head,
            candidate * PATCHES + tile * BLOCK_M, PATCHES - tile * BLOCK_M, first_other, scale_log2,
            FRAMES, PATCHES, OTHERS, HEADS, WIDTH, BLOCK_M, BLOCK_N, PAD,
        )  # fmt: skip
    else:
        _tile(
            qkv_ptr, out_ptr, frame_stride, candidate, head, first_other, OTHERS, first_other, scale_log2,
            FRAMES, PATCHES, OTHERS, HEADS, WIDTH, PAD, BLOCK_N, PAD,
        )  # fmt: skip


def attention(frames: Tensor, candidates: int, heads: int, config: Mapping[str, int]) -> Tensor:
    """Run `ops.frames.frame_attention`; frames must be contiguous but for the first dimension."""
    count, rows, width = frames.shape
    patches = rows // candidates - CONDITIONING
    head_dim = width // 3 // heads
    out = torch.empty(rows, heads * head_dim, dtype=frames.dtype, device=frames.device)
    block_m = min(config.get("block_m", 128), max(power_of_two(patches), 16))
    tiles = -(-patches // block_m)
    launch(
        _attention_kernel,
        (tiles + 1, candidates * heads),
        frames,
        out,
        frames.stride(0),
        candidates * patches,
        head_dim**-0.5 * _LOG2E,
        FRAMES=count,
        PATCHES=patches,
        OTHERS=CONDITIONING,
        HEADS=heads,
        WIDTH=head_dim,
        BLOCK_M=block_m,
        BLOCK_N=min(config.get("block_n", 64), patches),
        PAD=_OTHERS,
        TILES=tiles,
        num_warps=config.get("num_warps", 4),
        num_stages=config.get("num_stages", 3),
    )
    return out


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
