"""MiniCPM-RobotManip as stateless computation over explicit tensors.

Shapes: N images of P patches, B rows of S text slots, H action rows behind F future tokens. Rows are padded on the
right: every layer is causal, so a row's tokens see none of its padding.
"""

from __future__ import annotations

from typing import Any

import torch
from taktline_kernels import ops
from taktline_kernels.ops.delta import (
    conv_silu_split,
    gated_delta_rule,
    linear_conv_split,
    rms_norm_silu_gate,
)
from taktline_kernels.ops.gather import embed_rms_norm, mean_rows, reorder_rows
from taktline_kernels.ops.norms import add_rms_norm
from taktline_kernels.ops.solver import clean_actions
from torch import Tensor
from torch.nn import functional

from taktline_worker.fp8_layers import Fp8Linear, gated
from taktline_worker.layers import Linear, Norm
from taktline_worker.models.minicpm_robot.config import HeadConfig, TextConfig, VisionConfig
from taktline_worker.models.minicpm_robot.head_weights import ActionBlock, Bank, HeadWeights
from taktline_worker.models.minicpm_robot.weights import (
    DeltaNet,
    FullAttention,
    TextLayer,
    TextWeights,
    VisionBlock,
    VisionWeights,
    WindowMerger,
)

Memory = tuple[Tensor, Tensor]
"""Keys and values (B, S, heads, d) of a cross-attention block, in strides of what all blocks have together."""


def encode_images(weights: VisionWeights, v: VisionConfig, patches: Tensor) -> Tensor:
    """Text tokens (N, image tokens, text width) of patches (N, P, 3 * patch^2), channel first, row by row."""
    held = weights.patch.weight
    patches = reorder_rows(patches, weights.order, held.shape[1], held.dtype)
    x, y = weights.positions.expand(len(patches), -1, -1), weights.patch(patches)
    x, n = weights.blocks[0].norm1.after(x, y)
    following = [block.norm1 for block in weights.blocks[1:]] + [weights.norm]
    for index, (block, norm) in enumerate(zip(weights.blocks, following, strict=True)):
        if index == v.insert:
            x, n = _vision_block(block, weights.window.norm1, v.heads, x, n)
            x, n = _merge_windows(weights.window, norm, v.heads, x, n)
        else:
            x, n = _vision_block(block, norm, v.heads, x, n)
    n = weights.merge_norm(_windows(n).flatten(2))
    return weights.merge2(functional.gelu(weights.merge1(n)))  # the exact GELU, here alone


def _vision_block(block: VisionBlock, following: Norm, heads: int, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream (fp32) behind the block, and its norm for the next one; n is this one's norm."""
    q, k, value = block.qkv(n).view(*x.shape[:2], 3, heads, -1).unbind(2)
    x, n = _after(block.norm2, x, block.out, ops.attention_vision(q, k, value).flatten(2))
    return _after(following, x, block.fc2, block.fc1.gelu(n))


def _after(norm: Norm, x: Tensor, layer: Linear | Fp8Linear, given: Any) -> tuple[Tensor, Tensor]:
    """x + layer(given), and its norm."""
    return norm.after(x, layer(given)) if isinstance(layer, Fp8Linear) else norm.after_layer(x, layer, given)


def _windows(x: Tensor) -> Tensor:
    """(N, tokens, width) -> (N, tokens / 4, 4, width): 2 x 2 neighbours, row by row in their window."""
    return x.view(len(x), -1, 4, x.shape[-1])


def _merge_windows(weights: WindowMerger, following: Norm, heads: int, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Of the stream and its norm (N, windows * 4, width), one token (N, windows, width) a window, and its norm."""
    windows = n.view(-1, 4, n.shape[-1])
    q, k, value = weights.qkv(windows).view(*windows.shape[:2], 3, heads, -1).unbind(2)
    attended = ops.attention_vision(q, k, value).flatten(2)
    shape = (len(x), len(windows) // len(x), -1)
    stream, n = weights.norm2.after(x.view(shape), weights.out(attended).view(shape))
    return _after(following, mean_rows(stream.view(x.shape), 4), weights.fc2, weights.fc1.gelu(n))


def rope_tables(t: TextConfig, slots: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine (slots, head_dim / 2) fp32, for heads in the order of `orders.rotated_first`.

    Image tokens count on one axis like text, so all three axes are equal.
    """
    frequencies = torch.zeros(t.head_dim // 2, dtype=torch.float64)
    frequencies[: t.rotary // 2] = t.theta ** (-torch.arange(0, t.rotary, 2, dtype=torch.float64) / t.rotary)
    angles = torch.arange(slots, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def encode_text(
    weights: TextWeights, t: TextConfig, tokens: Tensor, image_rows: Tensor, images: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Features (B, S, width) after the final norm; slots behind a row's end hold values that nothing reads.

    Args:
        tokens: int64 (B, S).
        image_rows: int64 (B, S), which row of `images` stands there, or -1.
        images: (image tokens, width).
        cos: (S, head_dim / 2) fp32; `sin` likewise.
    """
    # The stream is fp32; terms and norms keep the dtype.
    x, n = embed_rms_norm(tokens, weights.embedding, image_rows, images, weights.layers[0].norm1, t.eps)
    following = [layer.norm1 for layer in weights.layers[1:]] + [weights.norm]
    for layer, norm in zip(weights.layers, following, strict=True):
        x, n = _add_norm(x, layer.mixer.out, _mixed(layer, t, n, cos, sin), layer.norm2, t.eps)
        x, n = _add_norm(x, layer.down, gated(layer.gate_up, layer.down, n), norm, t.eps)
    return n


def _add_norm(x: Tensor, layer: Linear | Fp8Linear, given: Any, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + layer(given), and its norm."""
    if isinstance(layer, Fp8Linear):
        return add_rms_norm(x, layer(given), weight, eps)
    return ops.linear_add_rms_norm(given, layer.weight, x, weight, eps)


def _mixed(layer: TextLayer, t: TextConfig, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What a layer's tokens saw of each other in normed x, before the mixer's last product."""
    if isinstance(layer.mixer, FullAttention):
        return _full_attention(layer.mixer, t, x, cos, sin)
    return _delta_net(layer.mixer, t, x)


def _full_attention(mixer: FullAttention, t: TextConfig, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads, pairs = t.heads + 2 * t.kv_heads, t.heads * t.head_dim
    qkv, gate = torch.split(mixer.qkv(x), [heads * t.head_dim, pairs], dim=-1)
    ops.norm_rotate(qkv, mixer.q_norm, mixer.k_norm, cos, sin, heads=t.heads, kv_heads=t.kv_heads, eps=t.eps)
    q, k, v = torch.split(qkv.view(*x.shape[:2], heads, t.head_dim), [t.heads, t.kv_heads, t.kv_heads], dim=2)
    return ops.attention(q, k, v, causal=True, gate=gate).flatten(2)


def _delta_net(mixer: DeltaNet, t: TextConfig, x: Tensor) -> Tensor:
    widths, heads = t.delta_widths, t.delta_heads
    if isinstance(mixer.inputs, Fp8Linear):
        mixed, rest = torch.split(mixer.inputs(x), [sum(widths), widths[2] + 2 * heads], dim=-1)
        parts = conv_silu_split(mixed, mixer.conv, widths)
    else:
        *parts, rest = linear_conv_split(x, mixer.inputs.weight, mixer.conv, widths)
    q, k, v = (part.view(*x.shape[:2], heads, -1) for part in parts)
    z, a, b = torch.split(rest, [widths[2], heads, heads], dim=-1)
    seen = gated_delta_rule(q, k, v, a, b, mixer.rate, mixer.dt_bias)
    return rms_norm_silu_gate(seen, mixer.norm, z.view(*x.shape[:2], heads, -1), t.eps).flatten(2)


def memories(weights: HeadWeights, h: HeadConfig, features: Tensor) -> list[Memory | None]:
    """What each block attends to in the backbone's features (B, S, text width), once a request; None = itself."""
    crossing = (len(weights.blocks) + 1) // 2
    all_of_them = weights.memory(features).view(*features.shape[:2], crossing, 2, h.heads, -1)
    own = [(keys, values) for keys, values in (one.unbind(2) for one in all_of_them.unbind(2))]
    return [None if index % 2 else own[index // 2] for index in range(len(weights.blocks))]


Tokens = tuple[Tensor, Tensor]
"""The head's stream (B, F + H, width), and its norm for the first block."""
Banks = list[tuple[Tensor | slice, Bank]]
"""(rows of the batch, bank) by embodiment."""


def encode_actions(bank: Bank, state: Tensor, x: Tensor, step: int) -> Tensor:
    """What the third layer of the action encoder reads, (B, H, width).

    Args:
        bank: the rows' own.
        state: (B, H, width), the state's part of the first layer in each action row.
        x: (B, H, action width), noisy, in the head's dtype.
        step: of the solver.
    """
    hidden = ops.linear(x, bank.action.weight, bank.action.bias, residual=state)
    return ops.linear(hidden, bank.second.weight, bank.time[step], activation="silu")


def begin(weights: HeadWeights, h: HeadConfig, banks: Banks, states: list[Tensor], x: Tensor, step: int) -> Tokens:
    """The tokens that the head's first block reads at a solver step.

    Args:
        states: for each bank `encode_actions`'s.
        x: (B, H, action width), noisy, in the head's dtype.
    """
    norm, found = weights.blocks[0].norms[step], []
    for (rows, bank), state in zip(banks, states, strict=True):
        hidden = encode_actions(bank, state, x[rows], step)
        found.append(ops.linear_on_rows(hidden, bank.third.weight, bank.rows, norm.weight, norm.bias, norm.eps))
    if len(banks) == 1:
        return found[0]
    stream = x.new_empty(len(x), h.future + h.horizon, h.width)
    n = torch.empty_like(stream)
    for (rows, _), parts in zip(banks, found, strict=True):
        stream[rows], n[rows] = parts
    return stream, n


def transform(
    weights: HeadWeights, h: HeadConfig, tokens: Tokens, step: int, seen: list[Memory | None], valid: Tensor
) -> Tensor:
    """What the decoder reads, (B, H, n), behind the blocks of a solver step.

    Args:
        tokens: what `begin` made of the noisy actions.
        seen: for each block what `memories` gave.
        valid: bool (B, S), which features are a row's own.
    """
    stream, n = tokens
    following = [block.norms[step] for block in weights.blocks[1:]] + [weights.tail_norms[step]]
    for index, (block, memory, norm) in enumerate(zip(weights.blocks, seen, following, strict=True)):
        first = h.future if index == len(weights.blocks) - 1 else 0  # the last one's future tokens are never read
        stream, n = _action_block(block, weights.plain, norm, h.heads, stream, n, first, memory, valid)
    return weights.tail(n)


def decode(banks: Banks, n: Tensor, noise: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The clean actions that the head expects, and what the next solver step reads.

    Shapes are (B, H, action width); clean actions are fp32, what the next step reads is in the head's dtype.

    Args:
        n: what `transform` gave.
        noise: fp32.
        share: of the noise at the next step.
    """
    found = [
        clean_actions(bank.decode1.relu(n[rows]), bank.decode2.weight, bank.decode2.bias, noise[rows], share)
        for rows, bank in banks
    ]
    if len(banks) == 1:
        return found[0]
    clean, mixed = torch.empty_like(noise), torch.empty_like(noise, dtype=n.dtype)
    for (rows, _), parts in zip(banks, found, strict=True):
        clean[rows], mixed[rows] = parts
    return clean, mixed


def _action_block(
    block: ActionBlock,
    plain: Norm,
    following: Norm,
    heads: int,
    x: Tensor,
    n: Tensor,
    first: int,
    memory: Memory | None,
    valid: Tensor,
) -> tuple[Tensor, Tensor]:
    """The stream of tokens from `first` on, and its norm for the next block, from the stream and this block's norm."""
    if memory is None:
        q, keys, values = block.q(n).view(*n.shape[:2], 3, heads, -1).unbind(2)
        attended = ops.attention(q[:, first:], keys, values)
    else:
        q = block.q(n[:, first:]).view(len(n), -1, heads, memory[0].shape[-1])
        attended = ops.attention(q, *memory, valid)
    x, n = plain.after_layer(x[:, first:], block.out, attended.flatten(2))
    return following.after_layer(x, block.fc2, block.fc1.gelu(n))
