"""How the expert's kernels (expert.cu) want weights and activations in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WIDTH, HIDDEN, HEADS, HEAD_DIM, ACTION = 1024, 4096, 8, 256, 32
MAX_ROWS = 64
"""Suffix tokens that one matrix tile holds."""


def pair_halves(qkv: Tensor) -> Tensor:
    """Interleave the halves of each head of (heads * 256, k) rows by eights: RoPE finds its pairs in one thread."""
    return qkv.view(-1, 2, HEAD_DIM // 16, 8, qkv.shape[1]).transpose(1, 2).reshape(qkv.shape)


def folded(weight: Tensor, scale: Tensor) -> Tensor:
    """(n, k) bf16, (k,) fp32 -> weight * (1 + scale) in bf16: its product with x lacks but the factor of x's norm."""
    return (weight.float() * (1 + scale)).to(weight.dtype)


def weight_image(weight: Tensor, product_columns: int, product_depth: int) -> Tensor:
    """Lay (n, k) bf16 weights out as the blocks' shared memory: [tile][slice][chunk of 64][row][64], swizzled.

    Columns inside each 32 are permuted to the order of the kernel's A fragments (expert.cu).
    """
    n, k = weight.shape
    columns = weight.view(n, k // 32, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(n, k)
    tiles, slices, chunks = n // product_columns, k // product_depth, product_depth // 64
    image = columns.view(tiles, product_columns, slices, chunks, 8, 8).permute(0, 2, 3, 1, 4, 5)
    row = torch.arange(product_columns, device=weight.device)[:, None]
    unit = torch.arange(8, device=weight.device)[None, :] ^ (row & 7)
    index = unit[None, None, None, :, :, None].expand(tiles, slices, chunks, product_columns, 8, 8)
    return torch.gather(image, 4, index).contiguous()


def split_parts(value: Tensor, count: int) -> list[Tensor]:
    """fp32 -> `count` bf16 tensors, each the rounded rest of those before it."""
    parts, rest = [], value.float()
    for _ in range(count):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return parts


def timed_weight(weight: Tensor, bias: Tensor) -> Tensor:
    """(1024, 1024), (1024,) fp32 -> (1024, 4096) bf16: both parts, the first again, and the bias in three columns.

    Multiplied with [large part, large part, small part, ones] of an fp32 row it is the fp32 product with its bias.
    """
    large, small = split_parts(weight, 2)
    last = torch.zeros_like(large)
    last[:, :3] = torch.stack(split_parts(bias, 3), dim=1)
    return torch.cat((large, small, large, last), dim=1)


def start_weight(qkv: Tensor, scale: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The products of π0's action_time_mlp_out with the first layer's matrix behind it, and that layer by itself.

    Where a norm multiplies by 1 + scale and shifts nothing, a query is its row's factor times
    qkv * (1 + scale) @ (weight @ s + bias): one product of s, whose factor can come later.

    Args:
        qkv: (2560, 1024) bf16.
        scale: (1024,) fp32, of the first norm.
        weight: (1024, 1024) fp32, action_time_mlp_out.
        bias: (1024,) fp32.

    Returns:
        (3584, 1024) fp16, the queries', keys' and values' rows as `pair_halves` orders them, then the layer's; and
        what is added to the product, (3584,) fp32.
    """
    before = pair_halves(qkv).double() * (1 + scale.double())
    both = torch.cat((before @ weight.double(), weight.double()))
    added = torch.cat((before @ bias.double(), bias.double()))
    return both.half(), added.float()


def timed_input(device: torch.device) -> Tensor:
    """(64, 4096) bf16 in fragment order: zeros, and ones where `timed_weight` has the bias."""
    values = torch.zeros(MAX_ROWS * 4 * WIDTH, dtype=torch.bfloat16, device=device)
    token = torch.arange(MAX_ROWS, device=device)[:, None]
    column = 3 * WIDTH + torch.arange(3, device=device)[None, :]
    tile = ((column >> 5) * 4 + (token >> 4)) * 2 + ((token >> 3) & 1)
    lane = (token & 7) * 4 + ((column >> 3) & 3)
    values[(tile * 32 + lane) * 8 + (column & 7)] = 1.0
    return values


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Weights of one expert layer, bf16.

    qkv (2560, 1024), out (1024, 2048), gate_up (8192, 1024) as
    `gpu.pack_gate_up` orders it, down (1024, 4096)."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Projections:
    """The fp32 layers between actions and the expert; the last four are π0's, None for π0.5.

    in_weight (1024, 32), in_bias (1024,) or π0's (steps, 1024), out_weight (32, 1024), out_bias (32,),
    time_weight (1024, 1024), time_bias (1024,), state_weight (1024, 32), state_bias (1024,)."""

    in_weight: Tensor
    in_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    time_weight: Tensor | None = None
    time_bias: Tensor | None = None
    state_weight: Tensor | None = None
    state_bias: Tensor | None = None
