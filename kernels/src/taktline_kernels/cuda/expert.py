"""The action expert of π0 and π0.5 for one row of the batch, as a chain of overlapping CUDA kernels (expert.cu)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from taktline_kernels.cuda.expert_kernels import (
    DOWN,
    GATE_UP,
    IN_FP16,
    IN_PARTS,
    MAX_KEYS,
    OUT,
    QKV,
    SCALED,
    SQUARES,
    START,
    ExpertKernels,
)
from taktline_kernels.cuda.expert_layout import (
    ACTION,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    MAX_ROWS,
    WIDTH,
    ExpertLayer,
    Projections,
    folded,
    pair_halves,
    start_weight,
    timed_input,
    timed_weight,
    weight_image,
)
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
        steady: no step changes the norms, and they shift nothing (π0).
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
        *,
        steady: bool = False,
    ) -> None:
        self._scale, self._shift, self._gate = scale, shift, gate
        p = self._projections = projections
        self._in_weight = p.in_weight.t().contiguous()
        self._steps = scale.shape[0]
        if max_keys > MAX_KEYS:
            raise ValueError(f"the expert chain attends over at most {MAX_KEYS} keys, not {max_keys}")
        # Of a norm that no step changes and that shifts nothing, the factor can come after the product and 1 + scale
        # lies in the matrix: the stream itself is what the product reads.
        self.starts = p.time_weight is not None and steady
        self._images, self._constants = [], []
        for index, layer in enumerate(layers):
            qkv, gate_up = pair_halves(layer.qkv), layer.gate_up
            if self.starts:
                qkv, gate_up = folded(qkv, scale[0, 2 * index]), folded(gate_up, scale[0, 2 * index + 1])
            self._images.append(
                (
                    weight_image(qkv, QKV.columns, QKV.depth),
                    weight_image(layer.out, OUT.columns, OUT.depth),
                    weight_image(gate_up, GATE_UP.columns, GATE_UP.depth),
                    weight_image(layer.down, DOWN.columns, DOWN.depth),
                )
            )
            # The shift's share of a product depends on the step alone.
            self._constants.append((shift[:, 2 * index] @ qkv.float().T, shift[:, 2 * index + 1] @ gate_up.float().T))
        device, bf16 = scale.device, torch.bfloat16
        # Activations in fragment order (expert.cu).
        self._stream = torch.zeros(MAX_ROWS, WIDTH, dtype=bf16, device=device)
        self._scaled = None if self.starts else torch.zeros_like(self._stream)
        self._input = self._stream if self._scaled is None else self._scaled
        self._squares = torch.zeros(SQUARES, MAX_ROWS, device=device)
        self._query = torch.zeros(MAX_ROWS, HEADS * HEAD_DIM, dtype=bf16, device=device)
        self._attended = torch.zeros_like(self._query)
        self._hidden = torch.zeros(MAX_ROWS, HIDDEN, dtype=bf16, device=device)
        self._kernels = ExpertKernels(eps, self._steps, timed=p.time_weight is not None)
        self._after = torch.zeros(1, dtype=torch.int32, device=device)
        self._timed = self._stream
        if p.time_weight is not None and p.time_bias is not None and p.state_weight is not None:
            self._timed = timed_input(device)
            self._timed_weight = weight_image(timed_weight(p.time_weight, p.time_bias), DOWN.columns, DOWN.depth)
            weight, self._start_constants = start_weight(layers[0].qkv, scale[0, 0], p.time_weight, p.time_bias)
            self._start_weight = weight_image(weight, START.columns, START.depth)
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
            p = self._projections
            self._kernels.head(
                SCALED,
                (self._stream, self._scaled, self._squares),
                state,
                (self._scale[0, -1], self._shift[0, -1]),
                self._scale[0, 0],
                (self._state_weight, p.state_bias),
                (p.out_weight, p.out_bias),
                self._timed,
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
                    started=self.starts and step > 0 and layer == 0,
                )
            length, before = after, 0
            self.head(actions, step, before=first, guidance=None if guidance is None else guidance[step])
            if self.starts and step + 1 < self._steps:
                self._start(actions.shape[0], length, keys[0], values[0], cos, sin)

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
        started: bool = False,
    ) -> None:
        """Run one layer of one step on the chain's stream; `started` leaves out the first product."""
        qkv, out, gate_up, down = self._images[layer]
        for_qkv, for_mlp = (constants[step] for constants in self._constants[layer])
        scale, gate = self._scale[step], self._gate[step]
        squares = self._squares
        if not started:
            self._kernels.product(
                QKV,
                WIDTH * 5 // 2,
                rows,
                overlap=overlap,
                weights=qkv,
                input=self._input,
                squares=squares,
                constants=for_qkv,
                output=self._query,
                k_cache=keys,
                v_cache=values,
                cosines=cos,
                sines=sin,
                length=length,
            )
        self._kernels.attention(
            self._query,
            keys,
            values,
            self._attended,
            length,
            rows,
            gate_up,
            first_alone=first_alone,
            narrow=not overlap,  # the prefix runs beside
            squares=squares if started else None,
        )
        residual: dict[str, Any] = {
            "output": self._stream,
            "scaled": self._scaled,
            "squares_out": squares,
        }
        self._kernels.product(
            OUT,
            WIDTH,
            rows,
            weights=out,
            input=self._attended,
            gate=gate[2 * layer],
            scale=scale[2 * layer + 1],
            **residual,
        )
        self._kernels.product(
            GATE_UP,
            2 * HIDDEN,
            rows,
            weights=gate_up,
            input=self._input,
            squares=squares,
            constants=for_mlp,
            output=self._hidden,
        )
        self._kernels.product(
            DOWN,
            WIDTH,
            rows,
            weights=down,
            input=self._hidden,
            gate=gate[2 * layer + 1],
            scale=scale[2 * layer + 2],
            **residual,
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
        p, last = self._projections, step + 1 == self._steps
        timed, starts = p.time_weight is not None, self.starts and step >= 0
        following = self._scale[0 if last else step + 1]
        self._kernels.head(
            IN_FP16 if starts else IN_PARTS if timed else SCALED,
            (self._stream, self._scaled, self._squares),
            actions,
            (self._scale[step, -1], self._shift[step, -1]),
            following[0],
            (self._in_weight, p.in_bias[0 if last else step + 1] if timed else p.in_bias),
            (p.out_weight, p.out_bias),
            self._timed,
            has_out=step >= 0,
            has_in=not last,
            before=before,
            ahead=ahead,
            overlap=overlap,
            guidance=guidance,
        )
        if timed and not starts and not last:
            self._kernels.product(
                DOWN,
                WIDTH,
                actions.shape[0] + ahead,
                weights=self._timed_weight,
                input=self._timed,
                gate=self._one,
                scale=following[0],
                output=self._stream,
                scaled=self._scaled,
                squares_out=self._squares,
                fresh=1,
            )

    def _start(self, rows: int, length: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor) -> None:
        """π0: the stream of a step, and its first layer's queries, keys and values without the norm's factor."""
        self._kernels.product(
            START,
            WIDTH * 7 // 2,
            rows,
            weights=self._start_weight,
            input=self._timed,
            constants=self._start_constants,
            output=self._query,
            scaled=self._stream,
            squares_out=self._squares,
            k_cache=keys,
            v_cache=values,
            cosines=cos,
            sines=sin,
            length=length,
        )
