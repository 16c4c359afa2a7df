"""The norm over channels: its reference against a plain statement, and the Triton kernel against the reference."""

from __future__ import annotations

import importlib

import pytest
import torch
from taktline_kernels.ops.channels import channel_norm
from torch.nn import functional

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 20, 5, 4), (1, 160, 3, 3)], ids=str)
@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_cell_gets_the_same_length(dtype, side_by_side, shape, silu):
    generator = torch.Generator().manual_seed(1)
    x, gamma = torch.randn(shape, generator=generator), 1 + 0.2 * torch.randn(shape[-3], generator=generator)
    x[..., 0, 0] = 0.0  # a cell of zeros stays one
    x, gamma = x.to(DEVICE, dtype), gamma.to(DEVICE, dtype)
    if side_by_side:
        x = x.movedim(-3, -1).contiguous().movedim(-1, -3)
    wide = x.double()
    expected = (
        wide / wide.norm(dim=-3, keepdim=True).clamp_min(1e-12) * shape[-3] ** 0.5 * gamma.double()[:, None, None]
    )
    expected = functional.silu(expected) if silu else expected
    kernel = importlib.import_module("taktline_kernels.triton_impl.channels")
    found = (channel_norm(x, gamma, silu=silu), kernel.channel_norm(x, gamma, silu, {"rows": 8}))
    for one in found:
        assert one.shape == x.shape
        assert one.dtype == dtype
        assert float((one.double() - expected).norm() / expected.norm()) < (1e-6 if dtype == torch.float32 else 6e-3)
    assert found[1].stride(-3) == 1
