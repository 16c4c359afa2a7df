"""A random V-JEPA 2-AC of the published size and of realistic scale, made on the device, under canonical names."""

from __future__ import annotations

from pathlib import Path

import torch
from taktline_worker.models.vjepa2_ac.config import expected_encoder_shapes, expected_predictor_shapes
from taktline_worker.models.vjepa2_ac.synthetic import PUBLISHED
from taktline_worker.models.vjepa2_ac.weights import CheckpointFile
from torch import Tensor

_ACTION_BIAS, _ACTION_SCALE, _LOOK = 400.0, (200.0, 200.0, 200.0, 20.0, 20.0, 20.0, 20.0), 0.33
"""What makes energies differ between candidates as a trained model's do, and not by rounding alone: the action's
embedding is as large as the late residual stream, metres weigh as much as the gripper, and every head looks at the
action token with about a quarter of its weight, by four elements of its keys that no position turns."""


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
        return value.bfloat16().float()

    predictor = {name: made(name, shape) for name, shape in expected_predictor_shapes(PUBLISHED).items()}
    a = PUBLISHED
    towards = torch.randn(a.width, generator=generator, device=device)
    towards /= towards.norm()
    predictor["action_encoder.bias"] = (_ACTION_BIAS * towards).bfloat16().float()
    predictor["action_encoder.weight"] *= torch.tensor(_ACTION_SCALE, device=device)
    for layer in range(a.depth):
        query, key, _ = predictor[f"predictor_blocks.{layer}.attn.qkv.weight"].view(3, a.heads, a.head_dim, -1)
        query[:, -4:] = 0.0
        key[:, -4:] = (_LOOK * towards).bfloat16().float()
        predictor[f"predictor_blocks.{layer}.attn.qkv.bias"].view(3, a.heads, a.head_dim)[0, :, -4:] = 1.0
    encoder = {name: made(name, shape) for name, shape in expected_encoder_shapes(PUBLISHED).items()}
    return CheckpointFile(Path("random"), encoder, predictor, PUBLISHED)
