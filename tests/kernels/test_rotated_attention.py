"""Attention that rotates heads on their way in: it compiles anywhere, and agrees on a GPU."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from taktline_kernels import ops
from torch import Tensor

rotated = pytest.importorskip("taktline_kernels.cuda.rotated_attention")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


def test_it_compiles_for_hopper_on_any_machine() -> None:
    nvrtc = importlib.import_module("taktline_kernels.cuda.nvrtc")
    resources_of = importlib.import_module("taktline_kernels.ahead").resources_of
    binary = nvrtc.compile_source("rotated_attention.cu", tuple(sorted(rotated.defines().items())))
    assert resources_of(binary) == (rotated.REGISTERS, 0)  # nothing is spilled


def test_without_a_rule_rotation_and_attention_are_their_own_ops() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv, cos, sin = (torch.randn(*shape, generator=generator) for shape in ((2, 5, 8 * 6), (5, 3), (5, 3)))
    weights = [torch.rand(6, generator=generator) for _ in range(2)]
    expected = qkv.clone()
    ops.norm_rotate(expected, *weights, cos, sin, heads=4, kv_heads=2)
    q, k, v = expected.view(2, 5, 8, 6).split((4, 2, 2), dim=2)  # type: ignore[no-untyped-call]
    found = ops.attention_rotated(qkv, *weights, cos, sin, heads=4, kv_heads=2, causal=True)
    assert torch.equal(found, ops.attention(q, k, v, causal=True))


def test_it_refuses_what_it_is_not_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(rotated, "_kernel", lambda: SimpleNamespace(launch=lambda *_, **__: launched.append(1)))

    def attend(
        tokens: int = 256, width: int = 64, table: Any = torch.float32, dtype: Any = torch.bfloat16, **other: Any
    ) -> None:
        given = {"norm": None, "kv_heads": 4, "causal": False, "rows": tokens} | other
        qkv, cos = torch.zeros(2, tokens, 12 * width, dtype=dtype), torch.zeros(given["rows"], width // 2, dtype=table)
        rest = (4, given["kv_heads"], given["causal"], 1e-6, {})
        rotated.attention_rotated(qkv, given["norm"], None, cos, cos, *rest)

    attend()
    for wrong in (
        {"tokens": 128},
        {"width": 128},
        {"kv_heads": 2},
        {"causal": True},
        {"rows": 512},
        {"dtype": torch.float32},
        {"norm": torch.ones(64)},
    ):
        with pytest.raises(ValueError, match="256 tokens in bf16, heads of 64 without norms"):
            attend(**wrong)
    with pytest.raises(ValueError, match="in fp32"):
        attend(table=torch.bfloat16)
    assert len(launched) == 1


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def distance(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("images", "heads"), [(1, 16), (2, 16), (5, 3)])
def test_it_is_as_near_to_fp32_as_the_two_ops(images: int, heads: int) -> None:
    qkv = rand(images, 256, 3 * heads * 64, seed=1)
    cos, sin = (rand(256, 32, seed=seed, dtype=torch.float32) for seed in (2, 3))
    reference = importlib.import_module("taktline_kernels.ops.attention")._rotated_reference
    rest = (None, None, cos, sin, heads, heads, False, 1e-6)
    expected = reference(qkv.float(), *rest)
    found = rotated.attention_rotated(qkv, *rest, {})
    assert all(torch.equal(found, rotated.attention_rotated(qkv, *rest, {})) for _ in range(3))
    assert distance(found, expected) < 1.1 * distance(reference(qkv.clone(), *rest), expected)
