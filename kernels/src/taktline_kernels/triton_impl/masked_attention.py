"""Triton attention of a block of queries of one head over all keys, with keys left out by row or causally."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import launch, power_of_two

_LOG2E = 1.4426950408889634


@triton.jit
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    valid_ptr,
    gate_ptr,
    out_ptr,
    queries,
    keys,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    valid_batch,
    gate_batch,
    gate_token,
    scale_log2,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    VALID: tl.constexpr,
    CAUSAL: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """SHARED: query heads of one key/value head. EVEN: keys fill whole blocks."""
    batch = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    width = tl.arange(0, PADDED)
    inside, wide = query < queries, width < WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    q_at = q_ptr + batch * q_batch + head * q_head + query.to(tl.int64)[:, None] * q_token + width[None, :]
    q = tl.load(q_at, mask=inside[:, None] & wide[None, :], other=0.0)
    k_at = k_ptr + batch * k_batch + (head // SHARED) * k_head + width[None, :]
    v_at = v_ptr + batch * v_batch + (head // SHARED) * v_head + width[None, :]
    out = tl.zeros((BLOCK_M, PADDED), dtype=tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    last = keys
    if CAUSAL:
        last = tl.minimum(keys, (tl.program_id(0) + 1) * BLOCK_M)
    for start in tl.range(0, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        if EVEN:  # noqa: SIM108
            mask = wide[None, :]
        else:
            mask = (key < keys)[:, None] & wide[None, :]
        k = tl.load(k_at + key.to(tl.int64)[:, None] * k_token, mask=mask, other=0.0)
        v = tl.load(v_at + key.to(tl.int64)[:, None] * v_token, mask=mask, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if VALID:
            seen = tl.load(valid_ptr + batch * valid_batch + key, mask=key < keys, other=0)
            # Finite: a row without any key gives their mean, which nothing reads, and no NaN.
            logits = tl.where((seen != 0)[None, :], logits, -1e30)
        if not EVEN:
            logits = tl.where((key < keys)[None, :], logits, float("-inf"))
        if CAUSAL:
            logits = tl.where(key[None, :] <= query[:, None], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        weights = tl.exp2(logits - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, axis=1)
        out = out * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    at = ((batch * queries + query)[:, None] * HEADS + head) * WIDTH + width[None, :]
    kept = inside[:, None] & wide[None, :]
    out = out / total[:, None]
    if GATE:
        places = batch * gate_batch + query.to(tl.int64)[:, None] * gate_token + head * WIDTH + width[None, :]
        # Rounded as attention's own answer, as if the gate were a kernel of its own.
        out = out.to(out_ptr.dtype.element_ty).to(tl.float32)
        out *= tl.sigmoid(tl.load(gate_ptr + places, mask=kept, other=0.0).to(tl.float32))
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=kept)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    causal: bool,
    gate: Tensor | None = None,
    *,
    config: Mapping[str, int],
) -> Tensor:
    """Run `ops.attention`; `config` may hold block_m, block_n, num_warps and num_stages."""
    gate = gate if gate is None or gate.stride(-1) == 1 else gate.contiguous()
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    batch, queries, heads, width = q.shape
    keys = k.shape[1]
    out = torch.empty((batch, queries, heads, width), dtype=q.dtype, device=q.device)
    seen = None if valid is None else valid.contiguous().view(torch.uint8)
    block_m = min(config.get("block_m", 64), max(16, power_of_two(queries)))
    block_n = min(config.get("block_n", 64), max(16, power_of_two(keys)))
    launch(
        _attention_kernel,
        (triton.cdiv(queries, block_m), heads, batch),
        q,
        k,
        v,
        q if seen is None else seen,
        q if gate is None else gate,
        out,
        queries,
        keys,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        0 if seen is None else seen.stride(0),
        *((0, 0) if gate is None else gate.stride()[:2]),
        width**-0.5 * _LOG2E,
        HEADS=heads,
        SHARED=heads // k.shape[2],
        WIDTH=width,
        PADDED=max(16, power_of_two(width)),
        VALID=seen is not None,
        CAUSAL=causal,
        GATE=gate is not None,
        EVEN=keys % block_n == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=config.get("num_warps", 4),
        num_stages=config.get("num_stages", 2),
    )
    return out
