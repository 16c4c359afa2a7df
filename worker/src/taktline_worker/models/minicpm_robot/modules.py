"""MiniCPM-RobotManip as stateless computation over explicit tensors.

Shapes: N images of P patches, B rows of S text slots, H action rows behind F future tokens. Rows are padded on the
right: every layer is causal, so a row's tokens see none of its padding.
"""

from __future__ import annotations

import torch
from taktline_kernels.ops.delta import conv_silu_split, gated_delta_rule, rms_norm_silu_gate
from taktline_kernels.ops.norms import add_rms_norm, rms_norm
from torch import Tensor
from torch.nn import functional

from taktline_worker.fp8_layers import after_swiglu
from taktline_worker.layers import Norm, attend, rotate
from taktline_worker.models.minicpm_robot.config import HeadConfig, TextConfig, VisionConfig
from taktline_worker.models.minicpm_robot.weights import (
    ActionBlock,
    Bank,
    DeltaNet,
    FullAttention,
    HeadWeights,
    TextLayer,
    TextWeights,
    VisionBlock,
    VisionWeights,
    WindowMerger,
)

Memory = tuple[Tensor, Tensor]
"""Keys and values (B, S, heads, d) of a cross-attention block."""


def encode_images(weights: VisionWeights, v: VisionConfig, patches: Tensor) -> Tensor:
    """Text tokens (N, image tokens, text width) of patches (N, P, 3 * patch^2), channel first, row by row."""
    x, y = weights.patch(patches) + weights.positions, None
    side = v.grid
    for index, block in enumerate(weights.blocks):
        x, y = _vision_block(block, v.heads, x, y)
        if index == v.insert:
            x, y = _merge_windows(weights.window, v.heads, _windows(x + y, side)), None
            side //= 2
    x = weights.merge_norm(_windows(weights.norm.after(x, y)[1], side).flatten(2))
    return weights.merge2(functional.gelu(weights.merge1(x)))  # the exact GELU, here alone


def _vision_block(block: VisionBlock, heads: int, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """The residual stream without this block's last term, and that term: the next norm adds it."""
    x, n = block.norm1.after(x, y)
    q, k, value = block.qkv(n).view(*x.shape[:2], 3, heads, -1).unbind(2)
    x, n = block.norm2.after(x, block.out(attend(q, k, value)))
    return x, block.fc2(block.fc1.gelu(n))


def _windows(x: Tensor, side: int) -> Tensor:
    """(N, side^2, width) row by row -> (N, side^2 / 4, 4, width): 2 x 2 neighbours, row by row in their window."""
    n, _, width = x.shape
    return x.view(n, side // 2, 2, side // 2, 2, width).transpose(2, 3).reshape(n, side * side // 4, 4, width)


def _merge_windows(weights: WindowMerger, heads: int, x: Tensor) -> Tensor:
    """(N, windows, 4, width) -> (N, windows, width)."""
    flat = x.flatten(0, 1)
    q, k, value = weights.qkv(weights.norm1(flat)).view(*flat.shape[:2], 3, heads, -1).unbind(2)
    x = (flat + weights.out(attend(q, k, value))).view(x.shape)
    mixed = weights.fc2(weights.fc1.gelu(weights.norm2(x.flatten(2))))
    return mixed + x.mean(dim=2)


def rope_tables(t: TextConfig, slots: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine (slots, rotary) fp32. Image tokens count on one axis like text, so all three axes are equal."""
    frequencies = t.theta ** (-torch.arange(0, t.rotary, 2, dtype=torch.float64) / t.rotary)
    angles = (torch.arange(slots, dtype=torch.float64)[:, None] * frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def encode_text(
    weights: TextWeights, t: TextConfig, tokens: Tensor, image_slots: Tensor, images: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Features (B, S, width) after the final norm; slots behind a row's end hold values that nothing reads.

    Args:
        tokens: int64 (B, S).
        image_slots: int64 (image tokens,), where in the flattened (B * S) each image token stands.
        images: (image tokens, width), in that order.
        cos: (S, rotary) fp32; `sin` likewise.
    """
    x = functional.embedding(tokens, weights.embedding)
    x.view(-1, x.shape[-1])[image_slots] = images.to(x.dtype)
    n = rms_norm(x, weights.layers[0].norm1, t.eps)
    following = [layer.norm1 for layer in weights.layers[1:]] + [weights.norm]
    for layer, norm in zip(weights.layers, following, strict=True):
        x, n = add_rms_norm(x, _mixed(layer, t, n, cos[:, None], sin[:, None]), layer.norm2, t.eps)
        x, n = add_rms_norm(x, after_swiglu(layer.down, layer.gate_up(n)), norm, t.eps)
    return n


def _mixed(layer: TextLayer, t: TextConfig, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A layer's answer to normed x across its tokens."""
    if isinstance(layer.mixer, FullAttention):
        return _full_attention(layer.mixer, t, x, cos, sin)
    return delta_net(layer.mixer, t, x)


def _full_attention(mixer: FullAttention, t: TextConfig, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    queries, pairs = 2 * t.heads * t.head_dim, t.kv_heads * t.head_dim
    both, k, v = torch.split(mixer.qkv(x), [queries, pairs, pairs], dim=-1)
    q, gate = both.view(*x.shape[:2], t.heads, 2, t.head_dim).unbind(3)
    q = _partly_rotated(rms_norm(q, mixer.q_norm, t.eps), cos, sin)
    k = _partly_rotated(rms_norm(k.view(*x.shape[:2], t.kv_heads, -1), mixer.k_norm, t.eps), cos, sin)
    seen = attend(q, k, v.view(*x.shape[:2], t.kv_heads, -1), causal=True)
    return mixer.out(seen * torch.sigmoid(gate.flatten(2)))


def _partly_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the first elements of each head, as many as the tables have."""
    turned = cos.shape[-1]
    return torch.cat((rotate(x[..., :turned], cos, sin), x[..., turned:]), dim=-1)


def delta_net(mixer: DeltaNet, t: TextConfig, x: Tensor) -> Tensor:
    """A gated delta net's answer (B, S, width) to normed x."""
    widths = t.delta_widths
    mixed, z, a, b = torch.split(mixer.inputs(x), [sum(widths), widths[2], t.delta_heads, t.delta_heads], dim=-1)
    q, k, v = (part.view(*x.shape[:2], t.delta_heads, -1) for part in conv_silu_split(mixed, mixer.conv, widths))
    decay = mixer.rate * functional.softplus(a.float() + mixer.dt_bias)
    seen = gated_delta_rule(q, k, v, decay, torch.sigmoid(b.float())).to(x.dtype)
    z = z.view(*x.shape[:2], t.delta_heads, -1)
    return mixer.out(rms_norm_silu_gate(seen, mixer.norm, z, t.eps).flatten(2))


def memories(weights: HeadWeights, h: HeadConfig, features: Tensor) -> list[Memory | None]:
    """What each block attends to in the backbone's features (B, S, text width) fp32, once a request; None = itself."""
    return [None if index % 2 else _split(block.kv(features), h.heads) for index, block in enumerate(weights.blocks)]


def predict(
    weights: HeadWeights,
    h: HeadConfig,
    banks: list[tuple[Tensor | slice, Bank]],
    states: list[Tensor],
    x: Tensor,
    step: int,
    seen: list[Memory | None],
    valid: Tensor,
) -> Tensor:
    """The clean actions (B, H, action width) that the head expects behind the noisy x at one solver step.

    Args:
        banks: (rows of the batch, bank) by embodiment.
        states: for each of them (its rows, 1, width), the state's part of the first projection.
        seen: for each block what `memories` gave.
        valid: bool (B, 1, 1, S), which features are a row's own.
    """
    inputs = x.new_empty(*x.shape[:2], h.width)
    for (rows, bank), state in zip(banks, states, strict=True):
        hidden = bank.action(x[rows]) + state
        hidden = functional.silu(bank.second(hidden) + bank.time[step])
        inputs[rows] = bank.third(hidden) + bank.offset
    tokens = torch.cat((weights.future.expand(len(x), -1, -1), inputs), dim=1)
    added: Tensor | None = None
    for block, memory in zip(weights.blocks, seen, strict=True):
        tokens, added = _action_block(block, weights.plain, h.heads, tokens, added, step, memory, valid)
    tokens = weights.tail(weights.tail_norms[step].after(tokens, added)[1][:, h.future :])
    out = torch.empty_like(x)
    for rows, bank in banks:
        out[rows] = bank.decode2(functional.relu(bank.decode1(tokens[rows])))
    return out


def _action_block(
    block: ActionBlock,
    plain: Norm,
    heads: int,
    x: Tensor,
    y: Tensor | None,
    step: int,
    memory: Memory | None,
    valid: Tensor,
) -> tuple[Tensor, Tensor]:
    """As `_vision_block`: the stream without the last term, and that term."""
    x, n = block.norms[step].after(x, y)
    keys, values = memory if memory is not None else _split(block.kv(n), heads)
    q = block.q(n).view(*n.shape[:2], heads, -1)
    x, n = plain.after(x, block.out(attend(q, keys, values, valid if memory is not None else None)))
    return x, block.fc2(block.fc1.gelu(n))


def _split(kv: Tensor, heads: int) -> Memory:
    keys, values = kv.view(*kv.shape[:2], 2, heads, -1).unbind(2)
    return keys, values
