"""Linear layers with what follows them: bias, gelu, gate, residual."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor
from torch.nn import functional

from taktline_kernels.ops import norms
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


_SMALL = "taktline_kernels.triton_impl.small_linear"
_LINEAR = register(
    "linear",
    _linear_reference,
    {
        "epilogue": "taktline_kernels.cuda.epilogue:linear",
        "cublaslt": "taktline_kernels.cuda.epilogue:linear_by_algorithm",
        "small": f"{_SMALL}:linear",
    },
)
_LINEAR_ADD_LAYER_NORM = register(
    "linear_add_layer_norm", _linear_add_layer_norm_reference, {"small": f"{_SMALL}:linear_add_layer_norm"}
)
_LINEAR_ADD_RMS_NORM = register(
    "linear_add_rms_norm", _linear_add_rms_norm_reference, {"small": f"{_SMALL}:linear_add_rms_norm"}
)


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
