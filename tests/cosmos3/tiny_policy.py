"""Tiny random Cosmos3 policies in the published layout, and a request stated with diffusers' model and solver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from taktline_worker.models.cosmos3.request import OFFICIAL, PAPER, PolicyRequest, RequestSettings, draw_noise
from torch import Tensor

ACTION_WIDTH = 12
DOMAINS = 10
VOCABULARY = 96
NANO: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_axes_dim": (4, 2, 2),
    "rope_theta": 5e6,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "action_gen": True,
    "action_dim": ACTION_WIDTH,
    "num_embodiment_domains": DOMAINS,
}
EDGE: dict[str, Any] = NANO | {
    "hidden_act": "relu2",
    "qk_norm_for_text": False,
    "use_und_k_norm_for_gen": True,
    "rope_theta": 1e8,
    "rms_norm_eps": 1e-5,
}
KINDS = {"nano": NANO, "edge": EDGE}

# An odd number of latent rows, as the official request has, and padding that is cut off.
OFFICIAL_TINY = replace(OFFICIAL, frames=9, padded=(96, 128), content=(92, 96), actions=8, raw_dims=5, domain=3)
PAPER_TINY = replace(
    PAPER, frames=9, encoded_frames=9, padded=(64, 96), content=(64, 96), actions=8, raw_dims=6, domain=4
)
EDGE_TINY = replace(OFFICIAL_TINY, interval=(960.0, 1001.0))


def make_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A diffusers transformer whose every tensor is random, the scales of norms included."""
    from diffusers import Cosmos3OmniTransformer

    model = Cosmos3OmniTransformer(**KINDS[kind] | changes).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                tensor.copy_(1.0 + 0.2 * noise)
            elif tensor.dim() == 2 and "embed_tokens" not in name and "action_proj" not in name:
                tensor.copy_(noise * tensor.shape[1] ** -0.5)
            else:
                tensor.copy_(noise * 0.3)
    return model


def write_checkpoint(model: Any, folder: Path) -> None:
    """The transformer's part of a published policy folder."""
    model.save_pretrained(folder / "transformer")
    (folder / "checkpoint.json").write_text("{}")


def fake_encoder(frames: Tensor) -> Tensor:
    """Stands in for the VAE, which has parity tests of its own: fixed random latents that depend on the pixels."""
    grid = (1 + (frames.shape[2] - 1) // 4, frames.shape[3] // 16, frames.shape[4] // 16)
    pooled = torch.nn.functional.adaptive_avg_pool3d(frames, grid)
    mixing = torch.randn(48, 3, generator=torch.Generator().manual_seed(7))
    return torch.einsum("cd,bdthw->bcthw", mixing, pooled) * 3.0


def make_request(
    settings: RequestSettings, seed: int, length: int = 9, empty: tuple[int, ...] = (5, 11, 20), imagine: bool = False
) -> PolicyRequest:
    """A random row."""
    random = np.random.default_rng(seed)
    video, actions = draw_noise(settings, ACTION_WIDTH, seed)
    frames = random.uniform(-1.0, 1.0, (3, settings.encoded_frames, *settings.padded)).astype(np.float32)
    state = random.normal(size=settings.raw_dims).astype(np.float32)
    return PolicyRequest(
        conditional=tuple(random.integers(0, VOCABULARY, length).tolist()),
        unconditional=empty,
        frames=torch.from_numpy(frames),
        state=torch.from_numpy(state) if settings.state_row else None,
        video_noise=video,
        action_noise=actions,
        imagine=imagine,
    )


def make_scheduler(settings: RequestSettings) -> Any:
    """diffusers' UniPC with the noise levels of the official server."""
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=settings.shift, solver_order=2
    )
    scheduler.set_timesteps(settings.steps, sigmas=np.linspace(0.999, 0.0, settings.steps + 1)[:-1])
    return scheduler


class Statement:
    """One policy request, stated with diffusers' transformer and solver; only the clean state row is laid out here."""

    def __init__(self, model: Any, settings: RequestSettings) -> None:
        self.model, self.settings = model, settings

    def velocities(self, tokens: tuple[int, ...], latents: Tensor, actions: Tensor, time: int) -> tuple[Tensor, Tensor]:
        """Velocities (48, t, h, w) and (rows, width) of one branch, zero where nothing is noised."""
        from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import (
            get_3d_mrope_ids_text_tokens,
            get_3d_mrope_ids_vae_tokens,
        )

        s, length = self.settings, len(tokens)
        frames, height, width = s.latent_grid
        rows, columns = -(-height // 2), -(-width // 2)
        text, after = get_3d_mrope_ids_text_tokens(length, 0)
        origin = after + self.model.config.unified_3d_mrope_temporal_modality_margin
        video = get_3d_mrope_ids_vae_tokens(frames, rows, columns, origin, fps=s.fps, temporal_compression_factor=4)[0]
        moves = get_3d_mrope_ids_vae_tokens(
            *(s.action_rows, 1, 1, origin),
            fps=s.fps,
            temporal_compression_factor=1,
            base_temporal_compression_factor=4,
            start_frame_offset=s.action_offset,
        )[0]
        first = int(s.state_row)
        video_start, action_start = length, length + frames * rows * columns
        noised = torch.arange(first, s.action_rows)
        count = (frames - 1) * rows * columns
        with torch.no_grad():
            out = self.model(
                input_ids=torch.tensor(tokens),
                text_indexes=torch.arange(length),
                position_ids=torch.cat((text, video, moves), dim=1),
                und_len=length,
                sequence_length=action_start + s.action_rows,
                vision_tokens=[latents[None].to(self.model.dtype)],
                vision_token_shapes=[(frames, rows, columns)],
                vision_sequence_indexes=torch.arange(video_start, action_start),
                vision_mse_loss_indexes=torch.arange(video_start + rows * columns, action_start),
                vision_timesteps=torch.full((count,), time),
                vision_noisy_frame_indexes=[torch.arange(1, frames)],
                action_tokens=[actions.to(self.model.dtype)],
                action_token_shapes=[(s.action_rows, 1, 1)],
                action_sequence_indexes=torch.arange(action_start, action_start + s.action_rows),
                action_mse_loss_indexes=action_start + noised,
                action_timesteps=torch.full((s.actions,), time),
                action_noisy_frame_indexes=[noised],
                action_domain_ids=[torch.tensor(s.domain)],
            )
        of_video, of_actions = out.sample[0][0].float(), out.action[0].float()
        of_actions[:, s.raw_dims :] = 0.0
        return of_video, of_actions

    def run(self, row: PolicyRequest) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
        """Guided velocities of every step, then the final latents (48, t, h, w) and actions (actions, raw_dims)."""
        s = self.settings
        _, height, width = s.latent_grid
        clean = fake_encoder(row.frames[None])[0, :, :1, :height, :width]
        latents = torch.cat((clean, row.video_noise[:, 1:]), dim=1)
        actions = row.action_noise.clone()
        if row.state is not None:
            actions[0, : s.raw_dims] = row.state
        of_video, of_actions = make_scheduler(s), make_scheduler(s)
        steps = []
        for time in of_video.timesteps:
            at = int(time)
            video, moves = self.velocities(row.conditional, latents, actions, at)
            if s.guidance != 1.0 and (s.interval is None or s.interval[0] < at < s.interval[1]):
                others = self.velocities(row.unconditional, latents, actions, at)
                video = others[0] + s.guidance * (video - others[0])
                moves = others[1] + s.guidance * (moves - others[1])
            steps.append((video, moves))
            latents = of_video.step(video[None], time, latents[None], return_dict=False)[0][0]
            actions = of_actions.step(moves[None], time, actions[None], return_dict=False)[0][0]
        return steps, latents, actions[int(s.state_row) :, : s.raw_dims]
