"""Attention of eight query heads over one cached key/value head as one Hopper kernel (cached_attention.cu)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from taktline_kernels.cuda import nvrtc
from taktline_kernels.cuda.frame_attention import wgmma_registers
from taktline_kernels.cuda.geglu import wgmma_source
from taktline_kernels.cuda.nvrtc import CudaKernel

HEADS, HEAD_DIM = 8, 256
_ROWS = 64
# Shared memory of a block for queries, keys and values: all but 3 KB.
_ROOM = 224 << 10
_LOG2E = 1.4426950408889634


def prologue(keys: int) -> str:
    """What goes before the file for tiles of `keys` positions."""
    return wgmma_source(keys) + wgmma_registers("wgmma_values", HEAD_DIM, transposed=True)


@functools.cache
def _kernel(wide: bool, keys: int, split: int, eight: bool) -> CudaKernel:
    queries, tile = (2 if wide else 1) * _ROWS * HEAD_DIM * 2, keys * HEAD_DIM * 2
    stages = (_ROOM - queries) // (2 * tile)
    return CudaKernel(
        "cached_attention.cu",
        "attend_cached",
        {"WIDE": int(wide), "KN": keys, "STAGES": stages, "SPLIT": split, "EIGHT": int(eight)},
        threads=384,
        shared_bytes=queries + 2 * stages * tile,
        cluster=split,
        prologue=prologue(keys),
    )


def attention_cached(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    extra: int,
    *,
    config: Mapping[str, int],
    first_alone: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    """Attend over the first lengths + extra rows of a cache.

    Args:
        q: (batch, tokens, 8, 256) bf16, tokens at one stride.
        k_cache: (batch, rows, 256) bf16; rows that are not attended to must be finite.
        v_cache: likewise.
        lengths: (batch,) int32.
        extra: rows appended after each row's length; length + extra must be at least 1.
        config: wide: two tiles of 64 query rows a block, else one whose keys two warpgroups share; keys: positions of a
            tile, a multiple of 16 up to 80; split: blocks that share the keys, 1, 2, 4 or 8, and 1 if wide.
        first_alone: the first token sees lengths + 1 rows only.
        scales: (batch * tokens, 1) fp32: makes the result e4m3, a scale a token, which is left here; not with split.

    Returns:
        (batch, tokens, 8, 256) bf16, or e4m3.

    Raises:
        ValueError: settings that do not go together.
    """
    batch, tokens = q.shape[:2]
    wide, split = bool(config.get("wide", 1)), config.get("split", 1)
    keys = config.get("keys", 80 if wide else 64)
    if split > 1 and (wide or scales is not None):
        raise ValueError("blocks that share the keys have one tile of queries each, and answer in bf16")
    out = torch.empty(
        (batch, tokens, HEADS, HEAD_DIM), dtype=q.dtype if scales is None else torch.float8_e4m3fn, device=q.device
    )
    queries = q.as_strided((batch * tokens, HEADS, HEAD_DIM), (q.stride(1), HEAD_DIM, 1))
    blocks = -(-tokens * HEADS // (_ROWS * (2 if wide else 1)))
    _kernel(wide, keys, split, scales is not None).launch(
        (blocks * split, batch, 1),
        [
            nvrtc.tensor_map(queries, (_ROWS // HEADS, HEADS, 64)),
            nvrtc.tensor_map(k_cache.view(-1, HEAD_DIM), (keys, 64)),
            nvrtc.tensor_map(v_cache.view(-1, HEAD_DIM), (keys, 64)),
            out,
            lengths if scales is None else scales,
            lengths,
            ctypes.c_int(extra),
            ctypes.c_int(tokens),
            ctypes.c_int(k_cache.shape[1]),
            ctypes.c_float(HEAD_DIM**-0.5 * _LOG2E),
            ctypes.c_int(int(first_alone)),
        ],
        overlap=True,
    )
    return out
