"""Tiny random VAEs in the published layout, for tests: made by the oracle itself."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import save_file
from taktline_worker.models.cosmos3.vae_config import VAE_FOLDER, VAE_STEM


def tiny_vae(seed: int = 0, latents: int = 48) -> AutoencoderKLWan:
    """The oracle with every structural piece of the published VAE at a fraction of its width, fp32."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    vae = AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=12,
        z_dim=latents,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=2,
        temperal_downsample=[False, True, True],
        latents_mean=torch.randn(latents, generator=draw).tolist(),
        latents_std=(0.5 + torch.rand(latents, generator=draw)).tolist(),
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )
    for name, parameter in vae.named_parameters():
        if name.endswith("gamma"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return vae.eval().requires_grad_(False)


def save_vae(folder: Path, vae: AutoencoderKLWan) -> Path:
    """Writes `folder`/vae as it is published; returns `folder`."""
    target = folder / VAE_FOLDER
    target.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in vae.config.items() if not key.startswith("_")}
    (target / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKLWan", **config}))
    tensors = {name: tensor.contiguous() for name, tensor in vae.state_dict().items()}
    save_file(tensors, target / f"{VAE_STEM}.safetensors")
    return folder
