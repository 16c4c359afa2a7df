"""The last layer of a head that predicts clean actions: the Triton kernel against the reference, and both exactly."""

from __future__ import annotations

import importlib

import pytest
import torch
from taktline_kernels.ops.dispatch import REGISTRY
from taktline_kernels.ops.solver import clean_actions

kernels = importlib.import_module("taktline_kernels.triton_impl.clean_actions")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.75, 0.0])
@pytest.mark.parametrize(("rows", "width", "depth"), [(6, 5, 40), (30, 80, 64), (33, 17, 24)])
def test_clean_actions_and_their_mix_with_the_noise(
    rows: int, width: int, depth: int, share: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(1, rows, depth, generator=generator).to(dtype).to(DEVICE)
    weight, bias = (torch.randn(*shape, generator=generator).to(DEVICE) for shape in ((width, depth), (width,)))
    noise = torch.randn(1, rows, width, generator=generator).to(DEVICE)
    exact = hidden.double() @ weight.double().t() + bias.double()
    mix = share * noise.double() + (1 - share) * exact
    for clean, mixed in (
        clean_actions(hidden, weight, bias, noise, share),
        kernels.clean_actions(hidden, weight, bias, noise, share, config={"block_k": 32}),
    ):
        assert (clean.dtype, mixed.dtype) == (torch.float32, dtype)
        # TF32 keeps ten bits of a weight; bf16 hidden rows fit into them.
        assert float((clean - exact).norm() / exact.norm()) < (1e-6 if dtype == torch.float32 else 1e-3)
        assert float((mixed.double() - mix).norm() / mix.norm()) < (1e-6 if dtype == torch.float32 else 4e-3)


def test_without_a_bias() -> None:
    hidden, weight, noise = torch.randn(3, 16).to(DEVICE), torch.randn(5, 16).to(DEVICE), torch.randn(3, 5).to(DEVICE)
    expected = clean_actions(hidden, weight, torch.zeros(5).to(DEVICE), noise, 0.5)
    for found in (
        clean_actions(hidden, weight, None, noise, 0.5),
        kernels.clean_actions(hidden, weight, None, noise, 0.5, config={}),
    ):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))


def test_the_op_knows_it() -> None:
    assert callable(REGISTRY["clean_actions"].load("triton"))
