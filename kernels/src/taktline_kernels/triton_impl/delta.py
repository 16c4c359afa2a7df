"""Triton kernels of the gated delta net: the gated norm, convolution and split, and the delta rule in chunks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import launch, power_of_two

CHUNK = 16
"""Tokens whose corrections are solved together. The inverse of the unit triangular system is a product of log2(CHUNK)
factors of its own powers, exact for any size and well conditioned in fp32 at this one."""


@triton.jit
def _gate_kernel(
    x_ptr, weight_ptr, gate_ptr, out_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    out = x * factor * weight * gate * tl.sigmoid(gate)
    tl.store(out_ptr + row * WIDTH + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm_silu_gate(x: Tensor, weight: Tensor, gate: Tensor, eps: float, *, config: Mapping[str, int]) -> Tensor:
    """See `ops.delta.rms_norm_silu_gate`."""
    width = x.shape[-1]
    x, gate = x.contiguous(), gate.contiguous()
    out = torch.empty_like(x)
    launch(
        _gate_kernel,
        (x.numel() // width,),
        x,
        weight,
        gate,
        out,
        eps,
        WIDTH=width,
        BLOCK=power_of_two(width),
        num_warps=config.get("num_warps", 1),
    )
    return out


@triton.jit
def _conv_kernel(
    x_ptr,
    weight_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    tokens,
    stride,
    CHANNELS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channels = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < CHANNELS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tap in tl.static_range(TAPS):
        source = at + (tap - TAPS + 1)
        held = (source >= 0) & (source < tokens)
        places = (row * tokens + source)[:, None] * stride + channels[None, :]
        x = tl.load(x_ptr + places, mask=held[:, None] & inside[None, :], other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + channels * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        total += x * weight[None, :]
    out = (total * tl.sigmoid(total)).to(q_ptr.dtype.element_ty)
    kept = (at < tokens)[:, None]
    token = (row * tokens + at)[:, None]
    first = channels < FIRST
    tl.store(q_ptr + token * FIRST + channels[None, :], out, mask=kept & first[None, :])
    second = (channels >= FIRST) & (channels < FIRST + SECOND)
    tl.store(k_ptr + token * SECOND + (channels - FIRST)[None, :], out, mask=kept & second[None, :])
    third = (channels >= FIRST + SECOND) & inside
    width = CHANNELS - FIRST - SECOND
    tl.store(v_ptr + token * width + (channels - FIRST - SECOND)[None, :], out, mask=kept & third[None, :])


def conv_silu_split(
    x: Tensor, weight: Tensor, widths: tuple[int, int, int], *, config: Mapping[str, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.delta.conv_silu_split`. The tokens of x may lie further apart than its channels: one matrix's part."""
    rows, tokens, channels = x.shape
    stride = x.stride(1)
    if x.stride(2) != 1 or x.stride(0) != tokens * stride:
        x = x.contiguous()
        stride = channels
    weight = weight.contiguous()
    parts = tuple(torch.empty(rows, tokens, width, dtype=x.dtype, device=x.device) for width in widths)
    block, together = config.get("block", 256), config.get("rows", 4)
    grid = (rows, triton.cdiv(tokens, together), triton.cdiv(channels, block))
    launch(
        _conv_kernel,
        grid,
        x,
        weight,
        *parts,
        tokens,
        stride,
        CHANNELS=channels,
        FIRST=widths[0],
        SECOND=widths[1],
        TAPS=weight.shape[1],
        BLOCK=block,
        ROWS=together,
        num_warps=config.get("num_warps", 4),
    )
    return parts[0], parts[1], parts[2]


@triton.jit
def _rule_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    out_ptr,
    tokens,
    heads,
    scale,
    KEY: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    row, head = sequence // heads, sequence % heads
    values = tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    keys = tl.arange(0, KEY_BLOCK)
    index = tl.arange(0, SIZE)
    earlier = index[:, None] > index[None, :]
    same = index[:, None] == index[None, :]
    last = index == SIZE - 1
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    state = tl.zeros((KEY_BLOCK, VALUE_BLOCK), tl.float32)
    for start in range(0, tokens, SIZE):
        at = start + index
        held = at < tokens
        gates = (row * tokens + at) * heads + head
        decay = tl.load(decay_ptr + gates, mask=held, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + gates, mask=held, other=0.0).to(tl.float32)
        key_places = gates[:, None] * KEY + keys[None, :]
        key_mask = held[:, None] & (keys < KEY)[None, :]
        q = tl.load(q_ptr + key_places, mask=key_mask, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + key_places, mask=key_mask, other=0.0).to(tl.float32)
        q = q * (tl.rsqrt(tl.sum(q * q, axis=1) + 1e-6) * scale)[:, None]
        k = k * tl.rsqrt(tl.sum(k * k, axis=1) + 1e-6)[:, None]
        value_places = gates[:, None] * VALUE + values[None, :]
        value_mask = held[:, None] & (values < VALUE)[None, :]
        v = tl.load(v_ptr + value_places, mask=value_mask, other=0.0).to(tl.float32)
        # The running sum of log decays, as a column and as a row.
        down = tl.sum(tl.where(earlier | same, decay[None, :], 0.0), axis=1)
        across = tl.sum(tl.where(same, down[:, None], 0.0), axis=0)
        end = tl.sum(tl.where(last, down, 0.0), axis=0)
        between = tl.where(earlier | same, tl.exp(tl.where(earlier | same, down[:, None] - across[None, :], 0.0)), 0.0)
        likeness = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        system = tl.where(earlier, beta[:, None] * likeness * between, 0.0)
        # (I + A)^-1 = (I - A)(I + A^2)(I + A^4)..., which ends because A is strictly triangular.
        inverse = tl.where(same, 1.0, 0.0) - system
        power = system
        for _ in tl.static_range(LEVELS - 1):
            power = tl.dot(power, power, input_precision=PRECISION)
            inverse += tl.dot(inverse, power, input_precision=PRECISION)
        grown = tl.exp(down)[:, None]
        wanted = beta[:, None] * (v - grown * tl.dot(k, state, input_precision=PRECISION))
        change = tl.dot(inverse, wanted, input_precision=PRECISION)
        inside = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
        out = grown * tl.dot(q, state, input_precision=PRECISION)
        out += tl.dot(inside, change, input_precision=PRECISION)
        tl.store(out_ptr + value_places, out, mask=value_mask)
        left = k * tl.exp(end - down)[:, None]
        state = state * tl.exp(end) + tl.dot(tl.trans(left), change, input_precision=PRECISION)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *, config: Mapping[str, int]
) -> Tensor:
    """See `ops.delta.gated_delta_rule`. One program for each row, head and part of the values' width."""
    rows, tokens, heads, key = q.shape
    value = v.shape[3]
    q, k, v, decay, beta = (x.contiguous() for x in (q, k, v, decay, beta))
    out = torch.empty(rows, tokens, heads, value, dtype=torch.float32, device=q.device)
    block = min(config.get("value_block", 32), max(16, power_of_two(value)))
    exact = q.dtype == torch.float32 or not config.get("tf32", 1)
    launch(
        _rule_kernel,
        (rows * heads, triton.cdiv(value, block)),
        q,
        k,
        v,
        decay,
        beta,
        out,
        tokens,
        heads,
        key**-0.5,
        KEY=key,
        KEY_BLOCK=max(16, power_of_two(key)),
        VALUE=value,
        VALUE_BLOCK=block,
        SIZE=CHUNK,
        LEVELS=CHUNK.bit_length() - 1,
        PRECISION="ieee" if exact else "tf32",
        num_warps=config.get("num_warps", 4),
        num_stages=config.get("num_stages", 3),
    )
    return out
