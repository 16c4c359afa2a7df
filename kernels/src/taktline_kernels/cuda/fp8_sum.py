"""e4m3 products that add onto a bf16 matrix, through cuBLASLt: PyTorch's scaled product overwrites its result."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from taktline_kernels.cuda.cublaslt import BF16, Attributes, LtMatmul

_E4M3 = 28
_FAST_SUMS = 25
_WEIGHT_SCALES, _ROW_SCALES, _WEIGHT_SCALE_MODE, _ROW_SCALE_MODE = 17, 18, 31, 32
_SCALE_A_ROW = 3
_ALIGNMENT = 16


class _SumProduct(LtMatmul):
    """y += (x * row scales) @ (weight * weight scales).T for one shape.

    Args:
        m, n, k: x is (m, k) and weight (n, k) in e4m3, y (m, n) bf16.
        device: where it runs.

    Raises:
        RuntimeError: the library has nothing for this shape here.
    """

    def __init__(self, m: int, n: int, k: int, device: torch.device) -> None:
        # The library looks whether there are scales before it says what it can do.
        placeholder = torch.ones(max(m, n), device=device)
        modes = (
            (_FAST_SUMS, ctypes.c_int8(1)),
            (_WEIGHT_SCALE_MODE, ctypes.c_int32(_SCALE_A_ROW)),
            (_ROW_SCALE_MODE, ctypes.c_int32(_SCALE_A_ROW)),
        )
        attributes = (*modes, *_scales(placeholder, placeholder))
        super().__init__((k, n, k, _E4M3), (k, m, k, _E4M3), (n, m, n, BF16), attributes, device, 1)
        if not self.algorithms:
            raise RuntimeError(f"cuBLASLt has no e4m3 product of {m} x {n} x {k} that adds onto bf16 here")

    def run(self, x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, y: Tensor) -> None:
        """Adds onto y."""
        self.multiply(x, weight, y, 0, _scales(weight_scales, scales), add=True)


def _scales(weight_scales: Tensor, scales: Tensor) -> Attributes:
    return (
        (_WEIGHT_SCALES, ctypes.c_void_p(weight_scales.data_ptr())),
        (_ROW_SCALES, ctypes.c_void_p(scales.data_ptr())),
    )


_product = functools.cache(_SumProduct)


def sum_product(
    rows: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, stream: Tensor, config: Mapping[str, int]
) -> None:
    """Run `ops.frame_products.frame_sum_product`.

    Raises:
        ValueError: operands of other dtypes, depths or shapes, or lying with gaps; the table's rule is too wide.
    """
    del config
    whole = all(one.is_contiguous() for one in (rows, scales, weight, weight_scales, stream))
    eight = rows.dtype == weight.dtype == torch.float8_e4m3fn and scales.dtype == weight_scales.dtype == torch.float32
    if not whole or not eight or stream.dtype != torch.bfloat16 or weight.shape[1] % _ALIGNMENT:
        raise ValueError("this product is of contiguous e4m3 operands with scales, whose depth is a multiple of 16")
    (count, depth), width = rows.shape, weight.shape[0]
    scaled = scales.shape == (count, 1) and weight_scales.shape == (1, width)
    if weight.shape[1] != depth or not scaled or stream.shape != (count, width):
        raise ValueError(
            f"this product of {count} x {depth} and {width} outputs got weights {tuple(weight.shape)}, scales "
            f"{tuple(scales.shape)} and {tuple(weight_scales.shape)}, and a stream {tuple(stream.shape)}"
        )
    _product(count, width, depth, rows.device).run(rows, scales, weight, weight_scales, stream)
