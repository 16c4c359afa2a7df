"""gelu(x @ gate.T) * (x @ up.T) as one Hopper kernel (geglu.cu)."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from taktline_kernels.cuda import nvrtc
from taktline_kernels.cuda.nvrtc import CudaKernel

TOKEN_TILES = (104, 136, 160, 192, 200)
"""Token counts of a tile to choose from; a kernel table may name others: multiples of 8, at most 208."""

_STAGES = 3


def wgmma_source(columns: int, eight: bool = False) -> str:
    """What goes before the file, wgmma(d, a, b, accumulate) with it.

    That adds 64 rows and `columns` columns, 32 bytes deep, of operands in shared memory.

    Args:
        eight: e4m3 operands instead of bf16.
    """
    shape, orders = ("k32.f32.e4m3.e4m3", "") if eight else ("k16.f32.bf16.bf16", ", 0, 0")
    count = columns // 2
    registers = ",".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
#include "hopper.cuh"
DEVICE void wgmma(float (&d)[{count}], u64 a, u64 b, int accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{columns}{shape} "
    "{{{registers}}}, %{count}, %{count + 1}, p, 1, 1{orders};\\n}}"
    : {outputs} : "l"(a), "l"(b), "r"(accumulate));
}}
"""


@functools.cache
def product_kernel(columns: int, silu: bool, eight: bool) -> CudaKernel:
    """The compiled file for tiles of `columns` tokens; `silu` instead of gelu, or `eight` for e4m3.

    Raises:
        RuntimeError: it cannot be compiled or loaded here.
    """
    shared = _STAGES * (256 + columns) * 128 + 2 * columns * 128
    return CudaKernel(
        "geglu.cu",
        "geglu_product",
        {"BN": columns, "STAGES": _STAGES, "EIGHT": int(eight), "SILU": int(silu)},
        threads=384,
        shared_bytes=shared,
        prologue=wgmma_source(columns, eight),
    )


def tile_for(rows: int, width: int, processors: int) -> int:
    """The token tile with the least work in the longest-running block."""
    weight_tiles = width // 128

    def cost(columns: int) -> tuple[int, int]:
        waves = -(-(-(-rows // columns) * weight_tiles) // processors)
        # Filling the pipeline and the epilogue take about as long as 16 more columns (fitted to one H200).
        return waves * (columns + 16), -columns

    return min(TOKEN_TILES, key=cost)


def linear_geglu(x: Tensor, packed: Tensor, *, tile: int | None = None, span: int = 12, silu: bool = False) -> Tensor:
    """Run the kernel.

    Args:
        x: (..., k) bf16, k a multiple of 64.
        packed: (2n, k) bf16 from `gpu.pack_gate_up`, n a multiple of 128.
        tile: tokens of a tile; None chooses.
        span: weight tiles that a wave of blocks works on together.
        silu: silu instead of gelu.

    Returns:
        (..., n) bf16.
    """
    flat = x.reshape(-1, x.shape[-1])
    rows, depth = flat.shape
    width = packed.shape[0] // 2
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    processors = nvrtc.processors(x.device)
    columns = tile or tile_for(rows, width, processors)
    token_tiles, weight_tiles = -(-rows // columns), width // 128
    product_kernel(columns, silu, False).launch(
        (min(processors, token_tiles * weight_tiles), 1, 1),
        [
            nvrtc.tensor_map(packed, (256, 64)),
            nvrtc.tensor_map(flat, (columns, 64)),
            nvrtc.tensor_map(out.view(rows, width), (columns, 64)),
            ctypes.c_int(token_tiles),
            ctypes.c_int(weight_tiles),
            ctypes.c_int(depth // 64),
            ctypes.c_int(min(span, weight_tiles)),
        ],
        overlap=True,
    )
    return out
