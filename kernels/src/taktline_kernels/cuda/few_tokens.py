"""Products of a diffusion transformer's blocks for one sequence of at most 48 tokens on Hopper (few_tokens.cu).

The residual stream goes from kernel to kernel with what the norm behind it needs: the stream times that norm's
multiplier, and parts of each row's sum and sum of squares. A layer behind a norm of multiplier w and shift b reads
those, and takes `first` = W w and `constant` = W b + bias, fp32 (n,).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from taktline_kernels import compiling
from taktline_kernels.cuda import nvrtc
from taktline_kernels.cuda.geglu import wgmma_source
from taktline_kernels.cuda.nvrtc import CudaKernel

MAX_TOKENS = 48
MAX_KEYS = 256
"""Of a cross-attention; a multiple of 16."""
WIDTH, HEADS, HIDDEN = 1536, 32, 6144
_HEAD = WIDTH // HEADS
_LOG2E = 1.4426950408889634
_DTYPES = {
    **dict.fromkeys(("bias", "scaled", "k", "v"), torch.bfloat16),
    **dict.fromkeys(("scale", "sums_out", "sums", "first", "constant"), torch.float32),
    "valid": torch.bool,
}
_FINISHED, _STREAM, _ATTEND = 0, 2, 3
_ROOM_FOR_TWO = 111 << 10
"""Bytes of shared memory with which two blocks run on one processor."""


class _Arguments(ctypes.Structure):
    """As few_tokens.cu has it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("bias", "out", "residual", "scaled", "scale", "sums_out", "sums")),
        *((name, ctypes.c_void_p) for name in ("first", "constant")),
        *((name, ctypes.c_float) for name in ("width", "eps")),
        *((name, ctypes.c_int) for name in ("share", "rows", "channels", "blocks", "skipped", "keys", "k_token")),
        *((name, ctypes.c_void_p) for name in ("k", "v", "valid")),
        ("logit_scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream.

    Attributes:
        x: bf16 (rows, WIDTH).
        scaled: x times the multiplier of the norm that follows.
        sums: fp32 (parts, 64, 2), parts of each row's sum and sum of squares of x.
    """

    x: Tensor
    scaled: Tensor
    sums: Tensor


@dataclass(frozen=True, slots=True)
class _Tile:
    """What a block of few_tokens.cu computes.

    Attributes:
        channels: output channels.
        peers: blocks of a cluster, which share the depth.
        stages: of 64 numbers of depth.
        mode: what becomes of the sums.
        normed: parts in which the sums of a norm's input come, or 0: no norm before the product.
        late: whether the next kernel is let start only when this one's weights are all on their way.
        held: whether it is let start only when all that was written before this one is there.
        ahead: whether the weight beyond the stages is asked for into L2 before the kernel before has ended.
        wide: whether the residual is fp32.
        relu: instead of gelu.
        keys: of a cross-attention.
    """

    channels: int
    peers: int
    stages: int
    mode: int
    normed: int = 0
    late: bool = False
    ahead: bool = False
    held: bool = False
    wide: bool = False
    relu: bool = False
    keys: int = 0

    @property
    def _stage_bytes(self) -> int:
        return self.stages * (self.channels + MAX_TOKENS) * 128

    @property
    def _received_bytes(self) -> int:
        """What a block's peers send it."""
        groups = self.channels // 8
        if self.mode == _FINISHED:
            return (self.peers - 1) * -(-groups // self.peers) * (MAX_TOKENS // 16) * 512
        return self.peers * groups * (1 if self.peers == 8 else 2) * 256

    @property
    def _apart(self) -> bool:
        """Whether what peers send has memory of its own, and need not wait until the stages have been read."""
        return self.mode != _ATTEND and self._stage_bytes + self._received_bytes <= _ROOM_FOR_TWO

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block; a key and its value take 224 bytes."""
        return self._stage_bytes + self._apart * self._received_bytes + self.keys * 224

    def defines(self) -> dict[str, int]:
        """Preprocessor constants of few_tokens.cu."""
        return {
            "NC": self.channels,
            "PEERS": self.peers,
            "STAGES": self.stages,
            "ROWS": MAX_TOKENS,
            "MODE": self.mode,
            "NORMED": self.normed,
            "APART": int(self._apart),
            "LATE": int(self.late),
            "AHEAD": int(self.ahead),
            "HELD": int(self.held),
            "WIDE": int(self.wide),
            "RELU": int(self.relu),
        }


_BEGIN = _Tile(96, 8, 3, _STREAM, held=True, wide=True)
_FC2 = _Tile(96, 8, 5, _STREAM, late=True)
_OUT = _Tile(48, 4, 6, _STREAM)
_FC1 = _Tile(96, 2, 6, _FINISHED, WIDTH // _OUT.channels, late=True, ahead=True)
_END = _Tile(32, 4, 6, _FINISHED, WIDTH // _FC2.channels, relu=True)
_SELF = _Tile(3 * _HEAD, 4, 4, _ATTEND, WIDTH // _FC2.channels, late=True)


def _cross(keys: int) -> _Tile:
    tile = _Tile(_HEAD, 4, 5, _ATTEND, WIDTH // _FC2.channels, late=True, ahead=True, keys=keys)
    return tile if tile.shared_bytes <= _ROOM_FOR_TWO else replace(tile, stages=4)


def tiles() -> tuple[_Tile, ...]:
    """All that a request can need."""
    return (_BEGIN, _FC1, _FC2, _OUT, _END, _SELF, *(_cross(keys) for keys in (16, 64, MAX_KEYS)))


def suits(*, width: int, heads: int, hidden: int, decoded: int) -> bool:
    """Whether the tiles come out even; `decoded` are the channels of the layer behind the last norm."""
    return (width, heads, hidden) == (WIDTH, HEADS, HIDDEN) and decoded % _END.channels == 0


@functools.cache
def _kernel(tile: _Tile) -> CudaKernel:
    """The compiled file.

    Raises:
        RuntimeError: it cannot be compiled or loaded here.
    """
    return CudaKernel(
        "few_tokens.cu",
        "few_tokens",
        tile.defines(),
        threads=160,
        shared_bytes=tile.shared_bytes,
        cluster=tile.peers,
        prologue=wgmma_source(tile.channels),
    )


def load() -> None:
    """Compile and load every program of the file that a request can need.

    Raises:
        RuntimeError: one cannot be compiled or loaded here.
    """
    with compiling.together():
        for tile in tiles():
            _kernel(tile)


def _check(
    tile: _Tile, x: Tensor, weight: Tensor, out: Tensor, pointers: Mapping[str, Tensor | None], keys: int
) -> None:
    """Refuses what the kernel would read or write beside what is meant.

    Raises:
        ValueError: a size, dtype or layout is another than the kernel's.
    """
    depth, channels, rows = x.shape[1], weight.shape[0], len(out)
    if rows > MAX_TOKENS or x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise ValueError(f"the kernels take up to {MAX_TOKENS} tokens in bf16")
    if channels % tile.channels or depth % (64 * tile.peers):
        raise ValueError(f"{channels} channels of depth {depth} do not come out even in {tile}")
    if len(x) > rows or (len(x) < rows and not tile.wide) or weight.shape[1] != depth:
        raise ValueError(f"{tuple(x.shape)} through {tuple(weight.shape)} does not come out as {rows} rows")
    wanted = {_FINISHED: channels, _STREAM: WIDTH, _ATTEND: WIDTH if keys else 3 * WIDTH}[tile.mode]
    if channels != wanted or (tile.mode != _FINISHED and out.shape[1] != WIDTH):
        raise ValueError(f"the kernel takes {wanted} channels, for rows of {WIDTH}, not {channels} for {out.shape[1]}")
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("bias", "scale", "first", "constant"), (channels,)),
        **dict.fromkeys(("residual", "scaled"), tuple(out.shape)),
        "sums": (tile.normed, 64, 2),
        "valid": (1, 1, 1, keys),
        **dict.fromkeys(("k", "v"), (1, keys, HEADS, _HEAD)),
    }
    for name, one in {"x": x, "weight": weight, **pointers}.items():
        if one is None:
            continue
        dtype = _DTYPES.get(name, torch.float32 if tile.wide and name == "residual" else torch.bfloat16)
        if one.dtype != dtype:
            raise ValueError(f"the kernels read {name} in {dtype}, not in {one.dtype}")
        if name in shapes and one.shape != shapes[name]:
            raise ValueError(f"the kernel takes {name} of {shapes[name]}, not of {tuple(one.shape)}")
        if name not in ("k", "v") and not one.is_contiguous():
            raise ValueError(f"the kernels read {name} without gaps")


def _run(
    tile: _Tile, x: Tensor, weight: Tensor, out: Tensor, *, pointers: Mapping[str, Tensor | None], **values: Any
) -> None:
    _check(tile, x, weight, out, pointers, values.get("keys", 0))
    depth, channels, rows = x.shape[1], weight.shape[0], len(out)
    box = min(tile.channels, _HEAD) if tile.mode == _ATTEND else tile.channels
    _kernel(tile).launch(
        (channels // tile.channels * tile.peers, 1, 1),
        [
            nvrtc.tensor_map(weight, (box, 64)),
            nvrtc.tensor_map(x, (MAX_TOKENS, 64)),
            _Arguments(
                **{name: one.data_ptr() for name, one in pointers.items() if one is not None},
                **values,
                out=out.data_ptr(),
                width=float(WIDTH),
                share=depth // 64 // tile.peers,
                rows=rows,
                channels=channels,
                blocks=depth // 64,
                skipped=rows - len(x),
            ),
        ],
        overlap=True,
    )


def begin(rows: Tensor, given: Tensor, weight: Tensor, multiplier: Tensor) -> Stream:
    """The stream before the first block: rows, and on the last of them given @ weight.T; rounded.

    Kernels behind this one start when all that was written before it is there: those of a cross-attention read keys and
    values before they wait for their predecessor.

    Args:
        rows: fp32 (rows, WIDTH).
        given: bf16 (at most as many rows, WIDTH).
        multiplier: fp32 (WIDTH,), of the first block's norm.
    """
    return _add(_BEGIN, rows, given, weight, None, multiplier)


def attend(
    stream: Stream,
    weight: Tensor,
    first: Tensor,
    constant: Tensor,
    eps: float,
    seen: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """Attention of each head of 48 behind the norm of the stream, (rows, WIDTH).

    Args:
        weight: (3 * WIDTH, WIDTH), queries, keys and values of all heads; (WIDTH, WIDTH), queries, with `seen`.
        seen: keys and values (1, keys, HEADS, 48), a multiple of 16 keys, at most MAX_KEYS, and bool (1, 1, 1, keys).
    """
    out = torch.empty_like(stream.x)
    pointers: dict[str, Tensor | None] = {"sums": stream.sums, "first": first, "constant": constant}
    values: dict[str, Any] = {"eps": eps, "logit_scale": _HEAD**-0.5 * _LOG2E}
    tile = _SELF
    if seen is not None:
        k, v, valid = seen
        tile = _cross(k.shape[1])
        if k.shape[1] % 16 or k.shape[1] > MAX_KEYS or k.stride() != v.stride() or k.stride()[2:] != (_HEAD, 1):
            raise ValueError("the kernel takes keys by 16, up to 256, heads side by side")
        pointers |= {"k": k, "v": v, "valid": valid.contiguous()}
        values |= {"keys": k.shape[1], "k_token": k.stride(1)}
    _run(tile, stream.scaled, weight, out, pointers=pointers, **values)
    return out


def gelu(stream: Stream, weight: Tensor, first: Tensor, constant: Tensor, eps: float) -> Tensor:
    """gelu (tanh form) of a layer (HIDDEN, WIDTH) behind the norm of the stream, whose sums `add` left for x itself."""
    return _finished(_FC1, stream, weight, first, constant, eps)


def relu(stream: Stream, weight: Tensor, first: Tensor, constant: Tensor, eps: float) -> Tensor:
    """relu of a layer (n, WIDTH) behind the norm of the stream, n a multiple of 32, as `add` behind HIDDEN left it."""
    return _finished(_END, stream, weight, first, constant, eps)


def add(x: Tensor, given: Tensor, weight: Tensor, bias: Tensor | None, multiplier: Tensor | None) -> Stream:
    """The stream x + given @ weight.T + bias, rounded, for the norm of this multiplier; none is ones."""
    tile = {HIDDEN: _FC2, WIDTH: _OUT}.get(given.shape[1])
    if tile is None:
        raise ValueError(f"the kernels add a layer of depth {HIDDEN} or {WIDTH}, not {given.shape[1]}")
    return _add(tile, x, given, weight, bias, multiplier)


def _finished(tile: _Tile, stream: Stream, weight: Tensor, first: Tensor, constant: Tensor, eps: float) -> Tensor:
    out = torch.empty((len(stream.x), weight.shape[0]), dtype=stream.x.dtype, device=stream.x.device)
    pointers = {"sums": stream.sums, "first": first, "constant": constant}
    _run(tile, stream.scaled, weight, out, pointers=pointers, eps=eps)
    return out


def _add(
    tile: _Tile, x: Tensor, given: Tensor, weight: Tensor, bias: Tensor | None, multiplier: Tensor | None
) -> Stream:
    out = torch.empty_like(x, dtype=given.dtype)
    scaled = out if multiplier is None else torch.empty_like(out)
    sums = torch.empty((WIDTH // tile.channels, 64, 2), dtype=torch.float32, device=x.device)
    pointers = {"bias": bias, "residual": x, "sums_out": sums, "scale": multiplier}
    if multiplier is not None:
        pointers["scaled"] = scaled
    _run(tile, given, weight, out, pointers=pointers)
    return Stream(out, scaled, sums)
