"""What known mistakes do to the golden values: each must show by far more than the parity tests let pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from taktline_worker.models.vjepa2_ac import modules, poses, rope
from torch import Tensor
from torch.nn import functional

Patch = Callable[[pytest.MonkeyPatch], None]


def measure(golden: Path, kit: Any) -> tuple[float, float, float]:
    """Largest latent error, mean latent error and largest energy error of the stored rollout."""
    case = load_file(golden / "full" / "rollout.safetensors")
    world = kit.world(micro_batch=8)
    latents: list[Tensor] = []
    energies = world.rollout(
        world.prepare(kit.scene(world)), case["actions"], lambda step, raw, z, pose: latents.append(z.clone())
    )
    errors = (torch.stack(latents, dim=1) - case["latents"][:, 1:]).abs()
    return float(errors.max()), float(errors.mean()), float((energies - case["energies"]).abs().max())


def matched_rope(patch: pytest.MonkeyPatch) -> None:
    """Angles interleaved like their partners: what a library kernel does, or a well-meant repair."""
    tables = rope.tables

    def repaired(positions: Tensor, head_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        width = rope.axis_width(head_dim)
        cos, sin = tables(positions, head_dim, dtype)
        order = torch.arange(width // 2).repeat_interleave(2)
        index = torch.cat([axis * width + order for axis in range(3)])
        sign = torch.tensor([-1.0, 1.0]).repeat(len(index) // 2)
        rest = torch.arange(len(index), head_dim)
        magnitude = (sin[..., : len(index)] * sign)[..., index]
        return (
            torch.cat((cos[..., index], cos[..., rest]), dim=-1),
            torch.cat((magnitude * sign, sin[..., rest]), dim=-1),
        )

    patch.setattr(rope, "tables", repaired)


def patch_coordinates_for_conditioning(patch: pytest.MonkeyPatch) -> None:
    positions = rope.frame_positions

    def counted(grid: int, frame: int, conditioning: int = 0) -> Tensor:
        found = positions(grid, frame, conditioning)
        found[:conditioning, 1] = torch.arange(conditioning) + 1
        return found

    patch.setattr(rope, "frame_positions", counted)


def no_latent_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modules, "latent_norm", lambda x: x)


def start_pose_at_every_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(poses, "integrate", lambda pose, action: pose)


def tanh_gelu(patch: pytest.MonkeyPatch) -> None:
    exact = functional.gelu
    patch.setattr(modules.functional, "gelu", lambda x: exact(x, approximate="tanh"))


def block_epsilon(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modules, "BLOCK_NORM_EPS", 1e-5)


def no_memory_of_earlier_frames(patch: pytest.MonkeyPatch) -> None:
    frame = modules.predictor_frame

    def forgetful(w: Any, x: Tensor, keys: Tensor, values: Tensor, start: int, cos: Tensor, sin: Tensor) -> Tensor:
        return frame(w, x, keys, values, 0, cos, sin)

    patch.setattr(modules, "predictor_frame", forgetful)


def test_the_right_code_passes(golden: Path, kit: Any) -> None:
    largest, mean, energy = measure(golden, kit)
    assert largest <= 1e-4
    assert mean <= 6e-6
    assert energy <= 2e-6


@pytest.mark.parametrize(
    ("mistake", "largest", "mean", "energy"),
    [
        (matched_rope, 1.0, 0.0, 1e-2),
        (patch_coordinates_for_conditioning, 1e-2, 0.0, 1e-4),
        (no_latent_norm, 0.1, 0.0, 1e-2),
        (start_pose_at_every_step, 0.1, 0.0, 1e-3),
        (no_memory_of_earlier_frames, 0.1, 0.0, 1e-3),
        # These two leave energies and elites almost as they are: the mean error of the latents is what sees them.
        (tanh_gelu, 3e-4, 3e-5, 0.0),
        (block_epsilon, 4e-5, 8e-6, 0.0),
    ],
)
def test_a_mistake_shows(
    golden: Path,
    kit: Any,
    monkeypatch: pytest.MonkeyPatch,
    mistake: Patch,
    largest: float,
    mean: float,
    energy: float,
) -> None:
    mistake(monkeypatch)
    found = measure(golden, kit)
    assert found[0] >= largest
    assert found[1] >= mean
    assert found[2] >= energy


def test_the_order_of_action_and_state_tokens_does_not_matter(
    golden: Path, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sit at one position and neither is read: an official property, here by swapping them."""
    assemble = modules.frame_tokens

    def swapped(*values: Any) -> Tensor:
        tokens = assemble(*values)
        return torch.cat((tokens[:, 1:2], tokens[:, :1], tokens[:, 2:]), dim=1)

    monkeypatch.setattr(modules, "frame_tokens", swapped)
    assert measure(golden, kit)[2] <= 2e-6
