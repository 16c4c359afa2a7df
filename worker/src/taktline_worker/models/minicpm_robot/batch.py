"""Rows of MiniCPM-RobotManip laid out for one call of the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MiniCpmRow:
    """One observation, ready for the network.

    Attributes:
        patches: fp32 (images, P, 3 * patch^2), normalised.
        tokens: int64 (n,), image tokens included, no padding.
        state: fp32 (state width,), raw: nothing is normalised.
        noise: fp32 (H, action width), the row's own.
        embodiment: bank of the head.
    """

    patches: Tensor
    tokens: NDArray[np.int64]
    state: Tensor
    noise: Tensor
    embodiment: int


@dataclass(frozen=True, slots=True)
class MiniCpmBatch:
    """What the network reads of B rows in S slots, on one device.

    Attributes:
        patches: fp32 (images of all rows, P, patch values), in the order of rows.
        tokens: int64 (B, S), zeros behind a row's end.
        image_rows: int64 (B, S), which of the images' tokens, counted through all rows, stands there, or -1.
        valid: bool (B, 1, 1, S), the slots that are a row's own.
        state: fp32 (B, state width).
        noise: fp32 (B, H, action width).
        embodiments: bank of each row.
    """

    patches: Tensor
    tokens: Tensor
    image_rows: Tensor
    valid: Tensor
    state: Tensor
    noise: Tensor
    embodiments: tuple[int, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of it, in a fixed order."""
        return self.patches, self.tokens, self.image_rows, self.valid, self.state, self.noise


def lay_out(rows: Sequence[MiniCpmRow], image_token: int, device: torch.device, slots: int = 0) -> MiniCpmBatch:
    """The rows side by side.

    Args:
        slots: S; 0 takes the longest row's. With S given, shapes follow from it and from the rows' images alone.
    """
    tokens = torch.zeros(len(rows), slots or max(len(row.tokens) for row in rows), dtype=torch.int64)
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = torch.from_numpy(row.tokens)
        valid[index, : len(row.tokens)] = True
    images = (tokens == image_token) & valid
    return MiniCpmBatch(
        patches=torch.cat([row.patches for row in rows]).to(device),
        tokens=tokens.to(device),
        image_rows=torch.where(images, images.flatten().cumsum(0).view_as(tokens) - 1, -1).to(device),
        valid=valid[:, None, None].to(device),
        state=torch.stack([row.state for row in rows]).to(device),
        noise=torch.stack([row.noise for row in rows]).to(device),
        embodiments=tuple(row.embodiment for row in rows),
    )
