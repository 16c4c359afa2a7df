"""Queries, keys and values in FP8 (e4m3) for attention of many tokens over themselves and a text before them.

Layouts, the multipliers that bring numbers into FP8's range, and a text's share of them. No GPU is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from taktline_kernels.fp8_rows import LARGEST

ROOM = 1.14
"""How much larger than exact products those of rounded rows and weights can be, at most.

Both factors are rounded to e4m3, by 2^-4 of themselves or, where they are subnormal, by nothing that counts, and the
result to bf16: (1 + 2^-4)^2 (1 + 2^-8) = 1.134.
"""
STEP = 128
"""Tokens of the values are filled up to a multiple of it: the GPU reads them in blocks along the tokens."""


@dataclass(frozen=True, slots=True)
class Fp8Heads:
    """One sequence's own heads, each number times a multiplier that all tokens share.

    Attributes:
        q: (lanes, queries, heads, head_dim) e4m3.
        k: (lanes, tokens, kv_heads, head_dim) e4m3.
        v: (lanes, kv_heads, head_dim, tokens filled up with zeros) e4m3: tokens side by side, as the GPU reads them.
        multipliers: fp32 (3,), of queries, keys and values.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    multipliers: Tensor


@dataclass(frozen=True, slots=True)
class Fp8Text:
    """The text before each sequence, every lane with multipliers of its own.

    Attributes:
        k: (lanes, slots, kv_heads, head_dim) e4m3.
        v: (lanes, kv_heads, head_dim, slots) e4m3; slots a multiple of `TEXT_STEP`.
        multipliers: fp32 (lanes, 2), of keys and values.
        lengths: int32 (lanes,), valid slots, one at least.
    """

    k: Tensor
    v: Tensor
    multipliers: Tensor
    lengths: Tensor


def head_multipliers(q_norm: Tensor, k_norm: Tensor, v_weight: Tensor, norm_weight: Tensor) -> Tensor:
    """Multipliers (3,) fp32 with which no query, key or value leaves FP8's range, whatever is observed.

    A normed head is no longer than sqrt(head_dim) times its largest weight, and rotation keeps lengths. A value is a
    row of the matrix times a normed token, so no larger than that row, weighed by the norm, times sqrt(width). FP8
    keeps its precision over four decades, so bounds far above what occurs cost nothing.

    Args:
        q_norm: (head_dim,) weight of the queries' norm; `k_norm` likewise.
        v_weight: (kv_heads * head_dim, width), the values' rows.
        norm_weight: (width,) weight of the norm before the product, as it multiplies.
    """
    longest = (v_weight.float() * norm_weight.float()).square().sum(dim=1).amax().sqrt() * v_weight.shape[1] ** 0.5
    largest = [norm.float().abs().amax() * len(norm) ** 0.5 for norm in (q_norm, k_norm)]
    return LARGEST / (torch.stack((*largest, longest)) * ROOM).clamp_min(1e-30)


def quantise_text(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A text's keys and values (layers, L, kv_heads, head_dim) with a multiplier each for every layer.

    Returns:
        e4m3 of the same shape, e4m3 (layers, kv_heads, head_dim, L), and multipliers fp32 (layers, 2).
    """
    wide = keys.float(), values.float()
    multipliers = torch.stack([LARGEST / t.abs().amax(dim=(1, 2, 3)).clamp_min(1e-30) for t in wide], dim=1)
    k, v = ((t * multipliers[:, index, None, None, None]).to(torch.float8_e4m3fn) for index, t in enumerate(wide))
    return k, v.permute(0, 2, 3, 1).contiguous(), multipliers


def filled(tokens: int) -> int:
    """Tokens filled up to whole blocks."""
    return -(-tokens // STEP) * STEP
