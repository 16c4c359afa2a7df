"""Triton kernel of the norm over channels that lie side by side, with the silu behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import launch, power_of_two


@triton.jit
def _channel_norm_kernel(
    x_ptr,
    gamma_ptr,
    out_ptr,
    rows,
    root,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    inside = (row < rows)[:, None] & (channel < CHANNELS)[None, :]
    at = row[:, None] * CHANNELS + channel[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gamma = tl.load(gamma_ptr + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(x * x, axis=1)), 1e-12)
    out = x * (root / length)[:, None] * gamma[None, :]
    if SILU:
        out = out * tl.sigmoid(out)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def channel_norm(x: Tensor, gamma: Tensor, silu: bool, config: Mapping[str, int]) -> Tensor:
    """Run `ops.channels.channel_norm`; any other layout is copied first."""
    rows = x.movedim(-3, -1).contiguous()
    channels = rows.shape[-1]
    out = torch.empty_like(rows)
    count = rows.numel() // channels
    block = power_of_two(channels)
    together = config.get("rows", max(1, 4096 // block))
    launch(
        _channel_norm_kernel,
        (triton.cdiv(count, together),),
        rows,
        gamma,
        out,
        count,
        math.sqrt(channels),
        CHANNELS=channels,
        BLOCK=block,
        ROWS=together,
        SILU=silu,
        num_warps=config.get("num_warps", 4),
    )
    return out.movedim(-1, -3)
