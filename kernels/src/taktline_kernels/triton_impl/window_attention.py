"""Triton kernel of attention inside windows of a few tokens, without matrix units: such windows would not fill them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import launch, power_of_two

_LOG2E = 1.4426950408889634
MAX_TOKENS = 16


@triton.jit
def _window_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    rows,
    token,
    scale_log2,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some tokens of one head; every key of a token's window in turn."""
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    held = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = (head * WIDTH + column)[None, :]
    first = row // TOKENS * TOKENS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    q = tl.load(q_ptr + row[:, None] * token + at, mask=held, other=0.0).to(tl.float32) * scale_log2
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, PADDED), tl.float32)
    for other in tl.static_range(TOKENS):
        places = (first + other)[:, None] * token + at
        logits = tl.sum(q * tl.load(k_ptr + places, mask=held, other=0.0).to(tl.float32), axis=1)
        higher = tl.maximum(top, logits)
        kept, weight = tl.exp2(top - higher), tl.exp2(logits - higher)
        out = out * kept[:, None] + weight[:, None] * tl.load(v_ptr + places, mask=held, other=0.0).to(tl.float32)
        total = total * kept + weight
        top = higher
    target = row[:, None] * (HEADS * WIDTH) + at
    tl.store(out_ptr + target, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=held)


def attention_vision(q: Tensor, k: Tensor, v: Tensor, config: Mapping[str, int]) -> Tensor:
    """Run `ops.attention_vision` for up to `MAX_TOKENS` tokens; all in fp32, rounded once.

    `config` may hold rows (tokens of a program) and num_warps.

    Raises:
        ValueError: more tokens; the table's rule is too wide.
    """
    windows, tokens, heads, width = q.shape
    if tokens > MAX_TOKENS:
        raise ValueError(f"the kernel for windows takes at most {MAX_TOKENS} tokens, not {tokens}")
    step = q.stride(1)
    if any(part.stride() != (tokens * step, step, width, 1) for part in (q, k, v)):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty((windows, tokens, heads, width), dtype=q.dtype, device=q.device)
    rows = config.get("rows", 16)
    launch(
        _window_kernel,
        (triton.cdiv(windows * tokens, rows), heads),
        q,
        k,
        v,
        out,
        windows * tokens,
        q.stride(1),
        width**-0.5 * _LOG2E,
        TOKENS=tokens,
        HEADS=heads,
        WIDTH=width,
        PADDED=power_of_two(width),
        ROWS=rows,
        num_warps=config.get("num_warps", 4),
    )
    return out
