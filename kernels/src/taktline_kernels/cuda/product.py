"""Linear layers of some hundred rows as one Hopper kernel (product.cu), with what follows them in the same kernel."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from taktline_kernels.cuda import nvrtc
from taktline_kernels.cuda.geglu import wgmma_source
from taktline_kernels.cuda.nvrtc import CudaKernel

_FINISHED, _SWIGLU, _PARTS, _MIXED = 0, 1, 2, 3
_TAPS = 4
_ROOM_FOR_TWO = 112 << 10
"""Bytes of shared memory with which two blocks run on one processor."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block computes, and in how many stages it is fed.

    Attributes:
        columns: tokens of a warpgroup, a multiple of 32, at most 256.
        stages: of 64 numbers of depth.
        groups: warpgroups, 1 or 2.
        together: they share 64 output channels, and have tokens of their own; else they share the tokens.
        ahead: whether the weight beyond the stages is asked for into L2 before the kernel before has ended.
        late: whether the kernel behind may start only when all that this one reads is on its way.
    """

    columns: int
    stages: int
    groups: int
    together: bool
    ahead: bool = True
    late: bool = False

    @classmethod
    def of(cls, config: Mapping[str, int]) -> Tile:
        """Read `columns`, `stages`, `groups`, `together`, `ahead` and `late` of a table's rule."""
        together, ahead, late = (bool(config.get(*one)) for one in (("together", 0), ("ahead", 1), ("late", 0)))
        return cls(config.get("columns", 64), config.get("stages", 4), config.get("groups", 2), together, ahead, late)

    @property
    def channels(self) -> int:
        """Output channels of a block."""
        return 64 if self.together else 64 * self.groups

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return self.columns * self.groups if self.together else self.columns

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return self.stages * (self.channels + self.tokens) * 128

    def defines(self, mode: int) -> dict[str, int]:
        """Preprocessor constants of product.cu."""
        two = self.shared_bytes <= _ROOM_FOR_TWO and self.columns <= 128
        return {
            "BN": self.columns,
            "STAGES": self.stages,
            "GROUPS": self.groups,
            "TOGETHER": int(self.together),
            "AHEAD": int(self.ahead),
            "LATE": int(self.late),
            "MODE": mode,
            "MINIMUM": 1 + two,
        }


@functools.cache
def _kernel(tile: Tile, mode: int) -> CudaKernel:
    """The compiled file.

    Raises:
        RuntimeError: it cannot be compiled or loaded here.
    """
    return CudaKernel(
        "product.cu",
        "product",
        tile.defines(mode),
        threads=128 * tile.groups + 32,
        shared_bytes=tile.shared_bytes,
        prologue=wgmma_source(tile.columns),
    )


def _run(
    tile: Tile,
    mode: int,
    x: Tensor,
    weight: Tensor,
    out: Tensor | None,
    *,
    bias: Tensor | None = None,
    gelu: bool = False,
    parts: Tensor | None = None,
    share: int = 0,
    taps: Tensor | None = None,
    mixed: Tensor | None = None,
) -> None:
    rows, depth = x.shape
    channels = weight.shape[0]
    if depth % 8 or channels % 8 or x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise ValueError("the kernel takes bf16 matrices whose sides are multiples of 8; the table's rule is too wide")
    blocks = -(-depth // 64)
    share = share or blocks
    gated = mode == _SWIGLU
    weight_tiles = channels // 128 if gated else -(-channels // tile.channels)
    token_tiles = -(-rows // tile.tokens)
    missing: Any = ctypes.c_void_p(0)
    _kernel(tile, mode).launch(
        (weight_tiles * token_tiles, -(-blocks // share), 1),
        [
            nvrtc.tensor_map(weight, (64 if gated else tile.channels, 64)),
            nvrtc.tensor_map(x, (tile.tokens, 64)),
            nvrtc.tensor_map(x if out is None else out, (tile.columns, 64)),
            *(missing if one is None else one for one in (bias, parts, taps, mixed)),
            ctypes.c_int(weight_tiles),
            ctypes.c_int(blocks),
            ctypes.c_int(share),
            ctypes.c_int(rows),
            ctypes.c_int(channels),
            ctypes.c_int(0 if taps is None else taps.shape[0]),
            ctypes.c_int(int(gelu)),
        ],
        overlap=True,
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    gate: Tensor | None,
    residual: Tensor | None,
    config: Mapping[str, int],
) -> Tensor:
    """Run `ops.linear` for bf16, with a bias and a gelu behind it or without; `config` as `Tile.of` reads it.

    Raises:
        ValueError: for any other call; the table's rule is too wide.
    """
    if activation not in ("none", "gelu") or gate is not None or residual is not None:
        raise ValueError("the kernel does a bias and a gelu, nothing else")
    if bias is not None and bias.dtype != x.dtype:
        raise ValueError(f"the kernel adds a bias of the input's dtype, {x.dtype}, not {bias.dtype}")
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)
    _run(Tile.of(config), _FINISHED, flat, weight, out.view(len(flat), -1), bias=bias, gelu=activation == "gelu")
    return out


def linear_silu_gate(x: Tensor, weight: Tensor, config: Mapping[str, int]) -> Tensor:
    """Run `ops.linear_silu_gate`; `config` may hold columns and stages.

    Raises:
        ValueError: the width is no multiple of 64; the table's rule is too wide.
    """
    if weight.shape[0] % 128:
        raise ValueError(f"the kernel takes gates in blocks of 64, not {weight.shape[0] // 2}")
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty((*x.shape[:-1], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _run(Tile.of({**config, "groups": 2, "together": 0}), _SWIGLU, flat, weight, out.view(len(flat), -1))
    return out


def parts_of(x: Tensor, weight: Tensor, config: Mapping[str, int]) -> Tensor:
    """fp32 (parts, rows, n), whose sum is x @ weight.T; `split` of the config are the parts, at most."""
    flat = x.reshape(-1, x.shape[-1])
    blocks = -(-flat.shape[1] // 64)
    share = -(-blocks // config.get("split", 1))
    parts = torch.empty((-(-blocks // share), len(flat), weight.shape[0]), dtype=torch.float32, device=x.device)
    _run(Tile.of(config), _PARTS, flat, weight, None, parts=parts, share=share)
    return parts


def linear_add_layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    config: Mapping[str, int],
) -> tuple[Tensor, Tensor]:
    """Run `ops.linear_add_layer_norm`; `config` as `parts_of` takes it, and sum_warps."""
    from taktline_kernels.triton_impl.part_sums import add_norm

    parts = parts_of(x, weight, config)
    return add_norm(parts, bias, residual, norm_weight, norm_bias, eps, x.dtype, config.get("sum_warps", 8))


def linear_add_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, config: Mapping[str, int]
) -> tuple[Tensor, Tensor]:
    """Run `ops.linear_add_rms_norm`; `config` as `parts_of` takes it, and sum_warps."""
    from taktline_kernels.triton_impl.part_sums import add_norm

    return add_norm(
        parts_of(x, weight, config), None, residual, norm_weight, None, eps, x.dtype, config.get("sum_warps", 8)
    )


def linear_conv_split(
    x: Tensor, weight: Tensor, taps: Tensor, widths: tuple[int, int, int], config: Mapping[str, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `ops.delta.linear_conv_split` where a tile has the tokens of one sequence, four taps and equal widths.

    Raises:
        ValueError: for any other call; the table's rule is too wide.
    """
    tile = Tile.of({**config, "together": 1})
    rows, tokens, _ = x.shape
    third = widths[0]
    if tile.tokens != tokens or widths != (third, third, third) or third % 64 or taps.shape != (3 * third, _TAPS):
        raise ValueError("the kernel takes one sequence a tile, four taps and equal widths")
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty((rows, tokens, weight.shape[0]), dtype=x.dtype, device=x.device)
    mixed = torch.empty((3, rows, tokens, third), dtype=x.dtype, device=x.device)
    _run(tile, _MIXED, flat, weight, out.view(len(flat), -1), taps=taps.contiguous(), mixed=mixed)
    return mixed[0], mixed[1], mixed[2], out[..., 3 * third :]
