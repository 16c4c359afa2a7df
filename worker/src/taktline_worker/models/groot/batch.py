"""Rows of GR00T laid out for one call of the network: one tensor a quantity, of a shape that can be chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from taktline_worker.models.groot.config import GrootArchitecture
from taktline_worker.models.groot.rtc import RtcRow

Grid = tuple[int, int]
"""Rows and columns of an image's patches."""


@dataclass(frozen=True, slots=True)
class GrootRow:
    """One observation, ready for the network.

    Attributes:
        patches: for each image fp32 (P, patch values), normalised, in merge order.
        grids: for each image its rows and columns of patches.
        tokens: int64 (n,), image tokens included, no padding.
        state: fp32 (state width,), normalised and zero-padded.
        noise: fp32 (H, action width), the row's own x at t = 0.
        embodiment: projector slot.
        rtc: the tail of the robot's last chunk; None without one.
    """

    patches: tuple[Tensor, ...]
    grids: tuple[tuple[int, int], ...]
    tokens: NDArray[np.int64]
    state: Tensor
    noise: Tensor
    embodiment: int
    rtc: RtcRow | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """Some slots of each row, closed up to the left.

    Attributes:
        index: int64 (B, n).
        valid: bool (B, 1, 1, n); the others stand behind them.
    """

    index: Tensor
    valid: Tensor

    @classmethod
    def of(cls, kept: Tensor, room: int = 0) -> Places:
        """The slots that `kept`, bool (B, S), marks; n is `room`, or what the row with most has."""
        counts = kept.sum(dim=1)
        most = room or max(1, int(counts.max()))
        index = torch.argsort(kept, dim=1, descending=True, stable=True)[:, :most]
        return cls(index, (torch.arange(most) < counts[:, None])[:, None, None])

    def to(self, device: torch.device) -> Places:
        """The same elsewhere."""
        return Places(self.index.to(device), self.valid.to(device))

    def take(self, features: Tensor) -> Tensor:
        """(B, S, width) -> (B, n, width)."""
        return features.gather(1, self.index[..., None].expand(-1, -1, features.shape[-1]))


@dataclass(frozen=True, slots=True)
class GrootBatch:
    """What the network reads of B rows in S slots.

    Attributes:
        patches: for each distinct grid (its images, P, patch values), in the order of rows; these and the last three
            in fp32, or as the weights are.
        grids: those grids.
        tokens: int64 (B, S), zeros behind a row's end.
        positions: int64 (B, S, 3), time, row and column.
        image_slots: int64 (image tokens,), where in the flattened (B * S) they stand, grid by grid.
        text: the text tokens; `image` the image tokens; `all` both.
        state: (B, state width).
        start: (B, H, action width), x at t = 0.
        strength: (B, H, action width), the share of each velocity that is followed.
        embodiments: projector slot of each row.
    """

    patches: tuple[Tensor, ...]
    grids: tuple[Grid, ...]
    tokens: Tensor
    positions: Tensor
    image_slots: Tensor
    text: Places
    image: Places
    all: Places
    state: Tensor
    start: Tensor
    strength: Tensor
    embodiments: tuple[int, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of it, in a fixed order."""
        places = [tensor for one in (self.text, self.image, self.all) for tensor in (one.index, one.valid)]
        rest = (self.tokens, self.positions, self.image_slots, self.state, self.start, self.strength)
        return (*self.patches, *places, *rest)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> GrootBatch:
        """The same elsewhere, what is fp32 in `dtype`; where it is already there, the very tensors."""
        return GrootBatch(
            patches=tuple(one.to(device, dtype) for one in self.patches),
            grids=self.grids,
            tokens=self.tokens.to(device),
            positions=self.positions.to(device),
            image_slots=self.image_slots.to(device),
            text=self.text.to(device),
            image=self.image.to(device),
            all=self.all.to(device),
            state=self.state.to(device, dtype),
            start=self.start.to(device, dtype),
            strength=self.strength.to(device, dtype),
            embodiments=self.embodiments,
        )


def lay_out(rows: Sequence[GrootRow], architecture: GrootArchitecture, slots: int = 0) -> GrootBatch:
    """The rows side by side, on the CPU.

    Args:
        slots: S; 0 takes the longest row's. With S given, shapes follow from it and from the rows' grids alone.
    """
    t = architecture.text
    tokens = torch.zeros(len(rows), slots or max(len(row.tokens) for row in rows), dtype=torch.int64)
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    positions = torch.zeros(*tokens.shape, 3, dtype=torch.int64)
    for index, row in enumerate(rows):
        count = len(row.tokens)
        tokens[index, :count] = torch.from_numpy(row.tokens)
        valid[index, :count] = True
        positions[index, :count] = text_positions(row, t.image_token, architecture.vision.merge)
    is_image = (tokens == t.image_token) & valid
    images = int(is_image.sum(dim=1).max())
    grids = [grid for row in rows for grid in row.grids]
    patches = [one for row in rows for one in row.patches]
    # The text reads the images' features where they stand, and these are computed grid by grid.
    counts = [h * w // architecture.vision.merge**2 for h, w in grids]
    places = torch.tensor_split(is_image.flatten().nonzero()[:, 0], list(accumulate(counts))[:-1])
    distinct = tuple(dict.fromkeys(grids))
    order = [[index for index, grid in enumerate(grids) if grid == own] for own in distinct]
    fixed = slots > 0
    return GrootBatch(
        patches=tuple(torch.stack([patches[index] for index in own]) for own in order),
        grids=distinct,
        tokens=tokens,
        positions=positions,
        image_slots=torch.cat([places[index] for own in order for index in own]),
        text=Places.of(valid & ~is_image, slots - images if fixed else 0),
        image=Places.of(is_image, images if fixed else 0),
        all=Places.of(valid, slots),
        state=torch.stack([row.state for row in rows]),
        start=torch.stack([_start(row) for row in rows]),
        strength=torch.stack([torch.ones_like(r.noise) if r.rtc is None else r.rtc.strength for r in rows]),
        embodiments=tuple(row.embodiment for row in rows),
    )


def text_positions(row: GrootRow, image_token: int, merge: int) -> Tensor:
    """(n, 3) time, row and column of each token: text advances all three, an image spans its merged grid.

    The token behind an image continues at the largest position of the image plus one.
    """
    grids = iter(row.grids)
    at, index, found = 0, 0, []
    tokens = row.tokens.tolist()
    while index < len(tokens):
        if tokens[index] != image_token:
            found.append(torch.full((1, 3), at))
            at, index = at + 1, index + 1
            continue
        height, width = (side // merge for side in next(grids))
        r, c = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        found.append(torch.stack((torch.zeros_like(r), r, c), dim=-1).view(-1, 3) + at)
        at, index = at + max(height, width), index + height * width
    return torch.cat(found)


def _start(row: GrootRow) -> Tensor:
    return row.noise if row.rtc is None else torch.where(row.rtc.strength < 1.0, row.rtc.start, row.noise)
