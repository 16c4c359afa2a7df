"""Rotary position embedding, half-split layout, angles and rotation in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from taktline_kernels.ops.dispatch import register


def rope_table(positions: Tensor, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the given positions.

    Args:
        positions: (...,) integer positions.
        head_dim: even width of a head.
        theta: base of the frequencies.

    Returns:
        (cos, sin), each (..., head_dim / 2) fp32. Frequencies stay fp32: rounding them to bf16, as some published
        code does in its bf16 mode, costs most of the accuracy.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device=positions.device).float() / head_dim
    angles = positions.float().unsqueeze(-1) * (1.0 / theta**exponent)
    return angles.cos(), angles.sin()


def _rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _norm_rotate_reference(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
) -> None:
    head_dim = 2 * cos.shape[-1]
    rows = qkv.view(-1, len(cos), heads + 2 * kv_heads, head_dim)
    for part, weight in ((rows[:, :, :heads], q_weight), (rows[:, :, heads : heads + kv_heads], k_weight)):
        wide = part.float()
        if weight is not None:
            wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
        part.copy_(_rope_reference(wide, cos, sin))


_ROPE = register("rope", _rope_reference, {})
_NORM_ROTATE = register(
    "norm_rotate", _norm_rotate_reference, {"triton": "taktline_kernels.triton_impl.heads:norm_rotate"}
)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads by their position.

    Args:
        x: (..., tokens, heads, head_dim).
        cos: (..., tokens, head_dim / 2) fp32, from `rope_table`.
        sin: likewise.

    Returns:
        Same shape and dtype as x; the rotation is fp32, rounded once.
    """
    shape = {"rows": x.numel() // (x.shape[-1] * x.shape[-2]), "heads": x.shape[-2], "head_dim": x.shape[-1]}
    result: Tensor = _ROPE.run(shape, x, x, cos, sin)
    return result


def norm_rotate(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    kv_heads: int,
    eps: float = 1e-6,
) -> None:
    """RMSNorm of every query and key head, then its rotation, in place; values stay. All in fp32, rounded once.

    Args:
        qkv: (..., (heads + 2 * kv_heads) * head_dim); queries, keys, values. Contiguous, or the first part of the
            rows of a contiguous tensor. Its rows go through the table's rows again and again.
        q_weight: (head_dim,), the multiplier; None leaves the norm out. `k_weight` likewise.
        cos: (table rows, head_dim / 2) fp32; `sin` likewise.
        eps: added to the mean square.

    Raises:
        ValueError: the rows are no multiple of the table's.
    """
    rows = qkv.numel() // qkv.shape[-1]
    if rows % len(cos):
        raise ValueError(f"{rows} rows over a table of {len(cos)}")
    shape = {"rows": rows, "heads": heads + kv_heads, "head_dim": 2 * cos.shape[-1]}
    _NORM_ROTATE.run(shape, qkv, qkv, q_weight, k_weight, cos, sin, heads, kv_heads, eps)
