"""The kernels of expert.cu as calls: a layer's products, its attention, and what lies between two solver steps."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from torch import Tensor

from taktline_kernels import compiling
from taktline_kernels.cuda.expert_layout import HEAD_DIM, HEADS, WIDTH
from taktline_kernels.cuda.nvrtc import CudaKernel
from taktline_kernels.guidance import Guidance

_WINDOWS = 8
MAX_KEYS = _WINDOWS * 128
"""Prefix slots plus action tokens that the attention's eight windows hold."""
_LOG2E = 1.4426950408889634

SQUARES = 32
"""Parts of a token's sum of squares, one a tile of columns of the kernel that writes them: the most that there are."""

# What the windows of a row block send each other: fp16 parts of 16 rows by 64 columns, and each row's maximum and sum.
_PARTS_BYTES = _WINDOWS * (2048 + 128)


# The kernel between two steps keeps half of both projections' weights, (32, 512) fp32 each.
_HEAD_BYTES = 32 * WIDTH * 4


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product of a layer.

    Attributes:
        columns: of a block.
        depth: K columns of a block.
        split: blocks that share K.
        epilogue: as expert.cu numbers them.
        pause: cycles for which it holds its weight copies back.
    """

    columns: int
    depth: int
    split: int
    epilogue: int
    pause: int = 0

    @property
    def weight_bytes(self) -> int:
        """Of a block."""
        return self.columns * self.depth * 2


QKV = Product(columns=32, depth=1024, split=1, epilogue=0, pause=3000)
OUT = Product(columns=32, depth=512, split=4, epilogue=2)
GATE_UP = Product(columns=64, depth=1024, split=1, epilogue=1, pause=2000)
DOWN = Product(columns=64, depth=512, split=8, epilogue=2)
START = Product(columns=32, depth=1024, split=1, epilogue=3)


SCALED, IN_PARTS, IN_FP16 = 1, 2, 3
"""HEAD of expert.cu: the stream and its first scaling, or π0's silu in three bf16 parts, or in fp16."""


class _Arguments(ctypes.Structure):
    """`Arguments` of expert.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "input", "squares", "constants", "output", "scaled")),
        *((name, ctypes.c_void_p) for name in ("squares_out", "gate", "scale", "k_cache", "v_cache")),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "length")),
        ("rows", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("fresh", ctypes.c_int),
    )


class ExpertKernels:
    """The loaded kernels of one chain.

    Args:
        eps: of the norms.
        steps: solver steps.
        timed: π0's, whose actions go through a layer of their own.
    """

    def __init__(self, eps: float, steps: int, *, timed: bool) -> None:
        self._eps, self._steps = eps, steps
        products = (QKV, OUT, GATE_UP, DOWN, *((START,) if timed else ()))
        self._attentions: dict[tuple[int, bool], CudaKernel] = {}
        with compiling.together():
            self._products = {product: product_kernel(product) for product in products}
            self._heads = {
                kind: CudaKernel("expert.cu", "head", {"HEAD": kind}, threads=256, shared_bytes=_HEAD_BYTES, cluster=2)
                for kind in (SCALED, *((IN_PARTS, IN_FP16) if timed else ()))
            }

    def product(
        self, product: Product, outputs: int, rows: int, *, overlap: bool = True, **fields: Tensor | int | None
    ) -> None:
        """Multiply.

        Args:
            product: which.
            outputs: columns of the whole result.
            rows: tokens.
            overlap: start before the preceding kernel ends.
            fields: what `Arguments` of expert.cu holds besides; None is a null pointer.
        """
        arguments = _Arguments(rows=rows, eps=self._eps)
        for name, value in fields.items():
            setattr(arguments, name, value.data_ptr() if isinstance(value, Tensor) else value)
        blocks = outputs // product.columns * product.split
        self._products[product].launch((blocks, 1, 1), [arguments], overlap=overlap)

    def _attention(self, rows: int, factors: bool, narrow: bool) -> CudaKernel:
        """The attention over a cache of so many rows: eight windows hold all, of a multiple of 16 keys each.

        Windows of fewer than 96 let two blocks share a processor: a gain where other work has most of them (`narrow`),
        a loss where others idle.
        """
        window = max(80 if narrow else 96, -(-rows // (16 * _WINDOWS)) * 16)
        if (window, factors) not in self._attentions:
            defines = {"KEYS": window} | ({"FACTORS": SQUARES} if factors else {})
            shared = window * 1024 + _PARTS_BYTES
            self._attentions[window, factors] = CudaKernel(
                "expert.cu", "attend", defines, threads=256, shared_bytes=shared, cluster=_WINDOWS
            )
        return self._attentions[window, factors]

    def attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        attended: Tensor,
        length: Tensor,
        rows: int,
        ahead: Tensor,
        *,
        first_alone: bool,
        narrow: bool,
        squares: Tensor | None,
    ) -> None:
        """Attend from `rows` tokens over length + rows cache rows, and ask for the weights `ahead` into L2.

        Args:
            query: (64, 2048) bf16 in the order of query fragments.
            keys: (rows of the cache, 256) bf16.
            values: likewise.
            attended: (64, 2048) bf16 in fragment order, written.
            length: (1,) int32, rows of the prefix.
            rows: tokens.
            ahead: any tensor.
            first_alone: the first token sees the prefix and itself only.
            narrow: other work has most of the processors.
            squares: parts of the tokens' sums of squares, where queries, keys and values lack the factor of their norm.
        """
        self._attention(keys.shape[0], squares is not None, narrow).launch(
            (-(-rows * HEADS // 32) * _WINDOWS, 1, 1),
            [
                query,
                keys,
                values,
                attended,
                length,
                ctypes.c_int(rows),
                ctypes.c_int(rows * HEADS),
                ctypes.c_float(HEAD_DIM**-0.5 * _LOG2E),
                ahead,
                ctypes.c_int(ahead.numel() * 2),
                ctypes.c_int(int(first_alone)),
                *(() if squares is None else (squares, ctypes.c_float(self._eps))),
            ],
            overlap=True,
        )

    def head(
        self,
        kind: int,
        stream: tuple[Tensor, Tensor | None, Tensor],
        actions: Tensor,
        final: tuple[Tensor, Tensor],
        following: Tensor,
        entry: tuple[Tensor, Tensor | None],
        leaving: tuple[Tensor, Tensor],
        timed: Tensor,
        *,
        has_out: bool = False,
        has_in: bool,
        before: int = 0,
        ahead: int = 0,
        overlap: bool = True,
        guidance: Guidance | None = None,
    ) -> None:
        """Finish a step on `actions` (with `has_out`), and begin the next (with `has_in`).

        Args:
            kind: what is made of action_in_proj's output: SCALED, IN_PARTS or IN_FP16.
            stream: the residual stream, what is scaled for the first layer (None where its matrix holds the norm's
                scale), and the parts of the stream's sums of squares.
            actions: (tokens, 32) fp32, changed in place.
            final: (1024,) fp32, scale and shift of the last norm.
            following: (1024,) fp32, scale of the first norm of the next step.
            entry: action_in_proj's transposed weight (32, 1024) and bias (1024,), fp32.
            leaving: action_out_proj's weight (32, 1024) and bias (32,), fp32.
            timed: written instead of the stream, except by SCALED.
            has_out: there is a step to finish.
            has_in: another one follows.
            before: tokens of the stream before the actions'.
            ahead: likewise in the next step.
            overlap: start before the preceding kernel ends.
            guidance: correction of the velocity, or None.
        """
        self._heads[kind].launch(
            (2 * actions.shape[0], 1, 1),
            [
                *(ctypes.c_void_p() if part is None else part for part in stream),
                actions,
                *final,
                following,
                *entry,
                *leaving,
                ctypes.c_float(-1.0 / self._steps),
                ctypes.c_float(self._eps),
                ctypes.c_int(int(has_out)),
                ctypes.c_int(int(has_in)),
                ctypes.c_int(before),
                ctypes.c_int(ahead),
                timed,
                ctypes.c_void_p() if guidance is None else guidance.target,
                ctypes.c_void_p() if guidance is None else guidance.influence,
                ctypes.c_float(0.0 if guidance is None else guidance.tau),
                ctypes.c_float(0.0 if guidance is None else guidance.weight),
            ],
            overlap=overlap,
        )


def product_kernel(product: Product) -> CudaKernel:
    """The compiled file for one of the products."""
    defines = {"N": product.columns, "KB": product.depth, "SPLIT": product.split, "EPILOGUE": product.epilogue}
    defines["PAUSE"] = product.pause
    if product.epilogue < 2:
        # What the stream's last writer has left: a part of each row's sum of squares for each of its tiles.
        defines["PARTS"] = WIDTH // (DOWN if product.epilogue == 0 else OUT).columns
    # Parts that the other blocks of a cluster send: 2 KB from each, with gaps.
    received = product.split * 2304 if product.epilogue == 2 else 0
    shared = product.weight_bytes + received
    return CudaKernel("expert.cu", "product", defines, threads=256, shared_bytes=shared, cluster=product.split)
