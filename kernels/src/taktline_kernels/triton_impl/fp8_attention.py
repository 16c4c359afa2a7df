"""Triton kernels of attention in FP8 (e4m3): heads normed, rotated and quantised; then one pass over all tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.fp8_heads import Fp8Heads, Fp8Text, filled
from taktline_kernels.triton_impl.launch import blocks_of, launch, power_of_two

_LOG2E = 1.4426950408889634


@triton.jit
def _heads_kernel(
    x_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    multipliers_ptr,
    q_ptr,
    k_ptr,
    table_rows,
    tokens,
    lane_stride,
    row_stride,
    room,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    TURN: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    half = tl.arange(0, HALF)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    query = (head < HEADS)[:, None]
    inside = (head < HEADS + KV_HEADS)[:, None] & (half >= 0)[None, :]
    lane = row // tokens
    token = row % tokens
    base = x_ptr + lane * lane_stride + token * row_stride + head[:, None] * (2 * HALF) + half[None, :]
    first = tl.load(base, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(base + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        factor = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        low = tl.where(query, tl.load(q_weight_ptr + half)[None, :], tl.load(k_weight_ptr + half)[None, :])
        high = tl.where(
            query, tl.load(q_weight_ptr + HALF + half)[None, :], tl.load(k_weight_ptr + HALF + half)[None, :]
        )
        first = first * factor * low.to(tl.float32)
        second = second * factor * high.to(tl.float32)
    if TURN:
        at = (row % table_rows) * HALF + half
        cos = tl.load(cos_ptr + at)[None, :]
        sin = tl.load(sin_ptr + at)[None, :]
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    by = tl.where(query, tl.load(multipliers_ptr), tl.load(multipliers_ptr + 1))
    first = (first * by).to(q_ptr.dtype.element_ty)
    second = (second * by).to(q_ptr.dtype.element_ty)
    if HEADS > 0:
        target = q_ptr + row * (HEADS * 2 * HALF) + head[:, None] * (2 * HALF) + half[None, :]
        tl.store(target, first, mask=inside & query)
        tl.store(target + HALF, second, mask=inside & query)
    if KV_HEADS > 0:
        at_k = (lane * room + token) * (KV_HEADS * 2 * HALF)
        target = k_ptr + at_k + (head - HEADS)[:, None] * (2 * HALF) + half[None, :]
        tl.store(target, first, mask=inside & (query == 0))
        tl.store(target + HALF, second, mask=inside & (query == 0))


@triton.jit
def _values_kernel(
    v_ptr,
    multiplier_ptr,
    out_ptr,
    tokens,
    room,
    lane_stride,
    row_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    lane = tl.program_id(2).to(tl.int64)
    width = tl.arange(0, WIDTH)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = token.to(tl.int64)[:, None] * row_stride + head * WIDTH + width[None, :]
    v = tl.load(v_ptr + lane * lane_stride + at, mask=(token < tokens)[:, None], other=0.0).to(tl.float32)
    turned = tl.trans((v * tl.load(multiplier_ptr + 2)).to(out_ptr.dtype.element_ty))
    target = out_ptr + ((lane * HEADS + head) * WIDTH + width[:, None]) * room + token[None, :]
    tl.store(target, turned)


@triton.jit
def _step(q, k, v, out, top, total, factor, count, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    logits = tl.dot(q, tl.trans(k))
    if MASKED:
        logits = tl.where((tl.arange(0, BLOCK_N) < count)[None, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, axis=1) * factor)
    # Up to 256 instead of 1: FP8 then keeps its precision down to a 16,000th of the largest weight.
    weights = tl.exp2(logits * factor - (new_top - 8.0)[:, None])
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(weights, axis=1)
    out = out * decay[:, None]
    return tl.dot(weights.to(v.dtype), tl.trans(v), out), new_top, total


@triton.jit
def _attention_kernel(
    q_ptr,
    keys,
    values,
    text_keys,
    text_values,
    text_multipliers_ptr,
    lengths_ptr,
    multipliers_ptr,
    out_ptr,
    rows,
    tokens,
    room,
    slots,
    q_lane_stride,
    scale_log2,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    KV_HEADS: tl.constexpr = HEADS // GROUP
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1)
    lane = tl.program_id(2)
    kv_head = head // GROUP
    width = tl.arange(0, WIDTH)
    inside = row < rows
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = row.to(tl.int64)[:, None] * (HEADS * WIDTH) + head * WIDTH + width[None, :]
    q = tl.load(q_ptr + lane.to(tl.int64) * q_lane_stride + at, mask=inside[:, None], other=0.0)
    length = tl.load(lengths_ptr + lane)
    of_q, of_k, of_v = tl.load(multipliers_ptr), tl.load(multipliers_ptr + 1), tl.load(multipliers_ptr + 2)
    of_text_k, of_text_v = tl.load(text_multipliers_ptr + 2 * lane), tl.load(text_multipliers_ptr + 2 * lane + 1)
    out = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    factor = scale_log2 / (of_q * of_text_k)
    values_row = (lane * KV_HEADS + kv_head) * WIDTH
    for start in tl.range(0, length, BLOCK_N):
        k = text_keys.load([lane * slots + start, kv_head * WIDTH])
        v = text_values.load([values_row, start])
        out, top, total = _step(q, k, v, out, top, total, factor, length - start, BLOCK_N, True)
    out = out * (of_v / of_text_v)
    factor = scale_log2 / (of_q * of_k)
    whole = (tokens // BLOCK_N) * BLOCK_N
    for start in tl.range(0, whole, BLOCK_N):
        k = keys.load([lane * room + start, kv_head * WIDTH])
        v = values.load([values_row, start])
        out, top, total = _step(q, k, v, out, top, total, factor, BLOCK_N, BLOCK_N, False)
    if whole < tokens:
        k = keys.load([lane * room + whole, kv_head * WIDTH])
        v = values.load([values_row, whole])
        out, top, total = _step(q, k, v, out, top, total, factor, tokens - whole, BLOCK_N, True)
    merged = out / (total * of_v)[:, None]
    target = out_ptr + lane.to(tl.int64) * rows * (HEADS * WIDTH) + at
    tl.store(target, merged.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def _laid_out(x: Tensor) -> Tensor:
    """(lanes, tokens, heads, head_dim) with the heads of a token side by side."""
    return x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous()


def heads_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    multipliers: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    table: tuple[Tensor, Tensor] | None,
    eps: float,
    adjacent: bool,
    config: Mapping[str, int],
) -> Fp8Heads:
    """Run `ops.fp8_attention.heads_fp8`.

    Args:
        config: heads, how many a program takes (a power of two), and num_warps.
    """
    q, k = _laid_out(q), _laid_out(k)
    lanes, tokens, kv_heads, width = k.shape
    # Keys of every lane in whole blocks, so that a lane begins where the copy engine can begin.
    room = filled(tokens)
    q8 = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    k8 = torch.empty((lanes, room, kv_heads, width), dtype=torch.float8_e4m3fn, device=q.device)
    cos, sin = (multipliers, multipliers) if table is None else table
    q_weight, k_weight = (multipliers, multipliers) if norms is None else norms
    fits = adjacent and q.stride() == k.stride()
    for x, heads, keys in ((q, q.shape[2], kv_heads),) if fits else ((q, q.shape[2], 0), (k, 0, kv_heads)):
        block = config.get("heads", power_of_two(heads + keys))
        launch(
            _heads_kernel,
            (x.shape[0] * x.shape[1], triton.cdiv(heads + keys, block)),
            x,
            q_weight,
            k_weight,
            cos,
            sin,
            multipliers,
            q8,
            k8,
            1 if table is None else len(cos),
            x.shape[1],
            x.stride(0),
            x.stride(1),
            room,
            eps,
            HEADS=heads,
            KV_HEADS=keys,
            HALF=width // 2,
            BLOCK=block,
            NORM=norms is not None,
            TURN=table is not None,
            num_warps=config.get("num_warps", 4),
        )
    v = _laid_out(v)
    block = 128
    turned = torch.empty((lanes, kv_heads, width, room), dtype=torch.float8_e4m3fn, device=v.device)
    launch(
        _values_kernel,
        (room // block, kv_heads, lanes),
        v,
        multipliers,
        turned,
        tokens,
        room,
        v.stride(0),
        v.stride(1),
        HEADS=kv_heads,
        WIDTH=width,
        BLOCK=block,
        num_warps=4,
    )
    return Fp8Heads(q8, k8[:, :tokens], turned, multipliers)


def attention_fp8(own: Fp8Heads, text: Fp8Text, dtype: torch.dtype, config: Mapping[str, int]) -> Tensor:
    """Run `ops.fp8_attention.attention_fp8`.

    Args:
        config: block_m, block_n, num_warps, num_stages.
    """
    lanes, rows, heads, width = own.q.shape
    tokens, kv_heads = own.k.shape[1], own.k.shape[2]
    room = own.k.stride(0) // own.k.stride(1)
    slots = text.k.shape[1]
    block_m, block_n = config.get("block_m", 128), config.get("block_n", 128)
    if slots % block_n:
        block_n = 64
    out = torch.empty((lanes, rows, heads, width), dtype=dtype, device=own.q.device)
    q = _laid_out(own.q)
    launch(
        _attention_kernel,
        (triton.cdiv(rows, block_m), heads, lanes),
        q,
        blocks_of(own.k.as_strided((lanes * room, kv_heads * width), (kv_heads * width, 1)), (block_n, width)),
        blocks_of(own.v.view(lanes * kv_heads * width, own.v.shape[3]), (width, block_n)),
        blocks_of(text.k.view(lanes * slots, kv_heads * width), (block_n, width)),
        blocks_of(text.v.view(lanes * kv_heads * width, slots), (width, block_n)),
        text.multipliers,
        text.lengths,
        own.multipliers,
        out,
        rows,
        tokens,
        room,
        slots,
        q.stride(0),
        width**-0.5 * _LOG2E,
        HEADS=heads,
        GROUP=heads // kv_heads,
        WIDTH=width,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=config.get("num_warps", 8),
        num_stages=config.get("num_stages", 3),
    )
    return out
