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

_TURN, _GELU = range(2)
_STAGES, _TILE = 5, 200


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


def _launch(after: int, x: Tensor, weights: Weights, out: Tensor, config: Mapping[str, int], *further: Any) -> None:
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
    """
    turned, boundary = ctypes.c_int(out.shape[1] // 128 * 2 // 3), ctypes.c_int(candidates * angles.shape[1])
    _launch(_TURN, rows, weights, out, config, angles, turned, boundary)


def gelu_product(rows: Tensor, weights: Weights, unit: float | None, config: Mapping[str, int]) -> Tensor:
    """Run `ops.frame_products.frame_gelu_product`; `config` as above."""
    out = torch.empty(rows.shape[0], weights.values.shape[0], dtype=rows.dtype, device=rows.device)
    _launch(_GELU, rows, weights, out, config, ctypes.c_float(1.0 if unit is None else 1.0 / unit))
    return out
