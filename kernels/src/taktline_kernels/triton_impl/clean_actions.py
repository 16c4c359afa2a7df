"""Triton kernel of the last layer of a head that predicts clean actions, and of the next step's input behind it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import launch, power_of_two


@triton.jit
def _clean_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    noise_ptr,
    clean_ptr,
    mixed_ptr,
    rows,
    share,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = channel < WIDTH
    held = (row < rows)[:, None]
    kept = held & inside[None, :]
    at = row[:, None] * WIDTH + channel[None, :]
    bias = tl.zeros((BLOCK_N,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    noise = tl.load(noise_ptr + at, mask=kept, other=0.0)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, DEPTH, BLOCK_K):
        depth = start + tl.arange(0, BLOCK_K)
        deep = depth < DEPTH
        hidden = tl.load(hidden_ptr + row[:, None] * DEPTH + depth[None, :], mask=held & deep[None, :], other=0.0)
        places = channel[:, None] * DEPTH + depth[None, :]
        weight = tl.load(weight_ptr + places, mask=inside[:, None] & deep[None, :], other=0.0)
        total = tl.dot(hidden.to(tl.float32), tl.trans(weight.to(tl.float32)), total, input_precision=PRECISION)
    clean = total + bias[None, :]
    tl.store(clean_ptr + at, clean, mask=kept)
    mixed = clean + share * (noise - clean)
    tl.store(mixed_ptr + at, mixed.to(mixed_ptr.dtype.element_ty), mask=kept)


def clean_actions(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, noise: Tensor, share: float, config: Mapping[str, int]
) -> tuple[Tensor, Tensor]:
    """Run `ops.clean_actions`; products in TF32 where hidden is bf16, in fp32 where it is fp32.

    `config` may hold block_m, block_n, block_k, num_warps and num_stages.
    """
    hidden, noise = hidden.contiguous(), noise.contiguous()
    width, depth = weight.shape
    rows = hidden.numel() // depth
    clean = torch.empty_like(noise)
    mixed = torch.empty_like(noise, dtype=hidden.dtype)
    block_m, block_n = config.get("block_m", 16), config.get("block_n", 16)
    launch(
        _clean_kernel,
        (triton.cdiv(rows, block_m), triton.cdiv(width, block_n)),
        hidden,
        weight,
        weight if bias is None else bias,
        noise,
        clean,
        mixed,
        rows,
        share,
        WIDTH=width,
        DEPTH=depth,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=min(config.get("block_k", 128), max(16, power_of_two(depth))),
        BIAS=bias is not None,
        PRECISION="ieee" if hidden.dtype == torch.float32 else "tf32",
        num_warps=config.get("num_warps", 4),
        num_stages=config.get("num_stages", 4),
    )
    return clean, mixed
