"""Every dimension of the demo policy, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from taktline_demo.task import FRAME_PIXELS, HORIZON


@dataclass(frozen=True)
class Architecture:
    """Sizes of the three towers; both language towers share depth, heads and head size, and have one key/value head."""

    image_size: int = FRAME_PIXELS
    patch_size: int = 14
    vision_layers: int = 4
    vision_width: int = 96
    vision_heads: int = 4
    vision_mlp: int = 320
    depth: int = 5
    heads: int = 8
    head_dim: int = 32
    prefix_width: int = 160
    prefix_mlp: int = 448
    expert_width: int = 128
    expert_mlp: int = 320
    vocabulary: int = 640
    action_width: int = 32
    """Padded action width, as in every published π0.5."""
    state_dim: int = 4
    action_dim: int = 4
    horizon: int = HORIZON
    prompt_tokens: int = 64
    solver_steps: int = 10
    min_period: float = 0.004
    max_period: float = 4.0

    @property
    def tokens_per_image(self) -> int:
        """Patches of one camera."""
        return (self.image_size // self.patch_size) ** 2
