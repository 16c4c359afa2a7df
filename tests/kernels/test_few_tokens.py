"""The kernels of a diffusion transformer for one sequence (few_tokens.cu): they compile anywhere, agree on a GPU."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

few = pytest.importorskip("taktline_kernels.cuda.few_tokens")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
ROWS = (41, 48, 1)
BAR = 6e-3
EPS = 1e-5


@pytest.mark.parametrize("tile", few.tiles(), ids=str)
def test_it_compiles_for_hopper_on_any_machine(tile: Any) -> None:
    nvrtc = importlib.import_module("taktline_kernels.cuda.nvrtc")
    geglu = importlib.import_module("taktline_kernels.cuda.geglu")
    resources_of = importlib.import_module("taktline_kernels.ahead").resources_of
    binary = nvrtc.compile_source(
        "few_tokens.cu", tuple(sorted(tile.defines().items())), geglu.wgmma_source(tile.channels)
    )
    registers, stack = resources_of(binary)
    assert stack == 0  # nothing is spilled
    assert 2 * registers * 160 <= 65536  # two blocks a processor
    assert 2 * (tile.shared_bytes + (4 << 10)) <= 228 << 10


def test_it_refuses_what_it_would_read_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    monkeypatch.setattr(few, "_kernel", lambda tile: SimpleNamespace(launch=lambda *_, **__: launched.append(1)))
    monkeypatch.setattr(few.nvrtc, "tensor_map", lambda tensor, box: None)

    def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def add(depth: int, channels: int = few.WIDTH, **other: Tensor) -> None:
        given = {"bias": of(few.WIDTH), "multiplier": of(few.WIDTH, dtype=torch.float32)} | other
        few.add(of(41, few.WIDTH), of(41, depth), of(channels, depth), **given)

    def attend(valid: Tensor) -> None:
        stream = few.Stream(of(41, few.WIDTH), of(41, few.WIDTH), of(16, 64, 2, dtype=torch.float32))
        k, vector = of(1, 16, few.HEADS, 48), of(few.WIDTH, dtype=torch.float32)
        few.attend(stream, of(few.WIDTH, few.WIDTH), vector, vector, EPS, (k, k, valid))

    for depth in (few.WIDTH, few.HIDDEN):
        add(depth)
    attend(of(1, 1, 1, 16, dtype=torch.bool))
    assert len(launched) == 3
    with pytest.raises(ValueError, match="of depth 6144 or 1536, not 3072"):
        add(3072)
    with pytest.raises(ValueError, match="do not come out even"):
        add(few.WIDTH, few.WIDTH + 8)
    stream = few.Stream(of(41, 1600), of(41, 1600), of(32, 64, 2, dtype=torch.float32))
    with pytest.raises(ValueError, match="do not come out even"):
        few.gelu(stream, of(few.HIDDEN, 1600), *(of(few.HIDDEN, dtype=torch.float32) for _ in range(2)), EPS)
    with pytest.raises(ValueError, match=r"read bias in torch\.bfloat16, not in torch\.float32"):
        add(few.WIDTH, bias=of(few.WIDTH, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"read scale in torch\.float32, not in torch\.bfloat16"):
        add(few.WIDTH, multiplier=of(few.WIDTH))
    with pytest.raises(ValueError, match=r"read valid in torch\.bool, not in torch\.float32"):
        attend(of(1, 1, 1, 16, dtype=torch.float32))
    assert len(launched) == 3


def test_it_refuses_sizes_that_it_would_read_or_write_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    monkeypatch.setattr(few, "_kernel", lambda tile: SimpleNamespace(launch=lambda *_, **__: launched.append(1)))
    monkeypatch.setattr(few.nvrtc, "tensor_map", lambda tensor, box: None)
    width, hidden = few.WIDTH, few.HIDDEN

    def of(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    def wide(*shape: int) -> Tensor:
        return torch.zeros(shape)

    def stream(parts: int) -> Any:
        return few.Stream(of(41, width), of(41, width), wide(parts, 64, 2))

    def seen(keys: int = 16, heads: int = few.HEADS, valid: int = 16) -> tuple[Tensor, Tensor, Tensor]:
        return of(1, keys, heads, 48), of(1, keys, heads, 48), torch.zeros(1, 1, 1, valid, dtype=torch.bool)

    behind, square, one = (of(hidden, width), wide(hidden), wide(hidden)), of(width, width), wide(width)
    decoded = (of(1024, width), wide(1024), wide(1024))
    few.begin(wide(41, width), of(40, width), square, one)
    few.add(of(41, width), of(41, hidden), of(width, hidden), of(width), one)
    few.gelu(stream(32), *behind, EPS)
    few.relu(stream(16), *decoded, EPS)
    few.attend(stream(16), of(3 * width, width), wide(3 * width), wide(3 * width), EPS, None)
    few.attend(stream(16), square, one, one, EPS, seen())
    assert len(launched) == 6
    refused: list[tuple[str, Any]] = [
        ("as 40 rows", lambda: few.begin(wide(40, width), of(41, width), square, one)),
        ("as 41 rows", lambda: few.add(of(41, width), of(48, width), square, of(width), one)),
        ("as 41 rows", lambda: few.add(of(41, width), of(40, width), square, of(width), one)),
        ("as 41 rows", lambda: few.add(of(41, width), of(41, width), of(width, hidden), of(width), one)),
        ("1536 channels", lambda: few.add(of(41, width), of(41, width), of(2 * width, width), of(2 * width), one)),
        ("for 3072", lambda: few.add(of(41, 2 * width), of(41, width), square, of(width), one)),
        ("residual without", lambda: few.add(of(width, 41).t(), of(41, width), square, of(width), one)),
        ("x without", lambda: few.add(of(41, width), of(width, 41).t(), square, of(width), one)),
        ("weight without", lambda: few.add(of(41, width), of(41, width), square.t(), of(width), one)),
        ("bias of", lambda: few.add(of(41, width), of(41, width), square, of(width - 8), one)),
        ("scale of", lambda: few.add(of(41, width), of(41, width), square, of(width), one[8:])),
        ("sums of", lambda: few.gelu(stream(16), *behind, EPS)),
        ("sums of", lambda: few.relu(stream(32), *decoded, EPS)),
        ("first of", lambda: few.gelu(stream(32), behind[0], behind[1][8:], behind[2], EPS)),
        ("constant of", lambda: few.relu(stream(16), decoded[0], decoded[1], decoded[2][8:], EPS)),
        ("come out even", lambda: few.attend(stream(16), square, one, one, EPS, None)),
        ("1536 channels", lambda: few.attend(stream(16), of(3 * width, width), one, one, EPS, seen())),
        ("k of", lambda: few.attend(stream(16), square, one, one, EPS, seen(heads=16))),
        ("valid of", lambda: few.attend(stream(16), square, one, one, EPS, seen(valid=8))),
    ]
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()
    assert len(launched) == 6


def rand(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).cuda()


def distance(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


class Layer:
    """A random layer (n, k) behind a random norm."""

    def __init__(self, n: int, k: int, seed: int) -> None:
        self.weight, self.bias = rand(n, k, seed=seed, scale=k**-0.5), rand(n, seed=seed + 1)
        self.multiplier = 1.0 + rand(k, seed=seed + 2, scale=0.2, dtype=torch.float32)
        self.shift = rand(k, seed=seed + 3, scale=0.2, dtype=torch.float32)
        self.first = self.weight.float() @ self.multiplier
        self.constant = self.weight.float() @ self.shift + self.bias.float()

    def exact(self, x: Tensor) -> Tensor:
        normed = functional.layer_norm(x.double(), x.shape[-1:], eps=EPS) * self.multiplier + self.shift
        return normed @ self.weight.double().T + self.bias


def stream_of(x: Tensor, multiplier: Tensor) -> Any:
    """The stream x, to which nothing is added."""
    return few.begin(x.float(), torch.zeros_like(x), torch.zeros(few.WIDTH, few.WIDTH).to(x), multiplier)


def exact_attention(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
    """(rows, WIDTH) of q (rows, WIDTH), k and v (keys, WIDTH)."""
    q, k, v = (one.view(len(one), few.HEADS, -1).transpose(0, 1) for one in (q, k, v))
    logits = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    if valid is not None:
        logits = logits.masked_fill(~valid, -torch.inf)
    return (logits.softmax(-1) @ v).transpose(0, 1).flatten(1)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("rows", ROWS)
def test_attention_of_the_stream_to_itself(rows: int) -> None:
    x, layer = rand(rows, few.WIDTH, seed=1), Layer(3 * few.WIDTH, few.WIDTH, 2)
    stream = stream_of(x, layer.multiplier)
    found = few.attend(stream, layer.weight, layer.first, layer.constant, EPS, None)
    assert distance(found, exact_attention(*layer.exact(x).chunk(3, dim=1), None)) < BAR


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("keys", [16, 32, 128, 256])
def test_attention_to_keys_of_which_some_are_not_seen(keys: int) -> None:
    x, layer = rand(41, few.WIDTH, seed=1) + 0.5, Layer(few.WIDTH, few.WIDTH, 2)
    whole = rand(1, keys, 3, 2, few.HEADS, 48, seed=3)
    k, v = whole[:, :, 1, 0], whole[:, :, 1, 1]
    valid = torch.arange(keys, device="cuda") < keys - 5
    stream = stream_of(x, layer.multiplier)
    found = few.attend(stream, layer.weight, layer.first, layer.constant, EPS, (k, v, valid[None, None, None]))
    expected = exact_attention(layer.exact(x), *(one[0].flatten(1).double() for one in (k, v)), valid)
    assert distance(found, expected) < BAR


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("scaled", [False, True])
def test_the_stream_goes_on_with_what_its_norm_needs(rows: int, scaled: bool) -> None:
    x, behind = rand(rows, few.WIDTH, seed=1) + 0.5, Layer(few.HIDDEN, few.WIDTH, 9)
    for depth in (few.WIDTH, few.HIDDEN):
        given, layer = rand(rows, depth, seed=4), Layer(few.WIDTH, depth, 5)
        multiplier = behind.multiplier if scaled else None
        stream = few.add(x, given, layer.weight, layer.bias, multiplier)
        exact = x.double() + given.double() @ layer.weight.double().T + layer.bias
        assert distance(stream.x, exact) < BAR
        expected = stream.x.float() if multiplier is None else stream.x.float() * multiplier
        assert distance(stream.scaled, expected) < BAR
        sums = stream.sums.sum(0)[:rows].double()
        wide = stream.x.double()
        assert torch.allclose(sums[:, 0], wide.sum(1), atol=1e-2)
        assert torch.allclose(sums[:, 1], wide.square().sum(1), rtol=1e-5)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("rows", "given"), [(41, 40), (48, 48), (2, 1), (17, 3)])
def test_the_stream_begins_with_rows_of_which_the_first_are_left_as_they_are(rows: int, given: int) -> None:
    table, x = rand(rows, few.WIDTH, seed=1, dtype=torch.float32) + 0.5, rand(given, few.WIDTH, seed=2)
    layer = Layer(few.WIDTH, few.WIDTH, 3)
    stream = few.begin(table, x, layer.weight, layer.multiplier)
    exact = table.double()
    assert torch.equal(stream.x[: rows - given], table[: rows - given].bfloat16())
    exact[rows - given :] += x.double() @ layer.weight.double().T
    assert distance(stream.x, exact) < BAR
    assert distance(stream.scaled, stream.x.float() * layer.multiplier) < BAR
    assert torch.allclose(stream.sums.sum(0)[:rows, 0].double(), stream.x.double().sum(1), atol=1e-2)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("rows", ROWS)
def test_relu_behind_the_last_norm(rows: int) -> None:
    x, given, layer = (
        rand(rows, few.WIDTH, seed=1) + 0.5,
        rand(rows, few.HIDDEN, seed=4),
        Layer(few.WIDTH, few.HIDDEN, 5),
    )
    behind = Layer(1024, few.WIDTH, 9)
    stream = few.add(x, given, layer.weight, layer.bias, behind.multiplier)
    found = few.relu(stream, behind.weight, behind.first, behind.constant, EPS)
    assert distance(found, functional.relu(behind.exact(stream.x))) < BAR


@pytest.mark.gpu
@needs_hopper
def test_relu_of_what_is_no_number_is_none() -> None:
    x, behind = rand(41, few.WIDTH, seed=1), Layer(1024, few.WIDTH, 9)
    layer = Layer(few.WIDTH, few.HIDDEN, 5)
    x[7] = torch.nan
    stream = few.add(x, rand(41, few.HIDDEN, seed=4), layer.weight, layer.bias, behind.multiplier)
    found = few.relu(stream, behind.weight, behind.first, behind.constant, EPS)
    assert torch.equal(found.isnan().all(1).nonzero()[:, 0].cpu(), torch.tensor([7]))
    assert int(found.isnan().sum()) == 1024


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("rows", ROWS)
def test_gelu_behind_the_norm_without_a_multiplier(rows: int) -> None:
    x, given = rand(rows, few.WIDTH, seed=1) + 0.5, rand(rows, few.WIDTH, seed=4)
    layer, behind = Layer(few.WIDTH, few.WIDTH, 5), Layer(few.HIDDEN, few.WIDTH, 9)
    behind.multiplier, behind.shift = torch.ones_like(behind.multiplier), torch.zeros_like(behind.shift)
    stream = few.add(x, given, layer.weight, layer.bias, None)
    found = few.gelu(stream, behind.weight, behind.weight.float().sum(1), behind.bias.float(), EPS)
    expected = functional.gelu(behind.exact(stream.x), approximate="tanh")
    assert distance(found, expected) < BAR
    assert all(
        torch.equal(found, few.gelu(stream, behind.weight, behind.weight.float().sum(1), behind.bias.float(), EPS))
        for _ in range(5)
    )


@pytest.mark.gpu
@needs_hopper
def test_it_refuses_what_it_is_not_made_for() -> None:
    layer = Layer(few.WIDTH, few.WIDTH, 5)
    with pytest.raises(ValueError, match="48 tokens"):
        few.add(rand(49, few.WIDTH, seed=1), rand(49, few.WIDTH, seed=2), layer.weight, layer.bias, None)
    stream = stream_of(rand(41, few.WIDTH, seed=1), layer.multiplier)
    k = rand(1, 24, few.HEADS, 48, seed=2)
    with pytest.raises(ValueError, match="by 16"):
        few.attend(
            stream, layer.weight, layer.first, layer.constant, EPS, (k, k, torch.ones(1, 1, 1, 24).bool().cuda())
        )
