"""Attention inside each image as one CUDA kernel over the fused projection's rows (image_attention.cu)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from taktline_kernels.cuda.nvrtc import CudaKernel
from taktline_kernels.cuda.sdpa import attention_vision as through_pytorch

TOKENS, HEAD_DIM = 256, 72
_LOG2E = 1.4426950408889634


@functools.cache
def _kernel(rows: int) -> CudaKernel:
    shared = (rows + 2 * TOKENS) * HEAD_DIM * 2
    return CudaKernel("image_attention.cu", "attend_images", {"ROWS": rows}, threads=4 * rows, shared_bytes=shared)


def attention_vision(q: Tensor, k: Tensor, v: Tensor, config: Mapping[str, int]) -> Tensor:
    """Run `ops.attention_vision` where q, k and v are one (images, 256, 3, heads, 72) bf16 tensor; else PyTorch does.

    `rows` of the config are the queries of a block: 64 or 128.
    """
    images, tokens, heads, width = q.shape
    row, step = 3 * heads * width, heads * width * q.element_size()
    packed = (
        (tokens, width, q.dtype) == (TOKENS, HEAD_DIM, torch.bfloat16)
        and all(part.stride() == (tokens * row, row, width, 1) for part in (q, k, v))
        and (k.data_ptr() - q.data_ptr(), v.data_ptr() - k.data_ptr()) == (step, step)
    )
    if not packed:
        return through_pytorch(q, k, v, {})
    out = torch.empty((images, tokens, heads, width), dtype=q.dtype, device=q.device)
    rows = config.get("rows", 128)
    _kernel(rows).launch(
        (images * heads * (TOKENS // rows), 1, 1),
        [q, out, ctypes.c_int(heads), ctypes.c_float(width**-0.5 * _LOG2E)],
        overlap=True,
    )
    return out
