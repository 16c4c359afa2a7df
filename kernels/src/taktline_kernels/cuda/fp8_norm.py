"""The norm of a world model's bf16 residual stream into e4m3 as one Hopper kernel (fp8_norm.cu)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from taktline_kernels.cuda import nvrtc
from taktline_kernels.cuda.nvrtc import CudaKernel
from taktline_kernels.ops.frames import FP8, Stream

WIDTH = 1024
_WARPS, _BLOCKS = 4, 5
"""Of a block, and blocks of a processor: a thread holds 32 numbers and the next row's, packed."""


@functools.cache
def _kernel() -> CudaKernel:
    return CudaKernel(
        "fp8_norm.cu",
        "fp8_norm",
        {"BLOCKS": _BLOCKS},
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
    """Run `ops.frames.frame_norm` for a bf16 stream of 1,024 numbers a row and an offset, into e4m3, and nothing else.

    Raises:
        ValueError: for any other call; the table's rule is too wide.
    """
    del config
    alone = not updates and weight is None and bias is None and keep is None and dtype == FP8
    if not isinstance(stream, Tensor) or not alone or offset is None:
        raise ValueError("this norm is of a bf16 stream and an offset into e4m3, without weight and bias")
    if stream.dtype != torch.bfloat16 or stream.shape[1:] != (WIDTH,) or not stream.is_contiguous():
        raise ValueError(f"this norm takes a contiguous bf16 stream of {WIDTH} numbers a row")
    if offset.dtype != torch.float32 or offset.shape != (WIDTH,) or not offset.is_contiguous():
        raise ValueError(f"this norm takes its offset as {WIDTH} numbers in contiguous fp32")
    rows, width = stream.shape
    out = torch.empty(rows, width, dtype=FP8, device=stream.device)
    _kernel().launch(
        (min(_BLOCKS * nvrtc.processors(stream.device), -(-rows // _WARPS)), 1, 1),
        [stream, offset, out, ctypes.c_int(rows), ctypes.c_float(eps), ctypes.c_float(1.0 / unit)],
        overlap=True,
    )
    return out
