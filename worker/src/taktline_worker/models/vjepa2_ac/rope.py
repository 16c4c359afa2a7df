"""The towers' rotary positions: three axes a head, angles tiled over the axis and partners interleaved.

Element j of an axis turns by frequency j modulo n, while its partner is its neighbour (2m with 2m + 1). The two do not
match, so this is no rotation; the published weights were trained with it, and library kernels of either layout are
wrong for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BASE = 10_000.0
_AXES = 3


def axis_width(head_dim: int) -> int:
    """Elements of one axis (even); three of them, then a rest that is left alone."""
    return 2 * ((head_dim // _AXES) // 2)


def tables(positions: Tensor, head_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of every token and element, for `rotate`.

    Args:
        positions: (tokens, 3) depth, row and column of each token.
        head_dim: width of one head.
        dtype: of the tables; the angles are computed in fp64 either way.

    Returns:
        Two (tokens, 1, head_dim); elements of the rest have cosine 1 and sine 0.
    """
    width = axis_width(head_dim)
    count = width // 2
    frequencies = _BASE ** (-torch.arange(count, dtype=torch.float64) / count)
    angles = positions.double()[:, :, None] * frequencies  # (tokens, 3, count)
    angles = angles.repeat(1, 1, 2).flatten(1)
    sign = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(angles.shape[1] // 2)
    cos = torch.ones(len(positions), head_dim, dtype=torch.float64)
    sin = torch.zeros(len(positions), head_dim, dtype=torch.float64)
    cos[:, : angles.shape[1]] = angles.cos()
    sin[:, : angles.shape[1]] = angles.sin() * sign
    return cos.to(dtype)[:, None], sin.to(dtype)[:, None]


def frame_positions(grid: int, frame: int, conditioning: int = 0) -> Tensor:
    """Positions (tokens, 3) of one frame: `conditioning` tokens at row and column 0, then its patches row by row."""
    rows = torch.arange(grid).repeat_interleave(grid)
    columns = torch.arange(grid).repeat(grid)
    patches = torch.stack((torch.full_like(rows, frame), rows, columns), dim=1)
    front = torch.tensor([[frame, 0, 0]]).expand(conditioning, 3)
    return torch.cat((front, patches))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + partner(x) * signed sin, in the tables' precision, rounded once.

    Args:
        x: (batch, tokens, heads, head_dim) with an even head_dim.
        cos: (tokens, 1, head_dim).
        sin: likewise.

    Returns:
        The shape and dtype of x.
    """
    wide = x.to(cos.dtype)
    partner = wide.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    return (wide * cos + partner * sin).to(x.dtype)
