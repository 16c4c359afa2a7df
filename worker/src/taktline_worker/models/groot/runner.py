"""The runner of GR00T N1.7: rows laid out for one call, backbone and memory once, then the solver loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from taktline_worker.models.groot import modules
from taktline_worker.models.groot.config import GrootArchitecture
from taktline_worker.models.groot.rtc import RtcRow
from taktline_worker.models.groot.weights import GrootWeights

StepObserver = Callable[[int, Tensor, Tensor], None]
"""Called with (step, x before it, velocity), for tests that compare step by step."""


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
        index: int64 (B, n), n of the row that has most.
        valid: bool (B, 1, 1, n).
    """

    index: Tensor
    valid: Tensor

    @classmethod
    def of(cls, kept: Tensor, device: torch.device) -> Places:
        """The slots that `kept`, bool (B, S) on the CPU, marks."""
        counts = kept.sum(dim=1)
        most = max(1, int(counts.max()))
        index = torch.argsort(kept, dim=1, descending=True, stable=True)[:, :most]
        return cls(index.to(device), (torch.arange(most) < counts[:, None])[:, None, None].to(device))

    def take(self, features: Tensor) -> Tensor:
        """(B, S, width) -> (B, n, width)."""
        return features.gather(1, self.index[..., None].expand(-1, -1, features.shape[-1]))


@dataclass(frozen=True, slots=True)
class Features:
    """The backbone's answer.

    Attributes:
        backbone: (B, S, width), before the head's own norm.
        refined: the same after norm and vision-language self-attention.
        text: where each row's text tokens stand, and which of these places are real; `image` likewise, `all` of both.
    """

    backbone: Tensor
    refined: Tensor
    text: Places
    image: Places
    all: Places


class GrootRunner:
    """Runs batches of mixed embodiments, image counts and prompt lengths; a row's answer is the one it gets alone.

    Position tables are kept by image grid: their scope is the checkpoint.
    """

    def __init__(self, weights: GrootWeights, architecture: GrootArchitecture) -> None:
        self.weights = weights
        self.architecture = architecture
        self.device = weights.text.embedding.device
        self._tables: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    @torch.inference_mode()
    def run(self, rows: Sequence[GrootRow], observer: StepObserver | None = None) -> Tensor:
        """fp32 (B, H, action width) on the CPU, normalised units."""
        a, weights = self.architecture, self.weights
        features = self.features(rows)
        slots = torch.tensor([row.embodiment for row in rows])
        projectors = [
            ((slots == slot).nonzero()[:, 0].to(self.device), weights.head.projectors[slot])
            for slot in sorted(set(slots.tolist()))
        ]
        given = torch.stack([row.state for row in rows]).to(self.device, weights.dtype)
        state = given.new_empty(len(rows), a.head.width)
        for index, projector in projectors:
            state[index] = modules.embed_state(projector, given[index])
        seen = self._memories(features)
        x = torch.stack([_start(row) for row in rows]).to(self.device, weights.dtype)
        strength = _strength(rows)
        strength = None if strength is None else strength.to(self.device, weights.dtype)
        dt = 1.0 / a.head.solver_steps
        for step in range(a.head.solver_steps):
            velocity = modules.velocity(weights, a, projectors, state, x, step, seen)
            if observer is not None:
                observer(step, x, velocity)
            x = x + dt * (velocity if strength is None else velocity * strength)
        return x.float().cpu()

    @torch.inference_mode()
    def features(self, rows: Sequence[GrootRow]) -> Features:
        """Vision, text and refinement of a batch."""
        a, weights = self.architecture, self.weights
        images, deep = self._images(rows)
        tokens, valid = _padded([row.tokens for row in rows])
        is_image = (tokens == a.text.image_token) & valid
        positions = torch.zeros(*tokens.shape, 3, dtype=torch.int64)
        for index, row in enumerate(rows):
            positions[index, : len(row.tokens)] = text_positions(row, a.text.image_token, a.vision.merge)
        cos, sin = modules.text_rope(a.text, positions.to(self.device))
        slots = is_image.flatten().nonzero()[:, 0].to(self.device)
        backbone = modules.encode_text(weights.text, a.text, tokens.to(self.device), slots, images, deep, cos, sin)
        refined = modules.refine(weights.head, a.head.vl_heads, backbone, valid.to(self.device))
        text, image, both = (Places.of(kept, self.device) for kept in (valid & ~is_image, is_image, valid))
        return Features(backbone, refined, text, image, both)

    def _memories(self, features: Features) -> list[tuple[Tensor, Tensor, Tensor] | None]:
        """What each block of the diffusion transformer attends to beside the action tokens, once a request.

        A block that reads the text, or the images, projects those tokens alone.
        """
        head = self.architecture.head
        places = {True: features.text, False: features.image, None: features.all}
        taken: dict[bool | None, Tensor] = {}
        found: list[tuple[Tensor, Tensor, Tensor] | None] = []
        for index, block in enumerate(self.weights.head.blocks):
            if not block.crosses:
                found.append(None)
                continue
            to_text = index % (2 * head.text_every) == 0 if head.text_every else None
            if to_text not in taken:
                taken[to_text] = places[to_text].take(features.refined)
            keys, values = modules.memory(block.attention, head.heads, taken[to_text])
            found.append((keys, values, places[to_text].valid))
        return found

    def _images(self, rows: Sequence[GrootRow]) -> tuple[Tensor, list[Tensor]]:
        """Features of all images in the order of rows, images of one grid in one call."""
        patches = [one for row in rows for one in row.patches]
        grids = [grid for row in rows for grid in row.grids]
        parts: list[list[Tensor]] = [[] for _ in patches]
        for grid in dict.fromkeys(grids):
            own = [index for index, other in enumerate(grids) if other == grid]
            batch = torch.stack([patches[index] for index in own]).to(self.device, self.weights.dtype)
            vision = self.architecture.vision
            features, deep = modules.encode_images(self.weights.vision, vision, batch, *self._grid_tables(grid))
            for place, index in enumerate(own):
                parts[index] = [features[place], *(one[place] for one in deep)]
        joined = [torch.cat(level) for level in zip(*parts, strict=True)]
        return joined[0], joined[1:]

    def _grid_tables(self, grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        if grid not in self._tables:
            vision = self.architecture.vision
            positions = modules.vision_positions(self.weights.vision.positions, *grid, vision.merge)
            cos, sin = modules.vision_rope(vision, *grid)
            self._tables[grid] = positions, cos.to(self.device), sin.to(self.device)
        return self._tables[grid]


def _start(row: GrootRow) -> Tensor:
    return row.noise if row.rtc is None else torch.where(row.rtc.strength < 1.0, row.rtc.start, row.noise)


def _strength(rows: Sequence[GrootRow]) -> Tensor | None:
    """(B, H, action width), 1 for rows without a tail; None where no row has one."""
    if all(row.rtc is None for row in rows):
        return None
    return torch.stack([torch.ones_like(row.noise) if row.rtc is None else row.rtc.strength for row in rows])


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


def _padded(rows: Sequence[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
    """Tokens (B, S) with zeros behind each row's end, and which of them are valid."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.from_numpy(row)
    return tokens, torch.arange(tokens.shape[1])[None] < lengths[:, None]
