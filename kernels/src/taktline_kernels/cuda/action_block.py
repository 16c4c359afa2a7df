"""The blocks of a small diffusion transformer for one sequence of at most 64 tokens, on Hopper (action_block.cu)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from taktline_kernels.cuda.expert_layout import weight_image
from taktline_kernels.cuda.frame_attention import wgmma_registers, wgmma_shared
from taktline_kernels.cuda.nvrtc import CudaKernel

WIDTH, HEAD_DIM = 768, 64
"""Of the stream, and of a head, that the kernels are tuned for."""
MAX_TOKENS, MAX_KEYS = 64, 512
ROWS, GELU, RESIDUAL = 0, 1, 2
HEADER = '#include "hopper.cuh"\n'
_LOG2E = 1.4426950408889634
_KEYS_STEP, _ASK_PARTS = 128, 16
_JOINED_BYTES = 64 * 66 * 4
"""Of what the four warps of an attention block have found."""


@dataclass(frozen=True, slots=True)
class Product:
    """How one product is cut.

    Attributes:
        mode: what follows it: ROWS, GELU or RESIDUAL.
        depth: of K, of the whole product.
        columns: of a block, 32 or 64.
        split: blocks of a cluster that share K.
        parts: of the rows' sums of squares that it reads, a multiple of 16.
    """

    mode: int
    depth: int
    columns: int = 32
    split: int = 1
    parts: int = 0

    @property
    def share(self) -> int:
        """Depth of a block."""
        return self.depth // self.split

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: weights, and its input, or all 64 rows of a tile that a cluster's blocks send."""
        beside = self.columns * 4 if self.mode == RESIDUAL else self.share * 2
        return self.columns * self.share * 2 + MAX_TOKENS * beside

    def defines(self) -> dict[str, int]:
        """Preprocessor constants of action_block.cu."""
        return {
            "MODE": self.mode,
            "COLUMNS": self.columns,
            "DEPTH": self.share,
            "SPLIT": self.split,
            "PARTS": self.parts,
        }

    def pack(self, weight: Tensor) -> Tensor:
        """(n, depth) in the order in which blocks read it, bf16."""
        weight = weight.bfloat16()
        if self.mode != RESIDUAL:
            # `weight_image` brings the columns of each 32 into the order that registers need: undone before.
            n, k = weight.shape
            weight = weight.view(n, k // 32, 2, 2, 4, 2).permute(0, 1, 4, 2, 3, 5).reshape(n, k)
        return weight_image(weight, self.columns, self.share)


class _Arguments(ctypes.Structure):
    """`Arguments` of action_block.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "input", "squares", "bias", "output", "scaled")),
        *((name, ctypes.c_void_p) for name in ("squares_out", "scale")),
        *((name, ctypes.c_int) for name in ("rows", "columns")),
        *((name, ctypes.c_float) for name in ("width", "eps")),
    )


def prologue(product: Product) -> str:
    """What goes before the file for a product: the shared header, and the instruction that takes its input."""
    if product.mode == RESIDUAL:
        return HEADER + wgmma_registers("wgmma", product.columns, False)
    return HEADER + wgmma_shared("wgmma", product.columns)


def load(product: Product) -> CudaKernel:
    """The compiled product.

    Raises:
        RuntimeError: it cannot be compiled or loaded here.
    """
    defines = tuple(sorted(product.defines().items()))
    return _kernel("product", defines, 256, product.shared_bytes, product.split, prologue(product))


@functools.cache
def _kernel(
    entry: str, defines: tuple[tuple[str, int], ...], threads: int, shared: int, cluster: int, before: str
) -> CudaKernel:
    given: Mapping[str, Any] = {"threads": threads, "shared_bytes": shared, "cluster": cluster, "prologue": before}
    return CudaKernel("action_block.cu", entry, dict(defines), **given)


def load_attentions(width: int) -> None:
    """Compile and load `attention`, and `ask` of a stream of this width for all the keys that it takes.

    Raises:
        RuntimeError: one cannot be compiled or loaded here.
    """
    _attend_kernel()
    for keys in range(_KEYS_STEP, MAX_KEYS + 1, _KEYS_STEP):
        _ask_kernel(width, keys)


def _attend_kernel() -> CudaKernel:
    shared = max(MAX_TOKENS * 2 * HEAD_DIM * 2, _JOINED_BYTES)
    return _kernel("attend", (("KEYS", MAX_TOKENS),), 128, shared, 1, HEADER)


def _ask_kernel(width: int, keys: int) -> CudaKernel:
    defines = (("ASK", 1), ("DEPTH", width), ("KEYS", keys))
    return _kernel("ask", defines, 256, (width + 2 * keys) * HEAD_DIM * 2, 1, HEADER)


def run(product: Product, columns: int, rows: int, width: int, eps: float, **fields: Tensor) -> None:
    """Multiply.

    Args:
        product: which.
        columns: of the whole result.
        rows: tokens.
        width: of the stream.
        eps: of the norm before it.
        fields: what `Arguments` of action_block.cu holds besides.
    """
    arguments = _Arguments(rows=rows, columns=columns, width=width, eps=eps)
    for name, value in fields.items():
        setattr(arguments, name, value.data_ptr())
    load(product).launch((columns // product.columns * product.split, 1, 1), [arguments], overlap=True)


def attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Attend from the tokens of one sequence to themselves.

    Args:
        q: (tokens, heads, 64) bf16, heads side by side.
        k: (tokens, heads, 64), likewise.
        v: likewise, in the strides of k.
        out: (64 * heads * 64,) bf16, written in panels.
    """
    tokens, heads, _ = q.shape
    _attend_kernel().launch(
        (heads * MAX_TOKENS // 16, 1, 1),
        [
            *(q, k, v, out),
            *(ctypes.c_int(n) for n in (tokens, q.stride(0), k.stride(0))),
            ctypes.c_float(HEAD_DIM**-0.5 * _LOG2E),
        ],
        overlap=True,
    )


def pack_queries(weight: Tensor) -> Tensor:
    """(heads * 64, width) in the order in which `ask` reads it, bf16."""
    return weight_image(weight.bfloat16(), HEAD_DIM, weight.shape[1])


def ask(
    weights: Tensor,
    bias: Tensor,
    stream: Tensor,
    squares: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor,
    out: Tensor,
    tokens: int,
    eps: float,
    *,
    early: bool,
) -> None:
    """Queries of the stream's norm, and their attention to keys that were there before.

    Args:
        weights: as `pack_queries` gives them.
        bias: (heads * 64,) fp32.
        stream: (64 * width,) bf16 in panels, times the norm's multiplier.
        squares: fp32 (16, 64), parts of the rows' sums of squares.
        k: (keys, heads, 64) bf16, heads side by side; keys at most `MAX_KEYS`.
        v: likewise, in the strides of k.
        valid: bool (keys,), those that are seen.
        out: (64 * heads * 64,) bf16, written in panels.
        tokens: of the stream.
        eps: of the norm.
        early: keys and values were there long before the kernel before this one.
    """
    if len(squares) != _ASK_PARTS:
        raise ValueError(f"queries read the rows' sums of squares in {_ASK_PARTS} parts, not {len(squares)}")
    width, keys = stream.numel() // MAX_TOKENS, -(-len(k) // _KEYS_STEP) * _KEYS_STEP
    _ask_kernel(width, keys).launch(
        (k.shape[1] * MAX_TOKENS // 16, 1, 1),
        [
            *(weights, stream, squares, bias, k, v, valid, out),
            *(ctypes.c_int(n) for n in (tokens, len(k), k.stride(0), int(early))),
            *(ctypes.c_float(x) for x in (float(width), eps, HEAD_DIM**-0.5 * _LOG2E)),
        ],
        overlap=True,
    )


def in_panels(x: Tensor) -> Tensor:
    """(tokens, k) -> (64 * k,) in the order in which a product reads it, zeros past the last token."""
    padded = x.new_zeros(MAX_TOKENS, x.shape[1])
    padded[: len(x)] = x
    return padded.flatten()[_places(x.shape[1], x.device)]


def from_panels(x: Tensor, tokens: int) -> Tensor:
    """(64 * k,) -> (tokens, k), what `in_panels` undoes."""
    out = torch.empty_like(x)
    out[_places(len(x) // MAX_TOKENS, x.device)] = x
    return out.view(MAX_TOKENS, -1)[:tokens]


def _places(width: int, device: torch.device) -> Tensor:
    """int64 (64 * width,): which element of (64, width) stands where in panels."""
    panel, token, piece, column = torch.meshgrid(
        *(torch.arange(n, device=device) for n in (width // 32, MAX_TOKENS, 4, 8)), indexing="ij"
    )
    return (token * width + panel * 32 + (piece ^ token // 2 % 4) * 8 + column).flatten()
