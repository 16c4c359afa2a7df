"""Attention of many tokens over themselves and a text before them, with queries, keys, values and weights in FP8."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from taktline_kernels.fp8_heads import Fp8Heads, Fp8Text, filled
from taktline_kernels.ops.attention import attention_suffix
from taktline_kernels.ops.dispatch import REGISTRY, register
from taktline_kernels.selector import REFERENCE, default_selector

_TRITON = "taktline_kernels.triton_impl.fp8_attention"
Pair = tuple[Tensor, Tensor]


def _heads_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    multipliers: Tensor,
    norms: Pair | None,
    table: Pair | None,
    eps: float,
    adjacent: bool,
) -> Fp8Heads:
    made = []
    for index, x in enumerate((q, k)):
        wide = x.float()
        if norms is not None:
            wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * norms[index].float()
        if table is not None:
            rows = wide.reshape(-1, len(table[0]), *wide.shape[2:])
            wide = REGISTRY["rope"].reference(rows, *table).view(wide.shape)
        made.append((wide * multipliers[index]).to(torch.float8_e4m3fn))
    turned = functional.pad((v.float() * multipliers[2]).permute(0, 2, 3, 1), (0, filled(v.shape[1]) - v.shape[1]))
    return Fp8Heads(made[0], made[1], turned.to(torch.float8_e4m3fn), multipliers)


def _attention_reference(own: Fp8Heads, text: Fp8Text, dtype: torch.dtype) -> Tensor:
    of_text = text.multipliers[:, :, None, None, None].unbind(1)
    out = attention_suffix(
        own.q.float() / own.multipliers[0],
        text.k.float() / of_text[0],
        (text.v.float() / of_text[1]).permute(0, 3, 1, 2),
        text.lengths,
        own.k.float() / own.multipliers[1],
        (own.v.float() / own.multipliers[2]).permute(0, 3, 1, 2)[:, : own.k.shape[1]],
    )
    return out.to(dtype)


_HEADS = register("heads_fp8", _heads_reference, {"triton": f"{_TRITON}:heads_fp8"})
_ATTENTION = register(
    "attention_fp8",
    _attention_reference,
    {"triton": f"{_TRITON}:attention_fp8", "hopper": "taktline_kernels.cuda.fp8_attention:attention_fp8"},
)


def heads_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    multipliers: Tensor,
    *,
    norms: Pair | None = None,
    table: Pair | None = None,
    eps: float = 1e-6,
    adjacent: bool = False,
) -> Fp8Heads:
    """RMSNorm of every query and key head, then its rotation, all in fp32; then FP8, rounded once.

    Args:
        q: (lanes, queries, heads, head_dim).
        k: (lanes, tokens, kv_heads, head_dim); `v` likewise.
        multipliers: fp32 (3,) from `fp8_heads.head_multipliers`.
        norms: weights (head_dim,) of queries and keys; None leaves the norm out.
        table: cosines and sines (rows, head_dim / 2) fp32, gone through again and again; None leaves the rotation out.
        eps: added to the mean square.
        adjacent: the caller's word that keys follow the queries in the rows of one tensor, so that both are one pass.
    """
    lanes, tokens, heads, width = k.shape
    shape = {"rows": lanes * tokens, "heads": q.shape[2] + heads, "head_dim": width}
    found: Fp8Heads = _HEADS.run(shape, q, q, k, v, multipliers, norms, table, eps, adjacent)
    return found


def attention_fp8(own: Fp8Heads, text: Fp8Text, dtype: torch.dtype) -> Tensor:
    """Attention of every query over its lane's text and all tokens.

    Exponentials and sums are fp32. Accelerated versions round the weights to FP8, the largest of a query to 256.

    Returns:
        (lanes, queries, heads, head_dim) in `dtype`.
    """
    lanes, rows, heads, width = own.q.shape
    shape = {"lanes": lanes, "rows": rows, "heads": heads, "head_dim": width, "keys": own.k.shape[1]}
    found: Tensor = _ATTENTION.run(shape, own.q, own, text, dtype)
    return found


def attends_in_fp8(heads: int, kv_heads: int, head_dim: int, device: torch.device) -> bool:
    """Whether the GPU's table names kernels that make such heads FP8 and attend over them, thousands of tokens at once.

    Where it does not, the references would compute in fp32 what bf16 computes faster.
    """
    rows = {"rows": 4096, "heads": heads + kv_heads, "head_dim": head_dim}
    attended = {"lanes": 1, "rows": 4096, "heads": heads, "head_dim": head_dim, "keys": 4096}
    asked = ((_HEADS.name, rows, torch.bfloat16), (_ATTENTION.name, attended, torch.float8_e4m3fn))
    return all(default_selector().choose(*one, device).kernel != REFERENCE for one in asked)
