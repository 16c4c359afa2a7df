"""Linear layers with what follows them: bias, gelu, gate, residual."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional

from taktline_kernels.ops.dispatch import register

Activation = Literal["none", "gelu"]


def _linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, gate: Tensor | None, residual: Tensor | None
) -> Tensor:
    out = functional.linear(x, weight, bias)
    if activation == "gelu":
        out = functional.gelu(out, approximate="tanh")
    if gate is not None:
        out = out * gate.to(out.dtype)
    if residual is not None:
        out = residual + out
    return out


_LINEAR = register("linear", _linear_reference, {"epilogue": "taktline_kernels.cuda.epilogue:linear"})


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
        bias: (n,) or None.
        activation: "none" or "gelu" (tanh form).
        gate: (n,) or None.
        residual: (..., n) or None.

    Returns:
        (..., n) in the dtype of x. Accelerated versions may keep fp32 between the stages and round once.
    """
    shape = {
        "m": x.numel() // x.shape[-1],
        "n": weight.shape[0],
        "k": weight.shape[1],
        "bias": int(bias is not None),
        "gelu": int(activation == "gelu"),
        "gate": int(gate is not None),
        "residual": int(residual is not None),
    }
    result: Tensor = _LINEAR.run(shape, x, x, weight, bias, activation, gate, residual)
    return result
