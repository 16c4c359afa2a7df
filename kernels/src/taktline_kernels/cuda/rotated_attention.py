"""Attention of a short sequence with itself, its heads normed and rotated, as one Hopper kernel (in the .cu beside)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from taktline_kernels.cuda.nvrtc import CudaKernel

_LOG2E = 1.4426950408889634
_ROWS = 16
"""Queries of a warp, and keys of a tile."""
_WIDTHS = (64, 128)
_MOST_BYTES = 220 << 10
"""Of shared memory for keys and values."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block of rotated_attention.cu has.

    Attributes:
        width: of a head.
        groups: of 16 queries.
        splits: warps that share the keys of 16 queries.
        tiles: of 16 keys that a warp has at most.
        norm: whether queries and keys are normed.
        rotate: whether they are rotated.
        causal: whether a query sees keys up to its own only.
        masked: whether keys are left out.
        blocks: that registers are kept for on one processor.
        room: kilobytes of shared memory at least: with many, blocks go to more processors.
    """

    width: int
    groups: int
    splits: int
    tiles: int
    norm: bool
    rotate: bool
    causal: bool
    masked: bool
    blocks: int = 1
    room: int = 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: keys and values, later each warp's fp32 answers."""
        keys = _ROWS * self.splits * self.tiles
        answers = self.splits * self.groups * _ROWS * self.width * 4
        return max(2 * keys * self.width * 2, answers, self.room << 10)

    def defines(self) -> dict[str, int]:
        """Preprocessor constants of rotated_attention.cu."""
        return {
            "D": self.width,
            "GROUPS": self.groups,
            "SPLITS": self.splits,
            "TILES": self.tiles,
            "NORM": int(self.norm),
            "ROTATE": int(self.rotate),
            "CAUSAL": int(self.causal),
            "MASKED": int(self.masked),
            "BLOCKS": self.blocks,
        }


@functools.cache
def _kernel(tile: Tile) -> CudaKernel:
    """The compiled file.

    Raises:
        RuntimeError: it cannot be compiled or loaded here.
    """
    threads = 32 * tile.groups * tile.splits
    return CudaKernel(
        "rotated_attention.cu", "attend_rotated", tile.defines(), threads=threads, shared_bytes=tile.shared_bytes
    )


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    table: tuple[Tensor, Tensor] | None = None,
    valid: Tensor | None = None,
    causal: bool,
    eps: float = 0.0,
    config: Mapping[str, int],
) -> Tensor:
    batch, tokens, heads, width = q.shape
    stride, step = q.stride(1), q.stride(0)
    rows = all(
        one.shape[1] == tokens
        and one.stride()[1:] == (stride, width, 1)
        and (batch == 1 or one.stride(0) == step == tokens * stride)
        and one.data_ptr() % 16 == 0
        for one in (q, k, v)
    )
    if q.dtype != torch.bfloat16 or width not in _WIDTHS or stride % 8 or not rows:
        raise ValueError("the kernel takes bf16 rows of heads of 64 or 128 side by side; the table's rule is too wide")
    if any(one.dtype != torch.float32 or not one.is_contiguous() for one in (*(norms or ()), *(table or ()))):
        raise ValueError("the kernel reads multipliers, cosines and sines in fp32")
    if table is not None and len(table[0]) % tokens:
        raise ValueError(f"a table of {len(table[0])} rows does not come out even in {tokens} tokens")
    splits = config.get("splits", 2)
    tile = Tile(
        width=width,
        groups=config.get("groups", 2),
        splits=splits,
        tiles=-(-tokens // (_ROWS * splits)),
        norm=norms is not None,
        rotate=table is not None,
        causal=causal,
        masked=valid is not None,
        blocks=config.get("blocks", 1),
        room=config.get("room", 0),
    )
    if tile.shared_bytes > _MOST_BYTES:
        raise ValueError(f"{tokens} keys do not fit shared memory; the table's rule is too wide")
    out = torch.empty((batch, tokens, heads, width), dtype=q.dtype, device=q.device)
    missing: Any = ctypes.c_void_p(0)
    _kernel(tile).launch(
        (-(-tokens // (_ROWS * tile.groups)), heads, batch),
        [
            *(q, k, v, out),
            *((missing, missing) if table is None else table),
            *((missing, missing) if norms is None else norms),
            missing if valid is None else valid.contiguous(),
            *(ctypes.c_int(n) for n in (tokens, heads, heads // k.shape[2], stride)),
            ctypes.c_int(tokens if table is None else len(table[0])),
            ctypes.c_float(eps),
            ctypes.c_float(width**-0.5 * _LOG2E),
        ],
        overlap=True,
    )
    return out


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
    """Run `ops.attention_rotated`; `config` may hold groups, splits, blocks and room of a `Tile`.

    Raises:
        ValueError: for any other call than of bf16 heads of 64 or 128; the table's rule is too wide.
    """
    if (q_weight is None) != (k_weight is None):
        raise ValueError("queries and keys have a norm both, or neither")
    norms = None if q_weight is None or k_weight is None else (q_weight, k_weight)
    rows = qkv.view(*qkv.shape[:2], heads + 2 * kv_heads, -1)
    q, k, v = rows[:, :, :heads], rows[:, :, heads : heads + kv_heads], rows[:, :, heads + kv_heads :]
    return _run(q, k, v, norms=norms, table=(cos, sin), causal=causal, eps=eps, config=config)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    causal: bool,
    gate: Tensor | None = None,
    *,
    config: Mapping[str, int],
) -> Tensor:
    """Run `ops.attention` of a sequence with itself; `config` as `attention_rotated` takes it.

    Raises:
        ValueError: for any other call; the table's rule is too wide.
    """
    if gate is not None:
        raise ValueError("the kernel has no gate")
    return _run(q, k, v, valid=valid, causal=causal, config=config)
