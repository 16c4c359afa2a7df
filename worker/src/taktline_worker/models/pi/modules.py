"""The network of π0 and π0.5 as stateless computation over explicit tensors; buffers and loops are the runner's.

Shapes: B rows, N images, T tokens an image, S prefix slots, P prompt tokens, H actions, W width, h heads of size d.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from taktline_kernels import ops
from taktline_kernels.ops.dispatch import REGISTRY
from torch import Tensor
from torch.nn import functional

from taktline_worker.models.pi.config import LAYER_NORM_EPS, RMS_EPS
from taktline_worker.models.pi.weights import ActionHeads, AdaptiveNorms, GemmaLayer, PiWeights, VisionWeights


def vision_tower(weights: VisionWeights, pixels: Tensor, heads: int) -> Tensor:
    """SigLIP without pooling.

    Args:
        pixels: (N, 3, size, size) fp32 in [-1, 1].
        heads: vision heads.

    Returns:
        (N, T, W) after the final LayerNorm, in the tower's dtype.
    """
    dtype = weights.projector_weight.dtype
    patches = _patches(pixels, weights.patch_weight.shape[1])
    x = functional.linear(patches, weights.patch_weight, weights.patch_bias) + weights.position
    x = x.to(dtype)
    images, tokens, width = x.shape
    for layer in weights.layers:
        hidden = ops.layer_norm(x, layer.norm1_weight, layer.norm1_bias, LAYER_NORM_EPS)
        qkv = ops.linear(hidden, layer.qkv_weight, layer.qkv_bias).view(images, tokens, 3, heads, width // heads)
        attended = ops.attention_vision(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]).reshape(images, tokens, width)
        attended = ops.linear(attended, layer.out_weight, layer.out_bias)
        x, hidden = ops.add_layer_norm(x, attended, layer.norm2_weight, layer.norm2_bias, LAYER_NORM_EPS)
        hidden = ops.linear(hidden, layer.fc1_weight, layer.fc1_bias, activation="gelu")
        x = ops.linear(hidden, layer.fc2_weight, layer.fc2_bias, residual=x)
    return ops.layer_norm(x, weights.norm_weight, weights.norm_bias, LAYER_NORM_EPS)


def image_features(weights: VisionWeights, pixels: Tensor, heads: int) -> Tensor:
    """Pixels (N, 3, size, size) -> prefix tokens (N, T, W); not divided by sqrt(W), as the policies were trained."""
    return ops.linear(vision_tower(weights, pixels, heads), weights.projector_weight, weights.projector_bias)


def text_features(embedding: Tensor, tokens: Tensor) -> Tensor:
    """Token ids (B, P) -> (B, P, W), multiplied by sqrt(W) once, in fp32 before the one rounding."""
    rows: Tensor = functional.embedding(tokens, embedding)
    scaled: Tensor = rows.float() * embedding.shape[1] ** 0.5
    return scaled.to(embedding.dtype)


def assemble_prefix(images: Tensor, text: Tensor, source: Tensor) -> Tensor:
    """Gathers each row's valid tokens to the front of its slots.

    Absent cameras and prompt padding take no slot: positions count valid tokens only, so leaving them out is exact.

    Args:
        images: (N, T, W).
        text: (B, P, W).
        source: (B, S) int64 index into the N*T image tokens followed by the B*P text tokens; slots past a row's
            length may point anywhere.

    Returns:
        (B, S, W) in the dtype of `text`.
    """
    width = text.shape[-1]
    pool = torch.cat([images.reshape(-1, width).to(text.dtype), text.reshape(-1, width)])
    return pool.index_select(0, source.reshape(-1)).view(*source.shape, width)


def prefix_pass(
    layers: tuple[GemmaLayer, ...], x: Tensor, lengths: Tensor, keys: Tensor, values: Tensor, heads: int
) -> Tensor:
    """Runs the prefix and writes its keys and values; the last layer stops there, as nothing reads its output.

    Args:
        x: (B, S, W), valid tokens first.
        lengths: (B,) int32, valid tokens of each row, at least 1.
        keys: (depth, B, >= S, d), written up to S; keys are stored after RoPE.
        values: likewise.
        heads: query heads.

    Returns:
        (B, S, W), the input of the last layer.
    """
    batch, slots, _ = x.shape
    cos, sin = ops.rope_table(torch.arange(slots, device=x.device), keys.shape[-1])
    cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
    hidden = ops.rms_norm(x, _given(layers[0].norm1_weight), RMS_EPS)
    for index, layer in enumerate(layers):
        last = index + 1 == len(layers)
        query, key, value = _project(layer, hidden, cos, sin, 0 if last else heads)
        keys[index, :, :slots] = key[:, :, 0]
        values[index, :, :slots] = value[:, :, 0]
        if last:
            break
        attended = ops.attention_prefix(query, key, value, lengths).reshape(batch, slots, -1)
        attended = ops.linear(attended, layer.out_weight)
        x, hidden = ops.add_rms_norm(x, attended, _given(layer.norm2_weight), RMS_EPS)
        down = _feed_forward(layer, hidden)
        x, hidden = ops.add_rms_norm(x, down, _given(layers[index + 1].norm1_weight), RMS_EPS)
    return x


def state_pass(weights: PiWeights, state: Tensor, lengths: Tensor, keys: Tensor, values: Tensor, heads: int) -> None:
    """π0: runs the state token once and appends its keys and values to each row's prefix.

    The state token sees the prefix and itself, neither x_t nor t, so its keys and values hold for all solver steps.

    Args:
        state: (B, action width) fp32, normalised and zero-padded.
        lengths: (B,) int32, valid prefix tokens; the state's slot of row b is lengths[b].
        keys: (depth, B, > max length, d), prefix keys; slot lengths[b] is written.
        values: likewise.
        heads: query heads.
    """
    head, layers = weights.heads, weights.expert
    x = functional.linear(state, _given(head.state_weight), head.state_bias)[:, None].to(layers[0].out_weight.dtype)
    cos, sin = ops.rope_table(lengths[:, None], keys.shape[-1])
    rows, slots = torch.arange(state.shape[0], device=state.device), lengths.long()
    hidden = ops.rms_norm(x, _given(layers[0].norm1_weight), RMS_EPS)
    for index, layer in enumerate(layers):
        query, key, value = _project(layer, hidden, cos, sin, heads)
        keys[index, rows, slots] = key[:, 0, 0]
        values[index, rows, slots] = value[:, 0, 0]
        if index + 1 == len(layers):
            break
        attended = ops.attention_suffix(
            query, keys[index].unsqueeze(2), values[index].unsqueeze(2), lengths, key, value
        ).flatten(2)
        attended = ops.linear(attended, layer.out_weight)
        x, hidden = ops.add_rms_norm(x, attended, _given(layer.norm2_weight), RMS_EPS)
        down = _feed_forward(layer, hidden)
        x, hidden = ops.add_rms_norm(x, down, _given(layers[index + 1].norm1_weight), RMS_EPS)


def velocity(
    weights: PiWeights,
    step: int,
    x_t: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    clean: Tensor | None = None,
) -> Tensor:
    """The flow field at solver step `step`.

    Args:
        x_t: (B, H, action width) fp32.
        keys: (depth, B, S, d): prefix (and π0's state token) keys.
        values: likewise.
        lengths: (B,) int32, valid entries of keys and values.
        cos: (B, H, d / 2) fp32, RoPE of the action positions, which start at `lengths`.
        sin: likewise.
        heads: query heads.
        clean: (B, H) bool, π0.5: actions that are finished already (trained RTC), whose time is 0; None = none.

    Returns:
        (B, H, action width) fp32: noise - action.
    """
    if weights.adaptive is None:
        hidden = _plain_expert(weights, _suffix_pi0(weights.heads, step, x_t), keys, values, lengths, cos, sin, heads)
    else:
        modulate = _modulation(weights.adaptive, step, clean)
        hidden = _adaptive_expert(weights, modulate, x_t, keys, values, lengths, cos, sin, heads)
    return functional.linear(hidden.float(), weights.heads.out_weight, weights.heads.out_bias)


def _suffix_pi0(heads: ActionHeads, step: int, x_t: Tensor) -> Tensor:
    hidden = functional.silu(functional.linear(x_t, heads.in_weight, heads.in_bias[step]))
    return functional.linear(hidden, _given(heads.time_out_weight), heads.time_out_bias)


def _plain_expert(
    weights: PiWeights,
    suffix: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
) -> Tensor:
    layers = weights.expert
    x = suffix.to(layers[0].out_weight.dtype)
    hidden = ops.rms_norm(x, _given(layers[0].norm1_weight), RMS_EPS)
    for index, layer in enumerate(layers):
        attended = _attend_suffix(layer, hidden, keys[index], values[index], lengths, cos, sin, heads)
        x, hidden = ops.add_rms_norm(x, attended, _given(layer.norm2_weight), RMS_EPS)
        down = _feed_forward(layer, hidden)
        last = index + 1 == len(layers)
        following = weights.expert_norm if last else layers[index + 1].norm1_weight
        x, hidden = ops.add_rms_norm(x, down, _given(following), RMS_EPS)
    return hidden


@dataclass(frozen=True, slots=True)
class _Modulation:
    """The AdaRMS of one solver step: one row for all actions, or one for each where some are finished already."""

    scale: Callable[[int], Tensor]
    shift: Callable[[int], Tensor]
    gate: Callable[[int], Tensor]
    norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    gated_add: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def _modulation(norms: AdaptiveNorms, step: int, clean: Tensor | None) -> _Modulation:
    tables = norms.scale[step], norms.shift[step], norms.gate[step]
    if clean is None:
        scale, shift, gate = (table.__getitem__ for table in tables)
        return _Modulation(scale, shift, gate, ops.ada_rms_norm, ops.gated_add_ada_rms_norm)
    finished, mask = _given(norms.clean), clean[..., None]

    def rows(part: int) -> Callable[[int], Tensor]:
        return lambda index: torch.where(mask, finished[part, index], tables[part][index])

    # The kernels take one row for the whole call; the references broadcast.
    norm, gated_add = REGISTRY["ada_rms_norm"].reference, REGISTRY["gated_add_ada_rms_norm"].reference
    return _Modulation(rows(0), rows(1), rows(2), norm, gated_add)


def _adaptive_expert(
    weights: PiWeights,
    modulate: _Modulation,
    x_t: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
) -> Tensor:
    layers = weights.expert
    scale, shift, gate = modulate.scale, modulate.shift, modulate.gate
    x = functional.linear(x_t, weights.heads.in_weight, weights.heads.in_bias).to(layers[0].out_weight.dtype)
    hidden = modulate.norm(x, scale(0), shift(0), RMS_EPS)
    for index, layer in enumerate(layers):
        attended = _attend_suffix(layer, hidden, keys[index], values[index], lengths, cos, sin, heads)
        first, second, following = 2 * index, 2 * index + 1, 2 * index + 2
        x, hidden = modulate.gated_add(x, attended, gate(first), scale(second), shift(second), RMS_EPS)
        down = _feed_forward(layer, hidden)
        x, hidden = modulate.gated_add(x, down, gate(second), scale(following), shift(following), RMS_EPS)
    return hidden


def _attend_suffix(
    layer: GemmaLayer,
    hidden: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
) -> Tensor:
    query, key, value = _project(layer, hidden, cos, sin, heads)
    attended = ops.attention_suffix(query, keys.unsqueeze(2), values.unsqueeze(2), lengths, key, value)
    return ops.linear(attended.flatten(2), layer.out_weight)


def _project(layer: GemmaLayer, hidden: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fused projection and RoPE: (B, tokens, W) -> query (B, tokens, h, d), key and value (B, tokens, 1, d).

    With `heads` 0 the query rows of the weight are left out.
    """
    batch, tokens, _ = hidden.shape
    head_dim = 2 * cos.shape[-1]
    weight = layer.qkv_weight if heads else layer.qkv_weight[-2 * head_dim :]
    packed = ops.linear(hidden, weight).view(batch, tokens, heads + 2, head_dim)
    rotated = ops.rope(packed[:, :, : heads + 1], cos, sin)
    return rotated[:, :, :heads], rotated[:, :, heads:], packed[:, :, heads + 1 :]


def _feed_forward(layer: GemmaLayer, hidden: Tensor) -> Tensor:
    """The gated feed-forward of one layer, (B, tokens, W) -> (B, tokens, W), without the residual."""
    return ops.linear(ops.geglu(ops.linear(hidden, layer.gate_up_weight)), layer.down_weight)


def _patches(pixels: Tensor, columns: int) -> Tensor:
    """(N, 3, size, size) -> (N, T, 3 * patch * patch), patches in row-major order, (channel, row, column) inside."""
    images, channels, height, width = pixels.shape
    patch = round((columns / channels) ** 0.5)
    grid = pixels.view(images, channels, height // patch, patch, width // patch, patch)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(images, -1, columns)


def _given(tensor: Tensor | None) -> Tensor:
    """A tensor that the family at hand always has."""
    if tensor is None:
        raise ValueError("this family has no such weight")
    return tensor
