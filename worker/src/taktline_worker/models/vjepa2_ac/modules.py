"""Encoder and predictor as stateless computation over explicit tensors; caches and loops are the runner's.

Shapes: N frames, T patches, m candidates, K = T + 2 tokens a frame, W width, D latent width, h heads of size d.
"""

from __future__ import annotations

import torch
from taktline_kernels import ops
from torch import Tensor
from torch.nn import functional

from taktline_worker.models.vjepa2_ac.config import BLOCK_NORM_EPS, LATENT_NORM_EPS
from taktline_worker.models.vjepa2_ac.rope import rotate
from taktline_worker.models.vjepa2_ac.weights import Block, EncoderWeights, PredictorWeights

CONDITIONING = 2
"""Tokens before the patches of each frame: action, then state."""


def patch_embeddings(weights: EncoderWeights, pixels: Tensor) -> Tensor:
    """(N, T, W) of pixels (N, 3, size, size), patches in row-major order."""
    side = round((weights.patch_weight.shape[1] // 3) ** 0.5)
    patches = functional.unfold(pixels.to(weights.patch_weight.dtype), side, stride=side).transpose(1, 2)
    return functional.linear(patches, weights.patch_weight, weights.patch_bias)


def encode(weights: EncoderWeights, pixels: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """(N, T, D), the encoder's output after its own norm; each frame alone. `cos`, `sin`: (T, 1, d)."""
    x = patch_embeddings(weights, pixels)
    for block in weights.blocks:
        q, k, v = _qkv(block, x, heads)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        x = _after_attention(block, x, _attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)))
    return _norm(x, weights.norm_weight, weights.norm_bias)


def latent_norm(x: Tensor) -> Tensor:
    """Affine-free layer norm over the latent width, at least fp32: planning happens in this space."""
    wide = x if x.dtype == torch.float64 else x.float()
    return functional.layer_norm(wide, (x.shape[-1],), eps=LATENT_NORM_EPS)


def embed_latents(weights: PredictorWeights, latents: Tensor) -> Tensor:
    """(..., T, D) -> (..., T, W), fp32 or wider."""
    return _wide_linear(latents, weights.embed_weight, weights.embed_bias)


def frame_tokens(
    weights: PredictorWeights, actions: Tensor, poses: Tensor, patches: Tensor, dtype: torch.dtype
) -> Tensor:
    """One frame's tokens: action, state, patches.

    Args:
        actions: (m, 7).
        poses: (m, 7), the pose before the action.
        patches: (m, T, W) embedded latents.
        dtype: of the residual stream.

    Returns:
        (m, K, W).
    """
    action = functional.linear(actions.to(weights.action_weight.dtype), weights.action_weight, weights.action_bias)
    pose = functional.linear(poses.to(weights.state_weight.dtype), weights.state_weight, weights.state_bias)
    return torch.cat((action[:, None].to(dtype), pose[:, None].to(dtype), patches.to(dtype)), dim=1)


def predictor_frame(
    weights: PredictorWeights, x: Tensor, keys: Tensor, values: Tensor, start: int, cos: Tensor, sin: Tensor
) -> Tensor:
    """Runs all blocks on one frame that sees itself and every frame before it.

    The mask of the official code is causal by frames and full inside a frame, and positions are absolute, so keys and
    values of earlier frames never change: with them cached no mask is left.

    Args:
        x: (m, K, W) tokens of the frame, residual dtype.
        keys: (layers, m, h, S, d) cache; slots up to `start` hold the earlier frames, this frame's are written behind.
        values: likewise.
        start: first slot of this frame.
        cos: (K, 1, d) of this frame's positions.
        sin: likewise.

    Returns:
        (m, K, W).
    """
    heads, end = keys.shape[2], start + x.shape[1]
    for layer, block in enumerate(weights.blocks):
        q, k, v = _qkv(block, x, heads)
        keys[layer, :, :, start:end] = rotate(k, cos, sin).transpose(1, 2)
        values[layer, :, :, start:end] = v.transpose(1, 2)
        seen_keys, seen_values = keys[layer, :, :, :end], values[layer, :, :, :end]
        x = _after_attention(block, x, _attend(rotate(q, cos, sin).transpose(1, 2), seen_keys, seen_values))
    return x


def predictor_output(weights: PredictorWeights, x: Tensor) -> Tensor:
    """(m, K, W) -> (m, T, D), fp32 or wider: the next frame's latents before `latent_norm`."""
    normed = _norm(x[:, CONDITIONING:], weights.norm_weight, weights.norm_bias)
    return _wide_linear(normed, weights.out_weight, weights.out_bias)


def energy(latents: Tensor, goal: Tensor) -> Tensor:
    """Mean absolute difference (m,) of latents (m, T, D) and goal (T, D), summed in their own dtype, fp32 or wider."""
    return (latents - goal).abs().flatten(1).mean(dim=1)


def _qkv(block: Block, x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    normed = _norm(x, block.norm1_weight, block.norm1_bias).to(block.qkv_weight.dtype)
    qkv = functional.linear(normed, block.qkv_weight, block.qkv_bias)
    q, k, v = qkv.view(*x.shape[:2], 3, heads, -1).unbind(2)
    return q, k, v


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (b, h, s, d), k and v (b, h, t, d), all visible -> (b, s, h * d)."""
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _after_attention(block: Block, x: Tensor, attended: Tensor) -> Tensor:
    x = x + functional.linear(attended, block.out_weight, block.out_bias)
    normed = _norm(x, block.norm2_weight, block.norm2_bias).to(block.fc1_weight.dtype)
    hidden = functional.gelu(functional.linear(normed, block.fc1_weight, block.fc1_bias))
    return x + functional.linear(hidden, block.fc2_weight, block.fc2_bias)


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T (..., n) of operands rounded to the weight's dtype, summed in fp32 or wider and not rounded again.

    What it feeds is compared, or added to, in fp32.
    """
    rounded = x.to(weight.dtype)
    if weight.dtype != torch.bfloat16:
        return functional.linear(rounded, weight)
    if weight.device.type == "cuda":
        product = torch.mm(rounded.flatten(0, -2), weight.t(), out_dtype=torch.float32)
        return product.view(*x.shape[:-1], -1)
    return functional.linear(rounded.float(), weight.float())


def _wide_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    product = wide_product(x, weight)
    return product + bias.to(product.dtype)


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if x.dtype == torch.float64:  # the op computes in fp32; fp64 only checks the other precisions
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, BLOCK_NORM_EPS)
    return ops.layer_norm(x, weight, bias, BLOCK_NORM_EPS)
