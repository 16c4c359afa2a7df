"""π0.5 on a GPU in bf16: the same computation as `modules`, with what can be fused fused, over a runner's buffers.

Shapes: B rows, N images, T tokens an image, S prefix slots, C cache rows, H actions, W width, h query heads of size d.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from taktline_kernels import gpu, ops
from taktline_kernels.cuda import expert
from taktline_kernels.cuda.expert import ExpertChain
from torch import Tensor
from torch.nn import functional

from taktline_worker.models.pi.config import LAYER_NORM_EPS, RMS_EPS, PiArchitecture
from taktline_worker.models.pi.modules import text_features
from taktline_worker.models.pi.weights import AdaptiveNorms, GemmaLayer, PiWeights, VisionWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """Packed weights as the fused computation reads them.

    Attributes:
        packed: the policy's weights; gate and up rows of both Gemma towers are interleaved (`gpu.pack_gate_up`).
        chain: the expert's kernel chain for one row, where this GPU and these dimensions have one.
    """

    packed: PiWeights
    chain: ExpertChain | None


def fuse(weights: PiWeights, architecture: PiArchitecture, horizon: int, max_keys: int) -> FusedWeights:
    """Reorder bf16 π0.5 weights on a CUDA device.

    Args:
        weights: from `pack_weights`.
        architecture: dimensions.
        horizon: action tokens.
        max_keys: most prefix slots plus action tokens of a row.
    """
    packed = replace(
        weights,
        prefix=tuple(replace(layer, gate_up_weight=gpu.pack_gate_up(layer.gate_up_weight)) for layer in weights.prefix),
        expert=tuple(replace(layer, gate_up_weight=gpu.pack_gate_up(layer.gate_up_weight)) for layer in weights.expert),
    )
    return FusedWeights(packed, _chain(packed, architecture, horizon, max_keys))


def _chain(weights: PiWeights, architecture: PiArchitecture, horizon: int, max_keys: int) -> ExpertChain | None:
    a, norms = architecture, weights.adaptive
    published = (a.expert_width, a.expert_mlp, a.heads, a.head_dim, a.action_width)
    reason = ""
    if norms is None or published != (expert.WIDTH, expert.HIDDEN, expert.HEADS, expert.HEAD_DIM, expert.ACTION):
        reason = "it is written for the published dimensions"
    elif torch.cuda.get_device_capability(weights.embedding.device)[0] != 9:
        reason = "it is written for Hopper GPUs"
    elif horizon > expert.MAX_ROWS or max_keys > expert.MAX_KEYS:
        reason = f"it holds {expert.MAX_ROWS} action tokens and {expert.MAX_KEYS} keys"
    if reason or norms is None:
        logger.warning("the expert's kernel chain is not used: %s", reason)
        return None
    layers = [
        expert.ExpertLayer(layer.qkv_weight, layer.out_weight, layer.gate_up_weight, layer.down_weight)
        for layer in weights.expert
    ]
    heads = weights.heads
    projections = (heads.in_weight, heads.in_bias, heads.out_weight, heads.out_bias)
    try:
        return ExpertChain(layers, norms.scale, norms.shift, norms.gate, *projections, max_keys=max_keys, eps=RMS_EPS)
    except RuntimeError as error:
        logger.warning("the expert's kernel chain is not used: it cannot be compiled or loaded here: %s", error)
        return None


def image_features(weights: VisionWeights, pixels: Tensor, heads: int) -> Tensor:
    """SigLIP and the projector, all images as one batch.

    Args:
        pixels: (N, 3, size, size) fp32 in [-1, 1].
        heads: vision heads.

    Returns:
        (N, T, prefix W) bf16.
    """
    images, channels, size, _ = pixels.shape
    patch = round((weights.patch_weight.shape[1] / channels) ** 0.5)
    side = size // patch
    patches = pixels.view(images, channels, side, patch, side, patch).permute(0, 2, 4, 1, 3, 5)
    patches = patches.reshape(images * side * side, -1)
    x = functional.linear(patches, weights.patch_weight, weights.patch_bias).view(images, side * side, -1)
    x = (x + weights.position).to(weights.projector_weight.dtype)
    tokens, width = x.shape[1:]
    first = weights.layers[0]
    hidden = ops.layer_norm(x, first.norm1_weight, first.norm1_bias, LAYER_NORM_EPS)
    for index, layer in enumerate(weights.layers):
        qkv = functional.linear(hidden, layer.qkv_weight, layer.qkv_bias).view(images, tokens, 3, heads, -1)
        attended = ops.attention_vision(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]).view(images, tokens, width)
        attended = functional.linear(attended, layer.out_weight, layer.out_bias)
        x, hidden = ops.add_layer_norm(x, attended, layer.norm2_weight, layer.norm2_bias, LAYER_NORM_EPS)
        hidden = gpu.linear_gelu(hidden, layer.fc1_weight, layer.fc1_bias)
        hidden = functional.linear(hidden, layer.fc2_weight, layer.fc2_bias)
        if index + 1 < len(weights.layers):
            following = weights.layers[index + 1]
            scale, shift = following.norm1_weight, following.norm1_bias
        else:
            scale, shift = weights.norm_weight, weights.norm_bias
        x, hidden = ops.add_layer_norm(x, hidden, scale, shift, LAYER_NORM_EPS)
    return functional.linear(hidden, weights.projector_weight, weights.projector_bias)


def prefix_pass(
    weights: PiWeights,
    images: Tensor,
    tokens: Tensor,
    source: Tensor,
    lengths: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
) -> None:
    """Run the prefix and write its rotated keys and its values; the last layer stops there.

    Args:
        images: (N, T, W) bf16.
        tokens: (B, P) int64 prompt tokens.
        source: (B, S) int64, which image or text token each slot holds (`modules.assemble_prefix`).
        lengths: (B,) int32.
        keys: (depth, B, C, d) bf16, written up to S.
        values: likewise.
        cos: (positions, d / 2) fp32.
        sin: likewise.
        heads: query heads.
    """
    layers, width, d = weights.prefix, weights.embedding.shape[1], keys.shape[-1]
    pool = torch.cat((images.view(-1, width), text_features(weights.embedding, tokens).view(-1, width)))
    x = pool.index_select(0, source.view(-1)).view(*source.shape, width)
    hidden = ops.rms_norm(x, _given(layers[0].norm1_weight), RMS_EPS)
    for index, layer in enumerate(layers):
        if index + 1 == len(layers):
            key_value = functional.linear(hidden, layer.qkv_weight[heads * d :])
            gpu.rope_cache(key_value, keys[index], values[index], cos, sin, lengths, heads=0, suffix=False)
            return
        qkv = functional.linear(hidden, layer.qkv_weight)
        gpu.rope_cache(qkv, keys[index], values[index], cos, sin, lengths, heads=heads, suffix=False)
        query = qkv[:, :, : heads * d].view(*qkv.shape[:2], heads, d)
        attended = gpu.attention_cached(query, keys[index], values[index], lengths, 0).flatten(2)
        attended = functional.linear(attended, layer.out_weight)
        x, hidden = ops.add_rms_norm(x, attended, _given(layer.norm2_weight), RMS_EPS)
        hidden = functional.linear(gpu.linear_geglu(hidden, layer.gate_up_weight), layer.down_weight)
        x, hidden = ops.add_rms_norm(x, hidden, _given(layers[index + 1].norm1_weight), RMS_EPS)


def solve(
    fused: FusedWeights,
    actions: Tensor,
    lengths: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
) -> None:
    """The Euler loop of π0.5, in place on `actions`.

    Args:
        actions: (B, H, action width) fp32: noise in, actions out.
        lengths: (B,) int32, valid prefix slots.
        keys: (depth, B, C, d): the prefix; rows lengths + i are overwritten by the suffix.
        values: likewise.
        cos: (positions, d / 2) fp32.
        sin: likewise.
        heads: query heads.
    """
    weights, chain = fused.packed, fused.chain
    batch, horizon, dim = actions.shape
    if batch == 1 and chain is not None:
        chain.solve(actions[0], lengths, keys[:, 0], values[:, 0], cos, sin)
        return
    norms = weights.adaptive
    if norms is None:
        raise ValueError("these weights are no π0.5 policy's")
    heads_in = weights.heads
    projections = (heads_in.in_weight, heads_in.in_bias, heads_in.out_weight, heads_in.out_bias)
    width, steps = weights.expert[0].out_weight.shape[0], int(weights.times.shape[0])
    flat = actions.view(batch * horizon, dim)
    x = torch.empty((batch, horizon, width), dtype=keys.dtype, device=keys.device)
    gpu.action_head(flat, x.view(-1, width), projections, None, None, None, None, dt=0.0, last=False)
    for step in range(steps):
        hidden, update, gate, final = _step(weights.expert, norms, step, x, lengths, keys, values, cos, sin, heads)
        x = torch.empty_like(x)
        gpu.action_head(
            flat,
            x.view(-1, width),
            projections,
            hidden.view(-1, width),
            update.view(-1, width),
            final,
            gate,
            dt=-1.0 / steps,
            last=step + 1 == steps,
        )


def _step(
    layers: tuple[GemmaLayer, ...],
    norms: AdaptiveNorms,
    step: int,
    x: Tensor,
    lengths: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """All layers of one step; returns stream, last update, its gate, and the final norm's scale and shift."""
    scale, shift, gate = norms.scale[step], norms.shift[step], norms.gate[step]
    horizon, d = x.shape[1], keys.shape[-1]
    hidden = ops.ada_rms_norm(x, scale[0], shift[0], RMS_EPS)
    for index, layer in enumerate(layers):
        first, second, following = 2 * index, 2 * index + 1, 2 * index + 2
        qkv = functional.linear(hidden, layer.qkv_weight)
        gpu.rope_cache(qkv, keys[index], values[index], cos, sin, lengths, heads=heads, suffix=True)
        query = qkv[:, :, : heads * d].view(*qkv.shape[:2], heads, d)
        attended = gpu.attention_cached(query, keys[index], values[index], lengths, horizon).flatten(2)
        attended = functional.linear(attended, layer.out_weight)
        x, hidden = ops.gated_add_ada_rms_norm(x, attended, gate[first], scale[second], shift[second], RMS_EPS)
        update = functional.linear(gpu.linear_geglu(hidden, layer.gate_up_weight), layer.down_weight)
        if index + 1 == len(layers):
            break
        x, hidden = ops.gated_add_ada_rms_norm(x, update, gate[second], scale[following], shift[following], RMS_EPS)
    return x, update, gate[2 * len(layers) - 1], (scale[-1], shift[-1])


def _given(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError("this family has no such weight")
    return tensor
