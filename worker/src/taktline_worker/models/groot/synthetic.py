"""A random GR00T N1.7 of the published size and of realistic scale, made on the device, under the stored names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from taktline_protocol import ErrorCode, TaktlineError
from torch import Tensor

from taktline_worker.fp8_layers import check_device
from taktline_worker.models.groot.batch import GrootRow
from taktline_worker.models.groot.config import (
    GrootArchitecture,
    HeadConfig,
    TextConfig,
    VisionConfig,
    expected_shapes,
)
from taktline_worker.models.groot.fp8 import quantise
from taktline_worker.models.groot.graphs import GrootGraphs
from taktline_worker.models.groot.profile import GrootProfile
from taktline_worker.models.groot.runner import GrootRunner
from taktline_worker.models.groot.weights import pack_weights

if TYPE_CHECKING:
    from taktline_worker.profiling.subject import Request

PUBLISHED = GrootArchitecture(
    vision=VisionConfig(
        depth=24, width=1024, heads=16, mlp=4096, patch=16, temporal=2, merge=2, positions=2304, deepstack=(5, 11, 17)
    ),
    text=TextConfig(
        layers=16,
        width=2048,
        heads=16,
        kv_heads=8,
        head_dim=128,
        mlp=6144,
        vocabulary=151936,
        theta=5e6,
        sections=(24, 20, 20),
        norm_eps=1e-6,
        image_token=151655,
    ),
    head=HeadConfig(
        vl_norm=True,
        vl_layers=4,
        vl_heads=32,
        layers=32,
        heads=32,
        width=1536,
        hidden=1024,
        state_width=132,
        action_width=132,
        horizon=40,
        positions=1024,
        position_embedding=True,
        embodiments=32,
        text_every=2,
        interleaved=True,
        solver_steps=4,
        time_buckets=1000,
        rtc_rate=6.0,
    ),
)
SIDE = 256
"""Pixels of a frame's side: LIBERO's two cameras and DROID's have 16 x 16 patches each."""


def random_tensors(a: GrootArchitecture, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor that inference reads, fp32 with bf16-representable values.

    Matrices have variance 1 / fan-in, so that activations keep their scale; norms scatter around 1.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        value = torch.randn(shape, generator=generator, device=device)
        if name.endswith((".bias", ".b")):
            value *= 0.02
        elif len(shape) == 1:
            value = 1.0 + 0.1 * value
        elif "embed" in name and "patch" not in name and "timestep" not in name:
            value *= 0.05
        elif name.endswith(".W"):  # (embodiment, in, out)
            value *= shape[1] ** -0.5
        else:
            value *= value[0].numel() ** -0.5
        return value.bfloat16().float()

    return {name: made(name, shape) for name, shape in expected_shapes(a).items()}


def _of_layers(a: GrootArchitecture, layers: int) -> GrootArchitecture:
    """The same with so many layers a tower, three of vision's feeding the text at least; 0 changes nothing."""
    if not layers:
        return a
    depth = max(3, layers)
    vision = replace(a.vision, depth=depth, deepstack=(depth - 3, depth - 2, depth - 1))
    head = replace(a.head, layers=2 * -(-layers // 2), vl_layers=min(layers, a.head.vl_layers), solver_steps=2)
    return replace(a, vision=vision, text=replace(a.text, layers=max(3, layers)), head=head)


def random_row(a: GrootArchitecture, images: int, tokens: int, seed: int = 0) -> GrootRow:
    """A row of `images` square frames and `tokens` tokens in all, the frames' among them."""
    generator = torch.Generator().manual_seed(seed)
    side = SIDE // a.vision.patch
    each = (side // a.vision.merge) ** 2
    ids = [np.full(1, 7), *(np.r_[8, np.full(each, a.text.image_token), 9] for _ in range(images))]
    rest = tokens - sum(len(part) for part in ids)
    if rest < 0:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"{images} images take {tokens - rest} of {tokens} tokens",
            "ask for fewer views or more prompt tokens",
        )
    h = a.head
    return GrootRow(
        patches=tuple(torch.randn(side * side, a.vision.patch_values, generator=generator) for _ in range(images)),
        grids=((side, side),) * images,
        tokens=np.concatenate([*ids, np.full(rest, 11)]).astype(np.int64),
        state=torch.randn(h.state_width, generator=generator),
        noise=torch.randn(h.horizon, h.action_width, generator=generator),
        embodiment=0,
    )


def random_profile(name: str, request: Request, device: torch.device, precision: str) -> GrootProfile:
    """GR00T of the published size as what is measured; LIBERO's shape unless the request says otherwise.

    Raises:
        TaktlineError: CONFIG_INVALID for FP8 on a device that lacks it.
    """
    del name
    if precision == "fp8":
        check_device(device)
    views, a = request.views or 2, _of_layers(PUBLISHED, request.layers)
    # The chat's frame takes 5 tokens and each image 2; LIBERO's instructions take about 19.
    each = (SIDE // a.vision.patch // a.vision.merge) ** 2
    tokens = 5 + views * (each + 2) + (request.prompt_tokens or 19)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    weights = pack_weights(random_tensors(a, device), a, [0], dtype, device)
    weights = quantise(weights) if precision == "fp8" else weights
    row = random_row(a, views, tokens)
    eager = GrootRunner(weights, a)
    if device.type != "cuda":
        return GrootProfile(eager, row, precision)
    graphs = GrootGraphs(eager, row, request.batches)
    graphs.capture()
    return GrootProfile(graphs, row, precision)
