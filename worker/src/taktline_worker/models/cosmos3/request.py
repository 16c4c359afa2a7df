"""What one request to a Cosmos3 policy is: the settings that all rows share, a row, its noise, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LATENT_CHANNELS = 48
SPATIAL_FACTOR = 16
"""Pixels of one latent cell along each side."""
TEMPORAL_FACTOR = 4
"""Frames of one latent frame; the first frame has a latent frame of its own."""


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Shape and solver of the requests that a policy is served with.

    Attributes:
        name: `official` (what the released weights were trained for), `paper` (a published benchmark's shape), or
            any other name of a caller's own.
        frames: video frames, the observed one included.
        encoded_frames: of these, how many are encoded; 1 = the observed frame only, which is all that is read.
        padded: (height, width) in pixels of the frames that the VAE gets.
        content: (height, width) in pixels of what is no padding; latent cells past it are cut off before denoising.
        fps: frames and actions a second; both have positions in time that depend on it.
        actions: rows of the answer.
        state_row: whether a clean row with the current state stands before the actions.
        raw_dims: numbers of an action that mean something; the rest of the row is zero.
        domain: row of the embodiment tables.
        steps: solver steps.
        shift: warp of the solver's noise levels.
        guidance: weight of classifier-free guidance; 1 = the conditional branch alone.
        interval: integer times strictly between these run guidance, all others the conditional branch alone;
            None = guidance at each step.
    """

    name: str = "official"
    frames: int = 33
    encoded_frames: int = 1
    padded: tuple[int, int] = (544, 736)
    content: tuple[int, int] = (540, 640)
    fps: float = 15.0
    actions: int = 32
    state_row: bool = True
    raw_dims: int = 8
    domain: int = 8
    steps: int = 4
    shift: float = 5.0
    guidance: float = 3.0
    interval: tuple[float, float] | None = None

    @property
    def latent_grid(self) -> tuple[int, int, int]:
        """(latent frames, rows, columns) that are denoised."""
        height, width = self.content
        return (self.frames - 1) // TEMPORAL_FACTOR + 1, height // SPATIAL_FACTOR, width // SPATIAL_FACTOR

    @property
    def action_rows(self) -> int:
        """Rows of the action sequence, the state row included."""
        return self.actions + int(self.state_row)

    @property
    def action_offset(self) -> int:
        """Position in time of the first action row, in frames after the observed one."""
        return 0 if self.state_row else 1


OFFICIAL = RequestSettings()
PAPER = RequestSettings(
    name="paper",
    padded=(480, 832),
    content=(480, 832),
    state_row=False,
    raw_dims=10,
)
PRESETS = {settings.name: settings for settings in (OFFICIAL, PAPER)}


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """One row of a batch: what the processor makes of an observation and what the runner takes.

    Attributes:
        conditional: token ids of the instruction's prompt, the two specials at the end included.
        unconditional: token ids of the empty prompt, likewise.
        frames: fp32 (3, encoded_frames, *padded) in [-1, 1], padding filled.
        state: fp32 (raw_dims,) in the model's units (gripper already turned round); None without a state row.
        video_noise: fp32 (48, *latent_grid).
        action_noise: fp32 (action_rows, action width), zero past raw_dims.
        imagine: whether the denoised latents are wanted with the actions.
    """

    conditional: tuple[int, ...]
    unconditional: tuple[int, ...]
    frames: Tensor
    state: Tensor | None
    video_noise: Tensor
    action_noise: Tensor
    imagine: bool = False


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """The runner's answer to one row, on the CPU.

    Attributes:
        actions: fp32 (actions, raw_dims) in the model's units, the state row dropped.
        latents: fp32 (48, *latent_grid), normalised as `vae.encode` gives them; None where not asked for.
    """

    actions: Tensor
    latents: Tensor | None


def draw_noise(settings: RequestSettings, action_width: int, seed: int) -> tuple[Tensor, Tensor]:
    """The noise of a request: (48, *latent_grid) and (action_rows, action_width), fp32.

    Both are drawn from generators of the same seed, as the official server does, and for clean slots as well.
    """
    video = np.random.RandomState(seed).standard_normal((LATENT_CHANNELS, *settings.latent_grid))
    actions = np.random.RandomState(seed).standard_normal((settings.action_rows, action_width))
    actions[:, settings.raw_dims :] = 0.0
    return torch.from_numpy(video.astype(np.float32)), torch.from_numpy(actions.astype(np.float32))
