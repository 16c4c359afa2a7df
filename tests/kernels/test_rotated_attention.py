"""Attention that norms and rotates heads on their way in: it compiles anywhere, and agrees on a GPU."""

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
EPS = 1e-6
VISION = rotated.Tile(64, 4, 2, 8, norm=False, rotate=True, causal=False, masked=False, blocks=2)
TEXT = rotated.Tile(128, 2, 4, 3, norm=True, rotate=True, causal=True, masked=False)
MASKED = rotated.Tile(64, 2, 4, 3, norm=False, rotate=False, causal=False, masked=True)


@pytest.mark.parametrize("tile", [VISION, TEXT, MASKED], ids=str)
def test_it_compiles_for_hopper_on_any_machine(tile: Any) -> None:
    nvrtc = importlib.import_module("taktline_kernels.cuda.nvrtc")
    resources_of = importlib.import_module("taktline_kernels.ahead").resources_of
    registers, stack = resources_of(nvrtc.compile_source("rotated_attention.cu", tuple(sorted(tile.defines().items()))))
    assert stack == 0  # nothing is spilled
    assert registers * 32 * tile.groups * tile.splits * tile.blocks <= 65536


def test_without_a_rule_rotation_and_attention_are_their_own_ops() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv, cos, sin = (torch.randn(*shape, generator=generator) for shape in ((2, 5, 8 * 6), (5, 3), (5, 3)))
    weights = [torch.rand(6, generator=generator) for _ in range(2)]
    expected = qkv.clone()
    ops.norm_rotate(expected, *weights, cos, sin, heads=4, kv_heads=2)
    q, k, v = expected.view(2, 5, 8, 6).split((4, 2, 2), dim=2)
    found = ops.attention_rotated(qkv, *weights, cos, sin, heads=4, kv_heads=2, causal=True)
    assert torch.equal(found, ops.attention(q, k, v, causal=True))


def test_it_refuses_what_it_would_read_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(rotated, "_kernel", lambda tile: SimpleNamespace(launch=lambda *_, **__: launched.append(tile)))

    def attend(tokens: int = 64, width: int = 64, rows: int = 64, **other: Any) -> None:
        given = {"dtype": torch.bfloat16, "table": torch.float32, "weight": None} | other
        qkv = torch.zeros(2, tokens, 3 * 4 * width, dtype=given["dtype"])
        table = torch.zeros(rows, width // 2, dtype=given["table"])
        rotated.attention_rotated(qkv, given["weight"], None, table, table, 4, 4, False, EPS, {"splits": 4})

    attend()
    assert [(one.width, one.splits, one.tiles) for one in launched] == [(64, 4, 1)]
    for wrong in ({"width": 32}, {"dtype": torch.float32}):
        with pytest.raises(ValueError, match="heads of 64 or 128"):
            attend(**wrong)
    with pytest.raises(ValueError, match="in fp32"):
        attend(table=torch.bfloat16)
    with pytest.raises(ValueError, match="does not come out even"):
        attend(rows=96)
    with pytest.raises(ValueError, match="do not fit"):
        attend(tokens=1024, rows=1024)
    with pytest.raises(ValueError, match="both, or neither"):
        attend(weight=torch.zeros(64))
    q = torch.zeros(1, 64, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="no gate"):
        rotated.attention(q, q, q, None, False, q, config={})
    assert len(launched) == 1


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def distance(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("config", [{}, {"groups": 4, "splits": 2, "blocks": 2}, {"groups": 1, "splits": 8}], ids=str)
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "kv_heads", "width", "norm", "causal"),
    [(2, 256, 16, 16, 64, False, False), (1, 160, 16, 8, 128, True, True), (3, 77, 4, 2, 128, True, False)],
)
def test_it_is_as_near_to_fp32_as_the_two_ops(
    batch: int, tokens: int, heads: int, kv_heads: int, width: int, norm: bool, causal: bool, config: dict[str, int]
) -> None:
    qkv = rand(batch, tokens, (heads + 2 * kv_heads) * width, seed=1)
    cos, sin = (rand(tokens, width // 2, seed=seed, dtype=torch.float32) for seed in (2, 3))
    weights = [1.0 + 0.2 * rand(width, seed=seed, dtype=torch.float32) for seed in (4, 5)] if norm else [None, None]
    reference = importlib.import_module("taktline_kernels.ops.attention")._rotated_reference
    rest = (*weights, cos, sin, heads, kv_heads, causal, EPS)
    expected = reference(qkv.float(), *rest)
    found = rotated.attention_rotated(qkv, *rest, config)
    assert all(torch.equal(found, rotated.attention_rotated(qkv, *rest, config)) for _ in range(3))
    assert distance(found, expected) < 1.1 * distance(reference(qkv.clone(), *rest), expected)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("tokens", "seen"), [(160, 156), (288, 3), (70, 70)])
@pytest.mark.parametrize("config", [{}, {"groups": 5, "splits": 2}], ids=str)
def test_keys_are_left_out(tokens: int, seen: int, config: dict[str, int]) -> None:
    q, k, v = rand(2, tokens, 3, 8, 64, seed=1).unbind(2)
    valid = torch.arange(tokens, device="cuda").expand(2, -1) < torch.tensor([[seen], [tokens]], device="cuda")
    expected = ops.attention(q.float(), k.float(), v.float(), valid)
    found = rotated.attention(q, k, v, valid, False, config=config)
    assert distance(found, expected) < 5e-3
