"""Attention in FP8 over a text and thousands of tokens as one Hopper kernel (fp8_attention.cu)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

from taktline_kernels.cuda import geglu, nvrtc
from taktline_kernels.cuda.nvrtc import CudaKernel
from taktline_kernels.fp8_heads import Fp8Heads, Fp8Text

WIDTH = 128
_STAGES = 4
_LOG2E = 1.4426950408889634


def prologue() -> str:
    """What goes before the file: the shared header, and both products."""
    count = WIDTH // 2
    registers = ",".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a = ",".join(f"%{count + i}" for i in range(4))
    keys = geglu.wgmma_source(WIDTH, eight=True).replace("void wgmma(", "void wgmma_keys(")
    return f"""{keys}
DEVICE void wgmma_values(float (&d)[{count}], const u32* a, u64 b, int accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{WIDTH}k32.f32.e4m3.e4m3 "
    "{{{registers}}}, {{{a}}}, %{count + 4}, p, 1, 1;\\n}}"
    : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}}
"""


@functools.cache
def _kernel() -> CudaKernel:
    return CudaKernel(
        "fp8_attention.cu",
        "attend",
        {"STAGES": _STAGES},
        threads=384,
        shared_bytes=(2 * _STAGES + 2) * 16384,
        prologue=prologue(),
    )


def covers(own: Fp8Heads, text: Fp8Text) -> bool:
    """Whether the kernel can run: heads of 128, and lanes of keys that begin at whole sixteens."""
    lanes = own.k.stride(0) // own.k.stride(1)
    return own.q.shape[3] == WIDTH and lanes % 16 == 0 and text.k.shape[1] % 16 == 0


def attention_fp8(own: Fp8Heads, text: Fp8Text, dtype: torch.dtype, config: Mapping[str, int]) -> Tensor:
    """Run `ops.fp8_attention.attention_fp8` for bf16 and heads of 128; anything else through Triton."""
    if dtype != torch.bfloat16 or not covers(own, text):
        from taktline_kernels.triton_impl import fp8_attention

        return fp8_attention.attention_fp8(own, text, dtype, {})
    lanes, rows, heads, width = own.q.shape
    tokens, kv_heads = own.k.shape[1], own.k.shape[2]
    room, slots = own.k.stride(0) // own.k.stride(1), text.k.shape[1]
    out = torch.empty((lanes, rows, heads, width), dtype=dtype, device=own.q.device)
    processors = nvrtc.processors(own.q.device)
    q = own.q
    _kernel().launch(
        (min(processors, lanes * heads * -(-rows // 128)), 1, 1),
        [
            _map(q, (heads * width, rows, lanes), (q.stride(1), q.stride(0)), (128, 64, 1)),
            _keys(own.k, lanes * room, kv_heads * width),
            _map(own.v, (own.v.shape[3], lanes * kv_heads * width), (own.v.shape[3],), (128, 128)),
            _keys(text.k, lanes * slots, kv_heads * width),
            _map(text.v, (slots, lanes * kv_heads * width), (slots,), (128, 128)),
            own.multipliers,
            text.multipliers,
            text.lengths,
            out,
            *(ctypes.c_int(n) for n in (lanes, rows, tokens, room, slots, heads, kv_heads)),
            ctypes.c_float(width**-0.5 * _LOG2E),
        ],
        overlap=True,
    )
    return out


def _keys(k: Tensor, rows: int, row: int) -> Any:
    """Rows of `row` bytes, sixteen at a time in the order in which the kernel wants them: 2 x 4 x 2."""
    return _map(k, (row, 2, 4, 2, rows // 16), (row, 4 * row, 2 * row, 16 * row), (128, 2, 4, 2, 8))


def _map(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> Any:
    """Describes bytes to the copy engine: 128-byte swizzle, zeros outside; the innermost dimension is dense."""
    wide, small = driver.cuuint64_t, driver.cuuint32_t
    code, found = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        len(sizes),
        tensor.data_ptr(),
        [wide(size) for size in sizes],
        [wide(stride) for stride in strides],
        [small(size) for size in box],
        [small(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(code) != 0:
        raise RuntimeError(f"a tensor map of {tuple(sizes)} by {tuple(strides)}: {code}")
    return found
