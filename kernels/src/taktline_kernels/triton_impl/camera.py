"""Triton kernel from camera frames to the patches of a vision tower: resize, letterbox and scaling in one pass.

A frame's geometry is two tables, one an axis: for each output row or column the first input it reads, how many, and
their weights. Integer weights of 22 fractional bits reproduce Pillow's resize, which rounds to bytes after each axis,
bit for bit; float weights are PyTorch's bilinear interpolation.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.ops.dispatch import one_kernel
from taktline_kernels.triton_impl.launch import launch, power_of_two


@triton.jit
def _patches_kernel(
    frames_ptr,
    offsets_ptr,
    strides_ptr,
    slots_ptr,
    starts_ptr,
    counts_ptr,
    weights_ptr,
    pixels_ptr,
    scaled_ptr,
    out_ptr,
    band,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PATCH: tl.constexpr,
    TAPS: tl.constexpr,
    BYTES: tl.constexpr,
    PDL: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    y = tl.program_id(1)
    x = tl.arange(0, BLOCK)
    inside = x < SIZE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots_ptr + image).to(tl.int64)
    side: tl.constexpr = SIZE // PATCH
    # (channel, row, column) inside a patch.
    target = out_ptr + (image * side * side + (y // PATCH) * side + x // PATCH) * (3 * PATCH * PATCH)
    target += (y % PATCH) * PATCH + x % PATCH
    if slot < 0:
        for channel in tl.static_range(3):
            value = tl.load(pixels_ptr + ((image * 3 + channel) * SIZE + y) * SIZE + x, mask=inside)
            tl.store(target + channel * PATCH * PATCH, value, mask=inside)
    else:
        offset = tl.load(offsets_ptr + image)
        stride = tl.load(strides_ptr + image)
        # Tables: [slot][axis: 0 rows, 1 columns][output][tap].
        row_table = slot * 2 * SIZE + y
        column_table = slot * 2 * SIZE + SIZE + x
        first_row = tl.load(starts_ptr + row_table)
        rows = tl.load(counts_ptr + row_table)
        first_column = tl.load(starts_ptr + column_table, mask=inside, other=0)
        columns = tl.load(counts_ptr + column_table, mask=inside, other=0)
        most = tl.max(columns, axis=0)
        for channel in tl.static_range(3):
            base = frames_ptr + offset + first_column * 3 + channel
            if BYTES:  # noqa: SIM108
                total = tl.full((BLOCK,), 1 << 21, dtype=tl.int32)
            else:
                total = tl.zeros((BLOCK,), dtype=tl.float32)
            for row in tl.range(0, rows):
                row_base = base + (first_row + row).to(tl.int64) * stride
                if BYTES:  # noqa: SIM108
                    part = tl.full((BLOCK,), 1 << 21, dtype=tl.int32)
                else:
                    part = tl.zeros((BLOCK,), dtype=tl.float32)
                for tap in tl.range(0, most):
                    used = tap < columns
                    byte = tl.load(row_base + tap * 3, mask=used, other=0).to(tl.int32)
                    weight = tl.load(weights_ptr + column_table * TAPS + tap, mask=used, other=0)
                    if BYTES:
                        part += byte * weight
                    else:
                        part += tl.load(scaled_ptr + byte) * weight
                weight = tl.load(weights_ptr + row_table * TAPS + row)
                if BYTES:
                    total += tl.minimum(tl.maximum(part >> 22, 0), 255) * weight
                else:
                    total += part * weight
            if BYTES:
                value = tl.load(scaled_ptr + tl.minimum(tl.maximum(total >> 22, 0), 255))
                value = value * 2.0 - 1.0
            else:
                value = tl.minimum(tl.maximum(total, 0.0), 1.0) * 2.0 - 1.0
            value = tl.where((columns > 0) & (rows > 0), value, band)
            tl.store(target + channel * PATCH * PATCH, value, mask=inside)


@one_kernel
def patches(
    frames: Tensor,
    offsets: Tensor,
    strides: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    weights: Tensor,
    pixels: Tensor,
    scaled: Tensor,
    out: Tensor,
    *,
    band: float,
    patch: int,
) -> None:
    """Fill `out` with the patches of each image.

    Args:
        frames: (bytes,) uint8, RGB frames one after the other, (H, W, 3) each.
        offsets: (n,) int64, where each image's frame begins.
        strides: (n,) int64, bytes of a frame's row.
        slots: (n,) int32, the geometry of each image; -1 takes `pixels` instead.
        starts: (geometries, 2, size) int32: rows, then columns.
        counts: likewise, inputs read; 0 makes a letterbox band.
        weights: (geometries, 2, size, taps), int32 with 22 fractional bits, or fp32.
        pixels: (n, 3, size, size) fp32, images that are ready.
        scaled: (256,) fp32, byte / 255.
        out: (n, tokens, 3 * patch * patch) fp32.
        band: value of the letterbox bands.
        patch: side of a patch.
    """
    size, taps = weights.shape[2:]
    launch(
        _patches_kernel,
        (out.shape[0], size),
        frames,
        offsets,
        strides,
        slots,
        starts,
        counts,
        weights,
        pixels,
        scaled,
        out,
        band,
        SIZE=size,
        BLOCK=power_of_two(size),
        PATCH=patch,
        TAPS=taps,
        BYTES=not weights.is_floating_point(),
        num_warps=4,
    )
