"""Activations of feed-forward layers: gated gelu (Gemma) and silu (Qwen), squared ReLU (Nemotron)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from taktline_kernels.ops.dispatch import register


def _geglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def _swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


_GEGLU = register("geglu", _geglu_reference, {"triton": "taktline_kernels.triton_impl.activations:geglu"})
_SWIGLU = register("swiglu", _swiglu_reference, {"triton": "taktline_kernels.triton_impl.activations:swiglu"})


def _relu2_reference(x: Tensor) -> Tensor:
    return functional.relu(x).square()


_RELU2 = register("relu2", _relu2_reference, {"triton": "taktline_kernels.triton_impl.activations:relu2"})


def _shape(gate_up: Tensor) -> dict[str, int]:
    width = gate_up.shape[-1] // 2
    return {"rows": gate_up.numel() // (2 * width), "width": width}


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh form of gelu, in fp32, rounded once.

    Args:
        gate_up: (..., 2 * width): the gate in the first half, up in the second.

    Returns:
        (..., width) in the dtype of gate_up.
    """
    result: Tensor = _GEGLU.run(_shape(gate_up), gate_up, gate_up)
    return result


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up in fp32, rounded once.

    Args:
        gate_up: (..., 2 * width): the gate in the first half, up in the second.

    Returns:
        (..., width) in the dtype of gate_up.
    """
    result: Tensor = _SWIGLU.run(_shape(gate_up), gate_up, gate_up)
    return result


def relu2(x: Tensor) -> Tensor:
    """max(x, 0) squared, rounded once; any shape, its dtype kept."""
    result: Tensor = _RELU2.run({"rows": x.numel() // x.shape[-1], "width": x.shape[-1]}, x, x)
    return result
