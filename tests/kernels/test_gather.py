"""Rows gathered with what their first reader wants of them: the Triton kernels against the torch references."""

from __future__ import annotations

import importlib

import pytest
import torch
from taktline_kernels.ops.dispatch import REGISTRY
from taktline_kernels.ops.gather import embed_rms_norm, mean_rows, reorder_rows
from torch import Tensor

gather = importlib.import_module("taktline_kernels.triton_impl.gather")
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if HAS_GPU else [torch.float32]


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def distance(actual: Tensor, expected: Tensor) -> float:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
def test_images_stand_between_embeddings(dtype: torch.dtype) -> None:
    tokens = torch.tensor([[3, 5, 5, 0], [5, 1, 0, 0]], device=DEVICE)
    places = torch.tensor([[-1, 1, 0, -1], [2, -1, -1, -1]], device=DEVICE)
    table, others, weight = rand(7, 72, seed=1, dtype=dtype), rand(3, 72, seed=2, dtype=dtype), rand(72, seed=3)
    arguments = (tokens, table, places, others, weight, 1e-6)
    rows, normed = embed_rms_norm(*arguments)
    expected = torch.stack([table[3], others[1], others[0], table[0], others[2], table[1], table[0], table[0]])
    assert torch.equal(rows.view(8, 72), expected.float())
    for actual, reference in zip(gather.embed_rms_norm(*arguments, config={}), (rows, normed), strict=True):
        assert distance(actual, reference) < (5e-3 if dtype == torch.bfloat16 else 1e-6)


def test_a_text_without_images() -> None:
    tokens = torch.tensor([[3, 5]], device=DEVICE)
    places = torch.full_like(tokens, -1)
    table, weight = rand(7, 16, seed=1), rand(16, seed=3)
    arguments = (tokens, table, places, table[:0], weight, 1e-6)
    for actual, reference in zip(gather.embed_rms_norm(*arguments, config={}), embed_rms_norm(*arguments), strict=True):
        assert distance(actual, reference) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_another_order_with_zeros_behind(dtype: torch.dtype) -> None:
    x, order = rand(2, 6, 21, seed=1), torch.tensor([5, 0, 3, 1, 2, 4], device=DEVICE)
    expected = torch.zeros(2, 6, 24, dtype=dtype, device=DEVICE)
    for place, source in enumerate(order.tolist()):
        expected[:, place, :21] = x[:, source].to(dtype)
    assert torch.equal(reorder_rows(x, order, 24, dtype), expected)
    assert torch.equal(gather.reorder_rows(x, order, 24, dtype, config={}), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_neighbours(dtype: torch.dtype) -> None:
    x = rand(2, 12, 21, seed=1, dtype=dtype)
    expected = torch.stack([x[:, 4 * place : 4 * place + 4].float().mean(dim=1) for place in range(3)], dim=1)
    for actual in (mean_rows(x, 4), gather.mean_rows(x, 4, config={})):
        assert distance(actual, expected.to(dtype)) < (5e-3 if dtype == torch.bfloat16 else 1e-6)


def test_rows_of_which_the_last_have_a_product() -> None:
    small = importlib.import_module("taktline_kernels.triton_impl.small_linear")
    dtype, bar = (torch.bfloat16, 6e-3) if HAS_GPU else (torch.float32, 3e-6)
    x, weight = rand(3, 5, 96, seed=1, dtype=dtype), rand(72, 96, seed=2, dtype=dtype)
    table, scale, shift = rand(9, 72, seed=3), rand(72, seed=4), rand(72, seed=5)
    arguments = (x, weight, table, scale, shift, 1e-5)
    expected = REGISTRY["linear_on_rows"].reference(*arguments)
    assert torch.equal(expected[0][:, :4], table[:4].to(dtype).expand(3, 4, 72))
    for cut in ({}, {"split": 3, "block_k": 32}, {"split": 2, "block_k": 32, "block_n": 32, "copy": 1}):
        for actual, reference in zip(small.linear_on_rows(*arguments, config=cut), expected, strict=True):
            assert distance(actual, reference) < bar
