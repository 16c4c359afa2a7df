"""Attention over a world model's frames as one Hopper kernel (frame_attention.cu)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from taktline_kernels.cuda import nvrtc
from taktline_kernels.cuda.nvrtc import CudaKernel
from taktline_kernels.ops.frames import FP8

PATCHES, HEAD_DIM = 256, 64
_STAGES = 8
_LOG2E = 1.4426950408889634
# Stages of keys and values, two sets of queries, two of the conditioning keys and values.
_SHARED_BYTES = _STAGES * 16384 + 2 * PATCHES * 128 + 4 * 2048


def wgmma_registers(name: str, columns: int, transposed: bool) -> str:
    """CUDA text of name(d, a, b, accumulate): 64 x `columns` += A in registers (64 x 16) times B in shared memory."""
    count = columns // 2
    registers = ",".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a = ",".join(f"%{count + i}" for i in range(4))
    return f"""
DEVICE void {name}(float (&d)[{count}], const u32* a, u64 b, int accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
    "{{{registers}}}, {{{a}}}, %{count + 4}, p, 1, 1, {int(transposed)};\\n}}"
    : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}}
"""


def wgmma_shared(name: str, columns: int) -> str:
    """CUDA text of name(d, a, b, accumulate): 64 x `columns` += A (64 x 16) times B, both in shared memory."""
    count = columns // 2
    registers = ",".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
DEVICE void {name}(float (&d)[{count}], u64 a, u64 b, int accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
    "{{{registers}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}"
    : {outputs} : "l"(a), "l"(b), "r"(accumulate));
}}
"""


def prologue() -> str:
    """What goes before the file: what Hopper's kernels share, and the matrix instructions it uses."""
    products = (
        wgmma_shared("wgmma_keys", 64),
        wgmma_shared("wgmma_few", 16),
        wgmma_registers("wgmma_values", 64, True),
    )
    return '#include "hopper.cuh"\n' + "".join(products)


@functools.cache
def _kernel(eight: bool) -> CudaKernel:
    return CudaKernel(
        "frame_attention.cu",
        "attend_frames",
        {"STAGES": _STAGES, "EIGHT": int(eight)},
        threads=384,
        shared_bytes=_SHARED_BYTES,
        prologue=prologue(),
    )


def attention(frames: Tensor, candidates: int, heads: int, unit: float | None, config: Mapping[str, int]) -> Tensor:
    """Run `ops.frames.frame_attention` for bf16, 256 patches and heads of 64; `frames` must be contiguous."""
    del config
    count, rows, width = frames.shape
    dtype = frames.dtype if unit is None else FP8
    out = torch.empty(rows, heads * HEAD_DIM, dtype=dtype, device=frames.device)
    _kernel(unit is not None).launch(
        (min(nvrtc.processors(frames.device), candidates * heads), 1, 1),
        [
            nvrtc.tensor_map(frames.view(count * rows, width), (64, 64)),
            frames,
            out,
            ctypes.c_int(count),
            ctypes.c_int(candidates),
            ctypes.c_int(heads),
            ctypes.c_float(HEAD_DIM**-0.5 * _LOG2E),
            ctypes.c_float(1.0 if unit is None else 1.0 / unit),
        ],
        overlap=True,
    )
    return out
