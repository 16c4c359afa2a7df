"""The kernels of a diffusion transformer's blocks (action_block.cu): they compile anywhere, and agree on a GPU."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

blocks = pytest.importorskip("taktline_kernels.cuda.action_block")
rows = importlib.import_module("taktline_kernels.triton_impl.action_rows")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
READ, GELU = blocks.Product(blocks.ROWS, 768, parts=16), blocks.Product(blocks.GELU, 768, parts=32)
OUT = blocks.Product(blocks.RESIDUAL, 768, columns=32, split=4)
FC2 = blocks.Product(blocks.RESIDUAL, 3072, columns=64, split=8)
EPS = 1e-5


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def distance(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def squares(stream: Tensor, parts: int) -> Tensor:
    """Parts of each row's sum of squares; those of a row are any numbers with the right sum."""
    found = torch.zeros(parts, blocks.MAX_TOKENS, device=stream.device)
    whole = stream.float().square().sum(dim=1)
    found[0, : len(stream)], found[parts - 1, : len(stream)] = 0.25 * whole, 0.75 * whole
    return found


def normed(stream: Tensor) -> Tensor:
    return stream.double() * torch.rsqrt(stream.double().square().mean(dim=1, keepdim=True) + EPS)


@pytest.mark.parametrize("product", [READ, GELU, OUT, FC2], ids=str)
def test_products_compile_for_hopper_on_any_machine(product: blocks.Product) -> None:
    nvrtc = importlib.import_module("taktline_kernels.cuda.nvrtc")
    resources_of = importlib.import_module("taktline_kernels.ahead").resources_of
    defines = tuple(sorted(product.defines().items()))
    registers, stack = resources_of(nvrtc.compile_source("action_block.cu", defines, blocks.prologue(product)))
    assert stack == 0  # nothing is spilled
    assert 2 * 256 * registers <= 65536  # the next kernel's blocks start beside these
    assert product.shared_bytes <= 227 << 10


@pytest.mark.parametrize("defines", [{"KEYS": 64}, *({"ASK": 1, "DEPTH": 768, "KEYS": n} for n in (128, 512))], ids=str)
def test_attentions_compile_for_hopper_on_any_machine(defines: dict[str, int]) -> None:
    nvrtc = importlib.import_module("taktline_kernels.cuda.nvrtc")
    resources_of = importlib.import_module("taktline_kernels.ahead").resources_of
    registers, stack = resources_of(
        nvrtc.compile_source("action_block.cu", tuple(sorted(defines.items())), blocks.HEADER)
    )
    assert (stack, 2 * 256 * registers <= 65536) == (0, True)


def test_queries_read_sixteen_parts_of_the_rows_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    monkeypatch.setattr(blocks, "_kernel", lambda *_: SimpleNamespace(launch=lambda *_, **__: launched.append(1)))
    stream, memory = torch.zeros(64 * 768), torch.zeros(97, 12, 64)
    for parts in (16, 12, 32):
        given = (stream, stream, stream, torch.zeros(parts, 64), memory, memory, stream, stream)
        if parts == 16:
            blocks.ask(*given, 62, EPS, early=False)
            continue
        with pytest.raises(ValueError, match=f"in 16 parts, not {parts}"):
            blocks.ask(*given, 62, EPS, early=False)
    assert len(launched) == 1


def test_panels_are_32_columns_of_all_tokens_in_a_swizzle() -> None:
    x = torch.randn(62, 96)
    panels = blocks.in_panels(x)
    assert torch.equal(blocks.from_panels(panels, 62), x)
    for token, column in ((0, 0), (5, 70), (61, 95)):
        piece = (column // 8 % 4) ^ (token // 2 % 4)
        assert panels[(column // 32 * 64 + token) * 32 + piece * 8 + column % 8] == x[token, column]


def test_a_products_weights_keep_their_columns_in_order() -> None:
    weight = torch.randn(64, 768).bfloat16()
    image = READ.pack(weight)  # (tiles, slices, chunks, rows, pieces, 8)
    for n, k in ((0, 0), (37, 100), (63, 767)):
        assert image[n // 32, 0, k // 64, n % 32, (k // 8 % 8) ^ (n % 8), k % 8] == weight[n, k]


def test_rows_of_constants_with_a_products_parts_on_the_last() -> None:
    parts, table, scale = rand(3, 30, 96), rand(62, 96, seed=1), rand(96, seed=2)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter has no bf16
    stream = torch.zeros(64, 96, dtype=dtype, device=DEVICE)
    scaled, sums = torch.zeros_like(stream).flatten(), torch.ones(16, 64, device=DEVICE)
    rows.rows_scaled(parts, table, scale, stream, scaled, sums)
    exact = table.double()
    exact[32:] += parts.double().sum(dim=0)
    bar = 4e-3 if DEVICE == "cuda" else 1e-6
    assert distance(stream[:62], exact) < bar
    assert distance(blocks.from_panels(scaled, 62), stream[:62].double() * scale) < bar
    assert distance(sums[:, :62].sum(dim=0), stream[:62].double().square().sum(dim=1)) < 1e-6


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("tokens", [62, 33])
@pytest.mark.parametrize(("product", "columns"), [(READ, 2304), (READ, 1024), (GELU, 3072)], ids=str)
def test_a_layer_of_the_streams_norm(product: blocks.Product, columns: int, tokens: int) -> None:
    stream, weight, bias = rand(tokens, 768).bfloat16(), rand(columns, 768, seed=1, scale=0.04), rand(columns, seed=2)
    weight = weight.bfloat16()
    out = torch.zeros(64 * columns, dtype=torch.bfloat16, device=DEVICE)
    given = {"input": blocks.in_panels(stream), "weights": product.pack(weight), "bias": bias}
    sums = squares(stream, product.parts)
    blocks.run(product, columns, tokens, 768, EPS, **given, squares=sums, output=out)
    expected = normed(stream) @ weight.double().t() + bias
    if product.mode == blocks.GELU:
        assert distance(blocks.from_panels(out, tokens), functional.gelu(expected, approximate="tanh")) < 4e-3
    else:
        assert distance(out.view(64, -1)[:tokens], expected) < 4e-3
    again = torch.zeros_like(out)
    blocks.run(product, columns, tokens, 768, EPS, **given, squares=sums, output=again)
    assert torch.equal(again, out)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("tokens", [62, 33])
@pytest.mark.parametrize("product", [OUT, FC2], ids=str)
def test_a_layer_added_to_the_stream(product: blocks.Product, tokens: int) -> None:
    given, weight = rand(tokens, product.depth).bfloat16(), rand(768, product.depth, seed=1, scale=0.02).bfloat16()
    bias, scale, before = rand(768, seed=2), 1 + 0.1 * rand(768, seed=3), rand(64, 768, seed=4).bfloat16()
    stream, scaled = before.clone(), torch.zeros(64 * 768, dtype=torch.bfloat16, device=DEVICE)
    sums = torch.zeros(32, 64, device=DEVICE)
    read = {"input": blocks.in_panels(given), "weights": product.pack(weight), "bias": bias, "scale": scale}
    blocks.run(product, 768, tokens, 768, 0.0, **read, output=stream, scaled=scaled, squares_out=sums)
    expected = before[:tokens].double() + given.double() @ weight.double().t() + bias
    assert distance(stream[:tokens], expected) < 4e-3
    assert torch.equal(stream[tokens:], before[tokens:])
    assert distance(blocks.from_panels(scaled, tokens), stream[:tokens].double() * scale) < 4e-3
    assert distance(sums.sum(dim=0)[:tokens], stream[:tokens].double().square().sum(dim=1)) < 1e-6


def attended(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None) -> Tensor:
    mask = None if valid is None else valid.expand(q.shape[1], len(q), -1)
    parts = (x.double().transpose(0, 1) for x in (q, k, v))
    return functional.scaled_dot_product_attention(*parts, attn_mask=mask).transpose(0, 1).flatten(1)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("tokens", [62, 17])
def test_attention_of_the_tokens_to_themselves(tokens: int) -> None:
    heads = rand(tokens, 3, 12, 64, scale=1.5).bfloat16().unbind(1)
    out = torch.zeros(64 * 768, dtype=torch.bfloat16, device=DEVICE)
    blocks.attention(*heads, out)
    assert distance(blocks.from_panels(out, tokens), attended(*heads)) < 4e-3


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("keys", [97, 128, 192, 256, 512])
def test_queries_of_the_stream_and_their_attention(keys: int, early: bool) -> None:
    stream, weight, bias = rand(62, 768).bfloat16(), rand(768, 768, seed=1, scale=0.04).bfloat16(), rand(768, seed=2)
    k, v = rand(keys, 2, 12, 64, seed=3).bfloat16().unbind(1)
    valid = torch.rand(keys, generator=torch.Generator().manual_seed(4)).to(DEVICE) > 0.3
    out = torch.zeros(64 * 768, dtype=torch.bfloat16, device=DEVICE)
    packed = blocks.pack_queries(weight)
    torch.cuda.synchronize()
    given = (packed, bias, blocks.in_panels(stream), squares(stream, 16), k, v, valid, out)
    blocks.ask(*given, 62, EPS, early=early)
    q = (normed(stream) @ weight.double().t() + bias).view(62, 12, 64)
    assert distance(blocks.from_panels(out, 62), attended(q, k, v, valid)) < 6e-3
