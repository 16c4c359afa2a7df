"""Queries, keys and values of a frame's tokens, queries and keys turned, as one Hopper kernel (turned_product.cu)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping

from torch import Tensor

from taktline_kernels.cuda import geglu, nvrtc
from taktline_kernels.cuda.nvrtc import CudaKernel

_STAGES, _TILE = 3, 200


@functools.cache
def _kernel(columns: int) -> CudaKernel:
    return CudaKernel(
        "turned_product.cu",
        "turned_product",
        {"BN": columns, "STAGES": _STAGES},
        threads=384,
        shared_bytes=_STAGES * (256 + columns) * 128,
        prologue=geglu.wgmma_source(columns),
    )


def turned_product(
    x: Tensor, paired: Tensor, bias: Tensor, angles: Tensor, candidates: int, out: Tensor, config: Mapping[str, int]
) -> None:
    """Run `ops.frames.frame_turned_product` for 256 patches and heads of 64; `tile` of the config are its rows."""
    rows, width = out.shape
    columns = config.get("tile", _TILE)
    token_tiles, weight_tiles = -(-rows // columns), width // 256
    _kernel(columns).launch(
        (min(nvrtc.processors(x.device), token_tiles * weight_tiles), 1, 1),
        [
            nvrtc.tensor_map(paired, (256, 64)),
            nvrtc.tensor_map(x, (columns, 64)),
            out,
            ctypes.c_int(rows),
            ctypes.c_int(token_tiles),
            ctypes.c_int(weight_tiles),
            ctypes.c_int(x.shape[1] // 64),
            ctypes.c_int(min(12, weight_tiles)),
            ctypes.c_int(weight_tiles * 2 // 3),
            ctypes.c_int(candidates * angles.shape[1]),
            angles,
            bias,
        ],
        overlap=True,
    )
