"""Triton kernel that writes rows to some places of a matrix, or adds them to what stands there."""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import launch, power_of_two


@triton.jit
def _place_kernel(
    target_ptr, places_ptr, rows_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = target_ptr + tl.load(places_ptr + row) * WIDTH + column
    given = tl.load(rows_ptr + row * WIDTH + column, mask=inside, other=0.0).to(target_ptr.dtype.element_ty)
    if ADD:
        found = tl.load(at, mask=inside, other=0.0).to(tl.float32) + given.to(tl.float32)
        given = found.to(target_ptr.dtype.element_ty)
    tl.store(at, given, mask=inside)


def place_rows(target: Tensor, places: Tensor, rows: Tensor, add: bool, config: Mapping[str, int]) -> None:
    """Run `ops.placing.place_rows`; `config` may hold num_warps."""
    if not len(rows):
        return
    width = rows.shape[1]
    launch(
        _place_kernel,
        (len(rows),),
        target,
        places.contiguous(),
        rows.contiguous(),
        WIDTH=width,
        BLOCK=power_of_two(width),
        ADD=add,
        num_warps=config.get("num_warps", 4),
    )
