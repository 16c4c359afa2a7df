"""A world model's products with what follows them, as one Hopper kernel each (wide_product.cu)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from taktline_kernels.cuda import geglu, nvrtc
from taktline_kernels.cuda.nvrtc import CudaKernel
from taktline_kernels.ops.frame_products import Weights
from taktline_kernels.ops.frames import FP8

_TURN, _GELU = range(2)
_STAGES, _TILE = 5, 200
_PATCHES, _HEAD, _OUTPUTS = 256, 64, 256
"""Patches of a candidate and numbers of a head where it turns; outputs come in multiples of these."""


@functools.cache
def _kernel(after: int, columns: int, stages: int, eight: bool) -> CudaKernel:
    return CudaKernel(
        "wide_product.cu",
        "wide_product",
        {"AFTER": after, "BN": columns, "STAGES": stages, "EIGHT": int(eight)},
        threads=384,
        shared_bytes=stages * (128 + columns) * 128,
        prologue=geglu.wgmma_source(columns, eight),
    )


def _check(x: Tensor, weights: Weights, out: Tensor) -> None:
    """Refuse what the kernel, which is handed addresses, would read or write wrongly.

    Raises:
        ValueError: operands of two kinds or other shapes, or lying with gaps.
    """
    values, scales = weights.values, weights.scales
    vectors = (weights.bias,) if scales is None else (weights.bias, scales)
    operand = torch.bfloat16 if scales is None else FP8
    if x.dtype != operand or values.dtype != operand:
        raise ValueError(f"this product is of bf16, or of e4m3 with scales, not of {x.dtype} and {values.dtype}")
    if not all(one.is_contiguous() for one in (x, values, out, *vectors)):
        raise ValueError("this product takes contiguous operands")
    (rows, depth), (width, deep) = x.shape, values.shape
    if depth != deep or depth * x.itemsize % 128 or width % _OUTPUTS or out.shape != (rows, width):
        raise ValueError(f"this product does not fit: {tuple(x.shape)}, {tuple(values.shape)} into {tuple(out.shape)}")
    if any(one.dtype != torch.float32 or one.shape != (width,) for one in vectors):
        raise ValueError(f"this product takes {width} biases, and as many scales, in fp32")


def _launch(after: int, x: Tensor, weights: Weights, out: Tensor, config: Mapping[str, int], *further: Any) -> None:
    _check(x, weights, out)
    values = weights.values
    eight = weights.scales is not None
    if eight:  # two numbers of a byte as one of two, for the copy engine
        x, values = x.view(torch.bfloat16), values.view(torch.bfloat16)
    rows, width = x.shape[0], values.shape[0]
    columns, stages = config.get("tile", _TILE), config.get("stages", _STAGES)
    token_tiles, weight_tiles = -(-rows // columns), width // 128
    _kernel(after, columns, stages, eight).launch(
        (min(nvrtc.processors(x.device), token_tiles * weight_tiles), 1, 1),
        [
            nvrtc.tensor_map(values, (128, 64)),
            nvrtc.tensor_map(x, (columns, 64)),
            out,
            ctypes.c_int(rows),
            ctypes.c_int(token_tiles),
            ctypes.c_int(weight_tiles),
            ctypes.c_int(x.shape[1] // 64),
            weights.bias,
            weights.bias if weights.scales is None else weights.scales,
            *further,
        ],
        overlap=True,
    )


def turned_product(
    rows: Tensor, weights: Weights, angles: Tensor, candidates: int, out: Tensor, config: Mapping[str, int]
) -> None:
    """Run `ops.frame_products.frame_turned_product` for 256 patches and heads of 64.

    Args:
        config: `tile` (rows of a tile, a multiple of 8, at most 200), `stages` (of 64 columns in shared memory).

    Raises:
        ValueError: for any other call, or operands that do not fit; the table's rule is too wide.
    """
    fits = angles.shape == (2, _PATCHES, _HEAD) and angles.dtype == torch.float32 and angles.is_contiguous()
    if not fits or out.dtype != torch.bfloat16 or out.shape[1] % (3 * _OUTPUTS) or candidates * _PATCHES > len(rows):
        raise ValueError(
            f"this product turns candidates of {_PATCHES} patches in heads of {_HEAD}, by fp32 angles, into bf16"
        )
    turned, boundary = ctypes.c_int(out.shape[1] // 128 * 2 // 3), ctypes.c_int(candidates * angles.shape[1])
    _launch(_TURN, rows, weights, out, config, angles, turned, boundary)


def gelu_product(rows: Tensor, weights: Weights, unit: float | None, config: Mapping[str, int]) -> Tensor:
    """Run `ops.frame_products.frame_gelu_product`; `config` and refusals as above."""
    if (unit is None) != (weights.scales is None):
        raise ValueError("this product has a unit where its operands are e4m3, and only there")
    out = torch.empty(rows.shape[0], weights.values.shape[0], dtype=rows.dtype, device=rows.device)
    _launch(_GELU, rows, weights, out, config, ctypes.c_float(1.0 if unit is None else 1.0 / unit))
    return out
