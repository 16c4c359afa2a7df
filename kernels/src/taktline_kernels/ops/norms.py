"""LayerNorm, RMSNorm and adaptive RMSNorm, each alone and fused with the residual add before it.

Statistics and affine are fp32 whatever the dtype of the rows; the result has the rows' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from taktline_kernels.ops.dispatch import register

_TRITON = "taktline_kernels.triton_impl.norms"


def _layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = x.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    return (scaled * weight.float() + bias.float()).to(x.dtype)


def _rms(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)


def _rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (_rms(x, eps) * (1.0 + weight.float())).to(x.dtype)


def _ada_rms_norm_reference(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    return (_rms(x, eps) * (1.0 + scale.float()) + shift.float()).to(x.dtype)


def _add_layer_norm_reference(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, _layer_norm_reference(total.float(), weight, bias, eps).to(y.dtype)


def _add_rms_norm_reference(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, _rms_norm_reference(total.float(), weight, eps).to(y.dtype)


def _gated_add_ada_rms_norm_reference(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = (x.float() + y.float() * gate.float()).to(x.dtype)
    return total, _ada_rms_norm_reference(total, scale, shift, eps)


_LAYER_NORM = register("layer_norm", _layer_norm_reference, {"triton": f"{_TRITON}:layer_norm"})
_RMS_NORM = register("rms_norm", _rms_norm_reference, {"triton": f"{_TRITON}:rms_norm"})
_ADA_RMS_NORM = register("ada_rms_norm", _ada_rms_norm_reference, {"triton": f"{_TRITON}:ada_rms_norm"})
_ADD_LAYER_NORM = register("add_layer_norm", _add_layer_norm_reference, {"triton": f"{_TRITON}:add_layer_norm"})
_ADD_RMS_NORM = register("add_rms_norm", _add_rms_norm_reference, {"triton": f"{_TRITON}:add_rms_norm"})
_GATED_ADD = register(
    "gated_add_ada_rms_norm",
    _gated_add_ada_rms_norm_reference,
    {"triton": f"{_TRITON}:gated_add_ada_rms_norm"},
)


def _shape(x: Tensor) -> dict[str, int]:
    return {"rows": x.numel() // x.shape[-1], "width": x.shape[-1]}


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm over the last dimension.

    Args:
        x: (..., width), fp32 or bf16.
        weight: (width,), the multiplier (no 1 is added).
        bias: (width,).
        eps: added to the variance.

    Returns:
        (..., width) in the dtype of x.
    """
    result: Tensor = _LAYER_NORM.run(_shape(x), x, x, weight, bias, eps)
    return result


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Gemma's RMSNorm: x / rms(x) * (1 + weight).

    Args:
        x: (..., width), fp32 or bf16.
        weight: (width,), any float dtype; fp32 keeps the official precision.
        eps: added to the mean square.

    Returns:
        (..., width) in the dtype of x.
    """
    result: Tensor = _RMS_NORM.run(_shape(x), x, x, weight, eps)
    return result


def ada_rms_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Tensor:
    """Adaptive RMSNorm of the π0.5 expert: x / rms(x) * (1 + scale) + shift.

    Args:
        x: (..., width), fp32 or bf16.
        scale: (width,), one row for the whole call (it depends on the solver step alone).
        shift: (width,), likewise.
        eps: added to the mean square.

    Returns:
        (..., width) in the dtype of x.
    """
    result: Tensor = _ADA_RMS_NORM.run(_shape(x), x, x, scale, shift, eps)
    return result


def add_layer_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Residual add and LayerNorm in one pass.

    Args:
        x: (..., width), the residual stream.
        y: (..., width), the sub-layer's output.
        weight: (width,).
        bias: (width,).
        eps: added to the variance.

    Returns:
        (x + y, layer_norm(x + y)): the sum in the dtype of x (fp32, or that of y), the norm in that of y; it reads the
        rounded sum.
    """
    result: tuple[Tensor, Tensor] = _ADD_LAYER_NORM.run(_shape(x), x, x, y, weight, bias, eps)
    return result


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Residual add and RMSNorm in one pass.

    Args:
        x: (..., width), the residual stream.
        y: (..., width), the sub-layer's output.
        weight: (width,); the multiplier is 1 + weight.
        eps: added to the mean square.

    Returns:
        (x + y, rms_norm(x + y)): the sum in the dtype of x (fp32, or that of y), the norm in that of y; it reads the
        rounded sum.
    """
    result: tuple[Tensor, Tensor] = _ADD_RMS_NORM.run(_shape(x), x, x, y, weight, eps)
    return result


def gated_add_ada_rms_norm(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Gated residual add and adaptive RMSNorm in one pass.

    Args:
        x: (..., width), the residual stream.
        y: (..., width), the sub-layer's output.
        gate: (width,), multiplies y.
        scale: (width,).
        shift: (width,).
        eps: added to the mean square.

    Returns:
        (x + y * gate, ada_rms_norm(x + y * gate)), both in the dtype of x; the sum is rounded once.
    """
    result: tuple[Tensor, Tensor] = _GATED_ADD.run(_shape(x), x, x, y, gate, scale, shift, eps)
    return result
