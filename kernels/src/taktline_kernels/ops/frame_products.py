"""Products of a world model's blocks with what follows them: rotation of queries and keys, GELU, the stream's sum."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from taktline_kernels.ops.dispatch import Op, register
from taktline_kernels.ops.frames import CONDITIONING, FP8, quantise_by, quantise_rows, rotate_reference
from taktline_kernels.selector import REFERENCE, default_selector

_TILE = 128
_WARPS = 4
_GROUP = 8
_CUDA = "taktline_kernels.cuda.wide_product"


@dataclass(frozen=True, slots=True)
class Weights:
    """A projection as its kernel reads it.

    Attributes:
        values: (n, k) bf16 or e4m3, rows in the order that its operation names.
        bias: (n,) fp32, in the order of the outputs, as are the scales.
        scales: (n,) fp32 of e4m3 values, times what the product's other operand is counted in; None otherwise.
    """

    values: Tensor
    bias: Tensor
    scales: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> Weights:
        """Weight (n, k) and bias (n,) as they are."""
        return cls(weight, bias.float())

    @classmethod
    def quantised(cls, weight: Tensor, bias: Tensor, unit: float) -> Weights:
        """In e4m3, with a scale an output, for rows counted in `unit`."""
        values, scales = quantise_rows(weight)
        return cls(values, bias.float(), unit * scales[:, 0])

    def in_pairs(self) -> Weights:
        """In the order of `frame_turned_product`: of every sixteen rows the even ones first."""
        return replace(self, values=pair_rows(self.values))

    def in_fours(self) -> Weights:
        """In the order of `frame_gelu_product`: of every 128 rows, those that one thread gets are four neighbours."""
        return replace(self, values=four_rows(self.values))


def pair_rows(weight: Tensor) -> Tensor:
    """(n, k) with the rows of every sixteen reordered, even ones first."""
    n, k = weight.shape
    return weight.view(n // 16, 8, 2, k).transpose(1, 2).reshape(n, k).contiguous()


def four_rows(weight: Tensor) -> Tensor:
    """(n, k) with the rows of every 128 reordered: row 64 h + 16 w + 8 s + g is row 32 w + 4 g + 2 h + s of before."""
    n, k = weight.shape
    return weight.view(n // _TILE, _WARPS, _GROUP, 2, 2, k).permute(0, 3, 1, 4, 2, 5).reshape(n, k).contiguous()


def _unpaired(paired: Tensor) -> Tensor:
    n, k = paired.shape
    return paired.view(n // 16, 2, 8, k).transpose(1, 2).reshape(n, k)


def _from_fours(values: Tensor) -> Tensor:
    n, k = values.shape
    return values.view(n // _TILE, 2, _WARPS, 2, _GROUP, k).permute(0, 2, 4, 1, 3, 5).reshape(n, k)


def _product(rows: Tensor, values: Tensor, weights: Weights) -> Tensor:
    """fp32 (rows, n), bias included; `values` are those of the weights in the order of the outputs."""
    product = rows.float() @ values.float().t()
    return (product if weights.scales is None else product * weights.scales) + weights.bias


def _turned_reference(rows: Tensor, weights: Weights, angles: Tensor, candidates: int, out: Tensor) -> None:
    product = _product(rows, _unpaired(weights.values), weights)
    # Conditioning tokens have the angles of the patch in row 0, column 0.
    cos, sin = (torch.cat((table, table[:1].expand(CONDITIONING, -1))) for table in angles)
    rotate_reference(product, cos, sin, candidates)
    out.copy_(product)


def _gelu_reference(rows: Tensor, weights: Weights, unit: float | None) -> Tensor:
    active = functional.gelu(_product(rows, _from_fours(weights.values), weights), approximate="tanh")
    return active.to(rows.dtype) if unit is None else quantise_by(active, unit)


def _sum_reference(rows: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, stream: Tensor) -> None:
    product = (rows.float() * scales) @ (weight.float() * weight_scales.t()).t()
    stream += product.to(stream.dtype)


_TURNED = register("frame_turned_product", _turned_reference, {"cuda": f"{_CUDA}:turned_product"})
_GELU = register("frame_gelu_product", _gelu_reference, {"cuda": f"{_CUDA}:gelu_product"})
_SUM = register("frame_sum_product", _sum_reference, {"cublaslt": "taktline_kernels.cuda.fp8_sum:sum_product"})


def turns_in_one(dtype: torch.dtype, device: torch.device, rows: int, width: int, patches: int, head_dim: int) -> bool:
    """Whether `frame_turned_product` of operands of `dtype`, with `width` numbers a row, is one kernel here."""
    return _in_one(_TURNED, dtype, device, rows=rows, width=width, patches=patches, head_dim=head_dim)


def gelu_in_one(dtype: torch.dtype, device: torch.device, rows: int, n: int, k: int) -> bool:
    """Whether `frame_gelu_product` is."""
    return _in_one(_GELU, dtype, device, rows=rows, n=n, k=k)


def sums_in_one(stream: Tensor, depth: int) -> bool:
    """Whether `frame_sum_product` onto `stream` is, of rows of `depth` numbers."""
    rows, n = stream.shape
    return _in_one(_SUM, FP8, stream.device, rows=rows, n=n, k=depth)


def _in_one(op: Op, dtype: torch.dtype, device: torch.device, **shape: int) -> bool:
    return default_selector().choose(op.name, shape, dtype, device).kernel != REFERENCE


def frame_turned_product(rows: Tensor, weights: Weights, angles: Tensor, candidates: int, out: Tensor) -> None:
    """Queries, keys and values of one frame's rows; the first two turn as in `frame_rotate`, before they are rounded.

    Args:
        rows: (m T + others, k) bf16 or e4m3, usually 2 m others, k a multiple of 64 (e4m3: 128).
        weights: `in_pairs`, 3 heads d outputs, a multiple of 256 for each of q, k and v.
        angles: (2, T, d) fp32, cosine and signed sine of the frame's patches; conditioning tokens lie in row 0 and
            column 0. The fused kernel, for d = 64 and 16 x 16 patches, takes elements 0..19 to turn by the frame,
            20..39 by the row, 40..59 by the column, and the others not at all.
        candidates: m.
        out: (m T + others, 3 heads d) bf16, overwritten.
    """
    shape = {"rows": out.shape[0], "width": out.shape[1], "patches": angles.shape[1], "head_dim": angles.shape[2]}
    _TURNED.run(shape, rows, rows, weights, angles, candidates, out)


def frame_gelu_product(rows: Tensor, weights: Weights, unit: float | None = None) -> Tensor:
    """GELU (tanh form) of a product.

    Args:
        rows: (rows, k) bf16 or e4m3, k a multiple of 64 (e4m3: 128).
        weights: `in_fours`, a multiple of 256 outputs.
        unit: of e4m3 operands, the value that becomes 1 in the result; None for bf16.

    Returns:
        (rows, n) in the operands' dtype.
    """
    assert (unit is None) == (rows.dtype != FP8)
    shape = {"rows": rows.shape[0], "n": weights.values.shape[0], "k": rows.shape[1]}
    result: Tensor = _GELU.run(shape, rows, rows, weights, unit)
    return result


def frame_sum_product(rows: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, stream: Tensor) -> None:
    """Adds a product of e4m3 operands, rounded to bf16, onto the residual stream.

    Args:
        rows: (rows, k) e4m3, k a multiple of 16.
        scales: (rows, 1) fp32.
        weight: (n, k) e4m3.
        weight_scales: (1, n) fp32.
        stream: (rows, n) bf16, in place.
    """
    shape = {"rows": stream.shape[0], "n": stream.shape[1], "k": weight.shape[1]}
    _SUM.run(shape, rows, rows, scales, weight, weight_scales, stream)
