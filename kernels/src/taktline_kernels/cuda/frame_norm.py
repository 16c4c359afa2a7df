"""A world model's norms as one Hopper kernel (frame_norm.cu)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from taktline_kernels.cuda import nvrtc
from taktline_kernels.cuda.nvrtc import CudaKernel
from taktline_kernels.ops.frames import Stream

WIDTH = 1024
_WARPS, _BLOCKS = 4, 3
"""Of a block, and blocks of a processor: a thread holds 32 numbers with their weights and biases, and the next ones."""


@functools.cache
def _kernel(updates: int, keep: bool) -> CudaKernel:
    return CudaKernel(
        "frame_norm.cu",
        "frame_norm",
        {"UPDATES": updates, "KEEP": int(keep)},
        threads=32 * _WARPS,
        shared_bytes=0,
        prologue='#include "hopper.cuh"\n',
    )


def norm(
    stream: Stream,
    updates: tuple[Tensor, ...],
    offset: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    keep: Stream | None,
    unit: float,
    config: Mapping[str, int],
) -> Tensor:
    """Run `ops.frames.frame_norm` for streams in 24 bits, 1,024 numbers wide, with bf16 updates, into bf16.

    Raises:
        ValueError: for any other call; the table's rule is too wide.
    """
    del unit, config
    whole = isinstance(stream, Tensor) or isinstance(keep, Tensor)
    if whole or len(updates) not in (1, 2) or offset is None or weight is None or bias is None:
        raise ValueError("this norm is of a stream in 24 bits with one or two updates, an offset, a weight and a bias")
    if dtype != torch.bfloat16:
        raise ValueError(f"this norm gives bf16, not {dtype}")
    vectors = (offset, weight, bias)
    if any(one.dtype != torch.float32 or one.shape != (WIDTH,) or not one.is_contiguous() for one in vectors):
        raise ValueError(f"this norm takes its offset, weight and bias as {WIDTH} numbers in contiguous fp32")
    upper, lower = stream
    kept_upper, kept_lower = stream if keep is None else keep
    rows, width = upper.shape
    if width != WIDTH or any(update.dtype != torch.bfloat16 for update in updates):
        raise ValueError(f"this norm takes bf16 updates of {WIDTH} numbers, not {updates[0].dtype} of {width}")
    if any(one.shape != upper.shape or not one.is_contiguous() for one in (*stream, kept_upper, kept_lower, *updates)):
        raise ValueError("this norm takes contiguous streams and updates of one shape")
    out = torch.empty(rows, width, dtype=dtype, device=upper.device)
    _kernel(len(updates), keep is not None).launch(
        (min(_BLOCKS * nvrtc.processors(upper.device), -(-rows // _WARPS)), 1, 1),
        [
            upper,
            lower,
            kept_upper,
            kept_lower,
            *(*updates, updates[0])[:2],
            offset,
            weight,
            bias,
            out,
            ctypes.c_int(rows),
            ctypes.c_float(eps),
        ],
        overlap=True,
    )
    return out
