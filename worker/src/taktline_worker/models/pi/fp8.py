"""π0 and π0.5 with FP8 (e4m3) products in the vision tower and the prefix: a scale a token, a scale an output channel.

Everything else is what `fused` computes: attention, norms, residuals and the whole action expert stay as they are.
Shapes as there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from taktline_kernels import gpu, ops
from taktline_kernels.gpu import Fp8Rows
from torch import Tensor
from torch.nn import functional

from taktline_worker.graph_capture import Stage
from taktline_worker.models.pi.config import LAYER_NORM_EPS, RMS_EPS
from taktline_worker.models.pi.fused import assemble, embed_patches, tell
from taktline_worker.models.pi.weights import GemmaLayer, PiWeights, VisionLayer, VisionWeights

# The product of the second vision layer is 15 % faster where its depth is a multiple of 128.
_VISION_MLP_STEP = 128


@dataclass(frozen=True, slots=True)
class Fp8VisionLayer:
    """One SigLIP block: the matrices in FP8, the rest as in `plain` (whose matrices are empty)."""

    plain: VisionLayer
    qkv: Fp8Rows
    out: Fp8Rows
    fc1: Fp8Rows
    fc1_bias: Tensor
    fc2: Fp8Rows


@dataclass(frozen=True, slots=True)
class Fp8GemmaLayer:
    """One prefix block."""

    norm1_weight: Tensor
    norm2_weight: Tensor
    qkv: Fp8Rows
    out: Fp8Rows
    gate_up: Fp8Rows
    down: Fp8Rows


@dataclass(frozen=True, slots=True)
class Fp8Towers:
    """The quantised vision tower and prefix."""

    vision: tuple[Fp8VisionLayer, ...]
    projector: Fp8Rows
    prefix: tuple[Fp8GemmaLayer, ...]


def quantise(weights: PiWeights) -> Fp8Towers:
    """Quantise bf16 weights as `pack_weights` leaves them (gate rows, then up rows)."""
    return Fp8Towers(
        vision=tuple(_vision_layer(layer) for layer in weights.vision.layers),
        projector=gpu.quantise_weight(weights.vision.projector_weight),
        prefix=tuple(_gemma_layer(layer) for layer in weights.prefix),
    )


def _vision_layer(layer: VisionLayer) -> Fp8VisionLayer:
    hidden = layer.fc1_weight.shape[0]
    padded = -(-hidden // _VISION_MLP_STEP) * _VISION_MLP_STEP
    none = layer.qkv_weight.new_empty(0)
    return Fp8VisionLayer(
        plain=replace(layer, qkv_weight=none, out_weight=none, fc1_weight=none, fc2_weight=none),
        qkv=gpu.quantise_weight(layer.qkv_weight),
        out=gpu.quantise_weight(layer.out_weight),
        fc1=gpu.quantise_weight(layer.fc1_weight, rows=padded),
        fc1_bias=functional.pad(layer.fc1_bias, (0, padded - hidden)),
        fc2=gpu.quantise_weight(layer.fc2_weight, columns=padded),
    )


def _gemma_layer(layer: GemmaLayer) -> Fp8GemmaLayer:
    if layer.norm1_weight is None or layer.norm2_weight is None:
        raise ValueError("a prefix layer has both its norms")
    return Fp8GemmaLayer(
        norm1_weight=layer.norm1_weight,
        norm2_weight=layer.norm2_weight,
        qkv=gpu.quantise_weight(layer.qkv_weight),
        out=gpu.quantise_weight(layer.out_weight),
        gate_up=gpu.quantise_weight(layer.gate_up_weight),
        down=gpu.quantise_weight(layer.down_weight),
    )


def image_features(towers: Fp8Towers, weights: VisionWeights, patches: Tensor, heads: int) -> Tensor:
    """SigLIP and the projector; see `fused.image_features`."""
    x = embed_patches(weights, patches)
    images, tokens, width = x.shape
    first = towers.vision[0].plain
    _, hidden = gpu.layer_norm_fp8(x, None, first.norm1_weight, first.norm1_bias, LAYER_NORM_EPS)
    for index, layer in enumerate(towers.vision):
        plain = layer.plain
        qkv = gpu.linear_fp8(hidden, layer.qkv, plain.qkv_bias).view(images, tokens, 3, heads, -1)
        attended = ops.attention_vision(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]).reshape(images, tokens, width)
        attended = gpu.linear_fp8(gpu.quantise_rows(attended), layer.out, plain.out_bias)
        x, hidden = gpu.layer_norm_fp8(x, attended, plain.norm2_weight, plain.norm2_bias, LAYER_NORM_EPS)
        hidden = gpu.gelu_fp8(gpu.linear_fp8(hidden, layer.fc1, layer.fc1_bias))
        update = gpu.linear_fp8(hidden, layer.fc2, plain.fc2_bias)
        if index + 1 < len(towers.vision):
            following = towers.vision[index + 1].plain
            scale, shift = following.norm1_weight, following.norm1_bias
        else:
            scale, shift = weights.norm_weight, weights.norm_bias
        x, hidden = gpu.layer_norm_fp8(x, update, scale, shift, LAYER_NORM_EPS)
    return gpu.linear_fp8(hidden, towers.projector, weights.projector_bias)


def prefix_pass(
    towers: Fp8Towers,
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
    written: Stage | None = None,
) -> None:
    """Run the prefix and write its rotated keys and its values; see `fused.prefix_pass`."""
    layers, d = towers.prefix, keys.shape[-1]
    x = assemble(weights, images, tokens, source)
    _, hidden = gpu.rms_norm_fp8(x, None, layers[0].norm1_weight, RMS_EPS)
    for index, layer in enumerate(layers):
        if index + 1 == len(layers):
            key_value = gpu.linear_fp8(hidden, layer.qkv.from_row(heads * d))
            gpu.rope_cache(key_value, keys[index], values[index], cos, sin, lengths, heads=0, suffix=False)
            tell(written, index)
            return
        qkv = gpu.linear_fp8(hidden, layer.qkv)
        gpu.rope_cache(qkv, keys[index], values[index], cos, sin, lengths, heads=heads, suffix=False)
        tell(written, index)
        query = qkv[:, :, : heads * d].view(*qkv.shape[:2], heads, d)
        quantised = gpu.attention_cached_fp8(query, keys[index], values[index], lengths, 0)
        attended = gpu.linear_fp8(quantised, layer.out)
        x, hidden = gpu.rms_norm_fp8(x, attended, layer.norm2_weight, RMS_EPS)
        hidden = gpu.geglu_fp8(gpu.linear_fp8(hidden, layer.gate_up))
        update = gpu.linear_fp8(hidden, layer.down)
        x, hidden = gpu.rms_norm_fp8(x, update, layers[index + 1].norm1_weight, RMS_EPS)


def without_matrices(weights: PiWeights) -> PiWeights:
    """The weights without what `quantise` has copied, so that its memory can be freed."""
    empty = torch.empty(0, dtype=weights.embedding.dtype, device=weights.embedding.device)
    vision = replace(weights.vision, layers=(), projector_weight=empty)
    return replace(weights, vision=vision, prefix=())
