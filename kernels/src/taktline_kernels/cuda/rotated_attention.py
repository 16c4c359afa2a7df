"""Attention inside images of 256 tokens, heads rotated on their way in, as one Hopper kernel (rotated_attention.cu)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from taktline_kernels.cuda.nvrtc import CudaKernel

TOKENS, WIDTH = 256, 64
_LOG2E = 1.4426950408889634
_GROUPS, _SPLITS = 4, 2
"""Of 16 queries a block; and warps that share the keys of 16 queries."""
REGISTERS = 144
"""Of a thread: with as many, a block runs beside one of the product before it, and never two on one processor."""


def defines() -> dict[str, int]:
    """Preprocessor constants of rotated_attention.cu."""
    return {"GROUPS": _GROUPS, "SPLITS": _SPLITS, "TOKENS": TOKENS, "REGISTERS": REGISTERS}


@functools.cache
def _kernel() -> CudaKernel:
    """The compiled file.

    Raises:
        RuntimeError: it cannot be compiled or loaded here.
    """
    rows = 2 * TOKENS + 16 * _GROUPS  # keys, queries and values
    threads = 32 * _GROUPS * _SPLITS
    return CudaKernel(
        "rotated_attention.cu", "attend_rotated", defines(), threads=threads, shared_bytes=rows * WIDTH * 2
    )


def attention_rotated(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    causal: bool,
    eps: float,
    config: Mapping[str, int],
) -> Tensor:
    """Run `ops.attention_rotated` without norms inside images of 256 tokens, heads of 64.

    Raises:
        ValueError: for any other call; the table's rule is too wide.
    """
    del eps, config
    images, tokens, width = qkv.shape
    shape = (tokens, width, kv_heads, len(cos)) == (TOKENS, 3 * heads * WIDTH, heads, TOKENS)
    if not shape or causal or q_weight is not None or k_weight is not None or qkv.dtype != torch.bfloat16:
        raise ValueError("the kernel takes images of 256 tokens in bf16, heads of 64 without norms")
    if not qkv.is_contiguous() or any(one.dtype != torch.float32 or not one.is_contiguous() for one in (cos, sin)):
        raise ValueError("the kernel reads rows that are contiguous, and cosines and sines in fp32")
    q, k, v = qkv.view(images, tokens, 3, -1).unbind(2)
    out = torch.empty((images, tokens, heads, WIDTH), dtype=qkv.dtype, device=qkv.device)
    _kernel().launch(
        (TOKENS // (16 * _GROUPS), heads, images),
        [
            *(q, k, v, out, cos, sin),
            ctypes.c_int(heads),
            ctypes.c_int(width),
            ctypes.c_float(WIDTH**-0.5 * _LOG2E),
        ],
        overlap=True,
    )
    return out
