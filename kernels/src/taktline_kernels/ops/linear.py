"""Linear layers with what follows them: bias, gelu, gate, residual."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from taktline_kernels.ops import norms
from taktline_kernels.ops.activations import swiglu
from taktline_kernels.ops.dispatch import register

Activation = Literal["none", "gelu", "relu", "silu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
"""By their numbers in the tables and in kernels."""


def _linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, gate: Tensor | None, residual: Tensor | None
) -> Tensor:
    if bias is None or bias.dtype == x.dtype:
        out = functional.linear(x, weight, bias)
    else:
        out = (functional.linear(x, weight) + bias).to(x.dtype)
    if activation == "gelu":
        out = functional.gelu(out, approximate="tanh")
    elif activation != "none":
        out = functional.relu(out) if activation == "relu" else functional.silu(out)
    if gate is not None:
        out = out * gate.to(out.dtype)
    if residual is not None:
        out = (residual + out).to(x.dtype)
    return out


def _linear_add_layer_norm_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return norms.add_layer_norm(residual, linear(x, weight, bias), norm_weight, norm_bias, eps)


def _linear_add_rms_norm_reference(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return norms.add_rms_norm(residual, linear(x, weight), norm_weight, eps)


def _linear_on_rows_reference(
    x: Tensor, weight: Tensor, table: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    first = len(table) - x.shape[1]
    last = table[first:] + linear(x, weight)
    rows = torch.cat((table[:first].expand(len(x), -1, -1).to(last.dtype), last), dim=1).to(x.dtype)
    return rows, norms.layer_norm(rows, norm_weight, norm_bias, eps)


def _linear_silu_gate_reference(x: Tensor, weight: Tensor) -> Tensor:
    return swiglu(linear(x, weight))


_SMALL = "taktline_kernels.triton_impl.small_linear"
_HOPPER = "taktline_kernels.cuda.product"
_LINEAR = register(
    "linear",
    _linear_reference,
    {
        "epilogue": "taktline_kernels.cuda.epilogue:linear",
        "cublaslt": "taktline_kernels.cuda.epilogue:linear_by_algorithm",
        "hopper": f"{_HOPPER}:linear",
        "small": f"{_SMALL}:linear",
    },
)
_LINEAR_ADD_LAYER_NORM = register(
    "linear_add_layer_norm",
    _linear_add_layer_norm_reference,
    {"hopper": f"{_HOPPER}:linear_add_layer_norm", "small": f"{_SMALL}:linear_add_layer_norm"},
)
_LINEAR_ADD_RMS_NORM = register(
    "linear_add_rms_norm",
    _linear_add_rms_norm_reference,
    {
        "cublaslt": "taktline_kernels.cuda.cublaslt:linear_add_rms_norm",
        "hopper": f"{_HOPPER}:linear_add_rms_norm",
        "small": f"{_SMALL}:linear_add_rms_norm",
    },
)


_LINEAR_ON_ROWS = register("linear_on_rows", _linear_on_rows_reference, {"small": f"{_SMALL}:linear_on_rows"})
_LINEAR_SILU_GATE = register("linear_silu_gate", _linear_silu_gate_reference, {"hopper": f"{_HOPPER}:linear_silu_gate"})


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "none",
    gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + gate * activation(x @ weight.T + bias).

    Args:
        x: (..., k).
        weight: (n, k), the dtype of x.
        bias: (n,), any float dtype, or None. Like the weight it is a parameter: it may be read before what was queued
            just before has run.
        activation: "none", "gelu" (tanh form), "relu" or "silu".
        gate: (n,) or None.
        residual: (..., n), any float dtype, or None.

    Returns:
        (..., n) in the dtype of x. Accelerated versions may keep fp32 between the stages and round once.
    """
    shape = {
        "m": x.numel() // x.shape[-1],
        "n": weight.shape[0],
        "k": weight.shape[1],
        "bias": int(bias is not None),
        "activation": ACTIVATIONS.index(activation),
        "gate": int(gate is not None),
        "residual": int(residual is not None),
    }
    result: Tensor = _LINEAR.run(shape, x, x, weight, bias, activation, gate, residual)
    return result


def linear_add_layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """A sub-layer's last product, the residual add behind it, and the layer norm of the sum.

    Args:
        x: (..., k).
        weight: (n, k), the dtype of x.
        bias: (n,) or None.
        residual: (..., n), the stream.
        norm_weight: (n,), the norm's multiplier, a parameter like weight and bias.
        norm_bias: (n,), likewise.
        eps: added to the variance.

    Returns:
        (s, layer_norm(s)) with s = residual + x @ weight.T + bias, in the dtypes of residual and of x. Where no rule
        names a kernel for both, each runs as its own op.
    """
    shape = {
        "m": x.numel() // x.shape[-1],
        "n": weight.shape[0],
        "k": weight.shape[1],
        "bias": int(bias is not None),
    }
    arguments = (x, weight, bias, residual, norm_weight, norm_bias, eps)
    result: tuple[Tensor, Tensor] = _LINEAR_ADD_LAYER_NORM.run(shape, x, *arguments)
    return result


def linear_add_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """A sub-layer's last product without a bias, the residual add behind it, and the RMSNorm of the sum.

    Args:
        x: (..., k).
        weight: (n, k), the dtype of x.
        residual: (..., n), the stream.
        norm_weight: (n,), the norm multiplies by 1 + this; a parameter like the weight.
        eps: added to the mean square.

    Returns:
        (s, rms_norm(s)) with s = residual + x @ weight.T, in the dtypes of residual and of x. Where no rule names a
        kernel for both, each runs as its own op.
    """
    shape = {"m": x.numel() // x.shape[-1], "n": weight.shape[0], "k": weight.shape[1]}
    result: tuple[Tensor, Tensor] = _LINEAR_ADD_RMS_NORM.run(shape, x, x, weight, residual, norm_weight, eps)
    return result


def linear_silu_gate(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T).

    Args:
        x: (..., k).
        weight: (2n, k), the gates first, the dtype of x; a parameter.

    Returns:
        (..., n) in the dtype of x. Where no rule names a kernel for all of it, product and gate run as their own ops,
        and what is between them is rounded.
    """
    shape = {"m": x.numel() // x.shape[-1], "n": weight.shape[0] // 2, "k": weight.shape[1]}
    result: Tensor = _LINEAR_SILU_GATE.run(shape, x, x, weight)
    return result


def linear_on_rows(
    x: Tensor, weight: Tensor, table: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """A product added to the last of some rows that are the same in every sequence, and the layer norm of all of them.

    Args:
        x: (B, h, k).
        weight: (n, k), the dtype of x; a parameter.
        table: (f + h, n), the rows, any float dtype; likewise.
        norm_weight: (n,), the norm's multiplier, likewise.
        norm_bias: (n,), likewise.
        eps: added to the variance.

    Returns:
        (s, layer_norm(s)), (B, f + h, n) in the dtype of x: s is the table, plus x @ weight.T in its last h rows.
    """
    shape = {"m": x.shape[0] * x.shape[1], "n": weight.shape[0], "k": weight.shape[1]}
    arguments = (x, weight, table, norm_weight, norm_bias, eps)
    result: tuple[Tensor, Tensor] = _LINEAR_ON_ROWS.run(shape, x, *arguments)
    return result
