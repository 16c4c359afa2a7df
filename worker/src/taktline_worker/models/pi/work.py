"""What each phase of a π policy must compute and move at least."""

from __future__ import annotations

from collections.abc import Mapping

from taktline_worker.models.pi.config import PiArchitecture
from taktline_worker.profiling.work import Work

PHASES = ("vision", "prefix", "expert")


def expert_byte_size(a: PiArchitecture) -> float:
    """Bytes a weight of the expert's matrices where each is one byte, with a scale of four bytes a matrix row."""
    query, values = a.heads * a.head_dim, 2 * a.head_dim
    rows = query + values + a.expert_width + 2 * a.expert_mlp + a.expert_width
    return 1.0 + 4.0 * rows / _layer_weights(a)


def phase_work(
    a: PiArchitecture,
    *,
    batch: int,
    views: int,
    prompt: int,
    horizon: int,
    steps: int,
    weight_bytes: Mapping[str, float] | None = None,
    cache_bytes: float = 2.0,
) -> dict[str, Work]:
    """Work by phase. The last prefix layer counts as its key and value only, as nothing reads its output.

    Bytes are the weights once (once a solver step in the expert) and, in the expert, the prefix's keys and values once
    a step; activations are taken to stay in caches. Layer norms, RoPE, activation functions and the fp32 heads between
    actions and expert are left out: together they are below a percent of a published policy.

    Args:
        a: dimensions.
        batch: rows.
        views: cameras a row.
        prompt: prompt tokens a row.
        horizon: action tokens.
        steps: solver steps.
        weight_bytes: bytes a weight by phase; 2 (bf16) where a phase is not named.
        cache_bytes: bytes of a number in the key and value cache.
    """
    size = {phase: (weight_bytes or {}).get(phase, 2.0) for phase in PHASES}
    tokens, images = a.tokens_per_image, batch * views
    per_token = 2 * (4 * a.vision_width**2 + 2 * a.vision_width * a.vision_mlp) + 4 * tokens * a.vision_width
    patch = 2 * a.vision_width * (3 * a.patch_size**2 + a.prefix_width)
    vision = images * tokens * (a.vision_layers * per_token + patch)
    vision_weights = a.vision_layers * (4 * a.vision_width**2 + 2 * a.vision_width * a.vision_mlp) + patch // 2
    rows, query = views * tokens + prompt, a.heads * a.head_dim
    full = a.prefix_width * (2 * query + 2 * a.head_dim) + 3 * a.prefix_width * a.prefix_mlp
    prefix_weights = (a.depth - 1) * full + a.prefix_width * 2 * a.head_dim
    prefix = batch * rows * (2 * prefix_weights + (a.depth - 1) * 4 * rows * query)
    layer = _layer_weights(a)
    state = int(a.family == "pi0")  # one more token, once: it depends on no step
    seen = rows + state + horizon
    expert = (
        batch
        * a.depth
        * (steps * horizon * (2 * layer + 4 * seen * query) + state * (2 * layer + 4 * (rows + 1) * query))
    )
    cache = batch * (rows + state) * a.depth * 2 * a.head_dim * cache_bytes
    return {
        "vision": Work(vision, vision_weights * size["vision"]),
        "prefix": Work(prefix, prefix_weights * size["prefix"]),
        "expert": Work(expert, steps * (a.depth * layer * size["expert"] + cache)),
    }


def _layer_weights(a: PiArchitecture) -> int:
    """Weights of the matrices of one expert layer."""
    return a.expert_width * (2 * a.heads * a.head_dim + 2 * a.head_dim) + 3 * a.expert_width * a.expert_mlp
