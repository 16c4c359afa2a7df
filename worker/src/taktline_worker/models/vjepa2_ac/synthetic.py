"""The planner's published size, and a world model of it with random weights as what its kernels are measured by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from taktline_worker.adapter import Phase
from taktline_worker.models.vjepa2_ac.config import (
    VJepa2Architecture,
    expected_encoder_shapes,
    expected_predictor_shapes,
)
from taktline_worker.models.vjepa2_ac.modules import CONDITIONING
from taktline_worker.models.vjepa2_ac.runner import VJepa2World
from taktline_worker.models.vjepa2_ac.weights import BF16, FP32, CheckpointFile, pack_weights

if TYPE_CHECKING:
    from taktline_worker.profiling.subject import Request

PUBLISHED = VJepa2Architecture(
    image_size=256,
    patch_size=16,
    encoder_width=1408,
    encoder_depth=40,
    encoder_heads=22,
    encoder_mlp=6144,
    width=1024,
    depth=24,
    heads=16,
    mlp=4096,
)
HORIZON = 2


class VJepa2Profile:
    """Units of candidates over random latents; a batch is the candidates of a unit.

    Args:
        worlds: by candidates.
    """

    policy = "vjepa2-ac"

    def __init__(self, worlds: dict[int, VJepa2World], precision: str) -> None:
        self._worlds, self.precision = worlds, precision
        self.device = str(next(iter(worlds.values())).device)
        self.captured = self.device != "cpu"
        self.shape = {"horizon": HORIZON}

    def phases(self, batch: int) -> Sequence[Phase]:
        """The one unit, with what its blocks' matrices compute and read."""
        world = self._worlds[batch]
        a = world.architecture
        matrices = a.depth * (4 * a.width * a.width + 2 * a.width * a.mlp)
        rows = HORIZON * batch * (a.tokens + CONDITIONING)
        return [Phase("unit", lambda: world._unit(HORIZON), 2.0 * rows * matrices, 2.0 * matrices)]

    def whole(self, batch: int) -> Callable[[], object]:
        """A unit as the planner launches it."""
        return lambda: self._worlds[batch]._launch(HORIZON)


def random_profile(name: str, request: Request, device: torch.device, precision: str) -> VJepa2Profile:
    """The published size, or so many layers of it as are asked for."""
    del name
    a = PUBLISHED
    if request.layers:
        a = replace(a, depth=request.layers, encoder_depth=request.layers)
    generator = torch.Generator(device=device).manual_seed(0)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        value = torch.randn(shape, generator=generator, device=device)
        if "norm" in name:
            return 0.1 * value + (1.0 if name.endswith("weight") else 0.0)
        return value * (0.02 if name.endswith("bias") else value[0].numel() ** -0.5)

    towers = [
        {name: made(name, shape) for name, shape in shapes(a).items()}
        for shapes in (expected_encoder_shapes, expected_predictor_shapes)
    ]
    checkpoint = CheckpointFile(Path("random"), towers[0], towers[1], a)
    weights = pack_weights(checkpoint, FP32 if precision == "fp32" else BF16, device)
    worlds = {}
    for candidates in request.batches:
        world = worlds[candidates] = VJepa2World(weights, a, candidates, HORIZON, quantised=precision == "fp8")
        for buffer in (world._patches, world._goal):
            buffer.normal_()
        world._actions.normal_(std=0.05)
        world.capture()
    return VJepa2Profile(worlds, precision)
