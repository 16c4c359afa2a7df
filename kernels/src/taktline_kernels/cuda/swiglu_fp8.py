"""silu(x @ gate.T) * (x @ up.T) of e4m3 operands in one Hopper kernel: geglu.cu with another format, bf16 out."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from taktline_kernels.cuda import geglu, nvrtc
from taktline_kernels.fp8_rows import Fp8Rows


def linear_swiglu(x: Fp8Rows, packed: Fp8Rows, config: Mapping[str, int]) -> Tensor:
    """Run `ops.fp8_products.linear_swiglu_fp8`; n and k must be multiples of 128.

    Args:
        config: tile, tokens of a tile, and span, weight tiles that a wave of blocks works on together; both optional.
    """
    depth = x.values.shape[-1]
    flat = x.values.view(-1, depth)
    rows, width = len(flat), packed.values.shape[0] // 2
    out = torch.empty((*x.values.shape[:-1], width), dtype=torch.bfloat16, device=flat.device)
    processors = nvrtc.processors(flat.device)
    columns = config.get("tile") or geglu.tile_for(rows, width, processors)
    token_tiles, weight_tiles = -(-rows // columns), width // 128
    half = torch.bfloat16  # two numbers of a byte as one of two, for the copy engine
    geglu.product_kernel(columns, True, True).launch(
        (min(processors, token_tiles * weight_tiles), 1, 1),
        [
            nvrtc.tensor_map(packed.values.view(half), (256, 64)),
            nvrtc.tensor_map(flat.view(half), (columns, 64)),
            nvrtc.tensor_map(out.view(rows, width), (columns, 64)),
            ctypes.c_int(token_tiles),
            ctypes.c_int(weight_tiles),
            ctypes.c_int(depth // 128),
            ctypes.c_int(min(config.get("span", 12), weight_tiles)),
            packed.scales,
            x.scales,
            ctypes.c_int(rows),
        ],
        overlap=True,
    )
    return out
