"""Attention through PyTorch's scaled_dot_product_attention (FlashAttention or cuDNN, PyTorch's choice)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional


def attention_vision(q: Tensor, k: Tensor, v: Tensor, config: Mapping[str, int]) -> Tensor:
    """Run `ops.attention_vision`."""
    out = functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2).contiguous()


def attention_suffix(
    q: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    prefix_lengths: Tensor,
    suffix_k: Tensor,
    suffix_v: Tensor,
    config: Mapping[str, int],
) -> Tensor:
    """Run `ops.attention_suffix` in two parts: FlashAttention takes no mask, so only the prefix goes another way.

    The parts are weighed by their sums of exponentials. For suffixes of thousands of tokens behind a short prefix.
    """
    heads = q.shape[2]
    queries = q.transpose(1, 2)
    keys, values, suffix_keys, suffix_values = (
        t.transpose(1, 2) if t.shape[2] == heads else t.transpose(1, 2).repeat_interleave(heads // t.shape[2], dim=1)
        for t in (prefix_k, prefix_v, suffix_k, suffix_v)
    )
    slots = torch.arange(keys.shape[2], device=q.device)
    bias = q.new_zeros(q.shape[0], 1, 1, keys.shape[2])
    bias = bias.masked_fill(slots >= prefix_lengths[:, None, None, None], float("-inf"))
    bias = bias.expand(-1, heads, queries.shape[2], -1)
    aten = torch.ops.aten
    if q.is_cuda:
        whole, whole_log = aten._scaled_dot_product_flash_attention(queries, suffix_keys, suffix_values)[:2]
        part, part_log = aten._scaled_dot_product_efficient_attention(queries, keys, values, bias, True)[:2]
    else:
        cpu = aten._scaled_dot_product_flash_attention_for_cpu
        whole, whole_log = cpu(queries, suffix_keys, suffix_values)
        part, part_log = cpu(queries, keys, values, attn_mask=bias)
    share = torch.sigmoid(part_log[..., : queries.shape[2]].float() - whole_log[..., : queries.shape[2]].float())
    out = torch.lerp(whole.float(), part.float(), share[..., None])
    return out.to(q.dtype).transpose(1, 2)
