"""Attention inside images of many tokens (patch_attention.cu): it compiles anywhere, and agrees on a GPU."""

from __future__ import annotations

import importlib

import pytest
import torch
from taktline_kernels.ops.dispatch import REGISTRY
from torch import Tensor

patches = pytest.importorskip("taktline_kernels.cuda.patch_attention")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


def heads_of(images: int, tokens: int, heads: int, device: str = "cpu") -> tuple[Tensor, ...]:
    qkv = torch.randn(images, tokens, 3, heads, 72, generator=torch.Generator().manual_seed(tokens))
    qkv[:, 7, 0] *= 8  # one query with a sharp distribution
    qkv[:, -5, 1] *= 40  # logits that grow late
    return qkv.bfloat16().to(device).unbind(2)


def test_it_compiles_for_hopper_on_any_machine() -> None:
    nvrtc = importlib.import_module("taktline_kernels.cuda.nvrtc")
    resources_of = importlib.import_module("taktline_kernels.ahead").resources_of
    binary = nvrtc.compile_source("patch_attention.cu", (("STAGES", patches._STAGES),), patches.prologue())
    registers, stack = resources_of(binary)
    assert stack == 0  # nothing is spilled
    assert registers * 384 <= 65536


def test_it_covers_one_projections_rows_only() -> None:
    q, k, v = heads_of(1, 256, 2)
    assert patches.covers(q, k, v)
    assert not patches.covers(q.float(), k.float(), v.float())
    assert not patches.covers(q.contiguous(), k, v)
    assert not patches.covers(*(part[:, :200] for part in (q, k, v)))
    assert not patches.covers(*(part[..., :64] for part in (q, k, v)))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("images", "tokens", "heads"), [(1, 128, 1), (1, 1024, 16), (3, 1024, 16), (20, 256, 2)])
def test_attention_inside_images(images: int, tokens: int, heads: int) -> None:
    parts = heads_of(images, tokens, heads, "cuda")
    expected = REGISTRY["attention_vision"].reference(*(part.float() for part in parts))
    actual = patches.attention_vision(*parts, {})
    assert (actual.dtype, actual.shape, actual.is_contiguous()) == (torch.bfloat16, expected.shape, True)
    distance = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert float(distance) < 4e-3
    assert torch.equal(actual, patches.attention_vision(*parts, {}))
    # An image's answer is the one it gets alone; tensors that are no parts of one projection take PyTorch's way.
    assert torch.equal(actual[-1:], patches.attention_vision(*(part[-1:] for part in parts), {}))
    apart = patches.attention_vision(parts[0].contiguous(), parts[1], parts[2], {})
    assert float((apart.double() - expected.double()).norm() / expected.double().norm()) < 4e-3
