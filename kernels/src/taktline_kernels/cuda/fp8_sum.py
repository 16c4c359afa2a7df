"""e4m3 products that add onto a bf16 matrix, through cuBLASLt: PyTorch's scaled product overwrites its result."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from taktline_kernels.cuda import cublaslt

_E4M3, _BF16, _FP32, _COMPUTE_FP32 = 28, 14, 0, 68
_TRANSPOSE_A, _FAST_SUMS, _MAX_WORKSPACE = 3, 25, 1
_WEIGHT_SCALES, _ROW_SCALES, _WEIGHT_SCALE_MODE, _ROW_SCALE_MODE = 17, 18, 31, 32
_SCALE_A_ROW = 3
_ALIGNMENT = 16


class _SumProduct:
    """y += (x * row scales) @ (weight * weight scales).T for one shape.

    Args:
        m, n, k: x is (m, k) and weight (n, k) in e4m3, y (m, n) bf16.
        device: where it runs.

    Raises:
        RuntimeError: the library has nothing for this shape here.
    """

    def __init__(self, m: int, n: int, k: int, device: torch.device) -> None:
        self._device = device
        self._alone = threading.Lock()  # the scales are part of the operation
        self._operation, preference = ctypes.c_void_p(), ctypes.c_void_p()
        cublaslt.call("cublasLtMatmulDescCreate", ctypes.byref(self._operation), _COMPUTE_FP32, _FP32)
        self._set(_TRANSPOSE_A, ctypes.c_int32(1))
        self._set(_FAST_SUMS, ctypes.c_int8(1))
        self._set(_WEIGHT_SCALE_MODE, ctypes.c_int32(_SCALE_A_ROW))
        self._set(_ROW_SCALE_MODE, ctypes.c_int32(_SCALE_A_ROW))
        # The library looks whether there are scales before it says what it can do.
        placeholder = torch.ones(max(m, n), device=device)
        self._set(_WEIGHT_SCALES, ctypes.c_void_p(placeholder.data_ptr()))
        self._set(_ROW_SCALES, ctypes.c_void_p(placeholder.data_ptr()))
        # It is column-major: weight.T (k, n) and x.T (k, m) give y.T (n, m).
        self._weight = cublaslt.layout(k, n, k, _E4M3)
        self._x = cublaslt.layout(k, m, k, _E4M3)
        self._y = cublaslt.layout(n, m, n, _BF16)
        cublaslt.call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        size = ctypes.c_size_t(cublaslt.WORKSPACE_BYTES)
        set_preference = functools.partial(cublaslt.call, "cublasLtMatmulPreferenceSetAttribute", preference)
        set_preference(_MAX_WORKSPACE, ctypes.byref(size), ctypes.c_size_t(8))
        found = ctypes.c_int()
        self._result = cublaslt.Result()
        operands = (self._operation, self._weight, self._x, self._y, self._y, preference)
        result = ctypes.byref(self._result)
        cublaslt.call(
            "cublasLtMatmulAlgoGetHeuristic", cublaslt.handle(device), *operands, 1, result, ctypes.byref(found)
        )
        cublaslt.call("cublasLtMatmulPreferenceDestroy", preference)
        if found.value < 1 or self._result.state != 0:
            raise RuntimeError(f"cuBLASLt has no e4m3 product of {m} x {n} x {k} that adds onto bf16 here")

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        cublaslt.call("cublasLtMatmulDescSetAttribute", self._operation, attribute, ctypes.byref(value), size)

    def run(self, x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, y: Tensor) -> None:
        """Adds onto y. Threads may call it side by side."""
        one = ctypes.c_float(1.0)
        stream = torch.cuda.current_stream().cuda_stream
        space = cublaslt.workspace(self._device, stream)
        pointer = ctypes.c_void_p
        with self._alone:
            self._set(_WEIGHT_SCALES, ctypes.c_void_p(weight_scales.data_ptr()))
            self._set(_ROW_SCALES, ctypes.c_void_p(scales.data_ptr()))
            cublaslt.call(
                "cublasLtMatmul",
                cublaslt.handle(self._device),
                self._operation,
                ctypes.byref(one),
                pointer(weight.data_ptr()),
                self._weight,
                pointer(x.data_ptr()),
                self._x,
                ctypes.byref(one),
                pointer(y.data_ptr()),
                self._y,
                pointer(y.data_ptr()),
                self._y,
                ctypes.byref(self._result.algorithm),
                pointer(space.data_ptr()),
                ctypes.c_size_t(cublaslt.WORKSPACE_BYTES),
                pointer(stream),
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
