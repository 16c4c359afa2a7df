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


_ROPE = register("rope", _rope_reference, {})


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
