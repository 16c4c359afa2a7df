"""Attention inside images of many tokens as one Hopper kernel over the fused projection's rows (patch_attention.cu)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from taktline_kernels.cuda import nvrtc
from taktline_kernels.cuda.frame_attention import wgmma_registers
from taktline_kernels.cuda.nvrtc import CudaKernel
from taktline_kernels.cuda.sdpa import attention_vision as through_pytorch

WIDTH, TILE = 72, 128
_STAGES = 3
_ROW_BYTES = 256
"""Of a head's row in shared memory."""
_LOG2E = 1.4426950408889634


def prologue() -> str:
    """What goes before the file: the shared header, and both products."""
    products = wgmma_registers("wgmma_keys", TILE, False) + wgmma_registers("wgmma_values", WIDTH, True)
    return '#include "hopper.cuh"\n' + products


@functools.cache
def _kernel() -> CudaKernel:
    return CudaKernel(
        "patch_attention.cu",
        "attend_patches",
        {"STAGES": _STAGES},
        threads=384,
        shared_bytes=_ROW_BYTES * TILE * (2 * _STAGES + 1),
        prologue=prologue(),
    )


def covers(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel can run: bf16, heads of 72 side by side, tokens in whole tiles, pieces of 16 bytes."""
    strides = q.stride()
    return (
        q.dtype == torch.bfloat16
        and q.shape[1] % TILE == 0
        and q.shape[3] == WIDTH
        and strides[2:] == (WIDTH, 1)
        and strides == k.stride() == v.stride()
        and not any(step % 8 for step in strides[:2])
        and all(t.data_ptr() % 16 == 0 for t in (q, k, v))
    )


def attention_vision(q: Tensor, k: Tensor, v: Tensor, config: Mapping[str, int]) -> Tensor:
    """Run `ops.attention_vision`; what the kernel does not cover goes through PyTorch."""
    del config
    if not covers(q, k, v):
        return through_pytorch(q, k, v, {})
    images, tokens, heads, width = q.shape
    out = torch.empty((images, tokens, heads, width), dtype=q.dtype, device=q.device)
    _kernel().launch(
        (min(nvrtc.processors(q.device), images * heads * (tokens // TILE)), 1, 1),
        [
            *(q, k, v, out),
            *(ctypes.c_int(n) for n in (images, tokens, heads, q.stride(0), q.stride(1))),
            ctypes.c_float(width**-0.5 * _LOG2E),
        ],
        overlap=True,
    )
    return out
