"""Attention through the kernels that PyTorch brings: FlashAttention and cuDNN's."""

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
    """Run `ops.attention_suffix` in two parts: cuDNN is fast without a mask only, so the prefix goes another way.

    The parts are weighed by their sums of exponentials. For suffixes of thousands of tokens behind a short prefix, in
    bf16 on a GPU; queries, keys and values are read where they lie, and fewer key heads are not repeated.
    """
    aten = torch.ops.aten
    queries, keys, values = (t.transpose(1, 2) for t in (q, suffix_k, suffix_v))
    if q.is_cuda:
        from taktline_kernels.triton_impl.long_attention import merge_prefix

        found = aten._scaled_dot_product_cudnn_attention(queries, keys, values, None, True)
        out: Tensor = found[0].transpose(1, 2).contiguous()
        merge_prefix(q, prefix_k, prefix_v, prefix_lengths, out, found[1].flatten(2), config)
        return out
    group = q.shape[2] // suffix_k.shape[2]
    slots = torch.arange(prefix_k.shape[1], device=q.device)
    bias = q.new_zeros(q.shape[0], 1, 1, prefix_k.shape[1])
    bias = bias.masked_fill(slots >= prefix_lengths[:, None, None, None], float("-inf"))
    bias = bias.expand(-1, q.shape[2], q.shape[1], -1)
    parts = []
    for k, v, mask in ((keys, values, None), (prefix_k.transpose(1, 2), prefix_v.transpose(1, 2), bias)):
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        parts.append(aten._scaled_dot_product_flash_attention_for_cpu(queries, k, v, attn_mask=mask))
    (whole, whole_log), (part, part_log) = parts
    share = torch.sigmoid(part_log.float() - whole_log.float())
    merged = torch.lerp(whole.float(), part.float(), share[..., None])
    return merged.to(q.dtype).transpose(1, 2)
