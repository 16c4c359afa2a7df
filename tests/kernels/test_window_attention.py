"""Attention inside windows of a few tokens: the Triton kernel against the reference."""

from __future__ import annotations

import importlib

import pytest
import torch
from taktline_kernels.ops.dispatch import REGISTRY
from torch import Tensor

windows = importlib.import_module("taktline_kernels.triton_impl.window_attention")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parts(count: int, tokens: int, heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k and v as parts of one projection."""
    generator = torch.Generator().manual_seed(count)
    qkv = 2 * torch.randn(count, tokens, 3, heads, width, generator=generator)
    return qkv.to(dtype).to(DEVICE).unbind(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "tokens"), [(1, 1), (5, 4), (8, 4), (3, 16)])
@pytest.mark.parametrize("width", [16, 24])
def test_windows_are_the_reference(count: int, tokens: int, width: int, dtype: torch.dtype) -> None:
    q, k, v = parts(count, tokens, 2, width, dtype)
    expected = REGISTRY["attention_vision"].reference(q.float(), k.float(), v.float())
    for args in ((q, k, v), (q, k.contiguous(), v)):  # parts of one projection, and tensors that are not
        found = windows.attention_vision(*args, config={"rows": 8})
        assert (found.dtype, found.shape) == (dtype, q.shape)
        assert float((found.float() - expected).norm() / expected.norm()) < (3e-6 if dtype == torch.float32 else 4e-3)


def test_more_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 16 tokens, not 17"):
        windows.attention_vision(*parts(1, 17, 1, 16, torch.float32), config={})


def test_the_op_knows_it() -> None:
    assert callable(REGISTRY["attention_vision"].load("windows"))
