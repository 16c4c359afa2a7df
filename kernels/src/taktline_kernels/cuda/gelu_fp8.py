"""gelu(x @ weight.T + bias) from e4m3 to e4m3 in one Hopper kernel: geglu.cu with another format and epilogue."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from taktline_kernels.cuda import geglu, nvrtc


def gelu_product(
    x: Tensor,
    x_scales: Tensor,
    paired: Tensor,
    weight_scales: Tensor,
    bias: Tensor,
    unit: float,
    config: Mapping[str, int],
) -> Tensor:
    """Run `ops.frames.frame_gelu_product`; `tile` of the config are the rows of a tile."""
    rows, depth = x.shape
    width = paired.shape[0]
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    processors = nvrtc.processors(x.device)
    columns = config.get("tile") or geglu.tile_for(rows, width // 2, processors)
    token_tiles, weight_tiles = -(-rows // columns), width // 256
    half = torch.bfloat16  # two numbers of a byte as one of two, for the copy engine
    geglu.product_kernel(columns, False, True).launch(
        (min(processors, token_tiles * weight_tiles), 1, 1),
        [
            nvrtc.tensor_map(paired.view(half), (256, 64)),
            nvrtc.tensor_map(x.view(half), (columns, 64)),
            nvrtc.tensor_map(out.view(half), (columns, 64)),
            ctypes.c_int(token_tiles),
            ctypes.c_int(weight_tiles),
            ctypes.c_int(depth // 128),
            ctypes.c_int(min(12, weight_tiles)),
            weight_scales,
            x_scales,
            bias,
            ctypes.c_int(rows),
            ctypes.c_float(1.0 / unit),
        ],
        overlap=True,
    )
    return out
