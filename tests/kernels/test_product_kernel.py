"""The Hopper kernel of linear layers with what follows them (product.cu): it compiles anywhere, and agrees on a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from taktline_kernels import ops
from taktline_kernels.ops.delta import conv_silu_split, linear_conv_split
from taktline_kernels.ops.dispatch import REGISTRY
from torch import Tensor

product = pytest.importorskip("taktline_kernels.cuda.product")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
APART = {"columns": 64, "stages": 4, "groups": 2, "together": 0}
ALONE = {"columns": 64, "stages": 6, "groups": 1, "together": 0}
TOGETHER = {"columns": 96, "stages": 3, "groups": 2, "together": 1}
BAR = 6e-3


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).cuda()


def distance(actual: Tensor, expected: Tensor) -> float:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("mode", "config"),
    [
        (product._FINISHED, ALONE),
        (product._FINISHED, {"columns": 160, "stages": 4}),
        (product._SWIGLU, APART),
        (product._PARTS, APART),
        (product._MIXED, TOGETHER),
    ],
    ids=str,
)
def test_it_compiles_for_hopper_on_any_machine(mode: int, config: dict[str, int]) -> None:
    nvrtc = importlib.import_module("taktline_kernels.cuda.nvrtc")
    geglu = importlib.import_module("taktline_kernels.cuda.geglu")
    resources_of = importlib.import_module("taktline_kernels.ahead").resources_of
    tile = product.Tile.of(config)
    defines = tuple(sorted(tile.defines(mode).items()))
    binary = nvrtc.compile_source("product.cu", defines, geglu.wgmma_source(tile.columns))
    registers, stack = resources_of(binary)
    assert stack == 0  # nothing is spilled
    assert registers * (128 * tile.groups + 32) * tile.defines(mode)["MINIMUM"] <= 65536


def test_a_tile_has_the_channels_and_tokens_of_its_groups() -> None:
    apart, together = product.Tile.of(APART), product.Tile.of(TOGETHER)
    assert (apart.channels, apart.tokens) == (128, 64)
    assert (together.channels, together.tokens) == (64, 192)
    assert together.shared_bytes == 3 * (64 + 192) * 64 * 2


def test_the_first_product_of_a_delta_net_is_the_product_and_the_convolution() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, taps = (torch.randn(*shape, generator=generator) for shape in ((2, 7, 24), (40, 24), (36, 4)))
    *parts, rest = linear_conv_split(x, weight, taps, (12, 12, 12))
    whole = ops.linear(x, weight)
    for part, expected in zip(parts, conv_silu_split(whole[..., :36], taps, (12, 12, 12)), strict=True):
        assert torch.equal(part, expected)
    assert torch.equal(rest, whole[..., 36:])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("config", [APART, ALONE, TOGETHER, {"columns": 128, "stages": 3}], ids=str)
@pytest.mark.parametrize(("rows", "n", "k"), [(192, 200, 1024), (70, 1160, 592), (513, 64, 64)])
@pytest.mark.parametrize("rest", ["nothing", "bias", "gelu"])
def test_a_linear_layer(rest: str, rows: int, n: int, k: int, config: dict[str, int]) -> None:
    x, weight = rand(rows, k, seed=1), rand(n, k, seed=2, scale=k**-0.5)
    bias = None if rest == "nothing" else rand(n, seed=3)
    arguments: tuple[Any, ...] = (x, weight, bias, "gelu" if rest == "gelu" else "none", None, None)
    assert distance(product.linear(*arguments, config=config), REGISTRY["linear"].reference(*arguments)) < BAR


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("config", [APART, {"columns": 96, "stages": 3}], ids=str)
def test_a_gate_behind_the_product(config: dict[str, int]) -> None:
    x, gate_up = rand(190, 1024, seed=1), rand(2 * 320, 1024, seed=2, scale=1 / 32)
    expected = ops.swiglu(ops.linear(x, gate_up))
    assert distance(product.linear_silu_gate(x, gate_up, config=config), expected) < BAR


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("config", [APART, ALONE, TOGETHER], ids=str)
@pytest.mark.parametrize(("rows", "split"), [(62, 3), (192, 8), (300, 1)])
def test_parts_and_the_norm_behind_them(rows: int, split: int, config: dict[str, int]) -> None:
    x, weight, bias = rand(rows, 1152, seed=1), rand(200, 1152, seed=2, scale=1 / 34), rand(200, seed=3)
    residual, scale, shift = (rand(*s, seed=4, dtype=torch.float32) for s in ((rows, 200), (200,), (200,)))
    cut = {**config, "split": split}
    layer = (x, weight, bias, residual, scale, shift, 1e-6)
    rms = (x, weight, residual, scale, 1e-6)
    for name, arguments in (("linear_add_layer_norm", layer), ("linear_add_rms_norm", rms)):
        found = getattr(product, name)(*arguments, config=cut)
        for actual, expected in zip(found, REGISTRY[name].reference(*arguments), strict=True):
            assert distance(actual, expected) < BAR


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("rows", "tokens", "columns"), [(1, 128, 64), (3, 192, 96), (1, 256, 128)])
def test_the_convolution_behind_the_product(rows: int, tokens: int, columns: int) -> None:
    x, weight = rand(rows, tokens, 1024, seed=1), rand(3 * 128 + 72, 1024, seed=2, scale=1 / 32)
    taps, widths = rand(3 * 128, 4, seed=3, scale=0.5), (128, 128, 128)
    config = {"columns": columns, "stages": 2, "groups": 2, "together": 1}
    found = product.linear_conv_split(x, weight, taps, widths, config=config)
    for actual, expected in zip(found, linear_conv_split(x, weight, taps, widths), strict=True):
        assert distance(actual, expected.contiguous() if actual.is_contiguous() else expected) < BAR
