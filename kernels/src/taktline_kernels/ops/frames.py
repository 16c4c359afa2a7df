"""Operations of a frame-causal world model: candidates side by side, each with T patch tokens and two others a frame.

Rows of a frame lie patches first: row c * T + p is patch p of candidate c, row m * T + 2 c + j its conditioning token
j. So the patches of a candidate are whole tiles, and those of all candidates one contiguous matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from taktline_kernels.ops.dispatch import register

CONDITIONING = 2
"""Tokens of a frame beside its patches."""
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_TRITON = "taktline_kernels.triton_impl.frames"
_ATTEND = "taktline_kernels.triton_impl.frame_attention"
_ATTEND_ON_HOPPER = "taktline_kernels.cuda.frame_attention"
_NORM_ON_HOPPER = "taktline_kernels.cuda.frame_norm"
_NORM_INTO_FP8 = "taktline_kernels.cuda.fp8_norm"

Stream = Tensor | tuple[Tensor, Tensor]
"""A residual stream (rows, width): fp32 or bf16, or an fp32 one's upper 24 bits, int16 as in bf16 and uint8 behind."""


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """The upper 24 bits of x (fp32), rounded to nearest; what is not finite stays so."""
    bits = x.contiguous().view(torch.int32)
    bits = torch.where(x.isfinite(), bits + 128, bits)
    return (bits >> 16).to(torch.int16), (bits >> 8 & 255).to(torch.uint8)


def joined(stream: Stream) -> Tensor:
    """The stream in fp32 (an fp64 one as it is)."""
    if isinstance(stream, Tensor):
        return stream.float() if stream.dtype == torch.bfloat16 else stream
    upper, lower = stream
    return (upper.int() << 16 | lower.int() << 8).view(torch.float32)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values and scales (rows, 1) fp32 of x (rows, k): each row's largest magnitude becomes 448."""
    scales = x.float().abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / FP8_MAX
    return (x.float() / scales).to(FP8), scales


def _norm_reference(
    stream: Stream,
    updates: tuple[Tensor, ...],
    offset: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    keep: Stream | None,
    unit: float,
) -> Tensor:
    total = joined(stream)
    for update in updates:
        total = total + update.to(total.dtype)
    if offset is not None:
        total = total + offset.to(total.dtype)
    if isinstance(keep, Tensor):
        keep.copy_(total)
    elif keep is not None:
        for kept, part in zip(keep, split(total), strict=True):
            kept.copy_(part)
    normed = functional.layer_norm(total, (total.shape[-1],), weight, bias, eps)
    return quantise_by(normed, unit) if dtype == FP8 else normed.to(dtype)


def rotate_reference(qkv: Tensor, cos: Tensor, sin: Tensor, candidates: int) -> None:
    """`frame_rotate` in torch operations."""
    heads = qkv.shape[1] // 3 // cos.shape[-1]
    patches = cos.shape[0] - CONDITIONING
    token = torch.cat(
        (
            torch.arange(patches).repeat(candidates),
            patches + torch.arange(len(qkv) - candidates * patches) % CONDITIONING,
        )
    ).to(qkv.device)
    both = (
        qkv[:, : 2 * heads * cos.shape[-1]].to(torch.promote_types(qkv.dtype, cos.dtype)).view(len(qkv), 2 * heads, -1)
    )
    partner = both.reshape(len(qkv), 2 * heads, -1, 2).flip(-1).reshape(both.shape)
    turned = both * cos[token][:, None] + partner * sin[token][:, None]
    qkv[:, : turned[0].numel()] = turned.flatten(1).to(qkv.dtype)


def by_candidate(rows: Tensor, candidates: int) -> Tensor:
    """(candidates, T + 2, k) of one frame's rows, patches first."""
    boundary = len(rows) - CONDITIONING * candidates
    patches, others = rows[:boundary], rows[boundary:]
    return torch.cat((patches.view(candidates, -1, rows.shape[1]), others.view(candidates, CONDITIONING, -1)), dim=1)


def as_rows(tokens: Tensor) -> Tensor:
    """The inverse of `by_candidate`."""
    patches, others = tokens[:, :-CONDITIONING], tokens[:, -CONDITIONING:]
    return torch.cat((patches.flatten(0, 1), others.flatten(0, 1)))


def _attention_reference(frames: Tensor, candidates: int, heads: int, unit: float | None = None) -> Tensor:
    tokens = frames.shape[1] // candidates
    split = [by_candidate(frame, candidates).view(candidates, tokens, 3, heads, -1).unbind(2) for frame in frames]
    q = split[-1][0].transpose(1, 2)
    k = torch.cat([one[1] for one in split], dim=1).transpose(1, 2)
    v = torch.cat([one[2] for one in split], dim=1).transpose(1, 2)
    attended = as_rows(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    return attended if unit is None else quantise_by(attended, unit)


def quantise_by(x: Tensor, unit: float) -> Tensor:
    """e4m3 of x / unit."""
    return (x.float() / unit).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _gelu_reference(x: Tensor, offset: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    active = functional.gelu(x.float() + offset.float(), approximate="none" if dtype == torch.float32 else "tanh")
    return quantise_rows(active) if dtype == FP8 else (active.to(dtype), None)


def _energy_reference(out: Tensor, offset: Tensor, goal: Tensor, candidates: int, eps: float) -> Tensor:
    latents = functional.layer_norm(out + offset, (out.shape[-1],), eps=eps)
    return (latents.view(candidates, -1, out.shape[-1]) - goal).abs().flatten(1).mean(dim=1)


_NORM = register(
    "frame_norm",
    _norm_reference,
    {"triton": f"{_TRITON}:norm", "cuda": f"{_NORM_ON_HOPPER}:norm", "cuda_fp8": f"{_NORM_INTO_FP8}:norm"},
)
_ROTATE = register("frame_rotate", rotate_reference, {"triton": f"{_TRITON}:rotate"})
_ATTENTION = register(
    "frame_attention",
    _attention_reference,
    {"triton": f"{_ATTEND}:attention", "cuda": f"{_ATTEND_ON_HOPPER}:attention"},
)
_GELU = register("frame_gelu", _gelu_reference, {"triton": f"{_TRITON}:gelu"})
_ENERGY = register("frame_energy", _energy_reference, {"triton": f"{_TRITON}:energy"})


def frame_norm(
    stream: Stream,
    updates: tuple[Tensor, ...],
    offset: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    *,
    keep: Stream | None = None,
    unit: float = 1.0,
) -> Tensor:
    """Layer norm of the residual stream with what sub-layers have added to it.

    Args:
        stream: (rows, width).
        updates: up to two (rows, width), the outputs of sub-layers that the stream does not hold yet.
        offset: (width,) fp32, biases that belong to the stream but were left out of it so far; or None.
        weight: (width,) fp32, beside a bias, or None.
        bias: likewise.
        eps: added to the variance.
        dtype: of the result.
        keep: where the sum goes, which may be the stream itself. In 24 bits it costs a quarter less to write, and then
            to read; that rounds by at most 2^-17 of a value, beside updates in bf16 that were rounded by 2^-9.
        unit: of float8_e4m3fn, the value that becomes 1.

    Returns:
        (rows, width) in `dtype`.
    """
    like = stream if isinstance(stream, Tensor) else stream[0]
    shape = {
        "rows": like.shape[0],
        "width": like.shape[1],
        "bytes": dtype.itemsize,
        "updates": len(updates),
        "offset": int(offset is not None),
        "affine": int(weight is not None),
        "keep": int(keep is not None),
    }
    result: Tensor = _NORM.run(shape, like, stream, updates, offset, weight, bias, eps, dtype, keep, unit)
    return result


def frame_rotate(qkv: Tensor, cos: Tensor, sin: Tensor, candidates: int) -> None:
    """Turns queries and keys in place; partners are neighbours, `sin` carries the sign.

    Args:
        qkv: (m T + others, 3 heads d): query, key and value columns, each head-major; usually 2 m others.
        cos: (T + 2, d) fp32, patches first.
        sin: likewise.
        candidates: m.
    """
    shape = {"rows": qkv.shape[0], "width": qkv.shape[1], "head_dim": cos.shape[-1]}
    _ROTATE.run(shape, qkv, qkv, cos, sin, candidates)


def frame_attention(frames: Tensor, candidates: int, heads: int, unit: float | None = None) -> Tensor:
    """Attention of the last frame's tokens over all tokens of their candidate in all frames.

    Args:
        frames: (F, m (T + 2), 3 heads d) with queries and keys turned; F at most 8.
        candidates: m.
        heads: of each of q, k and v.
        unit: None, or the value that becomes 1 in e4m3; a sum of values weighted by a softmax is no larger than the
            largest value, so one unit serves all rows.

    Returns:
        (m (T + 2), heads d), scores scaled by d^-0.5; e4m3 with a unit.
    """
    shape = {
        "frames": frames.shape[0],
        "patches": frames.shape[1] // candidates - CONDITIONING,
        "heads": heads,
        "head_dim": frames.shape[2] // 3 // heads,
    }
    result: Tensor = _ATTENTION.run(shape, frames, frames, candidates, heads, unit)
    return result


def frame_gelu(x: Tensor, offset: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """GELU of x + offset, quantised by rows for float8_e4m3fn.

    Exact for an fp32 result; else in its tanh form, off by 4.8e-4 at most, as much as bf16 rounds values of 1/8.

    Args:
        x: (rows, k).
        offset: (k,).
        dtype: of the result.

    Returns:
        (rows, k) in `dtype`, and the scales (rows, 1) fp32 where quantised.
    """
    result: tuple[Tensor, Tensor | None] = _GELU.run({"rows": x.shape[0], "width": x.shape[1]}, x, x, offset, dtype)
    return result


def frame_energy(out: Tensor, offset: Tensor, goal: Tensor, candidates: int, eps: float) -> Tensor:
    """Mean absolute distance of the layer-normed latents out + offset to the goal.

    Args:
        out: (m T, D) fp32, a product without its bias.
        offset: (D,) fp32.
        goal: (T, D) fp32.
        candidates: m.
        eps: of the affine-free norm.

    Returns:
        (m,) fp32; sums run in one fixed order.
    """
    result: Tensor = _ENERGY.run({"rows": out.shape[0], "width": out.shape[1]}, out, out, offset, goal, candidates, eps)
    return result
