"""What each phase of a Cosmos3 request must compute and move at least."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from taktline_worker.models.cosmos3 import vae
from taktline_worker.models.cosmos3.config import PATCH_VALUES, Cosmos3Architecture
from taktline_worker.models.cosmos3.modules import frame_tokens
from taktline_worker.models.cosmos3.request import RequestSettings
from taktline_worker.models.cosmos3.runner import is_guided
from taktline_worker.models.cosmos3.solver import make_schedule
from taktline_worker.models.cosmos3.vae_config import VaeConfig, encoder_shapes
from taktline_worker.models.cosmos3.vae_weights import pack_vae
from taktline_worker.profiling.work import Work

PHASES = ("encode", "denoise")
"""Of a request in the steady state: its texts were encoded with the first request that had them (`text_work`)."""


def phase_work(
    a: Cosmos3Architecture,
    settings: RequestSettings,
    vae_config: VaeConfig,
    *,
    batch: int,
    text: int,
    empty_text: int,
    encoder_bytes: float,
    tower_bytes: float,
) -> dict[str, Work]:
    """Work by phase: the VAE over the given frames, and the solver loop with both branches of guidance.

    Of the last layer only what is read counts: nothing of the observed frame and, at the last step, the actions alone.
    Bytes are the weights once a solver step, both branches together; activations are taken to stay in caches. Norms,
    rotations, activation functions and the solver are left out.

    Args:
        batch: rows.
        text: tokens of the conditional prompt; `empty_text` of the other.
        encoder_bytes: bytes a weight of the encoder; `tower_bytes` of the tower.
    """
    schedule = make_schedule(settings.steps, settings.shift)
    flops = 0.0
    for step in schedule:
        last = step is schedule[-1]
        flops += pass_flops(a, settings, text, actions_only=last)
        if is_guided(settings, step.time):
            flops += pass_flops(a, settings, empty_text, actions_only=last)
    step_weights = a.layers * layer_weights(a) + 2 * a.width * (PATCH_VALUES + settings.raw_dims)
    encoder = sum(torch.Size(shape).numel() for shape in encoder_shapes(vae_config).values())
    return {
        "encode": Work(batch * encode_flops(vae_config, settings), encoder_bytes * encoder),
        "denoise": Work(batch * flops, tower_bytes * settings.steps * step_weights),
    }


def layer_weights(a: Cosmos3Architecture) -> int:
    """Numbers in the matrices of one layer of one tower."""
    heads, kv_heads = a.heads * a.head_dim, a.kv_heads * a.head_dim
    return a.width * (2 * heads + 2 * kv_heads) + (3 if a.gated else 2) * a.width * a.mlp


def pass_flops(a: Cosmos3Architecture, settings: RequestSettings, text: int, *, actions_only: bool = False) -> float:
    """One pass of one branch of one row through the tower of video and actions."""
    rows, columns = frame_tokens(settings)
    frame = rows * columns
    tokens = settings.latent_grid[0] * frame + settings.action_rows
    heads, kv_heads = a.heads * a.head_dim, a.kv_heads * a.head_dim
    seen = text + tokens
    full = 2 * layer_weights(a) + 4 * seen * heads
    read = settings.actions if actions_only else tokens - frame
    # Of the last layer: keys and values of all tokens, the rest of those that are read.
    last = tokens * 4 * a.width * kv_heads + read * (full - 4 * a.width * kv_heads)
    noised = (settings.latent_grid[0] - 1) * frame
    projections = 2 * a.width * PATCH_VALUES * (noised + (0 if actions_only else noised))
    projections += 4 * a.width * settings.raw_dims * settings.actions
    return float((a.layers - 1) * tokens * full + last + projections)


def text_work(a: Cosmos3Architecture, text: int, weight_bytes: float) -> Work:
    """One prompt through the text tower, once an instruction; the last layer ends with its keys and values."""
    heads, kv_heads = a.heads * a.head_dim, a.kv_heads * a.head_dim
    weights = (a.layers - 1) * layer_weights(a) + 2 * a.width * kv_heads
    # A causal pair of tokens is seen from one side only.
    attention = (a.layers - 1) * 2 * text * (text + 1) * heads
    return Work(2.0 * text * weights + attention, weight_bytes * weights)


@lru_cache(maxsize=8)
def encode_flops(config: VaeConfig, settings: RequestSettings) -> float:
    """One row's frames through the VAE's encoder, counted over tensors without memory."""
    meta = torch.device("meta")
    tensors = {name: torch.empty(shape, device=meta) for name, shape in encoder_shapes(config).items()}
    weights = pack_vae(config, tensors, torch.float32, meta)
    frames = torch.empty(1, 3, settings.encoded_frames, *settings.padded, device=meta)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        vae.encode(weights, frames)
    return float(counter.get_total_flops())
