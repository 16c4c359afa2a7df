"""Decoding a video on several ranks: each decodes a tile with a margin, and rank 0 stitches them.

A tile sees `margin` latent cells of its neighbours and no more, while the published decoder's convolutions reach about
twelve cells: near a seam the result differs a little from the whole decode. What the middle of the decoder mixes over
the whole picture (its attention) is computed whole on every rank, so that this part is exact. With a margin of
`EXACT_MARGIN` cells the whole result is. Of the margin only the inner cell is shown, in a linear cross-fade with the
neighbour's; what lies further out, where a tile is most wrong, is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch import distributed as dist

from taktline_worker.models.cosmos3.vae import Region, decode_frames
from taktline_worker.models.cosmos3.vae_weights import VaeWeights

MARGIN = 2
"""Latent cells on each side that has a neighbour: 32 pixels."""
FADE = 1
"""Latent cells on each side of a seam over which two tiles are mixed."""
EXACT_MARGIN = 13 + FADE
"""What the stages behind the middle reach: 6 3x3 convolutions at 1x, 2x, 4x and 8x, one behind each enlargement, and
the last one: 6 + 1/2 + 3 + 1/4 + 3/2 + 1/8 + 3/4 + 1/8 cells, rounded up."""

Gather = Callable[[Tensor], Sequence[Tensor] | None]
"""Every rank's tensor of one shape, in the order of ranks, on rank 0; None on the others."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one rank decodes.

    Attributes:
        core: rows and columns of latent cells that are its own.
        seen: the same with the margins.
    """

    core: Region
    seen: Region


def grid_of(ranks: int) -> tuple[int, int]:
    """Rows and columns of tiles: as near to a square as the number allows, wider than high (8 = 2 x 4)."""
    rows = max(n for n in range(1, ranks + 1) if ranks % n == 0 and n * n <= ranks)
    return rows, ranks // rows


def tiles_of(rows: int, columns: int, ranks: int, margin: int = MARGIN) -> tuple[Tile, ...]:
    """Tiles of a picture of `rows` x `columns` latent cells, row by row; tile i is rank i's.

    Raises:
        ValueError: there are more tiles in a row or column than cells.
    """
    down, across = grid_of(ranks)
    if down > rows or across > columns:
        raise ValueError(f"{rows} x {columns} latent cells cannot be cut into {down} x {across} tiles")

    def cuts(length: int, parts: int) -> list[tuple[slice, slice]]:
        bounds = [part * length // parts for part in range(parts + 1)]
        return [
            (slice(start, end), slice(max(0, start - margin), min(length, end + margin)))
            for start, end in pairwise(bounds)
        ]

    return tuple(
        Tile((row, column), (seen_row, seen_column))
        for row, seen_row in cuts(rows, down)
        for column, seen_column in cuts(columns, across)
    )


def decode_tiled(
    weights: VaeWeights, latents: Tensor, rank: int, ranks: int, gather: Gather, margin: int = MARGIN
) -> Tensor | None:
    """Frames (B, 3, T, H, W) as `vae.decode` gives them, on rank 0; None on the others, which only take part.

    Every rank has the whole `latents` (B, latents, n, rows, columns) and makes this call.
    """
    c = weights.config
    rows, columns = latents.shape[-2:]
    tiles = tiles_of(rows, columns, ranks, margin)
    height, width = (max(_length(tile.seen[axis]) for tile in tiles) * c.space for axis in (0, 1))
    own = tiles[rank]
    decoded = torch.cat(list(decode_frames(weights, latents, own.seen)), dim=2)
    # One collective of a fixed shape serves tiles of all sizes.
    padded = decoded.new_zeros(*decoded.shape[:3], height, width)
    padded[..., : decoded.shape[-2], : decoded.shape[-1]] = decoded
    everyone = gather(padded)
    if everyone is None:
        return None
    return stitch(tiles, everyone, rows, columns, c.space)


def stitch(tiles: Sequence[Tile], decoded: Sequence[Tensor], rows: int, columns: int, space: int) -> Tensor:
    """One picture of the decoded tiles, each (..., at least its pixels): linear cross-fades at the seams."""
    shape = decoded[0].shape[:-2]
    result = torch.zeros(*shape, rows * space, columns * space, device=decoded[0].device)
    total = torch.zeros(rows * space, columns * space, device=decoded[0].device)
    for tile, pixels in zip(tiles, decoded, strict=True):
        down, across = (
            _fade(core, seen, space).to(total.device) for core, seen in zip(tile.core, tile.seen, strict=True)
        )
        weight = down[:, None] * across[None, :]
        place = tuple(slice(seen.start * space, seen.stop * space) for seen in tile.seen)
        result[..., place[0], place[1]] += pixels[..., : len(down), : len(across)].float() * weight
        total[place[0], place[1]] += weight
    return (result / total).to(decoded[0].dtype)


def _fade(core: slice, seen: slice, space: int) -> Tensor:
    """Weight of each pixel of a tile along one side: 1 inside, 0 outside, linear between over `FADE` cells each way."""
    at = torch.arange(_length(seen) * space) + 0.5
    weight = torch.ones(len(at))
    for margin, inward in ((core.start - seen.start, at), (seen.stop - core.stop, len(at) - at)):
        band = min(margin, FADE) * space
        if band:
            weight = torch.minimum(weight, (inward - margin * space + band).clamp(0, 2 * band) / (2 * band))
    return weight


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def gather_to_first(group: dist.ProcessGroup | None = None) -> Gather:
    """`Gather` over a torch.distributed group; None = all processes."""

    def gather(mine: Tensor) -> Sequence[Tensor] | None:
        leads = dist.get_rank(group) == 0
        size = dist.get_world_size(group)
        everyone = [torch.empty_like(mine) for _ in range(size)] if leads else None
        dist.gather(mine.contiguous(), everyone, group=group, group_dst=0)
        return everyone

    return gather
