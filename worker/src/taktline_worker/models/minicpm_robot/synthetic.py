"""A random MiniCPM-RobotManip of the published size and of realistic scale, made on the device, under stored names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from taktline_worker.fp8_layers import check_device
from taktline_worker.models.minicpm_robot.batch import MiniCpmRow
from taktline_worker.models.minicpm_robot.config import (
    HeadConfig,
    MiniCpmArchitecture,
    TextConfig,
    VisionConfig,
    expected_shapes,
)
from taktline_worker.models.minicpm_robot.fp8 import quantise
from taktline_worker.models.minicpm_robot.graphs import MiniCpmGraphs
from taktline_worker.models.minicpm_robot.profile import MiniCpmProfile
from taktline_worker.models.minicpm_robot.runner import MiniCpmRunner
from taktline_worker.models.minicpm_robot.weights import pack_weights

if TYPE_CHECKING:
    from taktline_worker.profiling.subject import Request

PUBLISHED = MiniCpmArchitecture(
    prefix="vlm.model.",
    vision=VisionConfig(
        width=1152,
        depth=27,
        heads=16,
        mlp=4304,
        window_mlp=17216,
        patch=14,
        positions=4900,
        insert=6,
        image_size=448,
    ),
    text=TextConfig(
        width=1024,
        layers=24,
        full=(3, 7, 11, 15, 19, 23),
        vocabulary=248_094,
        heads=8,
        kv_heads=2,
        head_dim=256,
        rotary=64,
        theta=1e7,
        mlp=3584,
        delta_heads=16,
        delta_key=128,
        delta_value=128,
        taps=4,
        eps=1e-6,
    ),
    head=HeadConfig(
        width=768,
        layers=16,
        heads=12,
        future=32,
        positions=1024,
        embodiments=32,
        state_width=80,
        action_width=80,
        hidden=1024,
        decoder=1024,
        horizon=30,
    ),
)
IMAGE_TOKEN = 248_000
FRAME_TOKENS = 5
"""Symbols around each image: its number between two, start and end."""


def random_tensors(a: MiniCpmArchitecture, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor that inference reads, fp32 with bf16-representable values.

    Matrices have variance 1 / fan-in, so that activations keep their scale; norms scatter around 1, those that add 1
    around 0.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        value = torch.randn(shape, generator=generator, device=device)
        if name.endswith((".bias", ".b", "dt_bias")):
            value *= 0.02
        elif len(shape) == 1:
            adds_one = "language_model" in name and "linear_attn.norm" not in name
            value = 0.1 * value + (0.0 if adds_one else 1.0)
        elif name.endswith(("embed_tokens.weight", "position_embedding.weight", "future_tokens.weight")):
            value *= 0.05
        elif name.endswith(".W"):  # (embodiment, in, out)
            value *= shape[1] ** -0.5
        else:
            value *= value[0].numel() ** -0.5
        return value.bfloat16().float()

    return {name: made(name, shape) for name, shape in expected_shapes(a).items()}


def _of_layers(a: MiniCpmArchitecture, layers: int) -> MiniCpmArchitecture:
    """The same with so many layers a tower, whole fours of the text's and as many of vision; 0 changes nothing."""
    if not layers:
        return a
    text = 4 * -(-layers // 4)
    vision = replace(a.vision, depth=max(2, layers), insert=min(a.vision.insert, max(2, layers) // 2 - 1))
    full = tuple(index for index in a.text.full if index < text)
    return replace(a, vision=vision, text=replace(a.text, layers=text, full=full), head=replace(a.head, layers=layers))


def random_row(a: MiniCpmArchitecture, views: int, text: int, seed: int = 0) -> MiniCpmRow:
    """A row of `views` images and `text` tokens beside them and their symbols."""
    generator = torch.Generator().manual_seed(seed)
    v, h = a.vision, a.head
    each = np.r_[np.full(FRAME_TOKENS, 8), np.full(v.image_tokens, IMAGE_TOKEN)]
    return MiniCpmRow(
        patches=torch.randn(views, v.grid**2, 3 * v.patch**2, generator=generator),
        tokens=np.concatenate([np.tile(each, views), np.full(text, 11)]).astype(np.int64),
        state=torch.randn(h.state_width, generator=generator),
        noise=torch.randn(h.horizon, h.action_width, generator=generator),
        embodiment=0,
    )


def random_profile(name: str, request: Request, device: torch.device, precision: str) -> MiniCpmProfile:
    """MiniCPM-RobotManip of the published size as what is measured; two views unless the request says otherwise.

    Raises:
        TaktlineError: CONFIG_INVALID for FP8 on a device that lacks it.
    """
    del name
    if precision == "fp8":
        check_device(device)
    a = _of_layers(PUBLISHED, request.layers)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    weights = pack_weights(random_tensors(a, device), a, [0], dtype, device)
    weights = quantise(weights) if precision == "fp8" else weights
    # The template takes about 9 tokens, LIBERO's instructions about 19.
    row = random_row(a, request.views or 2, request.prompt_tokens or 28)
    eager = MiniCpmRunner(weights, a, IMAGE_TOKEN)
    if device.type != "cuda":
        return MiniCpmProfile(eager, row, precision)
    graphs = MiniCpmGraphs(eager, row, request.batches)
    graphs.capture()
    return MiniCpmProfile(graphs, row, precision)
