"""Fused operations that exist on a GPU only: each replaces several ops of `taktline_kernels.ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from taktline_kernels.selector import default_selector
from taktline_kernels.triton_impl import action_head as action_head_module
from taktline_kernels.triton_impl import activations, attention, rope

CACHE_MARGIN = 128
"""Rows of finite values that must follow the last cache row in memory: attention reads whole blocks."""


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(x @ weight.T + bias), tanh form, in the matrix product's epilogue.

    Args:
        x: (..., k) bf16.
        weight: (n, k) bf16.
        bias: (n,) bf16.

    Returns:
        (..., n) bf16; gelu acts on the fp32 accumulator.
    """
    flat = x.reshape(-1, x.shape[-1])
    out: Tensor = torch._addmm_activation(bias, flat, weight.t(), use_gelu=True)
    return out.view(*x.shape[:-1], -1)


def linear_geglu(x: Tensor, packed: Tensor) -> Tensor:
    """gelu(x @ gate.T) * (x @ up.T).

    Args:
        x: (..., k) bf16.
        packed: (2n, k) bf16 from `pack_gate_up`.

    Returns:
        (..., n) bf16.
    """
    shape = {"m": x.numel() // x.shape[-1], "n": packed.shape[0] // 2, "k": x.shape[-1]}
    choice = default_selector().choose("linear_geglu", shape, x.dtype, x.device)
    if choice.kernel == "hopper" and shape["k"] % 64 == 0 and shape["n"] % 128 == 0:
        from taktline_kernels.cuda.geglu import linear_geglu as hopper

        return hopper(x, packed, tile=choice.config.get("tile"), span=choice.config.get("span", 12))
    return activations.geglu(torch.nn.functional.linear(x, packed), {}, paired=True)


def pack_gate_up(gate_up: Tensor) -> Tensor:
    """Interleave (2n, k) gate and up rows, gate first in the input, by eights; n a multiple of 8."""
    half = gate_up.shape[0] // 2
    return gate_up.view(2, half // 8, 8, -1).transpose(0, 1).reshape(gate_up.shape).contiguous()


rope_cache = rope.rope_cache


def attention_cached(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, extra: int) -> Tensor:
    """Attend over the first lengths + extra cache rows; settings from the GPU's table.

    Args:
        q: (batch, tokens, heads, head_dim), tokens at any stride.
        k_cache: (batch, rows, head_dim), followed by `CACHE_MARGIN` readable finite rows.
        v_cache: likewise.
        lengths: (batch,) int32.
        extra: rows appended behind each row's length.

    Returns:
        (batch, tokens, heads, head_dim).
    """
    shape = {"batch": q.shape[0], "rows": q.shape[1] * q.shape[2], "cache": k_cache.shape[1]}
    config = default_selector().choose("attention_cached", shape, q.dtype, q.device).config
    return attention.attention_cached(q, k_cache, v_cache, lengths, extra, config=config, bounded=False)


def action_head(
    actions: Tensor,
    next_hidden: Tensor,
    projections: tuple[Tensor, Tensor, Tensor, Tensor],
    hidden: Tensor | None,
    update: Tensor | None,
    final: tuple[Tensor, Tensor] | None,
    gate: Tensor | None,
    *,
    dt: float,
    last: bool,
) -> None:
    """Finish one solver step and begin the next; see `triton_impl.action_head`.

    Args:
        actions: (rows, action_dim) fp32, changed in place.
        next_hidden: (rows, width), written unless `last`.
        projections: action_in_proj weight and bias, action_out_proj weight and bias, fp32.
        hidden: (rows, width), or None before the first step.
        update: (rows, width), added to `hidden` with `gate`.
        final: scale and shift of the final norm.
        gate: (width,) fp32.
        dt: solver step.
        last: no step follows.
    """
    action_head_module.action_head(
        actions, next_hidden, *projections, hidden=hidden, update=update, modulation=final, gate=gate, dt=dt, last=last
    )
