"""Triton kernel that turns a fused QKV row into a rotated query and a written key/value cache row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import launch


@triton.jit
def _rope_cache_kernel(
    qkv_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    lengths_ptr,
    tokens,
    cache_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SUFFIX: tl.constexpr,
    QUERIES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch = row // tokens
    position = row % tokens
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if SUFFIX:
        position += tl.load(lengths_ptr + batch)
    half = tl.arange(0, HALF)
    cos = tl.load(cos_ptr + position * HALF + half)
    sin = tl.load(sin_ptr + position * HALF + half)
    base = qkv_ptr + row * ((HEADS * QUERIES + 2) * 2 * HALF)
    if QUERIES:
        offsets = tl.arange(0, HEADS)[:, None] * (2 * HALF) + half[None, :]
        first = tl.load(base + offsets).to(tl.float32)
        second = tl.load(base + offsets + HALF).to(tl.float32)
        tl.store(base + offsets, (first * cos[None, :] - second * sin[None, :]).to(qkv_ptr.dtype.element_ty))
        tl.store(base + offsets + HALF, (second * cos[None, :] + first * sin[None, :]).to(qkv_ptr.dtype.element_ty))
    key = base + HEADS * QUERIES * 2 * HALF
    first = tl.load(key + half).to(tl.float32)
    second = tl.load(key + HALF + half).to(tl.float32)
    target = batch * cache_stride + position * (2 * HALF)
    tl.store(k_ptr + target + half, (first * cos - second * sin).to(k_ptr.dtype.element_ty))
    tl.store(k_ptr + target + HALF + half, (second * cos + first * sin).to(k_ptr.dtype.element_ty))
    whole = tl.arange(0, 2 * HALF)
    tl.store(v_ptr + target + whole, tl.load(key + 2 * HALF + whole))


def rope_cache(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    *,
    heads: int,
    suffix: bool,
) -> None:
    """Rotate the queries of `qkv` in place, and write the rotated key and the value into the cache.

    Args:
        qkv: (batch, tokens, (heads + 2) * head_dim); with `heads` = 0 it holds key and value only.
        k_cache: (batch, rows, head_dim).
        v_cache: likewise.
        cos: (positions, head_dim / 2) fp32.
        sin: likewise.
        lengths: (batch,) int32: a suffix token i has position and cache row lengths + i, a prefix token i has i.
        heads: query heads (a power of two), or 0.
        suffix: which of the two.
    """
    batch, tokens, _ = qkv.shape
    launch(
        _rope_cache_kernel,
        (batch * tokens,),
        qkv,
        k_cache,
        v_cache,
        cos,
        sin,
        lengths,
        tokens,
        k_cache.stride(0),
        HEADS=max(heads, 1),
        HALF=cos.shape[-1],
        SUFFIX=suffix,
        QUERIES=int(heads > 0),
        num_warps=4,
    )
