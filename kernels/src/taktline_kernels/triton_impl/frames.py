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
    eps,
    top,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    UPDATE: tl.constexpr,
    OFFSET: tl.constexpr,
    AFFINE: tl.constexpr,
    QUANTISE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(stream_ptr + row * WIDTH + columns, mask=inside, other=0.0)
    if UPDATE:
        x += tl.load(update_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if OFFSET:
        x += tl.load(offset_ptr + columns, mask=inside, other=0.0)
    if UPDATE:
        tl.store(stream_ptr + row * WIDTH + columns, x, mask=inside)
    x = tl.where(inside, x - tl.sum(x, axis=0) / WIDTH, 0.0)
    out = x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    if AFFINE:
        out = out * tl.load(weight_ptr + columns, mask=inside, other=0.0)
        out += tl.load(bias_ptr + columns, mask=inside, other=0.0)
    if QUANTISE:
        scale = tl.maximum(tl.max(tl.abs(tl.where(inside, out, 0.0)), axis=0), 1e-12) / top
        tl.store(scale_ptr + row, scale)
        out = out / scale
    tl.store(out_ptr + row * WIDTH + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


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
    launch(
        _norm_kernel,
        (rows,),
        stream,
        stream if update is None else update,
        stream if offset is None else offset,
        stream if weight is None else weight,
        stream if bias is None else bias,
        out,
        stream if scales is None else scales,
        eps,
        FP8_MAX,
        WIDTH=width,
        BLOCK=power_of_two(width),
        UPDATE=update is not None,
        OFFSET=offset is not None,
        AFFINE=weight is not None,
        QUANTISE=scales is not None,
        num_warps=config.get("num_warps", 4),
    )
    return out, scales


@triton.jit
def _rotate_kernel(
    qkv_ptr,
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
    # One row a program. Its query and key columns are (2 * heads, d / 2, 2): partners lie in the last dimension.
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, 2 * HEADS)
    half = tl.arange(0, HALF)
    pair = tl.arange(0, 2)
    token = tl.where(row < boundary, row % PATCHES, PATCHES + (row - boundary) % OTHERS)
    width: tl.constexpr = 2 * HALF
    inner = half[:, None] * 2 + pair[None, :]
    offsets = heads[:, None, None] * width + inner[None, :, :]
    base = qkv_ptr + row * (3 * HEADS * width)
    cos = tl.load(cos_ptr + token * width + inner)
    sin = tl.load(sin_ptr + token * width + inner)
    cos_even, cos_odd = tl.split(cos)
    sin_even, sin_odd = tl.split(sin)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(base + offsets).to(tl.float32)
    if OFFSET:
        x += tl.load(offset_ptr + offsets).to(tl.float32)
    even, odd = tl.split(x)
    turned = tl.join(
        even * cos_even[None, :] + odd * sin_even[None, :],
        odd * cos_odd[None, :] + even * sin_odd[None, :],
    )
    tl.store(base + offsets, turned.to(qkv_ptr.dtype.element_ty))
    if OFFSET:
        values = 2 * HEADS * width + tl.arange(0, HEADS * width)
        v = tl.load(base + values).to(tl.float32) + tl.load(offset_ptr + values).to(tl.float32)
        tl.store(base + values, v.to(qkv_ptr.dtype.element_ty))


def rotate(
    qkv: Tensor, offset: Tensor | None, cos: Tensor, sin: Tensor, candidates: int, config: Mapping[str, int]
) -> None:
    """Run `ops.frames.frame_rotate`; heads and half the head width must be powers of two."""
    width = cos.shape[-1]
    patches = cos.shape[0] - CONDITIONING
    launch(
        _rotate_kernel,
        (qkv.shape[0],),
        qkv,
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
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if MASKED:
        logits = tl.where(seen[None, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, axis=1))
    weights = tl.exp2(logits - new_top[:, None])
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(weights, axis=1)
    out = out * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return out, new_top, total


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
    CONDITIONING_QUERIES: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    candidate = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    stride: tl.constexpr = 3 * HEADS * WIDTH
    width = tl.arange(0, WIDTH)
    first_other = boundary + candidate * OTHERS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if CONDITIONING_QUERIES:
        inside = query < OTHERS
        row = first_other + query
    else:
        inside = query < PATCHES
        row = candidate * PATCHES + query
    last = qkv_ptr + (FRAMES - 1) * frame_stride.to(tl.int64)
    column = head * WIDTH + width
    q = tl.load(last + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside[:, None], other=0.0)
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
    target = row[:, None].to(tl.int64) * (HEADS * WIDTH) + column[None, :]
    tl.store(out_ptr + target, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])


def attention(frames: Tensor, candidates: int, heads: int, config: Mapping[str, int]) -> Tensor:
    """Run `ops.frames.frame_attention`; frames must be contiguous but for the first dimension.

    The two conditioning queries of a candidate get programs of their own, with the smallest tile: in the patches' tiles
    they would waste a third of the work.
    """
    count, rows, width = frames.shape
    patches = rows // candidates - CONDITIONING
    head_dim = width // 3 // heads
    out = torch.empty(rows, heads * head_dim, dtype=frames.dtype, device=frames.device)
    block_n = min(config.get("block_n", 64), patches)
    for others in (False, True):
        block_m = _OTHERS if others else min(config.get("block_m", 128), max(power_of_two(patches), 16))
        launch(
            _attention_kernel,
            (1 if others else -(-patches // block_m), candidates * heads),
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
            BLOCK_N=block_n,
            PAD=_OTHERS,
            CONDITIONING_QUERIES=others,
            num_warps=config.get("num_warps", 4) if not others else 1,
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
    out = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
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
