"""Attention in FP8 over a text and thousands of tokens as one Hopper kernel (fp8_attention.cu)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from taktline_kernels.cuda import geglu, nvrtc
from taktline_kernels.cuda.nvrtc import CudaKernel
from taktline_kernels.fp8_heads import Fp8Heads, Fp8Text

WIDTH = 128
_STAGES = 4
_PAIR = torch.bfloat16
"""Two numbers of a byte as one of two, for the copy engine."""
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
    _kernel().launch(
        (min(processors, lanes * heads * -(-rows // 128)), 1, 1),
        [
            nvrtc.tensor_map(own.q.view(_PAIR).flatten(2), (1, 64, 64)),
            _keys(own.k, lanes * room, kv_heads * width),
            nvrtc.tensor_map(own.v.view(_PAIR).flatten(0, 2), (128, 64)),
            _keys(text.k, lanes * slots, kv_heads * width),
            nvrtc.tensor_map(text.v.view(_PAIR).flatten(0, 2), (128, 64)),
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
    sizes, strides = (rows // 16, 2, 4, 2, row // 2), (8 * row, row, 2 * row, row // 2, 1)
    return nvrtc.tensor_map(k.view(_PAIR).as_strided(sizes, strides), (8, 2, 4, 2, 64))
