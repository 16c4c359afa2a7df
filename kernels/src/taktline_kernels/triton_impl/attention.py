"""Triton attention of many query heads over one cached key/value head, optionally split over the keys."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import blocks_of, launch, power_of_two

_LOG2E = 1.4426950408889634


@triton.jit
def _cached_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    top_ptr,
    total_ptr,
    lengths_ptr,
    scales_ptr,
    extra,
    rows,
    cache_rows,
    q_batch_stride,
    q_token_stride,
    cache_batch_stride,
    out_batch_stride,
    scale_log2,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    BOUNDED: tl.constexpr,
    FIRST_ALONE: tl.constexpr,
    FP8: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    # With TMA, k_ptr and v_ptr describe blocks of the caches as (batch * cache_rows, WIDTH); past the end they read 0.
    # All query heads share the one key/value head, so a token's heads are rows: row = token * HEADS + head.
    batch = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    width = tl.arange(0, WIDTH)
    inside = row < rows
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    count = tl.load(lengths_ptr + batch) + extra
    q_offsets = batch * q_batch_stride + (row // HEADS) * q_token_stride + (row % HEADS) * WIDTH
    q = tl.load(q_ptr + q_offsets[:, None] + width[None, :], mask=inside[:, None], other=0.0)
    out = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    share = tl.cdiv(tl.cdiv(count, BLOCK_N), SPLITS) * BLOCK_N
    first = split * share
    last = tl.minimum(first + share, count)
    cache = batch * cache_batch_stride
    for start in tl.range(first, last, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        offsets = cache + column[:, None] * WIDTH + width[None, :]
        if TMA:
            k = k_ptr.load([(batch * cache_rows).to(tl.int32) + start, 0])
        elif BOUNDED:
            k = tl.load(k_ptr + offsets, mask=column[:, None] < cache_rows, other=0.0)
        else:
            k = tl.load(k_ptr + offsets)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if FIRST_ALONE:
            # The first token's heads end with its own key. Finite, as a row may have no key in a split: what it sums
            # there gets the factor zero.
            seen = tl.where(row < HEADS, count - extra + 1, count)
            logits = tl.where(column[None, :] < seen[:, None], logits, -1e30)
        else:
            logits = tl.where((column < count)[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        weights = tl.exp2(logits - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, axis=1)
        top = new_top
        if TMA:
            v = v_ptr.load([(batch * cache_rows).to(tl.int32) + start, 0])
        elif BOUNDED:
            v = tl.load(v_ptr + offsets, mask=column[:, None] < count, other=0.0)
        else:
            v = tl.load(v_ptr + offsets)
        out = out * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    if FP8:
        # The heads of a token are rows of one block, so its scale is at hand.
        out = out / total[:, None]
        largest = tl.reshape(tl.max(tl.abs(out), axis=1), (BLOCK_M // HEADS, HEADS))
        largest = tl.maximum(tl.max(largest, axis=1), 1e-30)
        token = tl.program_id(0) * (BLOCK_M // HEADS) + tl.arange(0, BLOCK_M // HEADS)
        tl.store(scales_ptr + batch * (rows // HEADS) + token, largest / 448.0, mask=token < rows // HEADS)
        factor = tl.reshape(tl.broadcast_to((448.0 / largest)[:, None], (BLOCK_M // HEADS, HEADS)), (BLOCK_M,))
        target = batch * out_batch_stride + row[:, None] * WIDTH + width[None, :]
        tl.store(out_ptr + target, (out * factor[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])
    elif SPLITS == 1:
        target = batch * out_batch_stride + row[:, None] * WIDTH + width[None, :]
        tl.store(out_ptr + target, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])
    else:
        part = (batch * SPLITS + split) * rows + row
        tl.store(partial_ptr + part[:, None] * WIDTH + width[None, :], out, mask=inside[:, None])
        tl.store(top_ptr + part, top, mask=inside)
        tl.store(total_ptr + part, total, mask=inside)


@triton.jit
def _combine_kernel(
    partial_ptr,
    top_ptr,
    total_ptr,
    out_ptr,
    rows,
    out_batch_stride,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0)
    splits = tl.arange(0, PADDED)
    width = tl.arange(0, WIDTH)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part = (batch * SPLITS + splits) * rows + row
    tops = tl.load(top_ptr + part, mask=splits < SPLITS, other=float("-inf"))
    totals = tl.load(total_ptr + part, mask=splits < SPLITS, other=0.0)
    factors = tl.exp2(tops - tl.max(tops, axis=0))
    partial = tl.load(partial_ptr + part[:, None] * WIDTH + width[None, :], mask=(splits < SPLITS)[:, None], other=0.0)
    out = tl.sum(partial * factors[:, None], axis=0) / tl.sum(totals * factors, axis=0)
    tl.store(out_ptr + batch * out_batch_stride + row * WIDTH + width, out.to(out_ptr.dtype.element_ty))


def attention_cached(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    extra: int,
    *,
    config: Mapping[str, int],
    bounded: bool = True,
    first_alone: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    """Attend over the first lengths + extra rows of a cache with one key/value head.

    Args:
        q: (batch, tokens, heads, head_dim); heads and head_dim contiguous, tokens at any stride.
        k_cache: (batch, rows, head_dim), rows contiguous.
        v_cache: likewise, same strides.
        lengths: (batch,) int32.
        extra: rows appended after each row's length; length + extra must be at least 1.
        config: block_m, block_n, splits, num_warps, num_stages; tma: blocks of keys and values are fetched by the copy
            engine, from Hopper on, where the caches lie without gaps and `bounded` is False.
        bounded: check every read against the cache's end. False when the caller's cache is followed by at least
            block_n rows of finite values.
        first_alone: the first token sees lengths + 1 rows only.
        scales: (batch * tokens, 1) fp32: makes the result e4m3, a scale a token, which is left here; not with splits,
            and block_m must be a multiple of heads.

    Returns:
        (batch, tokens, heads, head_dim) in the dtype of q, or e4m3.
    """
    batch, tokens, heads, width = q.shape
    rows = tokens * heads
    splits = config.get("splits", 1)
    dtype = q.dtype if scales is None else torch.float8_e4m3fn
    out = torch.empty((batch, tokens, heads, width), dtype=dtype, device=q.device)
    shape = (batch, splits, rows) if splits > 1 else (1,)
    tops = torch.empty(shape, dtype=torch.float32, device=q.device)
    totals = torch.empty(shape, dtype=torch.float32, device=q.device)
    partial = torch.empty((*shape, width) if splits > 1 else (1,), dtype=torch.float32, device=q.device)
    block_m, block_n = config.get("block_m", 64), config.get("block_n", 64)
    cache_rows = k_cache.shape[1]
    tma = bool(config.get("tma", 0)) and not bounded and k_cache.is_contiguous() and v_cache.is_contiguous()
    caches = (k_cache, v_cache)
    launch(
        _cached_kernel,
        (triton.cdiv(rows, block_m), splits, batch),
        q,
        *(blocks_of(cache.view(-1, width), (block_n, width)) if tma else cache for cache in caches),
        out,
        partial,
        tops,
        totals,
        lengths,
        lengths if scales is None else scales,
        extra,
        rows,
        cache_rows,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        out.stride(0),
        width**-0.5 * _LOG2E,
        HEADS=heads,
        WIDTH=width,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        SPLITS=splits,
        BOUNDED=bounded,
        FIRST_ALONE=first_alone,
        FP8=scales is not None,
        TMA=tma,
        num_warps=config.get("num_warps", 4),
        num_stages=config.get("num_stages", 2),
    )
    if splits > 1:
        launch(
            _combine_kernel,
            (rows, batch),
            partial,
            tops,
            totals,
            out,
            rows,
            out.stride(0),
            WIDTH=width,
            SPLITS=splits,
            PADDED=power_of_two(splits),
            num_warps=2,
        )
    return out


def attention_prefix(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, config: Mapping[str, int]) -> Tensor:
    """Run `ops.attention_prefix` for one key/value head."""
    k, v = k[:, :, 0].contiguous(), v[:, :, 0].contiguous()
    return attention_cached(q.contiguous(), k, v, lengths, 0, config=config)


def attention_suffix(
    q: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    prefix_lengths: Tensor,
    suffix_k: Tensor,
    suffix_v: Tensor,
    config: Mapping[str, int],
) -> Tensor:
    """Run `ops.attention_suffix` for one key/value head: the suffix is written behind each row's valid prefix."""
    batch, prefix = prefix_k.shape[:2]
    count = suffix_k.shape[1]
    width = prefix_k.shape[-1]
    index = prefix_lengths.long()[:, None] + torch.arange(count, device=q.device)[None, :]
    index = index[:, :, None].expand(batch, count, width)
    caches = []
    for before, after in ((prefix_k, suffix_k), (prefix_v, suffix_v)):
        cache = before.new_zeros((batch, prefix + count, width))
        cache[:, :prefix] = before[:, :, 0]
        caches.append(cache.scatter_(1, index, after[:, :, 0]))
    return attention_cached(q.contiguous(), caches[0], caches[1], prefix_lengths, count, config=config)
