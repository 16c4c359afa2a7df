"""The runner of GR00T N1.7: backbone and memory once, then the solver loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from taktline_kernels.selector import Choice, default_selector
from torch import Tensor

from taktline_worker.branches import Branch
from taktline_worker.graph_parts import cut
from taktline_worker.models.groot import modules
from taktline_worker.models.groot.batch import Grid, GrootBatch, GrootRow, lay_out
from taktline_worker.models.groot.config import GrootArchitecture, HeadConfig
from taktline_worker.models.groot.weights import GrootWeights, HeadWeights, Projector, reads_text

if TYPE_CHECKING:
    from taktline_worker.models.groot.chain import HeadChain

logger = logging.getLogger(__name__)

_HOPPER = 9
_MAX_TABLES = 32
StepObserver = Callable[[int, Tensor, Tensor], None]
"""Called with (step, x before it, velocity), for tests that compare step by step."""


@dataclass(frozen=True, slots=True)
class Features:
    """The backbone's answer.

    Attributes:
        backbone: (B, S, width), before the head's own norm.
        refined: the same after norm and vision-language self-attention.
    """

    backbone: Tensor
    refined: Tensor


class GrootRunner:
    """Runs batches of mixed embodiments, image counts and prompt lengths; a row's answer is the one it gets alone.

    Position tables are kept by image grid and number of images, the latest ones and all that captured graphs read.
    """

    def __init__(self, weights: GrootWeights, architecture: GrootArchitecture) -> None:
        self.weights = weights
        self.architecture = architecture
        self.device = weights.text.embedding.device
        frequencies, axes = modules.text_frequencies(architecture.text)
        self._frequencies, self._axes = frequencies.to(self.device), axes.to(self.device)
        self._tables: dict[tuple[Grid, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._captured: dict[tuple[Grid, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._chain = _head_chain(weights.head, architecture.head)

    @torch.inference_mode()
    def run(self, rows: Sequence[GrootRow], observer: StepObserver | None = None) -> Tensor:
        """fp32 (B, H, action width) on the CPU, normalised units."""
        return self.compute(lay_out(rows, self.architecture).to(self.device), observer).float().cpu()

    @torch.inference_mode()
    def compute(self, batch: GrootBatch, observer: StepObserver | None = None) -> Tensor:
        """(B, H, action width) of a batch on the device, in the weights' dtype; reads nothing back from it."""
        beside: list[Branch[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor | None]]]] = []

        def begun() -> None:
            cut()
            # What needs no image runs beside the vision tower.
            beside.append(Branch(self.device, lambda: (self._rotation(batch), self._first_tokens(batch))))

        images, deep = self.encode_images(batch, begun)
        rotation, first = beside[0].join()
        cut()
        refined = self.encode_text(batch, images, deep, rotation).refined
        return self.solve(batch, refined, observer, first)

    @torch.inference_mode()
    def encode(self, batch: GrootBatch) -> Features:
        """Vision, text and refinement of a batch on the device."""
        return self.encode_text(batch, *self.encode_images(batch))

    @torch.inference_mode()
    def encode_images(
        self, batch: GrootBatch, begun: Callable[[], object] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """(image tokens, text width) in the order of `image_slots`, and the same of each deepstack block.

        Args:
            begun: as `modules.encode_images` takes it, for the first grid.
        """
        a, weights = self.architecture, self.weights
        parts = []
        for patches, grid in zip(batch.patches, batch.grids, strict=True):
            tables = self.tables(grid, len(patches))
            given = patches.to(weights.dtype)
            features, deep = modules.encode_images(weights.vision, a.vision, given, *tables, begun)
            begun = None
            parts.append([one.flatten(0, 1) for one in (features, *deep)])
        images, *deep = [torch.cat(level) if len(level) > 1 else level[0] for level in zip(*parts, strict=True)]
        return images, deep

    @torch.inference_mode()
    def encode_text(
        self, batch: GrootBatch, images: Tensor, deep: list[Tensor], rotation: tuple[Tensor, Tensor] | None = None
    ) -> Features:
        """Text layers and refinement over what `encode_images` gave; `rotation` where it has been made."""
        a, weights = self.architecture, self.weights
        cos, sin = rotation or self._rotation(batch)
        backbone = modules.encode_text(weights.text, a.text, batch.tokens, batch.image_slots, images, deep, cos, sin)
        return Features(backbone, modules.refine(weights.head, a.head.vl_heads, backbone, batch.all.valid))

    @torch.inference_mode()
    def solve(
        self,
        batch: GrootBatch,
        refined: Tensor,
        observer: StepObserver | None = None,
        first: tuple[Tensor, Tensor | None] | None = None,
    ) -> Tensor:
        """The action head over `refined`: keys and values once, then the solver steps; as `compute`.

        Args:
            first: what `_first_tokens` gives, where it has been made.
        """
        a, weights = self.architecture, self.weights
        seen = self._memories(batch, refined)
        projectors = self._projectors(batch)
        state, rows = first or self._first_tokens(batch)
        x, strength = batch.start.to(weights.dtype), batch.strength.to(weights.dtype)
        dt = 1.0 / a.head.solver_steps
        chain = self._chain
        if rows is None or observer is not None or chain is None or not chain.takes(1 + x.shape[1], seen):
            chain = None
        limit = "one row, in bf16 on Hopper"
        shape = {"batch": len(x), "tokens": 1 + x.shape[1]}
        choice = Choice("blocks", f"the kernel chain is for {limit}") if chain is None else Choice("chain", limit)
        default_selector().note("head", shape, weights.dtype, x.device, choice)
        if chain is not None and rows is not None:
            for step in range(a.head.solver_steps):
                x = chain(batch.embodiments[0], x, strength, rows, step, seen, dt)
            return x
        for step in range(a.head.solver_steps):
            velocity = modules.velocity(weights, a, projectors, state, x, step, seen)
            if observer is not None:
                observer(step, x, velocity)
            x = torch.addcmul(x, velocity, strength, value=dt)
        return x

    def tables(self, grid: Grid, images: int) -> tuple[Tensor, Tensor, Tensor]:
        """Position embeddings (images, P, width) and the rotation's cosine and sine (P, half a head) of a grid."""
        key = grid, images
        if key in self._captured:
            return self._captured[key]
        found = self._tables.pop(key) if key in self._tables else self._made(grid, images)
        self._tables[key] = found
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured[key] = self._tables.pop(key)
        if len(self._tables) > _MAX_TABLES:
            del self._tables[next(iter(self._tables))]
        return found

    def _made(self, grid: Grid, images: int) -> tuple[Tensor, Tensor, Tensor]:
        vision = self.architecture.vision
        positions = modules.vision_positions(self.weights.vision.positions, *grid, vision.merge)
        cos, sin = modules.vision_rope(vision, *grid)
        positions = positions.to(self.weights.dtype).expand(images, -1, -1).contiguous()
        return positions, cos.to(self.device), sin.to(self.device)

    def _rotation(self, batch: GrootBatch) -> tuple[Tensor, Tensor]:
        return modules.text_rope(self._frequencies, self._axes, batch.positions)

    def _first_tokens(self, batch: GrootBatch) -> tuple[Tensor, Tensor | None]:
        """The states embedded (B, width), and for one row what its chain's steps begin with, where there is one."""
        given = batch.state.to(self.weights.dtype)
        state = modules.by_rows(self._projectors(batch), given, modules.embed_state)
        if self._chain is None or len(state) > 1:
            return state, None
        return state, self._chain.rows(batch.embodiments[0], state)

    def _projectors(self, batch: GrootBatch) -> list[tuple[Tensor | slice, Projector]]:
        """The rows of each embodiment and its projections; all rows of one embodiment need no index."""
        own = self.weights.head.projectors
        distinct = sorted(set(batch.embodiments))
        if len(distinct) == 1:
            return [(slice(None), own[distinct[0]])]
        slots = torch.tensor(batch.embodiments)
        return [((slots == slot).nonzero()[:, 0].to(self.device), own[slot]) for slot in distinct]

    def _memories(self, batch: GrootBatch, refined: Tensor) -> list[tuple[Tensor, Tensor, Tensor] | None]:
        """What each block of the diffusion transformer attends to beside the action tokens, once a request.

        A block that reads the text, or the images, projects those tokens alone.
        """
        head, weights = self.architecture.head, self.weights.head
        places = {True: batch.text, False: batch.image, None: batch.all}
        made = {
            place: iter(modules.memory(projection, head, places[place].take(refined)))
            for place, projection in weights.memories.items()
        }
        found: list[tuple[Tensor, Tensor, Tensor] | None] = []
        for index, block in enumerate(weights.blocks):
            place = reads_text(head, index)
            found.append((*next(made[place]), places[place].valid) if block.attention.crosses else None)
        return found


def _head_chain(head: HeadWeights, h: HeadConfig) -> HeadChain | None:
    """The head's blocks as a chain of kernels, where this GPU and the head's dimensions have one."""
    weight = head.blocks[0].fc1.weight
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return None
    if torch.cuda.get_device_capability(weight.device)[0] != _HOPPER:
        return None
    from taktline_worker.models.groot.chain import HeadChain  # only a machine with a GPU has what it imports

    if not HeadChain.suits(h, weight.shape[0]):
        return None
    try:
        return HeadChain(head)
    except RuntimeError as error:
        logger.warning("the action head's kernel chain is not used: it cannot be compiled or loaded here: %s", error)
        return None
