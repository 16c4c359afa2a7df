"""Attention of many tokens over themselves and a text before them as one Hopper kernel (suffix_attention.cu)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from taktline_kernels.cuda import geglu, nvrtc
from taktline_kernels.cuda.frame_attention import wgmma_registers
from taktline_kernels.cuda.nvrtc import CudaKernel

WIDTH = 128
_QUERIES, _STAGES, _TILE = 128, 2, 128
_LOG2E = 1.4426950408889634


def prologue(tile: int) -> str:
    """What goes before the file: the shared header, and both products."""
    keys = geglu.wgmma_source(tile).replace("void wgmma(", "void wgmma_keys(")
    return keys + wgmma_registers("wgmma_values", WIDTH, True)


@functools.cache
def _kernel(share: int, tile: int) -> CudaKernel:
    return CudaKernel(
        "suffix_attention.cu",
        "attend",
        {"SHARE": share, "STAGES": _STAGES, "TILE": tile},
        threads=384,
        shared_bytes=2 * WIDTH * (2 * _STAGES * tile + 2 * _QUERIES),
        prologue=prologue(tile),
    )


def covers(q: Tensor, prefix_k: Tensor, prefix_v: Tensor, suffix_k: Tensor, suffix_v: Tensor) -> bool:
    """Whether the kernel can run: bf16, heads of 128, a power of two of them to a key head, rows that can be copied."""
    share = q.shape[2] // suffix_k.shape[2]
    tensors = (q, prefix_k, prefix_v, suffix_k, suffix_v)
    return (
        q.dtype == torch.bfloat16
        and q.shape[3] == WIDTH
        and share * suffix_k.shape[2] == q.shape[2]
        and _QUERIES % share == 0
        and all(t.stride(3) == 1 and not any(step % 8 for step in t.stride()[:3]) for t in tensors)
        and all(t.data_ptr() % 16 == 0 for t in tensors)
    )


def attention_suffix(
    q: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    prefix_lengths: Tensor,
    suffix_k: Tensor,
    suffix_v: Tensor,
    config: Mapping[str, int],
) -> Tensor:
    """Run `ops.attention_suffix` in one pass over both; what the kernel does not cover goes through cuDNN's.

    `tile` of the config are the keys of a step, a multiple of 16 up to 160.
    """
    if not covers(q, prefix_k, prefix_v, suffix_k, suffix_v):
        from taktline_kernels.cuda import sdpa

        return sdpa.attention_suffix(q, prefix_k, prefix_v, prefix_lengths, suffix_k, suffix_v, {})
    lanes, rows, heads, width = q.shape
    tokens, kv_heads = suffix_k.shape[1:3]
    share, tile = heads // kv_heads, config.get("tile", _TILE)
    out = torch.empty((lanes, rows, heads, width), dtype=q.dtype, device=q.device)
    blocks = lanes * kv_heads * -(-rows * share // _QUERIES)
    _kernel(share, tile).launch(
        (min(nvrtc.processors(q.device), blocks), 1, 1),
        [
            nvrtc.tensor_map(q, (1, _QUERIES // share, share, 64)),
            *(_map(t, tile) for t in (suffix_k, suffix_v, prefix_k, prefix_v)),
            prefix_lengths,
            out,
            *(ctypes.c_int(n) for n in (lanes, rows, tokens, kv_heads)),
            ctypes.c_float(width**-0.5 * _LOG2E),
        ],
        overlap=True,
    )
    return out


def _map(t: Tensor, tile: int) -> Any:
    """`tile` tokens of one head, 64 numbers of each."""
    return nvrtc.tensor_map(t, (1, tile, 1, 64))
