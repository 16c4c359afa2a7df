"""Triton attention of one frame's tokens over all frames so far, each candidate and head for itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.ops.frames import CONDITIONING, quantise_by
from taktline_kernels.triton_impl.launch import launch, power_of_two

_LOG2E = 1.4426950408889634
_OTHERS = 16
"""Conditioning tokens of eight frames: the smallest tile of a matrix instruction."""


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


def attention(frames: Tensor, candidates: int, heads: int, unit: float | None, config: Mapping[str, int]) -> Tensor:
    """Run `ops.frames.frame_attention`; frames must be contiguous but for the first dimension."""
    count, rows, width = frames.shape
    patches = rows // candidates - CONDITIONING
    head_dim = width // 3 // heads
    out = torch.empty(rows, heads * head_dim, dtype=frames.dtype, device=frames.device)
    block_m = min(config.get("block_m", 128), max(power_of_two(patches), 16))
    tiles = -(-patches // block_m)
    # No more warps than the tile has slabs of sixteen rows. Where warps share rows, Triton 3.6's code for one tile a
    # candidate races: 64 patches with 8 warps gave other values at each call, and read outside its tensors.
    warps = min(config.get("num_warps", 4), max(1, block_m // 16))
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
        num_warps=warps,
        num_stages=config.get("num_stages", 3),
    )
    return out if unit is None else quantise_by(out, unit)
