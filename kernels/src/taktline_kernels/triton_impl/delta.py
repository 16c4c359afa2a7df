"""Triton kernels of the gated delta net: convolution and split, and the delta rule in chunks."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import launch, power_of_two

_EXACT, _TF32 = 0, 1
_BF16 = _TF32 if os.environ.get("TRITON_INTERPRET") == "1" else 2
"""How products take their operands; Triton's interpreter multiplies bf16 as the integers that hold it."""


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
def _product(a, b, KIND: tl.constexpr):
    """a @ b as in fp32 (0: three products in TF32), in TF32 (1), or of operands rounded to bf16 (2); sums are fp32."""
    if KIND == 2:
        product = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif KIND == 1:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32")
    else:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")
    return product


@triton.jit
def _chunk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    rate_ptr,
    bias_ptr,
    keys_ptr,
    values_ptr,
    queries_ptr,
    left_ptr,
    inside_ptr,
    end_ptr,
    tokens,
    heads,
    gate_row,
    gate_token,
    scale,
    KEY: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    GIVEN: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row, head = sequence // heads, sequence % heads
    keys = tl.arange(0, KEY_BLOCK)
    values = tl.arange(0, VALUE_BLOCK)
    index = tl.arange(0, SIZE)
    above, below = index[:, None], index[None, :]
    at = chunk * SIZE + index
    held = at < tokens
    rate = tl.load(rate_ptr + head).to(tl.float32)
    bias = tl.load(bias_ptr + head).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gates = row * gate_row + at * gate_token + head
    raw = tl.load(a_ptr + gates, mask=held, other=0.0).to(tl.float32) + bias
    decay = rate * (tl.maximum(raw, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(raw))))
    decay = tl.where(held, decay, 0.0)
    beta = tl.where(held, tl.sigmoid(tl.load(b_ptr + gates, mask=held, other=0.0).to(tl.float32)), 0.0)
    # The running sum of log decays.
    down = tl.sum(tl.where(above >= below, decay[None, :], 0.0), axis=1)
    end = tl.sum(decay, axis=0)
    apart = tl.where(above >= below, down[:, None] - down[None, :], 0.0)
    between = tl.where(above >= below, tl.exp(apart), 0.0)
    places = ((row * tokens + at) * heads + head)[:, None]
    key_places = places * KEY + keys[None, :]
    key_mask = held[:, None] & (keys < KEY)[None, :]
    spot = (sequence * tl.num_programs(1) + chunk) * SIZE + index[:, None]
    kind = keys_ptr.dtype.element_ty
    # Rows are multiplied as they were read; their norms go into what is small.
    k = tl.load(k_ptr + key_places, mask=key_mask, other=0.0)
    wide = k.to(tl.float32)
    unit = tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6)
    tl.store(left_ptr + spot * KEY_BLOCK + keys[None, :], (wide * (unit * tl.exp(end - down))[:, None]).to(kind))
    system = _product(k, tl.trans(k), GIVEN) * between * (beta * unit)[:, None] * unit[None, :]
    system = tl.where(above > below, system, 0.0)
    q = tl.load(q_ptr + key_places, mask=key_mask, other=0.0)
    inside = _product(q, tl.trans(k), GIVEN) * between * unit[None, :]
    wide = q.to(tl.float32)
    own = tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6) * scale
    grown = tl.exp(down)
    tl.store(queries_ptr + spot * KEY_BLOCK + keys[None, :], (wide * (own * grown)[:, None]).to(kind))
    tl.store(inside_ptr + spot * SIZE + index[None, :], (inside * own[:, None]).to(kind))
    # (I + A)^-1 of diagonal blocks, each twice as wide as the last: [[X, 0], [-Y A X, Y]].
    inverse = tl.where(above == below, 1.0, 0.0)
    inverse -= tl.where((above // 2 == below // 2) & (above > below), system, 0.0)
    for level in tl.static_range(1, LEVELS):
        corner = (above // 2 ** (level + 1) == below // 2 ** (level + 1)) & (above // 2**level > below // 2**level)
        step = _product(inverse, tl.where(corner, system, 0.0), KIND)
        inverse -= _product(step, inverse, KIND)
    solved = _product(inverse * (beta * grown * unit)[None, :], k, KIND)
    tl.store(keys_ptr + spot * KEY_BLOCK + keys[None, :], solved.to(kind))
    value_mask = held[:, None] & (values < VALUE)[None, :]
    v = tl.load(v_ptr + places * VALUE + values[None, :], mask=value_mask, other=0.0)
    solved = _product(inverse * beta[None, :], v, KIND)
    tl.store(values_ptr + spot * VALUE_BLOCK + values[None, :], solved.to(kind))
    tl.store(end_ptr + sequence * tl.num_programs(1) + chunk, tl.exp(end))


@triton.jit
def _state_kernel(
    keys_ptr,
    values_ptr,
    queries_ptr,
    left_ptr,
    inside_ptr,
    end_ptr,
    out_ptr,
    tokens,
    heads,
    chunks,
    KEY_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PART: tl.constexpr,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    row, head = sequence // heads, sequence % heads
    keys = tl.arange(0, KEY_BLOCK)
    index = tl.arange(0, SIZE)
    values = tl.program_id(1) * PART + tl.arange(0, PART)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    state = tl.zeros((KEY_BLOCK, PART), tl.float32)
    for chunk in range(chunks):
        spot = (sequence * chunks + chunk) * SIZE + index[:, None]
        key_places = spot * KEY_BLOCK + keys[None, :]
        change = tl.load(values_ptr + spot * VALUE_BLOCK + values[None, :]).to(tl.float32)
        change -= _product(tl.load(keys_ptr + key_places), state, KIND)
        out = _product(tl.load(queries_ptr + key_places), state, KIND)
        out += _product(tl.load(inside_ptr + spot * SIZE + index[None, :]), change, KIND)
        left = tl.load(left_ptr + key_places)
        state = state * tl.load(end_ptr + sequence * chunks + chunk) + _product(tl.trans(left), change, KIND)
        at = chunk * SIZE + index
        places = ((row * tokens + at) * heads + head)[:, None] * VALUE + values[None, :]
        mask = (at < tokens)[:, None] & (values < VALUE)[None, :]
        tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=mask)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    *,
    config: Mapping[str, int],
) -> Tensor:
    """See `ops.delta.gated_delta_rule`. Two kernels: what is inside each chunk, then the state from chunk to chunk.

    The first has a program for each row, head and chunk: it solves the chunk's triangular system for the keys and the
    values, so that the second, with a program for each row, head and part of the values' width, has two products
    between a state and the next one.
    """
    rows, tokens, heads, key = q.shape
    value = v.shape[3]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if a.stride() != b.stride() or a.stride(2) != 1:
        a, b = a.contiguous(), b.contiguous()
    exact = q.dtype == torch.float32
    size = config.get("chunk", 32)
    chunks = triton.cdiv(tokens, size)
    key_block, value_block = max(16, power_of_two(key)), max(16, power_of_two(value))
    part = min(config.get("value_block", 16), value_block)
    padded = rows * heads * chunks * size
    widths = (key_block, value_block, key_block, key_block, size)
    solved = [torch.empty(padded, width, dtype=q.dtype, device=q.device) for width in widths]
    ends = torch.empty(rows * heads * chunks, dtype=torch.float32, device=q.device)
    out = torch.empty(rows, tokens, heads, value, dtype=q.dtype, device=q.device)
    launch(
        _chunk_kernel,
        (rows * heads, chunks),
        q,
        k,
        v,
        a,
        b,
        rate,
        dt_bias,
        *solved,
        ends,
        tokens,
        heads,
        a.stride(0),
        a.stride(1),
        key**-0.5,
        KEY=key,
        KEY_BLOCK=key_block,
        VALUE=value,
        VALUE_BLOCK=value_block,
        SIZE=size,
        LEVELS=size.bit_length() - 1,
        GIVEN=_EXACT if exact else _BF16,
        KIND=_EXACT if exact else _BF16 if config.get("round_inside", 0) else _TF32,
        num_warps=config.get("num_warps", 4),
    )
    launch(
        _state_kernel,
        (rows * heads, triton.cdiv(value, part)),
        *solved,
        ends,
        out,
        tokens,
        heads,
        chunks,
        KEY_BLOCK=key_block,
        VALUE=value,
        VALUE_BLOCK=value_block,
        PART=part,
        SIZE=size,
        KIND=_EXACT if exact else _BF16,
        num_warps=config.get("state_warps", 4),
        num_stages=config.get("num_stages", 3),
    )
    return out
