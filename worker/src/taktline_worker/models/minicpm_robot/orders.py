"""In which order the network reads what is stored in another: heads that are turned, positions, patches."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated_first(width: int, rotary: int) -> Tensor:
    """int64 (width,): which stored element of a head stands where, so that a half-split rotation turns whole heads.

    Of the rotated elements, each half comes first in its half of the head; those that stay get the angle 0.
    """
    index, half = torch.arange(width), rotary // 2
    middle = rotary + width // 2 - half
    return torch.cat((index[:half], index[rotary:middle], index[half:rotary], index[middle:]))


def nearest_positions(grid: int, side: int) -> Tensor:
    """int64 (grid * grid,): for each patch, row by row, the cell of a square table of `side` that it falls into."""
    edges = torch.arange(1 / side, 1.0, 1 / side)
    cells = torch.bucketize(torch.arange(grid) / grid, edges, right=True)
    return (cells[:, None] * side + cells).flatten()


def window_order(grid: int) -> Tensor:
    """int64 (grid * grid,): the patch, counted row by row, at each place of the tower.

    Four patches of a 2 x 2 window follow each other, and the four windows of a 4 x 4 one; row by row in each, and these
    row by row in the image.
    """
    side = grid // 4
    places = torch.arange(grid * grid).view(side, 2, 2, side, 2, 2)
    return places.permute(0, 3, 1, 4, 2, 5).flatten()
