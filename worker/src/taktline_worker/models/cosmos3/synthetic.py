"""Random Cosmos3 policies of the published sizes and of realistic scale, made on the device under the stored names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from taktline_protocol import ErrorCode, TaktlineError
from torch import Tensor

from taktline_worker.models.cosmos3 import fp8, vae
from taktline_worker.models.cosmos3.config import Cosmos3Architecture, expected_shapes
from taktline_worker.models.cosmos3.graphs import GraphRunner
from taktline_worker.models.cosmos3.profile import Cosmos3Profile
from taktline_worker.models.cosmos3.request import OFFICIAL, PAPER, RequestSettings
from taktline_worker.models.cosmos3.vae_config import StageConfig, VaeConfig, encoder_shapes
from taktline_worker.models.cosmos3.vae_weights import VaeWeights, pack_vae
from taktline_worker.models.cosmos3.weights import pack_weights

if TYPE_CHECKING:
    from taktline_worker.profiling.subject import Request

NANO = Cosmos3Architecture(
    layers=36,
    width=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=12288,
    vocabulary=151936,
    gated=True,
    text_norms=True,
    text_norm_for_video=False,
    fp32_scale=False,
    norm_eps=1e-6,
    theta=5e6,
    sections=(24, 20, 20),
    margin=15000,
    time_scale=0.001,
    base_fps=24.0,
    action_width=64,
    domains=32,
)
EDGE = replace(
    NANO,
    layers=28,
    width=2048,
    heads=16,
    mlp=9216,
    vocabulary=131072,
    gated=False,
    text_norms=False,
    text_norm_for_video=True,
    fp32_scale=True,
    norm_eps=1e-5,
    theta=1e8,
)
VAE = VaeConfig(
    latents=48,
    patch=2,
    encoder=(
        StageConfig(160, 160, 2, 2, 1),
        StageConfig(160, 320, 2, 2, 2),
        StageConfig(320, 640, 2, 2, 2),
        StageConfig(640, 640, 2, 1, 1),
    ),
    decoder=(
        StageConfig(1024, 1024, 3, 2, 2),
        StageConfig(1024, 1024, 3, 2, 2),
        StageConfig(1024, 512, 3, 2, 1),
        StageConfig(512, 256, 3, 1, 1),
    ),
    mean=(0.0,) * 48,
    std=(1.0,) * 48,
)
POLICIES: dict[str, tuple[Cosmos3Architecture, RequestSettings]] = {
    "cosmos3-nano": (NANO, OFFICIAL),
    "cosmos3-nano-paper": (NANO, PAPER),
    "cosmos3-nano-branch": (NANO, replace(OFFICIAL, guidance=1.0)),  # as a rank computes that has one of the branches
    "cosmos3-edge": (EDGE, replace(OFFICIAL, interval=(960.0, 1001.0))),
    "cosmos3-edge-paper": (EDGE, PAPER),
}
PROMPT_TOKENS = 200
"""The official prompt's length, about; the empty prompt has ten."""


def random_tensors(a: Cosmos3Architecture, device: torch.device, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that inference reads, one by one, fp32 with bf16-representable values.

    Matrices have variance 1 / fan-in, so that activations keep their scale; norms scatter around 1.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, shape in expected_shapes(a).items():
        value = torch.randn(shape, generator=generator, device=device)
        embedding = "embed" in name and "time" not in name
        if embedding or name.endswith(("bias", ".bias.weight")):
            value *= 0.05
        elif len(shape) == 1:
            value = 1.0 + 0.1 * value
        elif name == "action_proj_in.fc.weight":  # flat (in, out) matrices
            value *= a.action_width**-0.5
        elif name == "action_proj_out.fc.weight":
            value *= a.width**-0.5
        else:
            value *= shape[1] ** -0.5
        yield name, value.bfloat16().float()


def random_vae(config: VaeConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> VaeWeights:
    """An encoder whose activations keep their scale."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        value = torch.randn(shape, generator=generator, device=device)
        if name.endswith("gamma"):
            return 1.0 + 0.1 * value
        return value * 0.02 if name.endswith("bias") else value * value[0].numel() ** -0.5

    tensors = {name: made(name, shape) for name, shape in encoder_shapes(config).items()}
    return pack_vae(config, tensors, dtype, device)


def random_profile(name: str, request: Request, device: torch.device, precision: str) -> Cosmos3Profile:
    """A policy of the published size as what is measured; the official request, or the paper's shape.

    Raises:
        TaktlineError: CONFIG_INVALID for views, which this family has its own of, or FP8 without a GPU for it.
    """
    if precision == "fp8":
        fp8.check_device(device)
    if request.views or request.action_horizon:
        raise _refused("views and horizon of this family are its request's", "leave --views and --horizon out")
    a, settings = POLICIES[name]
    if request.layers:
        a, settings = replace(a, layers=request.layers), replace(settings, steps=2)
    if request.solver_steps:
        settings = replace(settings, steps=request.solver_steps)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    encoder = random_vae(VAE, dtype, device)
    weights = pack_weights(random_tensors(a, device), a, settings, dtype, device)
    weights = fp8.quantise(weights) if precision == "fp8" else weights
    text = request.prompt_tokens or PROMPT_TOKENS
    room = -(-text // 64) * 64
    runner = GraphRunner(weights, a, settings, partial(vae.encode, encoder), rows=request.batches, texts=(room,))
    if device.type == "cuda":
        runner.capture()
    return Cosmos3Profile(name, runner, encoder.config, precision, text)


def _refused(message: str, next_step: str) -> TaktlineError:
    return TaktlineError(ErrorCode.CONFIG_INVALID, message, next_step)
