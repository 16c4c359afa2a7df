"""GR00T N1.7 as stateless computation over explicit tensors.

Shapes: N images, B rows, S text slots a row (right-padded: causal layers then need no mask), T action tokens + 1 state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from taktline_kernels import ops
from taktline_kernels.ops.placing import place_rows
from torch import Tensor
from torch.nn import functional

from taktline_worker.branches import Branch
from taktline_worker.fp8_layers import Fp8Linear, gated
from taktline_worker.layers import Linear, Norm, attend
from taktline_worker.models.groot.config import (
    VISION_THETA,
    GrootArchitecture,
    HeadConfig,
    TextConfig,
    VisionConfig,
)
from taktline_worker.models.groot.weights import (
    ActionBlock,
    Attention,
    GrootWeights,
    HeadWeights,
    Merger,
    Projector,
    TextLayer,
    TextWeights,
    VisionWeights,
)

_FIRST_BLOCKS = 3
"""So many blocks of the vision tower take the GPU as long as the launch of a graph with the others takes."""
_FEW_PATCHES = 2048
"""So many leave multiprocessors idle: a merger then runs beside the blocks behind it."""


def patch_order(rows: int, columns: int, merge: int) -> Tensor:
    """(rows * columns, 2) row and column of each patch, in the order in which patches are kept: block by block."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    grid = torch.stack((row, column), dim=-1).view(rows // merge, merge, columns // merge, merge, 2)
    return grid.transpose(1, 2).reshape(-1, 2)


def vision_positions(table: Tensor, rows: int, columns: int, merge: int) -> Tensor:
    """(patches, width) fp32: the learned square table read bilinearly at the grid's points, corners on corners."""
    side = round(table.shape[0] ** 0.5)
    order = patch_order(rows, columns, merge)
    floors, weights = [], []
    for axis, count in ((0, rows), (1, columns)):
        at = torch.linspace(0, side - 1, count)[order[:, axis]]
        floors.append(at.int().clamp(max=side - 1).long())
        weights.append((at - floors[-1])[:, None].to(table.device))
    below = [(floor + 1).clamp(max=side - 1) for floor in floors]
    (row, column), (row1, column1) = ([index.to(table.device) for index in pair] for pair in (floors, below))
    dy, dx = weights
    return (
        (1 - dy) * (1 - dx) * table[row * side + column]
        + (1 - dy) * dx * table[row * side + column1]
        + dy * (1 - dx) * table[row1 * side + column]
        + dy * dx * table[row1 * side + column1]
    )


def vision_rope(v: VisionConfig, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine (patches, half a head's width) fp32: rows turn the first half of it, columns the second."""
    half = v.width // v.heads // 2
    frequencies = VISION_THETA ** (-torch.arange(0, half, 2, dtype=torch.float64) / half)
    angles = patch_order(rows, columns, v.merge).double()[:, :, None] * frequencies
    angles = angles.flatten(1)
    return angles.cos().float(), angles.sin().float()


def encode_images(
    weights: VisionWeights,
    v: VisionConfig,
    patches: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    begun: Callable[[], object] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Features of N images of one grid.

    Args:
        patches: (N, P, patch values) in merge order.
        positions: (N, P, width) in the dtype of patches.
        cos: (P, half a head's width) fp32; `sin` likewise.
        begun: called behind the first few blocks, when nothing works beside them yet.

    Returns:
        (N, P / merge^2, text width), and the same of each deepstack block in order.
    """
    x, n = weights.blocks[0].norm1.after_layer(positions, weights.patch, patches)
    few = min(_FIRST_BLOCKS, len(weights.blocks) - 1, *weights.deepstack)
    following = [*(block.norm1 for block in weights.blocks[1:]), weights.merger.norm]
    deep: list[Branch[Tensor]] = []
    for index, (block, norm) in enumerate(zip(weights.blocks, following, strict=True)):
        if index == few and begun is not None:
            begun()
        qkv = block.qkv(n)
        ops.norm_rotate(qkv, None, None, cos, sin, heads=v.heads, kv_heads=v.heads)
        q, k, value = qkv.view(*x.shape[:2], 3, v.heads, -1).unbind(2)
        x, n = _after_layer(block.norm2, x, block.out, attend(q, k, value))
        x, n = _after_layer(norm, x, block.fc2, block.fc1.gelu(n))
        if index in weights.deepstack:
            work = partial(merge, weights.deepstack[index], x, v.merge)
            deep.append(Branch(x.device, work, beside=x.shape[0] * x.shape[1] <= _FEW_PATCHES))
    return merge(weights.merger, n, v.merge), [one.join() for one in deep]


def _after_layer(norm: Norm, x: Tensor, layer: Linear | Fp8Linear, given: Any) -> tuple[Tensor, Tensor]:
    """x + layer(given), and its norm."""
    if isinstance(layer, Fp8Linear):
        return norm.after(x, layer(given))
    return norm.after_layer(x, layer, given)


def merge(weights: Merger, x: Tensor, side: int) -> Tensor:
    """(N, P, width) -> (N, P / side^2, text width); neighbours already lie side by side. This GELU is the exact one.

    x has been normed already where the norm comes before the regrouping.
    """
    x = x.reshape(x.shape[0], x.shape[1] // side**2, -1)
    if not weights.norm_first:
        x = weights.norm(x)
    return weights.fc2(functional.gelu(weights.fc1(x)))


def text_frequencies(t: TextConfig) -> tuple[Tensor, Tensor]:
    """fp64 frequencies (d / 2,) of a head's turns, and which of time, row and column (d / 2,) each turns by.

    All turn by time, except that of every three the second turns by the row and the third by the column, up to three
    times the axis' section.
    """
    half = t.head_dim // 2
    frequencies = t.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    index = torch.arange(half)
    axis = torch.zeros(half, dtype=torch.long)
    for which in (1, 2):
        axis[(index % 3 == which) & (index < 3 * t.sections[which])] = which
    return frequencies, axis


def text_rope(frequencies: Tensor, axes: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (B * S, half a head's width) fp32 of positions (B, S, 3): time, row, column."""
    angles = (positions.double().index_select(-1, axes) * frequencies).flatten(0, 1)
    return angles.cos().float(), angles.sin().float()


def encode_text(
    weights: TextWeights,
    t: TextConfig,
    tokens: Tensor,
    image_slots: Tensor,
    images: Tensor,
    deep: list[Tensor],
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Features of the last kept layer, before any final norm.

    Args:
        tokens: int64 (B, S).
        image_slots: int64 (image tokens,), where in the flattened (B * S) each image token stands.
        images: (image tokens, width), in that order.
        deep: features added at the image tokens between layer 0 and 1, 1 and 2, ..., shaped like `images`; what
            would come behind the last layer is not part of its output.
        cos: (B * S, half a head's width) fp32; `sin` likewise.

    Returns:
        (B, S, width); slots behind a row's end hold values that nothing reads.
    """
    x = functional.embedding(tokens, weights.embedding)
    place_rows(x, image_slots, images)
    n = ops.rms_norm(x, weights.layers[0].norm1, t.norm_eps)
    following = [layer.norm1 for layer in weights.layers[1:]]
    for index, (layer, norm) in enumerate(zip(weights.layers, following, strict=False)):
        x, hidden = _text_layer(layer, t, x, n, cos, sin)
        if index < len(deep):
            y = layer.down(hidden)
            place_rows(y, image_slots, deep[index], add=True)
            x, n = ops.add_rms_norm(x, y, norm, t.norm_eps)
        else:
            x, n = _add_norm(x, layer.down, hidden, norm, t.norm_eps)
    x, hidden = _text_layer(weights.layers[-1], t, x, n, cos, sin)
    out: Tensor = x + weights.layers[-1].down(hidden)
    return out


def _text_layer(layer: TextLayer, t: TextConfig, x: Tensor, n: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Any]:
    """The stream x behind the attention, and what the feed-forward's last product reads; n is the norm of x."""
    qkv = layer.qkv(n)
    ops.norm_rotate(qkv, layer.q_norm, layer.k_norm, cos, sin, heads=t.heads, kv_heads=t.kv_heads, eps=t.norm_eps)
    heads = qkv.view(*x.shape[:2], -1, t.head_dim)
    q, k, v = heads[:, :, : t.heads], heads[:, :, t.heads : -t.kv_heads], heads[:, :, -t.kv_heads :]
    x, n = _add_norm(x, layer.out, attend(q, k, v, causal=True), layer.norm2, t.norm_eps)
    return x, gated(layer.gate_up, layer.down, n)


def _add_norm(x: Tensor, layer: Linear | Fp8Linear, given: Any, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + layer(given), and its norm; the layer has no bias."""
    if isinstance(layer, Fp8Linear):
        return ops.add_rms_norm(x, layer(given), weight, eps)
    return ops.linear_add_rms_norm(given, layer.weight, x, weight, eps)


def refine(weights: HeadWeights, heads: int, x: Tensor, valid: Tensor) -> Tensor:
    """The vision-language self-attention over each row's own tokens.

    The official code lets the padding of a batch into it; a row alone has none, and that is the answer here.

    Args:
        x: (B, S, width).
        valid: bool (B, 1, 1, S).
    """
    if weights.vl_norm is not None:
        x = weights.vl_norm(x)
    if not weights.refinement:
        return x
    n = weights.refinement[0].norm1(x)
    following = [block.norm1 for block in weights.refinement[1:]]
    for block, norm in zip(weights.refinement, [*following, None], strict=True):
        attention = block.attention
        x, n = block.norm2.after_layer(x, attention.out, attend(*self_attention(attention, heads, n), valid))
        hidden = block.fc1.gelu(n)
        if norm is None:
            break
        x, n = norm.after_layer(x, block.fc2, hidden)
    return x + block.fc2(hidden)


def self_attention(attention: Attention, heads: int, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, S, heads, d) of n (B, S, width)."""
    q, k, v = attention.qkv(n).view(*n.shape[:2], 3, heads, -1).unbind(2)
    return q, k, v


def memory(projection: Linear, h: HeadConfig, features: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values (B, S, heads, d) of the cross-attention blocks that read these, the same at all solver steps."""
    whole = projection(features).view(*features.shape[:2], -1, 2, h.heads, h.width // h.heads)
    return [(block[:, :, 0], block[:, :, 1]) for block in whole.unbind(2)]


def embed_state(projector: Projector, state: Tensor) -> Tensor:
    """(B, state width) -> (B, width)."""
    return projector.state2(projector.state1.relu(state))


def embed_actions(projector: Projector, x: Tensor, step: int) -> Tensor:
    """(B, H, action width) -> (B, H, width) at one solver step."""
    h = ops.linear(x, projector.action1.weight, projector.action_time[step], activation="silu")
    return ops.linear(h, projector.action2.weight, residual=projector.offset.expand(len(x), -1, -1))


def decode_actions(projector: Projector, x: Tensor) -> Tensor:
    """(B, H, width) -> (B, H, action width)."""
    return projector.decode2(projector.decode1.relu(x))


def action_block(
    block: ActionBlock,
    weights: HeadWeights,
    heads: int,
    x: Tensor,
    n: Tensor,
    following: Norm,
    seen: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """One block of the diffusion transformer on the stream x (B, 1 + H, width).

    Args:
        n: x behind the block's own norm.
        following: what norms the stream behind this block.
        seen: keys, values and the mask (B, 1, 1, S) of a cross-attention block; None for self-attention.

    Returns:
        The stream behind the block, and its norm.
    """
    if seen is None:
        attended = attend(*self_attention(block.attention, heads, n))
    else:
        attended = attend(block.attention.qkv(n).view(*n.shape[:2], heads, -1), *seen)
    x, n = weights.plain.after_layer(x, block.attention.out, attended)
    return following.after_layer(x, block.fc2, block.fc1.gelu(n))


def velocity(
    weights: GrootWeights,
    a: GrootArchitecture,
    projectors: list[tuple[Tensor | slice, Projector]],
    state: Tensor,
    x: Tensor,
    step: int,
    seen: list[tuple[Tensor, Tensor, Tensor] | None],
) -> Tensor:
    """The velocity of one solver step.

    Args:
        projectors: (rows of the batch, projector) by embodiment.
        state: (B, width), embedded.
        x: (B, H, action width).
        seen: for each block what `action_block` takes.

    Returns:
        (B, H, action width).
    """
    head = weights.head
    h = by_rows(projectors, x, lambda projector, own: embed_actions(projector, own, step))
    h = torch.cat((state[:, None], h), dim=1)
    norms = [*(block.norms[step] for block in head.blocks), head.tail_norms[step]]
    n = norms[0](h)
    for block, following, its in zip(head.blocks, norms[1:], seen, strict=True):
        h, n = action_block(block, head, a.head.heads, h, n, following, its)
    return by_rows(projectors, n[:, 1:], decode_actions)


def by_rows(
    projectors: list[tuple[Tensor | slice, Projector]], x: Tensor, layer: Callable[[Projector, Tensor], Tensor]
) -> Tensor:
    """The layer of each row's own projector."""
    parts = [(rows, layer(projector, x[rows])) for rows, projector in projectors]
    if len(parts) == 1:
        return parts[0][1]
    out = x.new_empty(len(x), *parts[0][1].shape[1:])
    for rows, part in parts:
        out[rows] = part
    return out
