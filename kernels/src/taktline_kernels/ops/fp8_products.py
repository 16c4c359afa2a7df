"""Products of FP8 rows with more behind them than a bias."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from taktline_kernels.fp8_rows import Fp8Rows
from taktline_kernels.ops.dispatch import register
from taktline_kernels.selector import REFERENCE, default_selector


def _reference(x: Fp8Rows, packed: Fp8Rows) -> Tensor:
    flat = x.values.view(-1, x.values.shape[-1]).float()
    both = (flat @ packed.values.float().T) * x.scales * packed.scales.T
    gate, up = both.view(len(flat), -1, 2, 8).unbind(2)
    return (functional.silu(gate) * up).reshape(*x.values.shape[:-1], -1).bfloat16()


_NAME = "linear_swiglu_fp8"
_LINEAR_SWIGLU = register(_NAME, _reference, {"hopper": "taktline_kernels.cuda.swiglu_fp8:linear_swiglu"})


def linear_swiglu_fp8(x: Fp8Rows, packed: Fp8Rows) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T).

    Args:
        x: (..., k).
        packed: (2n, k), eight rows of the gate and eight of the up in turn (`fp8_rows.pack_gate_up`).

    Returns:
        (..., n) bf16; silu acts on the fp32 sums.
    """
    shape = {"m": x.scales.numel(), "n": packed.values.shape[0] // 2, "k": packed.values.shape[1]}
    found: Tensor = _LINEAR_SWIGLU.run(shape, x.values, x, packed)
    return found


def fuses_swiglu_fp8(n: int, k: int, device: torch.device) -> bool:
    """Whether the GPU's table names a kernel for gates and ups (2n, k), which must come in whole tiles."""
    if n % 128 or k % 128:
        return False
    shape = {"m": 1024, "n": n, "k": k}
    return default_selector().choose(_NAME, shape, torch.float8_e4m3fn, device).kernel != REFERENCE
