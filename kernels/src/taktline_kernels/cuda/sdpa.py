"""Attention through PyTorch's scaled_dot_product_attention (FlashAttention or cuDNN, PyTorch's choice)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional


def attention_vision(q: Tensor, k: Tensor, v: Tensor, config: Mapping[str, int]) -> Tensor:
    """Run `ops.attention_vision`."""
    out = functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2).contiguous()
