"""Cosmos3 with FP8 (e4m3) products in the tower of video and actions: a scale a token, a scale an output channel.

Everything else is as in bf16: the text tower (its keys and values are made once an instruction), attention, residuals,
patch, action and time projections, and the solver.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from taktline_kernels import fp8_rows
from taktline_kernels.fp8_rows import Fp8Rows
from taktline_protocol import ErrorCode, TaktlineError
from torch import Tensor

from taktline_worker.models.cosmos3.weights import Cosmos3Weights, Linear, TowerLayer

CAPABILITY = (9, 0)


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """A weight (n, k) in FP8; quantises its input where that was not done before."""

    rows: Fp8Rows

    def __call__(self, x: Tensor | Fp8Rows) -> Tensor:
        """(..., k) -> (..., n) bf16."""
        given = x if isinstance(x, Fp8Rows) else functions().quantise_rows(x)
        out: Tensor = functions().linear_fp8(given, self.rows)
        return out

    def split(self, rows: int) -> tuple[Fp8Linear, Fp8Linear]:
        """The first `rows` outputs, and the others."""
        first = Fp8Rows(self.rows.values[:rows], self.rows.scales[:rows])
        return Fp8Linear(first), Fp8Linear(self.rows.from_row(rows))


def functions() -> Any:  # a module, which only a machine with Triton can import
    """The fused functions of the GPU."""
    from taktline_kernels import gpu

    return gpu


def quantise(weights: Cosmos3Weights) -> Cosmos3Weights:
    """The same with the matrices of the tower of video and actions in FP8, layer by layer."""
    return replace(weights, joint=tuple(_layer(layer) for layer in weights.joint))


def _layer(layer: TowerLayer) -> TowerLayer:
    def made(linear: object) -> Fp8Linear:
        assert isinstance(linear, Linear)
        return Fp8Linear(fp8_rows.quantise_weight(linear.weight))

    return replace(layer, qkv=made(layer.qkv), out=made(layer.out), up=made(layer.up), down=made(layer.down))


def check_device(device: torch.device) -> None:
    """Raises CONFIG_INVALID unless the GPU multiplies FP8."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            "engine.precision is fp8, which needs a Hopper GPU or a later one",
            "set spec.engine.precision to bf16, or place the policy in such a pool",
        )
