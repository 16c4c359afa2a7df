"""Linear layers with FP8 (e4m3) products, a scale a token and a scale an output channel, for several families.

Their weights are bf16 until they are quantised; activations are bf16 between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from taktline_kernels import fp8_rows, ops
from taktline_kernels.fp8_rows import Fp8Rows
from torch import Tensor

from taktline_worker.engine_options import config_error

CAPABILITY = (9, 0)
STEP = 16
"""The GPU multiplies FP8 matrices whose sides are multiples of this."""

_Layer = TypeVar("_Layer")


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """A weight (n, k) in FP8 and its bias (n,) bf16, or None; quantises its input where that was not done before."""

    rows: Fp8Rows
    bias: Tensor | None = None

    def __call__(self, x: Tensor | Fp8Rows) -> Tensor:
        """(..., k) -> (..., n) bf16."""
        given = x if isinstance(x, Fp8Rows) else functions().quantise_rows(x)
        out: Tensor = functions().linear_fp8(given, self.rows, self.bias)
        return out

    def gelu(self, x: Tensor | Fp8Rows) -> Fp8Rows:
        """The same, and the tanh form of GELU behind it, as another such layer reads it."""
        out: Fp8Rows = functions().gelu_fp8(self(x))
        return out

    def split(self, rows: int) -> tuple[Fp8Linear, Fp8Linear]:
        """The first `rows` outputs, and the others."""
        first, last = (None, None) if self.bias is None else (self.bias[:rows], self.bias[rows:])
        head = Fp8Rows(self.rows.values[:rows], self.rows.scales[:rows])
        return Fp8Linear(head, first), Fp8Linear(self.rows.from_row(rows), last)


def functions() -> Any:  # a module, which only a machine with Triton can import
    """The fused functions of the GPU."""
    from taktline_kernels import gpu

    return gpu


def quantised(layer: _Layer, *names: str) -> _Layer:
    """The layer (a dataclass) with the linear layers of these names in FP8.

    One with a side that the GPU cannot multiply in FP8 stays as it is.
    """
    made = {}
    for name in names:
        linear: Any = getattr(layer, name)
        if not any(side % STEP for side in linear.weight.shape):
            made[name] = Fp8Linear(fp8_rows.quantise_weight(linear.weight), getattr(linear, "bias", None))
    changed: _Layer = replace(layer, **made)  # type: ignore[type-var]
    return changed


def gated(gate_up: Any, down: Any, x: Tensor) -> Any:
    """silu(gate) * up of the products of x, as `down` reads it: in FP8, made in the same pass, or as it is."""
    if isinstance(down, Fp8Linear):
        return functions().swiglu_fp8(gate_up(x))
    return ops.swiglu(gate_up(x)) if isinstance(gate_up, Fp8Linear) else ops.linear_silu_gate(x, gate_up.weight)


def check_device(device: torch.device) -> None:
    """Raises CONFIG_INVALID unless the GPU multiplies FP8."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        raise config_error(
            "engine.precision is fp8, which needs a Hopper GPU or a later one",
            "set spec.engine.precision to bf16, or place the policy in such a pool",
        )
