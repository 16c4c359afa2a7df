"""Triton attention over a fused QKV row whose query and key heads are normed and rotated where they are read.

Every block of queries rotates the keys anew: for some hundred tokens that is cheaper than a pass of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import launch, power_of_two

_LOG2E = 1.4426950408889634


@triton.jit
def _rotated(at, token, inside, weight_ptr, cos_ptr, sin_ptr, position, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """Both halves (tokens, HALF) of one head of some tokens: normed, rotated, rounded to the stored dtype."""
    half = tl.arange(0, HALF)
    first = tl.load(at + token[:, None] + half[None, :], mask=inside[:, None], other=0.0)
    dtype = first.dtype
    second = tl.load(at + token[:, None] + HALF + half[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    first = first.to(tl.float32)
    cos = tl.load(cos_ptr + position[:, None] * HALF + half[None, :], mask=inside[:, None], other=0.0)
    sin = tl.load(sin_ptr + position[:, None] * HALF + half[None, :], mask=inside[:, None], other=0.0)
    if NORM:
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        factor = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        first = first * factor * tl.load(weight_ptr + half).to(tl.float32)[None, :]
        second = second * factor * tl.load(weight_ptr + HALF + half).to(tl.float32)[None, :]
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def _rotated_attention_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    tokens,
    table_rows,
    eps,
    scale_log2,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    WIDTH: tl.constexpr = 2 * HALF
    ROW: tl.constexpr = (HEADS + 2 * KV_HEADS) * WIDTH
    batch = tl.program_id(2)
    head = tl.program_id(1)
    group = head // (HEADS // KV_HEADS)
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    width = tl.arange(0, WIDTH)
    inside = query < tokens
    start_row = batch * tokens
    base = qkv_ptr + start_row.to(tl.int64) * ROW
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    q1, q2 = _rotated(
        base + head * WIDTH, query * ROW, inside, q_weight_ptr, cos_ptr, sin_ptr,
        (start_row + query) % table_rows, eps, HALF, NORM,
    )  # fmt: skip
    out = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    last = tokens
    if CAUSAL:
        last = tl.minimum(tokens, (tl.program_id(0) + 1) * BLOCK_M)
    for start in tl.range(0, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        valid = key < tokens
        v_at = base + (HEADS + KV_HEADS + group) * WIDTH + key[:, None] * ROW + width[None, :]
        v = tl.load(v_at, mask=valid[:, None], other=0.0)
        k1, k2 = _rotated(
            base + (HEADS + group) * WIDTH, key * ROW, valid, k_weight_ptr, cos_ptr, sin_ptr,
            (start_row + key) % table_rows, eps, HALF, NORM,
        )  # fmt: skip
        logits = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        logits = tl.dot(q2, tl.trans(k2), logits, input_precision="ieee") * scale_log2
        if not EVEN:
            logits = tl.where(valid[None, :], logits, float("-inf"))
        if CAUSAL:
            logits = tl.where(key[None, :] <= query[:, None], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        weights = tl.exp2(logits - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, axis=1)
        out = out * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    at = ((start_row + query).to(tl.int64)[:, None] * HEADS + head) * WIDTH + width[None, :]
    tl.store(out_ptr + at, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])


def attention_rotated(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    causal: bool,
    eps: float,
    config: Mapping[str, int],
) -> Tensor:
    """Run `ops.attention_rotated` for heads whose width is a power of two, norms both or neither.

    `config` may hold block_m, block_n, num_warps and num_stages.

    Raises:
        ValueError: another width, or one norm; the table's rule is too wide.
    """
    half = cos.shape[-1]
    if half != power_of_two(half) or half < 16 or (q_weight is None) != (k_weight is None):
        raise ValueError(f"the kernel takes heads of 32, 64, 128, ... and both norms or none, not {2 * half}")
    batch, tokens = qkv.shape[:2]
    out = torch.empty((batch, tokens, heads, 2 * half), dtype=qkv.dtype, device=qkv.device)
    block_m = min(config.get("block_m", 64), max(16, power_of_two(tokens)))
    block_n = min(config.get("block_n", 64), max(16, power_of_two(tokens)))
    launch(
        _rotated_attention_kernel,
        (triton.cdiv(tokens, block_m), heads, batch),
        qkv,
        cos if q_weight is None else q_weight,
        cos if k_weight is None else k_weight,
        cos,
        sin,
        out,
        tokens,
        len(cos),
        eps,
        (2 * half) ** -0.5 * _LOG2E,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        NORM=q_weight is not None,
        CAUSAL=causal,
        EVEN=tokens % block_n == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=config.get("num_warps", 4),
        num_stages=config.get("num_stages", 2),
    )
    return out
