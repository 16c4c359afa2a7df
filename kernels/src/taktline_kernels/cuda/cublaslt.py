"""bf16 products through cuBLASLt with the algorithm that a table names, where its first choice is not the fastest."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

BF16, FP32, _COMPUTE_FP32 = 14, 0, 68
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER = 3, 7, 8
_BATCH_COUNT, _BATCH_STRIDE = 5, 6
_MAX_WORKSPACE = 1
_EPILOGUES = {(False, False): 1, (True, False): 4, (True, True): 36}
WORKSPACE_BYTES = 32 << 20

Attributes = Sequence[tuple[int, Any]]
"""Numbers of an operation's attributes, and their ctypes values."""


class Result(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]  # PyTorch loads the library with it
    return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0] if torch.version.cuda else ''}")


def call(name: str, *arguments: Any) -> None:
    """One function of the library.

    Raises:
        RuntimeError: it did not succeed.
    """
    status = getattr(_library(), name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name} returned {status}")


@functools.cache
def handle(device: torch.device) -> ctypes.c_void_p:
    """The library's own, one a device."""
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        call("cublasLtCreate", ctypes.byref(handle))
    return handle


@functools.cache
def workspace(device: torch.device, stream: int) -> Tensor:
    """`WORKSPACE_BYTES`, one a stream: products that run beside each other must not share it."""
    del stream
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def layout(rows: int, columns: int, step: int, dtype: int, parts: int = 1, part_step: int = 0) -> ctypes.c_void_p:
    """`parts` column-major matrices, `part_step` elements from one to the next and `step` from column to column."""
    layout = ctypes.c_void_p()
    call(
        "cublasLtMatrixLayoutCreate",
        ctypes.byref(layout),
        dtype,
        ctypes.c_uint64(rows),
        ctypes.c_uint64(columns),
        ctypes.c_int64(step),
    )
    if parts > 1:
        attributes: tuple[tuple[int, Any], ...] = (
            (_BATCH_COUNT, ctypes.c_int32(parts)),
            (_BATCH_STRIDE, ctypes.c_int64(part_step)),
        )
        for attribute, value in attributes:
            size = ctypes.c_size_t(ctypes.sizeof(value))
            call("cublasLtMatrixLayoutSetAttribute", layout, attribute, ctypes.byref(value), size)
    return layout


class LtMatmul:
    """out = x @ weight.T, or out += that, for one shape.

    The library is column-major: weight.T (k, n) and x.T (k, m) give out.T (n, m).

    Args:
        weight, x, out: `layout`'s arguments.
        attributes: of the operation, besides the transposition of the weight.
        device: where it runs.
        limit: most algorithms to ask for.

    Attributes:
        algorithms: what the library offers for this shape, its own first choice first. The order is fixed for one
            version of the library.
    """

    def __init__(
        self,
        weight: tuple[int, ...],
        x: tuple[int, ...],
        out: tuple[int, ...],
        attributes: Attributes,
        device: torch.device,
        limit: int,
    ) -> None:
        self._device = device
        self._alone = threading.Lock()  # addresses that one call sets are part of the operation
        self._operation, preference = ctypes.c_void_p(), ctypes.c_void_p()
        call("cublasLtMatmulDescCreate", ctypes.byref(self._operation), _COMPUTE_FP32, FP32)
        self._set(((_TRANSPOSE_A, ctypes.c_int32(1)), *attributes))
        self._weight, self._x, self._out = layout(*weight), layout(*x), layout(*out)
        call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        size = ctypes.c_size_t(WORKSPACE_BYTES)
        call("cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, ctypes.byref(size), ctypes.c_size_t(8))
        results, found = (Result * limit)(), ctypes.c_int()
        call(
            "cublasLtMatmulAlgoGetHeuristic",
            handle(device),
            self._operation,
            self._weight,
            self._x,
            self._out,
            self._out,
            preference,
            limit,
            results,
            ctypes.byref(found),
        )
        call("cublasLtMatmulPreferenceDestroy", preference)
        self.algorithms = [result for result in results[: found.value] if result.state == 0]

    def _set(self, attributes: Attributes) -> None:
        for attribute, value in attributes:
            size = ctypes.c_size_t(ctypes.sizeof(value))
            call("cublasLtMatmulDescSetAttribute", self._operation, attribute, ctypes.byref(value), size)

    def multiply(
        self, x: Tensor, weight: Tensor, out: Tensor, algorithm: int, attributes: Attributes, *, add: bool = False
    ) -> None:
        """Write to `out`, or add onto it, with `attributes` that are of this call. Threads may call it side by side.

        Raises:
            RuntimeError: the library refuses.
        """
        one, before = ctypes.c_float(1.0), ctypes.c_float(float(add))
        stream = torch.cuda.current_stream().cuda_stream
        chosen, space = self.algorithms[algorithm], workspace(self._device, stream)
        pointer = ctypes.c_void_p
        with self._alone:
            self._set(attributes)
            call(
                "cublasLtMatmul",
                handle(self._device),
                self._operation,
                ctypes.byref(one),
                pointer(weight.data_ptr()),
                self._weight,
                pointer(x.data_ptr()),
                self._x,
                ctypes.byref(before),
                pointer(out.data_ptr()),
                self._out,
                pointer(out.data_ptr()),
                self._out,
                ctypes.byref(chosen.algorithm),
                pointer(space.data_ptr()),
                ctypes.c_size_t(WORKSPACE_BYTES),
                pointer(stream),
            )


class LtProduct(LtMatmul):
    """activation(x @ weight.T + bias) for one shape.

    Args:
        m, n, k: x is (m, k), weight (n, k).
        bias: whether there is one.
        gelu: tanh form, with a bias only.
        device: where it runs.
        parts: above 1, the sums of so many equal parts of k apart, in fp32.
        limit: most algorithms to ask for.
    """

    def __init__(
        self, m: int, n: int, k: int, bias: bool, gelu: bool, device: torch.device, parts: int = 1, limit: int = 64
    ) -> None:
        share = k // parts
        super().__init__(
            (share, n, k, BF16, parts, share),
            (share, m, k, BF16, parts, share),
            (n, m, n, BF16 if parts == 1 else FP32, parts, n * m),
            ((_EPILOGUE, ctypes.c_int32(_EPILOGUES[bias, gelu])),),
            device,
            limit,
        )

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, algorithm: int) -> None:
        """Write the product of contiguous bf16 tensors to `out` (m, n), or to fp32 (parts, m, n).

        Raises:
            RuntimeError: the library refuses.
        """
        attributes = () if bias is None else ((_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr())),)
        self.multiply(x, weight, out, algorithm, attributes)


@functools.cache
def _product(m: int, n: int, k: int, bias: bool, gelu: bool, device: torch.device, parts: int = 1) -> LtProduct:
    return LtProduct(m, n, k, bias, gelu, device, parts)


def _check(x: Tensor, weight: Tensor, parts: int = 1) -> None:
    """Refuse what the library would read wrongly: it is handed addresses, and every part begins at 16 bytes.

    Raises:
        ValueError: a rule of the table is too wide, or the caller's tensors lie with gaps.
    """
    depth = weight.shape[1]
    if not x.is_contiguous() or not weight.is_contiguous():
        raise ValueError("a product through cuBLASLt takes contiguous rows and weights")
    if parts < 1 or (parts > 1 and depth % (8 * parts)):
        raise ValueError(f"{parts} parts of a depth of {depth} are not multiples of 8; the table's rule is too wide")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, algorithm: int) -> Tensor:
    """activation(x @ weight.T + bias) with one of the library's algorithms.

    Args:
        x: (..., k) bf16, contiguous.
        weight: (n, k) bf16, contiguous.
        bias: (n,) bf16 or None.
        gelu: apply gelu (tanh form); needs a bias.
        algorithm: index into `LtProduct.algorithms`; the first where there are not so many.

    Returns:
        (..., n) bf16.

    Raises:
        ValueError: x or weight lies with gaps.
    """
    _check(x, weight)
    depth = x.shape[-1]
    rows, width = x.numel() // depth, weight.shape[0]
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    product = _product(rows, width, depth, bias is not None, gelu, x.device)
    product.run(x, weight, bias, out, algorithm if algorithm < len(product.algorithms) else 0)
    return out


def linear_add_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, config: Mapping[str, int]
) -> tuple[Tensor, Tensor]:
    """Run `ops.linear_add_rms_norm`: parts of the depth, in fp32, that the norm's kernel sums.

    Args:
        config: parts (k is a multiple of 8 of them), algorithm (index into `LtProduct.algorithms`), sum_warps.

    Raises:
        ValueError: x or weight lies with gaps, or the parts do not divide the depth.
    """
    from taktline_kernels.triton_impl.part_sums import add_norm

    depth = x.shape[-1]
    rows, width, parts = x.numel() // depth, weight.shape[0], config.get("parts", 2)
    _check(x, weight, parts)
    product = _product(rows, width, depth, False, False, x.device, parts)
    sums = torch.empty((parts, rows, width), dtype=torch.float32, device=x.device)
    algorithm = config.get("algorithm", 0)
    product.run(x, weight, None, sums, algorithm if algorithm < len(product.algorithms) else 0)
    return add_norm(sums, None, residual, norm_weight, None, eps, x.dtype, config.get("sum_warps", 8))
