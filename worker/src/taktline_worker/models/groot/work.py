"""What each phase of a GR00T request must compute and move at least."""

from __future__ import annotations

from taktline_worker.models.groot.batch import Grid
from taktline_worker.models.groot.config import GrootArchitecture
from taktline_worker.profiling.work import Work

PHASES = ("vision", "text", "head")


def phase_work(
    a: GrootArchitecture,
    *,
    batch: int,
    grids: tuple[Grid, ...],
    text: int,
    weight_bytes: float,
    block_bytes: float | None = None,
) -> dict[str, Work]:
    """Work by phase: the vision tower and its mergers; text layers and refinement; the action head's solver loop.

    Bytes are the weights once, and once a solver step in the diffusion transformer; activations are taken to stay in
    caches. Norms, rotations, activation functions and what is tabulated at load are left out.

    Args:
        batch: rows.
        grids: of one row's images.
        text: tokens of a row beside its image tokens.
        weight_bytes: bytes a weight.
        block_bytes: bytes a weight of vision blocks and text layers, where those are others.
    """
    v, t, h = a.vision, a.text, a.head
    merged = v.merge**2
    patches = [rows * columns for rows, columns in grids]
    block = 4 * v.width**2 + 2 * v.width * v.mlp
    merger = (1 + len(v.deepstack)) * ((merged * v.width) ** 2 + merged * v.width * t.width)
    vision = sum(
        count * 2 * (v.depth * block + v.width * v.patch_values + merger / merged) + v.depth * 4 * count**2 * v.width
        for count in patches
    )
    wide = weight_bytes
    narrow = wide if block_bytes is None else block_bytes
    vision_bytes = narrow * v.depth * block + wide * (v.width * v.patch_values + merger)

    images = sum(patches) // merged
    slots, query = images + text, t.heads * t.head_dim
    layer = t.width * (2 * query + 2 * t.kv_heads * t.head_dim) + 3 * t.width * t.mlp
    refined = 12 * t.width**2
    text_weights = t.layers * layer + h.vl_layers * refined
    attention = 4 * slots**2 * (t.layers * query + h.vl_layers * t.width)
    backbone = slots * 2 * text_weights + attention

    tokens = 1 + h.horizon
    step_weights = _projections(a)
    memory, memory_weights, step = 0.0, 0.0, 2.0 * h.horizon * _projections(a)
    for index in range(h.layers):
        crosses = not (h.interleaved and index % 2)
        own = (10 if crosses else 12) * h.width**2
        seen = tokens
        if crosses:
            seen = slots if not h.text_every else (text if index % (2 * h.text_every) == 0 else images)
            memory += 4 * seen * t.width * h.width
            memory_weights += 2 * t.width * h.width
        step_weights += own
        step += tokens * 2 * own + 4 * tokens * seen * h.width
    steps = h.solver_steps
    return {
        "vision": Work(batch * vision, vision_bytes),
        "text": Work(batch * backbone, narrow * t.layers * layer + wide * h.vl_layers * refined),
        "head": Work(batch * (memory + steps * step), wide * (memory_weights + steps * step_weights)),
    }


def _projections(a: GrootArchitecture) -> int:
    """Weights that an action token passes outside the blocks, at each step."""
    h = a.head
    encoder = h.action_width * h.width + 2 * h.width**2
    return encoder + h.width * h.hidden + h.hidden**2 + h.hidden * h.action_width
