"""The three attentions of a π policy (inside one image, inside the prefix, from the chunk to both), and a general one.

Logits and softmax are fp32; the scale is head_dim ** -0.5. Key/value heads may be fewer than query heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from taktline_kernels.ops.delta import sigmoid_gate
from taktline_kernels.ops.dispatch import register

_TRITON = "taktline_kernels.triton_impl.attention"
_LARGE = 2**21
"""Logits of one head from which on they are not written out."""


def _attend(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
    """q (b, s, h, d), k and v (b, t, g, d), valid (b, t) or None -> (b, s, h, d)."""
    batch, rows, heads, width = q.shape
    groups = k.shape[2]
    if (q.device.type == "cpu" and q.dtype == torch.float32) or rows * k.shape[1] >= _LARGE:
        # The same sums without the (rows x columns) intermediates: two to thirty times faster on a CPU, and the only
        # way in which a video's tokens fit a GPU.
        keys, values = (t.transpose(1, 2) for t in (k, v))
        if groups == 1:
            keys, values = (t.expand(-1, heads, -1, -1) for t in (keys, values))
        elif groups != heads:
            keys, values = (t.repeat_interleave(heads // groups, dim=1) for t in (keys, values))
        mask = None if valid is None else valid[:, None, None, :]
        out = functional.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask)
        return out.transpose(1, 2)
    grouped = q.reshape(batch, rows, groups, heads // groups, width)
    logits = torch.einsum("bsgnd,btgd->bgnst", grouped.float(), k.float()) * width**-0.5
    if valid is not None:
        logits = logits.masked_fill(~valid[:, None, None, None, :], torch.finfo(torch.float32).min)
    weights = logits.softmax(dim=-1)
    out = torch.einsum("bgnst,btgd->bsgnd", weights, v.float())
    return out.reshape(batch, rows, heads, width).to(q.dtype)


def _valid(lengths: Tensor, columns: int) -> Tensor:
    return torch.arange(columns, device=lengths.device)[None, :] < lengths[:, None]


def _vision_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _attend(q, k, v, None)


def _prefix_reference(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return _attend(q, k, v, _valid(lengths, k.shape[1]))


def _suffix_reference(
    q: Tensor, prefix_k: Tensor, prefix_v: Tensor, prefix_lengths: Tensor, suffix_k: Tensor, suffix_v: Tensor
) -> Tensor:
    valid = _valid(prefix_lengths, prefix_k.shape[1])
    valid = torch.cat((valid, valid.new_ones(q.shape[0], suffix_k.shape[1])), dim=1)
    return _attend(q, torch.cat((prefix_k, suffix_k), dim=1), torch.cat((prefix_v, suffix_v), dim=1), valid)


def _masked_reference(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, causal: bool, gate: Tensor | None = None
) -> Tensor:
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if valid is None else valid[:, None, None, :],
        is_causal=causal,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)
    return out if gate is None else sigmoid_gate(out.flatten(2), gate).view(out.shape)


_MASKED = register(
    "attention", _masked_reference, {"triton": "taktline_kernels.triton_impl.masked_attention:attention"}
)
_VISION = register(
    "attention_vision",
    _vision_reference,
    {
        "sdpa": "taktline_kernels.cuda.sdpa:attention_vision",
        "packed": "taktline_kernels.cuda.image_attention:attention_vision",
        "patches": "taktline_kernels.cuda.patch_attention:attention_vision",
        "windows": "taktline_kernels.triton_impl.window_attention:attention_vision",
    },
)
_PREFIX = register("attention_prefix", _prefix_reference, {"triton": f"{_TRITON}:attention_prefix"})
_SUFFIX = register(
    "attention_suffix",
    _suffix_reference,
    {
        "triton": f"{_TRITON}:attention_suffix",
        "parts": "taktline_kernels.cuda.sdpa:attention_suffix",
        "hopper": "taktline_kernels.cuda.suffix_attention:attention_suffix",
    },
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None = None,
    *,
    causal: bool = False,
    gate: Tensor | None = None,
) -> Tensor:
    """Attention of every head for itself, with keys left out by row or causally.

    Args:
        q: (batch, queries, heads, head_dim), any strides with a contiguous last dimension.
        k: (batch, keys, kv_heads, head_dim), likewise.
        v: likewise.
        valid: bool (batch, keys), the keys that are seen, or None for all. A row that sees none gets any values.
        causal: query i sees keys up to i; without `valid`, and with as many keys as queries.
        gate: (batch, queries, heads * head_dim), whose sigmoid multiplies the answer, or None; tokens may lie further
            apart.

    Returns:
        (batch, queries, heads, head_dim) in the dtype of q.

    Raises:
        ValueError: causal with `valid`, or with another number of keys.
    """
    if causal and (valid is not None or k.shape[1] != q.shape[1]):
        raise ValueError("causal attention takes as many keys as queries, all of them valid")
    shape = {
        "batch": q.shape[0],
        "queries": q.shape[1],
        "keys": k.shape[1],
        "heads": q.shape[2],
        "kv_heads": k.shape[2],
        "head_dim": q.shape[3],
        "masked": int(valid is not None),
        "causal": int(causal),
    }
    result: Tensor = _MASKED.run(shape, q, q, k, v, valid, causal, *(() if gate is None else (gate,)))
    return result


def attention_vision(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full attention inside each image.

    Args:
        q: (images, tokens, heads, head_dim), any strides with a contiguous last dimension.
        k: likewise.
        v: likewise.

    Returns:
        (images, tokens, heads, head_dim) in the dtype of q.
    """
    shape = {"batch": q.shape[0], "tokens": q.shape[1], "heads": q.shape[2], "head_dim": q.shape[3]}
    result: Tensor = _VISION.run(shape, q, q, k, v)
    return result


def attention_prefix(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Bidirectional attention over the valid prefix tokens, which come first in each row.

    Args:
        q: (batch, tokens, heads, head_dim).
        k: (batch, tokens, kv_heads, head_dim).
        v: likewise.
        lengths: (batch,) int32, valid tokens, at least 1.

    Returns:
        (batch, tokens, heads, head_dim); rows from `lengths` on are finite and mean nothing.
    """
    shape = {"batch": q.shape[0], "tokens": q.shape[1], "heads": q.shape[2], "head_dim": q.shape[3]}
    result: Tensor = _PREFIX.run(shape, q, q, k, v, lengths)
    return result


def attention_suffix(
    q: Tensor, prefix_k: Tensor, prefix_v: Tensor, prefix_lengths: Tensor, suffix_k: Tensor, suffix_v: Tensor
) -> Tensor:
    """Attention of the action tokens over the valid prefix and all of the suffix.

    Args:
        q: (batch, suffix, heads, head_dim).
        prefix_k: (batch, prefix, kv_heads, head_dim).
        prefix_v: likewise.
        prefix_lengths: (batch,) int32, valid prefix tokens.
        suffix_k: (batch, suffix, kv_heads, head_dim).
        suffix_v: likewise.

    Returns:
        (batch, suffix, heads, head_dim) in the dtype of q.
    """
    shape = {
        "batch": q.shape[0],
        "rows": q.shape[1],
        "heads": q.shape[2],
        "head_dim": q.shape[3],
        "prefix": prefix_k.shape[1],
    }
    result: Tensor = _SUFFIX.run(shape, q, q, prefix_k, prefix_v, prefix_lengths, suffix_k, suffix_v)
    return result
