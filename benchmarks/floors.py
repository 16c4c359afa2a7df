"""The least time of a π policy on a GPU: each phase's operations over the matrix rate, or its bytes over bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

from taktline_worker.models.pi.config import PiArchitecture


@dataclass(frozen=True, slots=True)
class Roof:
    """What one GPU was measured to do: dense bf16 products on random data, and device-to-device copies."""

    flops: float
    bytes_per_s: float


H200 = Roof(flops=790e12, bytes_per_s=4.3e12)


def phase_floors_ms(
    a: PiArchitecture, roof: Roof, batch: int, views: int, prompt: int, horizon: int, steps: int
) -> dict[str, float]:
    """Floor of each phase in ms. The last prefix layer counts as its key and value only; weights are bf16.

    Args:
        a: dimensions.
        roof: ceilings.
        batch: rows.
        views: cameras.
        prompt: prompt tokens.
        horizon: action tokens.
        steps: solver steps.
    """
    tokens = a.tokens_per_image
    images = batch * views
    per_token = 2 * (4 * a.vision_width**2 + 2 * a.vision_width * a.vision_mlp) + 4 * tokens * a.vision_width
    patch = 2 * a.vision_width * (3 * a.patch_size**2 + a.prefix_width)
    vision = images * tokens * (a.vision_layers * per_token + patch)
    vision_weights = 2 * (a.vision_layers * (4 * a.vision_width**2 + 2 * a.vision_width * a.vision_mlp) + patch // 2)
    rows = views * tokens + prompt
    query = a.heads * a.head_dim
    full = a.prefix_width * (2 * query + 2 * a.head_dim) + 3 * a.prefix_width * a.prefix_mlp
    last = a.prefix_width * 2 * a.head_dim
    prefix_weights = (a.depth - 1) * full + last
    prefix = batch * rows * (2 * prefix_weights + (a.depth - 1) * 4 * rows * query)
    layer = a.expert_width * (2 * query + 2 * a.head_dim) + 3 * a.expert_width * a.expert_mlp
    expert = batch * horizon * a.depth * (2 * layer + 4 * (rows + horizon) * query)
    cache = batch * rows * a.depth * 2 * a.head_dim * 2
    work = {
        "vision": (vision, vision_weights),
        "prefix": (prefix, 2 * prefix_weights),
        "expert": (steps * expert, steps * (2 * a.depth * layer + cache)),
    }
    return {name: 1e3 * max(ops / roof.flops, moved / roof.bytes_per_s) for name, (ops, moved) in work.items()}
