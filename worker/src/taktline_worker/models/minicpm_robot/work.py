"""What each phase of a MiniCPM-Robot request must compute and move at least."""

from __future__ import annotations

from taktline_worker.models.minicpm_robot.config import SOLVER_STEPS, MiniCpmArchitecture
from taktline_worker.profiling.work import Work

PHASES = ("vision", "text", "head")


def phase_work(
    a: MiniCpmArchitecture,
    *,
    batch: int,
    images: int,
    text: int,
    weight_bytes: float,
    block_bytes: float | None = None,
) -> dict[str, Work]:
    """Work by phase: the vision tower and its mergers; the text layers; the action head's four predictions.

    Bytes are the weights once, and once a prediction in the head; activations are taken to stay in caches. Norms,
    rotations, activation functions, the convolution's four taps and what is tabulated at load are left out. The delta
    rule counts its three products with the state and its update: 8 d e a head and token.

    Args:
        batch: rows.
        images: of a row.
        text: tokens of a row beside its image tokens.
        weight_bytes: bytes a weight.
        block_bytes: bytes a weight of vision blocks and text layers, where those are others.
    """
    v, t, h = a.vision, a.text, a.head
    patches, merged = v.grid**2, v.grid**2 // 4
    block, four = 4 * v.width**2 + 2 * v.width * v.mlp, 4 * v.width
    before, after = v.insert + 1, v.depth - v.insert - 1
    window = 2 * v.width * v.window_mlp + four * v.window_mlp - v.width * v.window_mlp
    end = four * four + four * t.width
    vision = 2 * (patches * (before * block + 3 * v.patch**2 * v.width) + merged * after * block)
    vision += 4 * v.width * (before * patches**2 + after * merged**2)
    vision += 2 * (patches * 4 * v.width**2 + merged * window) + 4 * v.width * patches * 4
    vision += 2 * v.image_tokens * end
    wide = weight_bytes
    narrow = wide if block_bytes is None else block_bytes
    vision_bytes = narrow * v.depth * block + wide * (3 * v.patch**2 * v.width + 4 * v.width**2 + window + end)

    slots, pairs = images * v.image_tokens + text, t.heads * t.head_dim
    full = t.width * (2 * pairs + 2 * t.kv_heads * t.head_dim) + pairs * t.width
    query, key, value = t.delta_widths
    delta = t.width * (query + key + 2 * value + 2 * t.delta_heads) + value * t.width
    count = len(t.full)
    text_weights = count * full + (t.layers - count) * delta + t.layers * 3 * t.width * t.mlp
    backbone = slots * 2 * text_weights + count * 4 * slots**2 * pairs
    backbone += (t.layers - count) * slots * t.delta_heads * 8 * t.delta_key * t.delta_value

    tokens, w = h.future + h.horizon, h.width
    crossing = (h.layers + 1) // 2
    own = crossing * 10 * w**2 + (h.layers - crossing) * 12 * w**2
    encoder = h.action_width * w + 2 * w**2
    decoder = w * h.hidden + h.hidden * h.decoder + h.decoder * h.action_width
    memory_weights = crossing * 2 * t.width * w
    step = tokens * 2 * own + h.horizon * 2 * (encoder + decoder)
    step += crossing * 4 * tokens * slots * w + (h.layers - crossing) * 4 * tokens**2 * w
    step_weights = own + encoder + decoder
    return {
        "vision": Work(batch * images * vision, vision_bytes),
        "text": Work(batch * backbone, narrow * text_weights),
        "head": Work(
            batch * (slots * 2 * memory_weights + SOLVER_STEPS * step),
            wide * (memory_weights + SOLVER_STEPS * step_weights),
        ),
    }
