"""A Triton kernel that adds short prefixes, of another length a row, to the attention of a long suffix over itself."""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import launch

_LOG2E = 1.4426950408889634


@triton.jit
def _step(q, k, v, out, top, total, scale_log2, count, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    logits = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        logits = tl.where((tl.arange(0, BLOCK_N) < count)[None, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, axis=1) * scale_log2)
    weights = tl.exp2(logits * scale_log2 - new_top[:, None])
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(weights, axis=1)
    out = out * decay[:, None]
    return tl.dot(weights.to(v.dtype), v, out, input_precision="ieee"), new_top, total


@triton.jit
def _merge_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    out_ptr,
    log_ptr,
    rows,
    prefix_rows,
    q_lane_stride,
    q_row_stride,
    log_head_stride,
    scale_log2,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    # Neighbouring programs take the heads of the same rows, which lie side by side in memory.
    head = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.program_id(2).to(tl.int64)
    width = tl.arange(0, WIDTH)
    inside = row < rows
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    length = tl.load(lengths_ptr + lane)
    at = row.to(tl.int64)[:, None]
    q = tl.load(
        q_ptr + lane * q_lane_stride + at * q_row_stride + head * WIDTH + width[None, :],
        mask=inside[:, None],
        other=0.0,
    )
    other = tl.load(log_ptr + (lane * HEADS + head) * log_head_stride + row, mask=inside, other=0.0)
    out = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    stride: tl.constexpr = (HEADS // GROUP) * WIDTH
    base = lane * prefix_rows * stride + (head // GROUP) * WIDTH
    for start in tl.range(0, length, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        offsets = base + slot[:, None] * stride + width[None, :]
        k = tl.load(k_ptr + offsets, mask=(slot < length)[:, None], other=0.0)
        v = tl.load(v_ptr + offsets, mask=(slot < length)[:, None], other=0.0)
        out, top, total = _step(q, k, v, out, top, total, scale_log2, length - start, BLOCK_N, True)
    # Weigh both parts by their sums of exponentials; the other's is a natural logarithm.
    other = (
        tl.load(log_ptr + (lane * HEADS + head) * log_head_stride + row, mask=inside, other=0.0) * 1.4426950408889634
    )
    both = tl.maximum(top, other)
    own_share = tl.exp2(top - both)
    other_share = tl.exp2(other - both)
    scale = 1.0 / (total * own_share + other_share)
    target = out_ptr + (lane * rows + at) * (HEADS * WIDTH) + head * WIDTH + width[None, :]
    suffix = tl.load(target, mask=inside[:, None], other=0.0).to(tl.float32)
    merged = out * (own_share * scale)[:, None] + suffix * (other_share * scale)[:, None]
    tl.store(target, merged.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def _laid_out(t: Tensor) -> Tensor:
    """As the kernels read it: heads one behind the other in a row, lanes whole rows apart."""
    whole = t.stride(1) != 0 and t.stride(0) % t.stride(1) == 0
    fits = t.stride(3) == 1 and t.stride(2) == t.shape[3] and whole and t.stride(1) % 8 == 0
    return t if fits and t.storage_offset() % 8 == 0 else t.contiguous()


def merge_prefix(
    q: Tensor, prefix_k: Tensor, prefix_v: Tensor, lengths: Tensor, out: Tensor, logs: Tensor, config: Mapping[str, int]
) -> None:
    """Adds the prefix to what the suffix has given, in place.

    Args:
        q: (lanes, rows, heads, head_dim).
        prefix_k: (lanes, slots, kv_heads, head_dim); `prefix_v` likewise.
        lengths: int32 (lanes,), valid slots.
        out: (lanes, rows, heads, head_dim), contiguous: attention over the suffix alone.
        logs: fp32 (lanes, heads, rows or more): logarithms of its sums of exponentials.
        config: block_m, block_n, num_warps, num_stages.
    """
    lanes, rows, heads, width = q.shape
    q, prefix_k, prefix_v = _laid_out(q), prefix_k.contiguous(), prefix_v.contiguous()
    block_m = config.get("block_m", 128)
    launch(
        _merge_kernel,
        (heads, triton.cdiv(rows, block_m), lanes),
        q,
        prefix_k,
        prefix_v,
        lengths,
        out,
        logs,
        rows,
        prefix_k.shape[1],
        q.stride(0),
        q.stride(1),
        logs.stride(1),
        width**-0.5 * _LOG2E,
        HEADS=heads,
        GROUP=heads // prefix_k.shape[2],
        WIDTH=width,
        BLOCK_M=block_m,
        BLOCK_N=config.get("block_n", 64),
        num_warps=config.get("num_warps", 8),
        num_stages=config.get("num_stages", 2),
    )
