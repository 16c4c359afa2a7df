"""The action expert of π0 and π0.5 for one row of the batch, as a chain of overlapping CUDA kernels (expert.cu)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from taktline_kernels.cuda.expert_layout import (
    ACTION,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    MAX_ROWS,
    WIDTH,
    ExpertLayer,
    Projections,
    pair_halves,
    timed_input,
    timed_weight,
    weight_image,
)
from taktline_kernels.cuda.nvrtc import CudaKernel
from taktline_kernels.guidance import Guidance

__all__ = [
    "ACTION",
    "HEADS",
    "HEAD_DIM",
    "HIDDEN",
    "MAX_KEYS",
    "MAX_ROWS",
    "WIDTH",
    "ExpertChain",
    "ExpertLayer",
    "Projections",
]

MAX_KEYS = 1024
"""Prefix slots plus action tokens that the attention's eight windows hold."""


_WINDOWS = 8
_LOG2E = 1.4426950408889634


# Parts of a token's sum of squares, one a tile of columns of the kernel that writes them: at most the out projection's.
_SQUARES = 32

# What the windows of a row block send each other: fp16 parts of 16 rows by 64 columns, and each row's maximum and sum.
_PARTS_BYTES = _WINDOWS * (2048 + 128)


# The kernel between two steps keeps half of both projections' weights, (32, 512) fp32 each.
_HEAD_BYTES = 32 * WIDTH * 4


@dataclass(frozen=True, slots=True)
class _Product:
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
        return self.columns * self.depth * 2


_QKV = _Product(columns=32, depth=1024, split=1, epilogue=0, pause=3000)
_OUT = _Product(columns=32, depth=512, split=4, epilogue=2)
_GATE_UP = _Product(columns=64, depth=1024, split=1, epilogue=1, pause=4000)
_DOWN = _Product(columns=64, depth=512, split=8, epilogue=2)


class _Arguments(ctypes.Structure):
    """`Arguments` of expert.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "input", "squares", "constants", "output", "scaled")),
        *((name, ctypes.c_void_p) for name in ("squares_out", "gate", "scale", "k_cache", "v_cache")),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "length")),
        *((name, ctypes.c_int) for name in ("rows", "columns")),
        ("eps", ctypes.c_float),
        ("fresh", ctypes.c_int),
    )


class ExpertChain:
    """All solver steps of one row.

    Args:
        layers: the expert's weights.
        scale: (steps, 2 * depth + 1, 1024) fp32, AdaRMS scales; norms 2i and 2i + 1 are layer i's, the last is final.
        shift: likewise.
        gate: likewise.
        projections: between actions and expert.
        max_keys: most prefix slots plus suffix tokens of a request.
        eps: of the norms.
    """

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        scale: Tensor,
        shift: Tensor,
        gate: Tensor,
        projections: Projections,
        max_keys: int,
        eps: float = 1e-6,
    ) -> None:
        self._scale, self._shift, self._gate = scale, shift, gate
        p = self._projections = projections
        self._in_weight = p.in_weight.t().contiguous()
        self._eps, self._steps = eps, scale.shape[0]
        if max_keys > MAX_KEYS:
            raise ValueError(f"the expert chain attends over at most {MAX_KEYS} keys, not {max_keys}")
        # Keys of a window: a multiple of 32, eight windows hold them all.
        window = -(-max_keys // (32 * _WINDOWS)) * 32
        self._images, self._constants = [], []
        for index, layer in enumerate(layers):
            qkv = pair_halves(layer.qkv)
            gate_up = layer.gate_up
            self._images.append(
                (
                    weight_image(qkv, _QKV.columns, _QKV.depth),
                    weight_image(layer.out, _OUT.columns, _OUT.depth),
                    weight_image(gate_up, _GATE_UP.columns, _GATE_UP.depth),
                    weight_image(layer.down, _DOWN.columns, _DOWN.depth),
                )
            )
            # The shift's share of a product depends on the step alone.
            self._constants.append((shift[:, 2 * index] @ qkv.float().T, shift[:, 2 * index + 1] @ gate_up.float().T))
        device, bf16 = scale.device, torch.bfloat16
        self.stream = torch.zeros(MAX_ROWS, WIDTH, dtype=bf16, device=device)
        self._scaled = torch.zeros(MAX_ROWS, WIDTH, dtype=bf16, device=device)
        self._squares = torch.zeros(_SQUARES, MAX_ROWS, device=device)
        self._query = torch.zeros(MAX_ROWS, HEADS * HEAD_DIM, dtype=bf16, device=device)
        self._attended = torch.zeros_like(self._query)
        self._hidden = torch.zeros(MAX_ROWS, HIDDEN, dtype=bf16, device=device)
        self._products = {product: _kernel(product) for product in (_QKV, _OUT, _GATE_UP, _DOWN)}
        self._attend = CudaKernel(
            "expert.cu",
            "attend",
            {"KEYS": window},
            threads=256,
            shared_bytes=window * 1024 + _PARTS_BYTES,
            cluster=_WINDOWS,
        )
        self._head = CudaKernel("expert.cu", "head", {"HEAD": 1}, threads=256, shared_bytes=_HEAD_BYTES, cluster=2)
        self._after = torch.zeros(1, dtype=torch.int32, device=device)
        if p.time_weight is not None and p.time_bias is not None and p.state_weight is not None:
            self._timed_head = CudaKernel(
                "expert.cu", "head", {"HEAD": 2}, threads=256, shared_bytes=_HEAD_BYTES, cluster=2
            )
            self._timed_weight = weight_image(timed_weight(p.time_weight, p.time_bias), _DOWN.columns, _DOWN.depth)
            self._timed = timed_input(device)
            self._one = torch.ones(WIDTH, device=device)
            self._state_weight = p.state_weight.t().contiguous()

    def solve(
        self,
        actions: Tensor,
        state: Tensor | None,
        length: Tensor,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        guidance: Sequence[Guidance] | None = None,
        before_layer: Callable[[int], None] | None = None,
    ) -> None:
        """Run every step, in place.

        Args:
            actions: (tokens, 32) fp32, at most MAX_ROWS tokens, with π0's state: noise in, actions out.
            state: π0: (1, 32) fp32; None for π0.5.
            length: (1,) int32, valid prefix rows of the caches.
            keys: (depth, rows, 256) bf16; rows from length on are overwritten by the suffix.
            values: likewise.
            cos: (positions, 128) fp32.
            sin: likewise.
            guidance: the correction of each step's velocity, or None.
            before_layer: called before each layer of the first step, which reads that layer's keys and values.
        """
        # π0's state is the first token of the first step; the later steps find its keys and values in the cache.
        before, after = int(state is not None), length
        if state is not None:
            after = torch.add(length, 1, out=self._after)
        # Not overlapped: everything before the chain, the prefix above all, is complete when it starts.
        self.head(actions, -1, ahead=before, overlap=False)
        if state is not None:
            self._launch_head(
                self._head,
                1,
                state,
                (self._state_weight, self._projections.state_bias),
                scale=self._scale[0],
                shift=self._shift[0],
                following=self._scale[0],
                has_in=True,
            )
        for step in range(self._steps):
            rows, first = actions.shape[0] + before, before
            for layer in range(len(self._images)):
                # What the hook makes this stream wait for is complete when the layer starts.
                joins = step == 0 and before_layer is not None
                if step == 0 and before_layer is not None:
                    before_layer(layer)
                self.layer(
                    rows,
                    step,
                    layer,
                    length,
                    keys[layer],
                    values[layer],
                    cos,
                    sin,
                    first_alone=first > 0,
                    overlap=not joins,
                )
            length, before = after, 0
            self.head(actions, step, before=first, guidance=None if guidance is None else guidance[step])

    def layer(
        self,
        rows: int,
        step: int,
        layer: int,
        length: Tensor,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        first_alone: bool = False,
        overlap: bool = True,
    ) -> None:
        """Run one layer of one step on the chain's stream."""
        qkv, out, gate_up, down = self._images[layer]
        for_qkv, for_mlp = (constants[step] for constants in self._constants[layer])
        scale, gate = self._scale[step], self._gate[step]
        stream, scaled, squares = self.stream, self._scaled, self._squares
        self._product(
            _QKV,
            WIDTH * 5 // 2 // _QKV.columns,
            rows,
            overlap=overlap,
            weights=qkv,
            input=scaled,
            squares=squares,
            constants=for_qkv,
            output=self._query,
            k_cache=keys,
            v_cache=values,
            cosines=cos,
            sines=sin,
            length=length,
        )
        self.attention(rows, length, keys, values, ahead=gate_up, first_alone=first_alone)
        residual: dict[str, Any] = {
            "output": stream,
            "scaled": scaled,
            "squares_out": squares,
            "columns": WIDTH,
        }
        self._product(
            _OUT,
            WIDTH // _OUT.columns,
            rows,
            weights=out,
            input=self._attended,
            gate=gate[2 * layer],
            scale=scale[2 * layer + 1],
            **residual,
        )
        self._product(
            _GATE_UP,
            2 * HIDDEN // _GATE_UP.columns,
            rows,
            weights=gate_up,
            input=scaled,
            squares=squares,
            constants=for_mlp,
            output=self._hidden,
        )
        self._product(
            _DOWN,
            WIDTH // _DOWN.columns,
            rows,
            weights=down,
            input=self._hidden,
            gate=gate[2 * layer + 1],
            scale=scale[2 * layer + 2],
            **residual,
        )

    def attention(
        self, rows: int, length: Tensor, keys: Tensor, values: Tensor, ahead: Tensor, *, first_alone: bool = False
    ) -> None:
        """Attend from the chain's queries over length + rows cache rows, and prefetch the weights `ahead` to L2."""
        self._attend.launch(
            (-(-rows * HEADS // 32) * _WINDOWS, 1, 1),
            [
                self._query,
                keys,
                values,
                self._attended,
                length,
                ctypes.c_int(rows),
                ctypes.c_int(rows * HEADS),
                ctypes.c_float(HEAD_DIM**-0.5 * _LOG2E),
                ahead,
                ctypes.c_int(ahead.numel() * 2),
                ctypes.c_int(int(first_alone)),
            ],
            overlap=True,
        )

    def head(
        self,
        actions: Tensor,
        step: int,
        *,
        before: int = 0,
        ahead: int = 0,
        overlap: bool = True,
        guidance: Guidance | None = None,
    ) -> None:
        """Finish `step` (none for -1) and begin the next, if there is one.

        Args:
            actions: (tokens, 32) fp32, changed in place.
            step: the solver step that the stream has passed.
            before: tokens of the stream before the actions'.
            ahead: likewise in the next step.
            overlap: start before the preceding kernel ends.
            guidance: correction of the velocity of `step`, or None.
        """
        last, timed = step + 1 == self._steps, self._projections.time_weight is not None
        following = self._scale[0 if last else step + 1]
        in_bias = self._projections.in_bias
        self._launch_head(
            self._timed_head if timed else self._head,
            actions.shape[0],
            actions,
            (self._in_weight, in_bias[0 if last else step + 1] if timed else in_bias),
            scale=self._scale[step],
            shift=self._shift[step],
            following=following,
            has_out=step >= 0,
            has_in=not last,
            before=before,
            ahead=ahead,
            overlap=overlap,
            guidance=guidance,
        )
        if timed and not last:
            self._product(
                _DOWN,
                WIDTH // _DOWN.columns,
                actions.shape[0] + ahead,
                weights=self._timed_weight,
                input=self._timed,
                gate=self._one,
                scale=following[0],
                output=self.stream,
                scaled=self._scaled,
                squares_out=self._squares,
                columns=WIDTH,
                fresh=1,
            )

    def _launch_head(
        self,
        kernel: CudaKernel,
        tokens: int,
        actions: Tensor,
        entry: tuple[Tensor, Tensor | None],
        *,
        scale: Tensor,
        shift: Tensor,
        following: Tensor,
        has_out: bool = False,
        has_in: bool,
        before: int = 0,
        ahead: int = 0,
        overlap: bool = True,
        guidance: Guidance | None = None,
    ) -> None:
        p = self._projections
        kernel.launch(
            (2 * tokens, 1, 1),
            [
                self.stream,
                self._scaled,
                self._squares,
                actions,
                scale[-1],
                shift[-1],
                following[0],
                *entry,
                p.out_weight,
                p.out_bias,
                ctypes.c_float(-1.0 / self._steps),
                ctypes.c_float(self._eps),
                ctypes.c_int(int(has_out)),
                ctypes.c_int(int(has_in)),
                ctypes.c_int(before),
                ctypes.c_int(ahead),
                self._timed if p.time_weight is not None else self._scaled,
                ctypes.c_void_p() if guidance is None else guidance.target,
                ctypes.c_void_p() if guidance is None else guidance.influence,
                ctypes.c_float(0.0 if guidance is None else guidance.tau),
                ctypes.c_float(0.0 if guidance is None else guidance.weight),
            ],
            overlap=overlap,
        )

    def _product(
        self, product: _Product, tiles: int, rows: int, *, overlap: bool = True, **fields: Tensor | int
    ) -> None:
        arguments = _Arguments(rows=rows, eps=self._eps)
        for name, value in fields.items():
            setattr(arguments, name, value.data_ptr() if isinstance(value, Tensor) else value)
        self._products[product].launch((tiles * product.split, 1, 1), [arguments], overlap=overlap)


def _kernel(product: _Product) -> CudaKernel:
    defines = {"N": product.columns, "KB": product.depth, "SPLIT": product.split, "EPILOGUE": product.epilogue}
    defines["PAUSE"] = product.pause
    if product.epilogue < 2:
        # What the stream's last writer has left: a part of each row's sum of squares for each of its tiles.
        defines["PARTS"] = WIDTH // (_DOWN if product.epilogue == 0 else _OUT).columns
    # Parts that the other blocks of a cluster send: 2 KB from each.
    received = product.split * 2048 if product.epilogue == 2 else 0
    shared = product.weight_bytes + received
    return CudaKernel("expert.cu", "product", defines, threads=256, shared_bytes=shared, cluster=product.split)
