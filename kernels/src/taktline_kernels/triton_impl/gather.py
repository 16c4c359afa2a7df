"""Triton kernels that gather rows, one row a program: embeddings with images between them, patches in another order."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import launch, power_of_two


@triton.jit
def _embed_kernel(
    tokens_ptr,
    table_ptr,
    places_ptr,
    others_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    scale = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    token, place = tl.load(tokens_ptr + row), tl.load(places_ptr + row)
    own = tl.load(table_ptr + token * WIDTH + column, mask=inside & (place < 0), other=0.0).to(tl.float32)
    other = tl.load(others_ptr + place * WIDTH + column, mask=inside & (place >= 0), other=0.0)
    x = own + other.to(table_ptr.dtype.element_ty).to(tl.float32)
    tl.store(sum_ptr + row * WIDTH + column, x, mask=inside)
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    out = x * factor * (1.0 + scale)
    tl.store(out_ptr + row * WIDTH + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def embed_rms_norm(
    tokens: Tensor,
    table: Tensor,
    places: Tensor,
    others: Tensor,
    weight: Tensor,
    eps: float,
    config: Mapping[str, int],
) -> tuple[Tensor, Tensor]:
    """Run `ops.gather.embed_rms_norm`; `config` may hold num_warps."""
    width = table.shape[1]
    x = torch.empty((*tokens.shape, width), dtype=torch.float32, device=table.device)
    out = torch.empty_like(x, dtype=table.dtype)
    launch(
        _embed_kernel,
        (tokens.numel(),),
        tokens.contiguous(),
        table,
        places.contiguous(),
        others.contiguous(),
        weight,
        x,
        out,
        eps,
        WIDTH=width,
        BLOCK=power_of_two(width),
        num_warps=config.get("num_warps", 4),
    )
    return x, out


@triton.jit
def _reorder_kernel(
    x_ptr,
    order_ptr,
    out_ptr,
    rows,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = (row // rows).to(tl.int64) * rows + tl.load(order_ptr + row % rows)
    x = tl.load(x_ptr + source * VALUES + column, mask=column < VALUES, other=0.0)
    at = row.to(tl.int64) * WIDTH + column
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=column < WIDTH)


def reorder_rows(x: Tensor, order: Tensor, width: int, dtype: torch.dtype, config: Mapping[str, int]) -> Tensor:
    """Run `ops.gather.reorder_rows`; `config` may hold num_warps."""
    x = x.contiguous()
    count, rows, values = x.shape
    out = torch.empty((count, rows, width), dtype=dtype, device=x.device)
    launch(
        _reorder_kernel,
        (count * rows,),
        x,
        order,
        out,
        rows,
        VALUES=values,
        WIDTH=width,
        BLOCK=power_of_two(width),
        num_warps=config.get("num_warps", 2),
    )
    return out


@triton.jit
def _mean_kernel(x_ptr, out_ptr, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for one in tl.static_range(COUNT):
        total += tl.load(x_ptr + (row * COUNT + one) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, (total / COUNT).to(out_ptr.dtype.element_ty), mask=inside)


def mean_rows(x: Tensor, count: int, config: Mapping[str, int]) -> Tensor:
    """Run `ops.gather.mean_rows`; `config` may hold num_warps."""
    x = x.contiguous()
    images, rows, width = x.shape
    out = torch.empty((images, rows // count, width), dtype=x.dtype, device=x.device)
    launch(
        _mean_kernel,
        (images * rows // count,),
        x,
        out,
        COUNT=count,
        WIDTH=width,
        BLOCK=power_of_two(width),
        num_warps=config.get("num_warps", 4),
    )
    return out
