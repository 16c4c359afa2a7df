"""Random full-size π0 and π0.5 weights of realistic scale, made on the device, under canonical names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from taktline_worker.models.pi import byte_expert
from taktline_worker.models.pi.config import CameraSlot, PiArchitecture, PiConventions, expected_shapes
from taktline_worker.models.pi.normalise import identity
from taktline_worker.models.pi.profile import PiProfile
from taktline_worker.models.pi.runners import make_runner
from taktline_worker.models.pi.weights import BF16, BF16_VISION, FP32, pack_weights

if TYPE_CHECKING:
    from taktline_worker.profiling.subject import Request

PI05 = PiArchitecture(
    family="pi05",
    vision_layers=27,
    vision_width=1152,
    vision_heads=16,
    vision_mlp=4304,
    image_size=224,
    patch_size=14,
    depth=18,
    heads=8,
    head_dim=256,
    prefix_width=2048,
    prefix_mlp=16384,
    expert_width=1024,
    expert_mlp=4096,
    vocabulary=257152,
    action_width=32,
)
PI0 = replace(PI05, family="pi0")


def random_tensors(architecture: PiArchitecture, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """All of `stream_random_tensors` at once."""
    return dict(stream_random_tensors(architecture, device, seed))


def stream_random_tensors(
    architecture: PiArchitecture, device: torch.device, seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that inference reads, one by one, fp32 with bf16-representable values.

    Matrices have variance 1 / fan-in, so that activations keep their scale; norm weights scatter around their neutral
    value; AdaRMS modulations have scale and gate of order 0.3 and 0.5, as trained checkpoints do.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, shape in expected_shapes(architecture).items():
        value = torch.randn(shape, generator=generator, device=device)
        if "norm" in name and name.endswith("dense.weight"):
            value *= 0.5 / shape[1] ** 0.5
        elif "norm" in name and name.endswith("dense.bias"):
            value *= 0.1
            value[2 * architecture.expert_width :] += 0.5
        elif "norm" in name:
            value *= 0.1
            if name.startswith("vision.") and name.endswith("weight"):
                value += 1.0
        elif name == "prefix.embed_tokens.weight":
            value *= architecture.prefix_width**-0.5
        elif name.endswith("position_embedding.weight"):
            value *= 0.2
        elif name.endswith("bias"):
            value *= 0.02
        else:
            value *= (value[0].numel()) ** -0.5
        yield name, value.bfloat16().float()


def conventions(views: int, horizon: int, steps: int) -> PiConventions:
    """Conventions with identity normalisation, for what the weights' packing needs."""
    return PiConventions(
        layout="lerobot",
        slots=tuple(CameraSlot(key=f"camera{i}", names=(f"camera{i}",), required=True) for i in range(views)),
        state_dim=8,
        action_dim=32,
        state_normaliser=identity(),
        action_normaliser=identity(),
        prompt="state",
        prompt_tokens=200,
        resize="bilinear",
        horizon=horizon,
        solver_steps=steps,
    )


def random_profile(name: str, request: Request, device: torch.device, precision: str) -> PiProfile:
    """`pi05` or `pi0` of the published size as what is measured. Raises TaktlineError where quantisation is refused."""
    architecture = {"pi05": PI05, "pi0": PI0}[name]
    if request.layers:
        architecture = replace(architecture, vision_layers=request.layers, depth=request.layers)
    policies = {"fp32": FP32, "bf16": BF16_VISION if device.type == "cuda" else BF16, "fp8": BF16_VISION}
    views, prompt = request.views or 3, request.prompt_tokens or 200
    quantisation = request.quantised()
    byte_expert.check(quantisation, precision, request.batches, device)
    plan = conventions(views, request.action_horizon or 50, request.solver_steps or 10)
    plan = replace(plan, prompt_tokens=prompt)
    # One by one: all at once would need the fp32 file's 13 GB beside what is packed.
    tensors = stream_random_tensors(architecture, device)
    weights = pack_weights(tensors, architecture, plan, policies[precision], device)
    runner = make_runner(weights, architecture, plan, request.batches, precision, quantisation=quantisation)
    return PiProfile(runner, architecture, plan.horizon, plan.solver_steps, views, prompt, precision, quantisation)
