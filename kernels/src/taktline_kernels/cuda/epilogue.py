"""Linear layers whose activation runs in the matrix product's own epilogue."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from taktline_kernels import gpu
from taktline_kernels.cuda import cublaslt


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    gate: Tensor | None,
    residual: Tensor | None,
    config: Mapping[str, int],
) -> Tensor:
    """Run `ops.linear` for a gelu behind a bias, nothing else.

    Raises:
        ValueError: for any other call; the table's rule is too wide.
    """
    del config
    if bias is None or activation != "gelu" or gate is not None or residual is not None:
        raise ValueError("the epilogue is for gelu(x @ weight.T + bias)")
    _check_bias(x, bias)
    return gpu.linear_gelu(x, weight, bias)


def linear_by_algorithm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    gate: Tensor | None,
    residual: Tensor | None,
    config: Mapping[str, int],
) -> Tensor:
    """Run `ops.linear` for bf16 with cuBLASLt's algorithm number `algorithm` of the config.

    A bias, or a bias and a gelu, may be behind the product.

    Raises:
        ValueError: for any other call; the table's rule is too wide.
    """
    if activation not in ("none", "gelu") or gate is not None or residual is not None:
        raise ValueError("an algorithm is named for products with a bias or a gelu, or without")
    if activation == "gelu" and bias is None:
        raise ValueError("the library's gelu is behind a bias")
    _check_bias(x, bias)
    algorithm = config.get("algorithm", 0)
    return cublaslt.linear(x.contiguous(), weight, bias, gelu=activation == "gelu", algorithm=algorithm)


def _check_bias(x: Tensor, bias: Tensor | None) -> None:
    if bias is not None and bias.dtype != x.dtype:
        raise ValueError(f"the library adds a bias of the input's dtype, {x.dtype}, not {bias.dtype}")
