"""Triton kernel that norms and rotates the query and key heads of a fused QKV row where they lie."""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import launch, power_of_two


@triton.jit
def _norm_rotate_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    table_rows,
    stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNED: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    half = tl.arange(0, BLOCK)
    wide = half < HALF
    head = tl.arange(0, TURNED)
    inside = (head < HEADS + KV_HEADS)[:, None] & wide[None, :]
    base = qkv_ptr + row * stride
    offsets = head[:, None] * (2 * HALF) + half[None, :]
    first = tl.load(base + offsets, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(base + offsets + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        factor = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        query = (head < HEADS)[:, None]
        low = tl.where(
            query,
            tl.load(q_weight_ptr + half, mask=wide, other=0.0).to(tl.float32)[None, :],
            tl.load(k_weight_ptr + half, mask=wide, other=0.0).to(tl.float32)[None, :],
        )
        high = tl.where(
            query,
            tl.load(q_weight_ptr + HALF + half, mask=wide, other=0.0).to(tl.float32)[None, :],
            tl.load(k_weight_ptr + HALF + half, mask=wide, other=0.0).to(tl.float32)[None, :],
        )
        first = first * factor * low
        second = second * factor * high
    at = (row % table_rows) * HALF + half
    cos = tl.load(cos_ptr + at, mask=wide, other=0.0)[None, :]
    sin = tl.load(sin_ptr + at, mask=wide, other=0.0)[None, :]
    tl.store(base + offsets, (first * cos - second * sin).to(qkv_ptr.dtype.element_ty), mask=inside)
    tl.store(base + offsets + HALF, (second * cos + first * sin).to(qkv_ptr.dtype.element_ty), mask=inside)


def norm_rotate(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
    config: Mapping[str, int],
) -> None:
    """Run `ops.norm_rotate`; norms both or neither."""
    if (q_weight is None) != (k_weight is None):
        raise ValueError("queries and keys have a norm both, or neither")
    half = cos.shape[-1]
    launch(
        _norm_rotate_kernel,
        (qkv.numel() // qkv.shape[-1],),
        qkv,
        cos if q_weight is None else q_weight,
        cos if k_weight is None else k_weight,
        cos,
        sin,
        len(cos),
        qkv.stride(-2) if qkv.dim() > 1 else qkv.shape[-1],
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        BLOCK=power_of_two(half),
        TURNED=power_of_two(heads + kv_heads),
        NORM=q_weight is not None,
        num_warps=config.get("num_warps", 4),
    )
