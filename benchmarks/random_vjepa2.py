"""A random V-JEPA 2-AC of the published size and of realistic scale, made on the device, under canonical names."""

from __future__ import annotations

from pathlib import Path

import torch
from taktline_worker.models.vjepa2_ac.config import (
    VJepa2Architecture,
    expected_encoder_shapes,
    expected_predictor_shapes,
)
from taktline_worker.models.vjepa2_ac.weights import CheckpointFile
from torch import Tensor

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
_ACTION_SCALE = 20.0
"""Actions are some centimetres: their embedding is made this much larger than a unit input's, so that energies differ
between candidates as a trained model's do and not by rounding alone."""


def random_checkpoint(device: torch.device, seed: int = 0) -> CheckpointFile:
    """Both towers in fp32 with bf16-representable values; matrices have variance 1 / fan-in, norms scatter around 1."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        value = torch.randn(shape, generator=generator, device=device)
        if "norm" in name:
            value = 0.1 * value + (1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            value *= 0.02
        else:
            value *= value[0].numel() ** -0.5
            value *= _ACTION_SCALE if name == "action_encoder.weight" else 1.0
        return value.bfloat16().float()

    return CheckpointFile(
        path=Path("random"),
        encoder={name: made(name, shape) for name, shape in expected_encoder_shapes(PUBLISHED).items()},
        predictor={name: made(name, shape) for name, shape in expected_predictor_shapes(PUBLISHED).items()},
        architecture=PUBLISHED,
    )
