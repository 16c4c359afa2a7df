"""Runs a checkpoint of the demo policy directly, without the platform: the training's own yardstick."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from taktline_demo.arm import CAMERAS
from taktline_demo.jpeg import decode_jpeg
from taktline_demo.policy.architecture import Architecture
from taktline_demo.policy.checkpoint import load_checkpoint, load_statistics
from taktline_demo.policy.network import DemoPolicy
from taktline_demo.policy.prompt import discretise
from taktline_demo.policy.tokenizer import load_tokenizer
from taktline_demo.policy.training_data import encode_prompt


class DirectPolicy:
    """A loaded checkpoint: JPEG frames, state and instruction in, joint targets out."""

    def __init__(self, folder: Path, *, random_weights_seed: int | None = None) -> None:
        """Reads `folder`. A `random_weights_seed` replaces the weights by untrained ones: the control experiment."""
        if random_weights_seed is None:
            self._policy, self._statistics = load_checkpoint(folder)
        else:
            torch.manual_seed(random_weights_seed)
            self._policy, self._statistics = DemoPolicy(Architecture()).eval(), load_statistics(folder)
        self._tokenizer: Any = load_tokenizer(folder / "tokenizer")

    @torch.no_grad()
    def act(
        self, images: dict[str, bytes], state: NDArray[np.float32], instruction: str, seed: int
    ) -> NDArray[np.float32]:
        """The action chunk, joint targets in rad, float32, shape (H, 4); `seed` fixes the solver's noise."""
        a = self._policy.architecture
        frames = np.stack([decode_jpeg(images[name]) for name in CAMERAS])
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)[None].float() / 255.0 * 2.0 - 1.0
        bins = discretise(self._statistics["observation.state"].normalise(state))
        tokens = torch.tensor([encode_prompt(self._tokenizer, instruction, bins)])
        prefix = self._policy.encode(pixels, tokens, torch.ones_like(tokens, dtype=torch.bool))
        noise = torch.randn(a.horizon, a.action_width, generator=torch.Generator().manual_seed(seed))
        sampled = self._policy.sample(prefix, noise[None])[0, :, : a.action_dim]
        return self._statistics["action"].restore(sampled.numpy())
