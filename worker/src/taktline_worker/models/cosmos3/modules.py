"""Cosmos3 as stateless computation over explicit tensors: a text tower, and one of video and actions that reads it.

Shapes: B rows, `lanes` sequences (a row has one for each branch of guidance that is here), N tokens of a sequence in
the order clean frame, noised frames, state row, noised actions. Heads and MLP columns are this rank's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from taktline_kernels import ops
from taktline_kernels.fp8_heads import Fp8Heads, Fp8Text
from taktline_kernels.ops.fp8_attention import attention_fp8, heads_fp8
from torch import Tensor
from torch.nn import functional

from taktline_worker.models.cosmos3.config import PATCH, Cosmos3Architecture
from taktline_worker.models.cosmos3.fp8 import Fp8Linear, functions
from taktline_worker.models.cosmos3.mesh import Mesh
from taktline_worker.models.cosmos3.request import TEMPORAL_FACTOR, RequestSettings
from taktline_worker.models.cosmos3.weights import Cosmos3Weights, Fp8GatedLinear, GatedLinear, Product, TowerLayer


def frame_tokens(settings: RequestSettings) -> tuple[int, int]:
    """Rows and columns of tokens of one latent frame; an odd side is filled up with zeros."""
    _, height, width = settings.latent_grid
    return -(-height // PATCH), -(-width // PATCH)


def patchify(latents: Tensor) -> Tensor:
    """(B, C, t, h, w) -> (B, t * rows * columns, 4 C), values by row, column and channel; odd sides get zeros."""
    height, width = latents.shape[-2:]
    latents = functional.pad(latents, (0, width % PATCH, 0, height % PATCH))
    rows, columns = latents.shape[-2] // PATCH, latents.shape[-1] // PATCH
    cut = latents.reshape(*latents.shape[:3], rows, PATCH, columns, PATCH)
    return cut.permute(0, 2, 3, 5, 4, 6, 1).flatten(1, 3).flatten(2)


def unpatchify(tokens: Tensor, channels: int, height: int, width: int) -> Tensor:
    """The inverse of `patchify`: (B, tokens, 4 C) -> (B, C, t, height, width), the filled cells dropped."""
    rows, columns = -(-height // PATCH), -(-width // PATCH)
    cut = tokens.view(tokens.shape[0], -1, rows, columns, PATCH, PATCH, channels)
    return cut.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)[..., :height, :width]


def text_positions(length: int) -> Tensor:
    """(length, 3) of text tokens: all axes advance together."""
    return torch.arange(length, dtype=torch.float32)[:, None].expand(-1, 3)


def joint_positions(a: Cosmos3Architecture, settings: RequestSettings, length: int) -> Tensor:
    """(N, 3) time, row and column of each token behind a text of `length` tokens.

    The sums are made in fp32 and in this order, as in training: at 15,000 fp32 keeps three decimals only.
    """
    origin = float(length + a.margin)
    frames = settings.latent_grid[0]
    rows, columns = frame_tokens(settings)
    per_second = a.base_fps / TEMPORAL_FACTOR
    index = torch.arange(frames, dtype=torch.float32)
    times = index / (settings.fps / TEMPORAL_FACTOR) * per_second + origin
    video = torch.cartesian_prod(times, torch.arange(float(rows)), torch.arange(float(columns)))
    index = torch.arange(settings.action_rows, dtype=torch.float32) + float(settings.action_offset)
    actions = torch.zeros(settings.action_rows, 3)
    actions[:, 0] = index / settings.fps * per_second + origin
    return torch.cat((video, actions))


def rope_table(a: Cosmos3Architecture, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (N, head_dim / 2) fp32 of positions (N, 3).

    Of every three frequencies the second turns by the row and the third by the column, up to three times the axis'
    section; all others turn by time. Frequencies and angles are fp32, as in training.
    """
    half = a.head_dim // 2
    exponent = torch.arange(0, a.head_dim, 2, dtype=torch.float32) / a.head_dim
    frequencies = 1.0 / (a.theta**exponent)
    index = torch.arange(half)
    axis = torch.zeros(half, dtype=torch.long)
    for which in (1, 2):
        axis[(index % 3 == which) & (index < 3 * a.sections[which])] = which
    angles = positions[:, axis] * frequencies
    return angles.cos(), angles.sin()


PIECES = 2
"""Into so many the tokens are cut behind the attention where ranks share the matrices: one piece is added up over the
ranks while another's products are computed."""


def mlp(layer: TowerLayer, a: Cosmos3Architecture, x: Any) -> Tensor:
    """SwiGLU, or squared ReLU without a gate; of this rank's columns, still to be added up over the ranks."""
    up = layer.up(x)
    if isinstance(layer.up, GatedLinear | Fp8GatedLinear):
        return layer.down(up)
    if isinstance(layer.down, Fp8Linear):
        return layer.down(functions().swiglu_fp8(up) if a.gated else functions().relu2_fp8(up))
    return layer.down(ops.swiglu(up) if a.gated else ops.relu2(up))


def normed(
    x: Tensor, y: Tensor | None, weight: Tensor, a: Cosmos3Architecture, reader: Product | GatedLinear | Fp8GatedLinear
) -> tuple[Tensor, Any]:
    """x + y, and its norm as `reader` takes it: in the dtype of x, or in FP8. y None adds nothing."""
    if isinstance(reader, Fp8Linear | Fp8GatedLinear):
        total, rows = functions().rms_norm_fp8(x, y, weight, a.norm_eps)
        return total, rows
    if y is None:
        return x, ops.rms_norm(x, weight, a.norm_eps)
    return ops.add_rms_norm(x, y, weight, a.norm_eps)


def encode_text(
    weights: Cosmos3Weights, a: Cosmos3Architecture, tokens: Tensor, cos: Tensor, sin: Tensor, mesh: Mesh
) -> tuple[Tensor, Tensor]:
    """Keys and values of a prompt in every layer, as the other tower reads them.

    They depend on the token ids alone, not on any observation. Of the last layer nothing else is computed.

    Args:
        tokens: int64 (L,).
        cos: (L, head_dim / 2) fp32; `sin` likewise.

    Returns:
        (layers, L, kv heads, head_dim), twice.
    """
    x = functional.embedding(tokens, weights.embedding)[None]
    keys, values = [], []
    last = weights.text[-1]
    heads, kv_heads = a.heads // mesh.place.shards, a.kv_heads // mesh.place.shards
    for layer in weights.text:
        qkv = layer.qkv(ops.rms_norm(x, layer.norm1, a.norm_eps))
        q, k, v = _split_heads(qkv, a, mesh)
        # The other tower reads these keys or, where it has a norm of its own for them, others of the same product.
        shared = k
        if layer.shared_norm is not None:
            shared = k.clone() if layer.k_norm is None else ops.rms_norm(k, layer.k_norm - 1.0, a.norm_eps)
            norms = layer.shared_norm, layer.shared_norm
            ops.norm_rotate(shared.flatten(2), *norms, cos, sin, heads=kv_heads, kv_heads=0, eps=a.norm_eps)
        ops.norm_rotate(qkv, layer.q_norm, layer.k_norm, cos, sin, heads=heads, kv_heads=kv_heads, eps=a.norm_eps)
        keys.append(shared[0])
        values.append(v[0])
        if layer is last:
            break
        seen = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        attended = mesh.sum(layer.out(seen.transpose(1, 2).flatten(2)))()
        x, n = ops.add_rms_norm(x, attended, layer.norm2, a.norm_eps)
        x = x + mesh.sum(mlp(layer, a, n))()
    return torch.stack(keys), torch.stack(values)


def joint_layer(
    layer: TowerLayer,
    a: Cosmos3Architecture,
    x: Tensor,
    y: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    text_keys: Tensor,
    text_values: Tensor,
    lengths: Tensor,
    mesh: Mesh,
    *,
    tokens: int,
    first: int = 0,
    text_multipliers: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One layer of the tower of video and actions: each token sees the whole text and every token.

    Args:
        x: (lanes, tokens of this rank, width); the stream is x + y, so that the next norm can add them. y None: x.
        cos: (lanes, tokens of this rank, head_dim / 2) fp32; `sin` likewise.
        text_keys: (lanes, text slots, kv heads, head_dim); `text_values` likewise. Where attention multiplies in FP8
            they are as `Fp8Text` has them.
        lengths: int32 (lanes,), valid text slots.
        tokens: of a whole sequence; what a rank has beyond them is padding that no token sees.
        first: leave out the result of all tokens before this one (their keys and values are still seen).
        text_multipliers: fp32 (lanes, 2) of keys and values in FP8.

    Returns:
        The stream behind the layer, again in two parts (lanes, tokens of this rank - first, width).
    """
    x, n = normed(x, y, layer.norm1, a, layer.qkv)
    if layer.multipliers is not None:
        assert text_multipliers is not None
        own = _fp8_heads(layer, a, n, cos, sin, mesh, tokens, layer.multipliers)
        text = Fp8Text(text_keys, text_values, text_multipliers, lengths)
        seen = attention_fp8(replace(own, q=own.q[:, first:]), text, x.dtype)
    else:
        if mesh.place.parts > 1:
            q, k, v = _gathered_heads(layer, a, n, cos, sin, mesh, tokens)
        else:
            qkv = layer.qkv(n)
            heads, kv_heads = a.heads // mesh.place.shards, a.kv_heads // mesh.place.shards
            table = cos.flatten(0, 1), sin.flatten(0, 1)
            ops.norm_rotate(qkv, layer.q_norm, layer.k_norm, *table, heads=heads, kv_heads=kv_heads, eps=a.norm_eps)
            q, k, v = _split_heads(qkv, a, mesh)
        seen = ops.attention_suffix(q[:, first:], text_keys, text_values, lengths, k, v)
    lanes, count = seen.shape[:2]
    # Token by token from here on: pieces of rows.
    pieces = PIECES if mesh.place.shards > 1 else 1
    projected = [mesh.sum(layer.out(piece)) for piece in seen.flatten(2).flatten(0, 1).chunk(pieces)]
    streams, added = [], []
    for piece, total in zip(x[:, first:].reshape(lanes * count, -1).chunk(pieces), projected, strict=True):
        stream, n = normed(piece, total(), layer.norm2, a, layer.up)
        streams.append(stream)
        added.append(mesh.sum(mlp(layer, a, n)))
    totals = [total() for total in added]
    x, y = (parts[0] if pieces == 1 else torch.cat(parts) for parts in (streams, totals))
    return x.view(lanes, count, -1), y.view(lanes, count, -1)


def _fp8_heads(
    layer: TowerLayer,
    a: Cosmos3Architecture,
    n: Any,
    cos: Tensor,
    sin: Tensor,
    mesh: Mesh,
    tokens: int,
    multipliers: Tensor,
) -> Fp8Heads:
    """Queries of this rank's tokens, keys and values of all, in FP8."""
    if mesh.place.parts > 1:
        return heads_fp8(*_gathered_heads(layer, a, n, cos, sin, mesh, tokens), multipliers)
    assert layer.q_norm is not None
    assert layer.k_norm is not None
    return heads_fp8(
        *_split_heads(layer.qkv(n), a, mesh),
        multipliers,
        norms=(layer.q_norm, layer.k_norm),
        table=(cos.flatten(0, 1), sin.flatten(0, 1)),
        eps=a.norm_eps,
        adjacent=True,
    )


def _gathered_heads(
    layer: TowerLayer, a: Cosmos3Architecture, n: Any, cos: Tensor, sin: Tensor, mesh: Mesh, tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of this rank's tokens, keys and values of all: the queries are made while those are on their way."""
    lanes, own = cos.shape[:2]
    of_q, of_kv = layer.qkv.split(a.heads * a.head_dim)
    table = cos.flatten(0, 1), sin.flatten(0, 1)
    kv = of_kv(n)
    ops.norm_rotate(kv, layer.k_norm, layer.k_norm, *table, heads=0, kv_heads=a.kv_heads, eps=a.norm_eps)
    arriving = mesh.gather(kv.view(lanes, own, -1, a.head_dim))
    q = of_q(n)
    ops.norm_rotate(q, layer.q_norm, layer.q_norm, *table, heads=a.heads, kv_heads=0, eps=a.norm_eps)
    q = q.view(lanes, own, -1, a.head_dim)
    k, v = arriving()[:, :tokens].chunk(2, dim=2)
    return q, k, v


def _split_heads(qkv: Tensor, a: Cosmos3Architecture, mesh: Mesh) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads = a.heads // mesh.place.shards, a.kv_heads // mesh.place.shards
    split = qkv.view(*qkv.shape[:-1], -1, a.head_dim)
    return split[..., :heads, :], split[..., heads:-kv_heads, :], split[..., -kv_heads:, :]
