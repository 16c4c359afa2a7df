"""FP8 matrices with a scale a row, and the layouts of weights that the fused operations read; no GPU is needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 448.0
"""Largest finite value of e4m3."""


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """A matrix in FP8 with one scale a row: activations (a scale a token) or weights (a scale an output channel).

    Attributes:
        values: (..., k) e4m3.
        scales: (rows, 1) fp32; values * scales is the matrix.
    """

    values: Tensor
    scales: Tensor

    def from_row(self, first: int) -> Fp8Rows:
        """The rows from `first` on, of a two-dimensional matrix."""
        return Fp8Rows(self.values[first:], self.scales[first:])


def quantise_weight(weight: Tensor, rows: int = 0, columns: int = 0) -> Fp8Rows:
    """(n, k) -> FP8 with a scale an output channel, padded with zeros to `rows` and `columns`."""
    wide = weight.float()
    scales = wide.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / LARGEST
    values = (wide / scales).to(torch.float8_e4m3fn)
    missing = (max(rows - weight.shape[0], 0), max(columns - weight.shape[1], 0))
    if any(missing):
        padded = values.new_zeros((weight.shape[0] + missing[0], weight.shape[1] + missing[1]))
        padded[: weight.shape[0], : weight.shape[1]] = values
        values, scales = padded, torch.cat((scales, scales.new_ones(missing[0], 1)))
    return Fp8Rows(values, scales)


def pack_gate_up(gate_up: Tensor) -> Tensor:
    """Interleave (2n, k) gate and up rows, gate first in the input, by eights; n a multiple of 8."""
    half = gate_up.shape[0] // 2
    return gate_up.view(2, half // 8, 8, -1).transpose(0, 1).reshape(gate_up.shape).contiguous()
