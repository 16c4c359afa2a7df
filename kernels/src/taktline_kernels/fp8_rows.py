"""Matrices of one byte a number with a scale a row, and the layouts of weights that the fused operations read.

No GPU is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LARGEST = 448.0
"""Largest finite value of e4m3."""

ByteFormat = Literal["fp8", "int8"]
"""e4m3, or whole numbers from -127 to 127. A bf16 number holds each value of either exactly."""


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


@dataclass(frozen=True, slots=True)
class ByteWeight:
    """A weight stored in a byte a number, for activations that stay bf16.

    Attributes:
        values: (n, k) e4m3 or int8.
        scales: (n,) fp32, one an output channel; values * scales is the weight.
    """

    values: Tensor
    scales: Tensor

    @property
    def bytes(self) -> int:
        """Memory of values and scales."""
        return self.values.numel() * self.values.element_size() + self.scales.numel() * self.scales.element_size()


def byte_weight(weight: Tensor, number_format: ByteFormat) -> ByteWeight:
    """(n, k) -> a byte a number, rounded to the nearest; the largest of each row is kept as it is."""
    if number_format == "fp8":
        rows = quantise_weight(weight)
        return ByteWeight(rows.values, rows.scales[:, 0].contiguous())
    wide = weight.float()
    scales = wide.abs().amax(dim=1).clamp_min(1e-30) / 127.0
    return ByteWeight((wide / scales[:, None]).round().to(torch.int8), scales)


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


def unpack_gate_up(packed: Tensor) -> Tensor:
    """The inverse of `pack_gate_up`: (2n, k) -> the gate rows, then the up rows."""
    return packed.view(packed.shape[0] // 16, 2, 8, -1).transpose(0, 1).reshape(packed.shape)
