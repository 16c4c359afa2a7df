"""The world model's kernels against their torch references: interpreted without a GPU, compiled with one."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from taktline_kernels.ops import frames as ops
from taktline_kernels.ops.dispatch import REGISTRY
from torch import Tensor

kernels = importlib.import_module("taktline_kernels.triton_impl.frames")
attention = importlib.import_module("taktline_kernels.triton_impl.frame_attention").attention
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# The interpreter multiplies bf16 matrices as the integers they are stored in: without a GPU the dots run in fp16.
HALF = torch.bfloat16 if HAS_GPU else torch.float16
BARS = {torch.float32: 3e-6, torch.bfloat16: 6e-3, torch.float16: 6e-3}
GENERATOR = torch.Generator().manual_seed(11)
NORMED = 1.0 / 14
"""What normed rows are counted in: of 32, the largest number of a row of 1,024, e4m3 makes 448."""


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype).to(DEVICE)


def close(actual: Tensor, expected: Tensor, bar: float | None = None) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    assert error < (BARS[actual.dtype] if bar is None else bar), f"relative error {error:.3e}"


def same_quantised(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    close(actual[1], expected[1], 1e-5)
    near_in_steps(actual[0], expected[0])
    assert float(actual[0].float().abs().max()) == ops.FP8_MAX


def near_in_steps(actual: Tensor, expected: Tensor) -> None:
    """The interpreter's conversion loses the carry into the exponent, so the values are compared on a GPU only."""
    assert actual.dtype == expected.dtype == ops.FP8
    assert actual.shape == expected.shape
    if HAS_GPU:
        ours, theirs = actual.float(), expected.float()
        assert bool(((ours - theirs).abs() <= theirs.abs() / 8 + 2**-9).all()), "more than one step away"
        assert float((ours == theirs).float().mean()) > 0.99


@pytest.mark.parametrize("width", [96, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, ops.FP8])
@pytest.mark.parametrize("halved", [False, True])
def test_norm(width: int, dtype: torch.dtype, halved: bool) -> None:
    stream = 3.0 * rand(7, width)
    update, second = rand(7, width, dtype=torch.bfloat16), rand(7, width, dtype=torch.bfloat16)
    offset, weight, bias = rand(width), rand(width), rand(width)
    reference = REGISTRY["frame_norm"].reference
    for given in (
        ((update,), offset, weight, bias, True),
        ((update,), None, weight, bias, False),
        ((update, second), offset, weight, bias, True),
        ((update, second), offset, weight, bias, False),
        ((), offset, weight, bias, False),
        ((), offset, None, None, False),
        ((), None, None, None, False),
    ):
        *inputs, keep = given
        ours, theirs = (ops.split(stream) if halved else stream.clone() for _ in range(2))
        actual = kernels.norm(ours, *inputs, 1e-6, dtype, ours if keep else None, NORMED, config={})
        expected = reference(theirs, *inputs, 1e-6, dtype, theirs if keep else None, NORMED)
        close(ops.joined(ours), ops.joined(theirs))
        assert torch.equal(ops.joined(ours), ops.joined(ops.split(stream) if halved else stream)) != keep
        if dtype == ops.FP8:
            near_in_steps(actual, expected)
        else:
            close(actual, expected)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, ops.FP8])
def test_norm_of_a_stream_in_bf16(offset: bool, dtype: torch.dtype) -> None:
    stream, weight, bias = 3.0 * rand(7, 96, dtype=torch.bfloat16), rand(96), rand(96)
    given = ((), rand(96) if offset else None, weight, bias, 1e-6, dtype, None, NORMED)
    reference = REGISTRY["frame_norm"].reference
    expected = reference(stream, *given)
    assert torch.equal(expected.float(), reference(stream.float(), *given).float())
    actual = kernels.norm(stream, *given, config={})
    if dtype == ops.FP8:
        near_in_steps(actual, expected)
    else:
        close(actual, expected)


def spoilt(rows: int, width: int) -> Tensor:
    """A stream whose first four rows hold a NaN, an infinity, and infinities of both signs; all others are finite."""
    stream = 3.0 * rand(rows, width)
    stream[0, 3], stream[1, 0], stream[2, width - 1] = torch.nan, torch.inf, -torch.inf
    stream[3, 1], stream[3, 2] = torch.inf, -torch.inf
    return stream


@pytest.mark.parametrize("width", [96, 1024])
@pytest.mark.parametrize("form", ["fp32", "bf16", "24 bits"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, ops.FP8])
def test_norm_hides_nothing_that_is_not_finite(width: int, form: str, dtype: torch.dtype) -> None:
    """It must reach the energies, where it is an error. The interpreter's conversion makes numbers of e4m3's NaN."""
    whole = spoilt(7, width)
    stream = ops.split(whole) if form == "24 bits" else whole.to(torch.bfloat16 if form == "bf16" else torch.float32)
    given = (stream, (), rand(width), rand(width), rand(width), 1e-6, dtype, None, NORMED)
    found = [REGISTRY["frame_norm"].reference(*given)]
    if HAS_GPU or dtype != ops.FP8:
        found.append(kernels.norm(*given, config={}))
    for one in found:
        assert bool(one[:4].float().isnan().all())
        assert bool(one[4:].float().isfinite().all())


@pytest.mark.parametrize("left_out", ["weight", "bias"])
def test_norm_refuses_a_weight_or_a_bias_alone(left_out: str) -> None:
    vectors = {"weight": rand(96), "bias": rand(96)} | {left_out: None}
    with pytest.raises(ValueError, match="or neither"):
        kernels.norm(rand(4, 96), (), None, **vectors, eps=1e-6, dtype=torch.bfloat16, keep=None, unit=1.0, config={})


def test_a_stream_in_fp32_goes_on_in_24_bits() -> None:
    stream, update = 3.0 * rand(7, 96), rand(7, 96, dtype=torch.bfloat16)
    ours, theirs = ops.split(torch.zeros_like(stream)), ops.split(torch.zeros_like(stream))
    given = (stream, (update,), None, None, None, 1e-6, torch.bfloat16)
    close(kernels.norm(*given, ours, 1.0, config={}), REGISTRY["frame_norm"].reference(*given, theirs, 1.0))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    exact = stream + update.float()
    assert bool(((ops.joined(ours) - exact).abs() <= exact.abs() * 2**-16).all())
    # What is not finite must reach the energies, where it is an error.
    stream[0, 0], stream[1, 1], stream[2, 2] = torch.nan, torch.inf, -torch.inf
    kernels.norm(stream, (), None, None, None, 1e-6, torch.bfloat16, ours, 1.0, config={})
    assert torch.equal(ops.joined(ours).isfinite(), stream.isfinite())
    assert torch.equal(ops.joined(ops.split(stream)).isfinite(), stream.isfinite())


@pytest.mark.parametrize(("candidates", "others"), [(3, 6), (1, 8)])
def test_rotation(candidates: int, others: int) -> None:
    patches, heads, width = 16, 2, 32
    qkv = rand(candidates * patches + others, 3 * heads * width, dtype=torch.bfloat16)
    angles = rand(patches + 2, width)
    ours, theirs = qkv.clone(), qkv.clone()
    kernels.rotate(ours, angles.cos(), angles.sin(), candidates, config={})
    REGISTRY["frame_rotate"].reference(theirs, angles.cos(), angles.sin(), candidates)
    close(ours, theirs)
    values = slice(2 * heads * width, None)
    assert torch.equal(ours[:, values], qkv[:, values])


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: a CUDA kernel")
@pytest.mark.parametrize("rows", [1, 7, 5000])
@pytest.mark.parametrize("count", [1, 2])
def test_norm_on_hopper(rows: int, count: int) -> None:
    """Rows of large numbers and small ones; in one an infinity, which stays one where the sum is kept."""
    hopper = importlib.import_module("taktline_kernels.cuda.frame_norm").norm
    stream = 3.0 * rand(rows, 1024) * (10.0 ** torch.linspace(-2, 3, rows))[:, None].to(DEVICE)
    stream[rows // 2, 3] = torch.inf if rows > 1 else 0.0
    given = tuple(rand(rows, 1024, dtype=torch.bfloat16) for _ in range(count)), rand(1024), rand(1024), rand(1024)
    finite = torch.arange(rows, device=DEVICE) != (rows // 2 if rows > 1 else -1)
    for keeps in (False, True):
        ours, theirs = ops.split(stream), ops.split(stream)
        found = hopper(ours, *given, 1e-6, torch.bfloat16, ours if keeps else None, 1.0, config={})
        expected = REGISTRY["frame_norm"].reference(
            theirs, *given, 1e-6, torch.bfloat16, theirs if keeps else None, 1.0
        )
        close(found[finite], expected[finite])
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: a CUDA kernel")
@pytest.mark.parametrize("rows", [1, 7, 5000, 25800])
def test_norm_of_a_stream_in_bf16_into_e4m3_on_hopper(rows: int) -> None:
    hopper = importlib.import_module("taktline_kernels.cuda.fp8_norm").norm
    stream = (3.0 * rand(rows, 1024) * (10.0 ** torch.linspace(-2, 3, rows))[:, None].to(DEVICE)).bfloat16()
    given = (stream, (), rand(1024), None, None, 1e-6, ops.FP8, None, NORMED)
    near_in_steps(hopper(*given, config={}), REGISTRY["frame_norm"].reference(*given))
    if rows > 4:
        found = hopper(spoilt(rows, 1024).bfloat16(), *given[1:], config={}).float()
        assert bool(found[:4].isnan().all())
        assert bool(found[4:].isfinite().all())


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: a CUDA kernel")
def test_norm_on_hopper_refuses_what_it_is_not_for() -> None:
    hopper = importlib.import_module("taktline_kernels.cuda.frame_norm").norm
    stream, vector = ops.split(rand(4, 1024)), rand(1024)
    for given in ((stream, (), vector), (rand(4, 1024), (rand(4, 1024, dtype=torch.bfloat16),), vector)):
        with pytest.raises(ValueError, match="24 bits"):
            hopper(*given, vector, vector, 1e-6, torch.bfloat16, None, 1.0, config={})


def test_norm_into_e4m3_refuses_what_it_would_read_wrongly() -> None:
    hopper = pytest.importorskip("taktline_kernels.cuda.fp8_norm").norm
    stream, vector = rand(4, 1024, dtype=torch.bfloat16), rand(1024)
    for given, said in (
        ((stream, (stream,), vector, None, None, 1e-6, ops.FP8), "and an offset"),
        ((stream, (), None, None, None, 1e-6, ops.FP8), "and an offset"),
        ((stream, (), vector, vector, vector, 1e-6, ops.FP8), "and an offset"),
        ((stream, (), vector, None, None, 1e-6, torch.bfloat16), "and an offset"),
        ((ops.split(rand(4, 1024)), (), vector, None, None, 1e-6, ops.FP8), "and an offset"),
        ((rand(4, 512, dtype=torch.bfloat16), (), vector, None, None, 1e-6, ops.FP8), "1024 numbers"),
        ((stream.float(), (), vector, None, None, 1e-6, ops.FP8), "1024 numbers"),
        ((stream, (), vector.bfloat16(), None, None, 1e-6, ops.FP8), "contiguous fp32"),
        ((stream, (), vector[:1], None, None, 1e-6, ops.FP8), "1024 numbers in contiguous fp32"),
        ((stream, (), rand(1, 1024), None, None, 1e-6, ops.FP8), "1024 numbers in contiguous fp32"),
        ((stream[None], (), vector, None, None, 1e-6, ops.FP8), "1024 numbers a row"),
    ):
        with pytest.raises(ValueError, match=said):
            hopper(*given, None, NORMED, config={})


def test_norm_on_hopper_refuses_what_it_would_read_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("taktline_kernels.cuda.frame_norm")
    launched: list[int] = []
    monkeypatch.setattr(module.nvrtc, "processors", lambda device: 1)
    monkeypatch.setattr(module, "_kernel", lambda *_: SimpleNamespace(launch=lambda *_, **__: launched.append(1)))
    stream, update, vector = ops.split(torch.ones(4, 1024)), torch.ones(4, 1024, dtype=torch.bfloat16), torch.ones(1024)

    def run(count: int = 1, /, onto: ops.Stream = stream, update: Tensor = update, **other: object) -> None:
        given = {"offset": vector, "weight": vector, "bias": vector, "keep": None} | other
        module.norm(onto, (update,) * count, **given, eps=1e-6, dtype=torch.bfloat16, unit=1.0, config={})

    run(1)
    run(2)
    assert len(launched) == 2
    with pytest.raises(ValueError, match="one or two updates"):
        run(3)
    for name in ("offset", "weight", "bias"):
        for wrong in (vector.bfloat16(), torch.ones(2048)[::2], vector[:1]):
            with pytest.raises(ValueError, match="contiguous fp32"):
                run(**{name: wrong})
    fewer = ops.split(torch.ones(3, 1024))
    for wrongly in (
        {"onto": (stream[0], fewer[1])},
        {"keep": fewer},
        {"update": update[:3]},
        {"update": torch.ones(4, 2048, dtype=torch.bfloat16)[:, ::2]},
    ):
        with pytest.raises(ValueError, match="of one shape"):
            run(**wrongly)
    assert len(launched) == 2


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("count", "patches", "heads"), [(1, 16, 2), (2, 64, 1), (3, 32, 2)])
def test_attention(count: int, patches: int, heads: int, dtype: torch.dtype) -> None:
    candidates, width = 2, 64
    frames = rand(count, candidates * (patches + 2), 3 * heads * width, dtype=dtype)
    expected = REGISTRY["frame_attention"].reference(frames, candidates, heads)
    close(attention(frames, candidates, heads, None, config={"block_m": 32, "block_n": 16}), expected)
    unit = 2.0**-6
    eight = attention(frames, candidates, heads, unit, config={"block_m": 32, "block_n": 16})
    assert eight.dtype == ops.FP8
    close(eight.float() * unit, expected.float(), 0.04)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: the published size is slow in the interpreter")
@pytest.mark.parametrize("count", [1, 2, 8])
def test_attention_at_the_published_size(count: int) -> None:
    frames = rand(count, 6 * 258, 3072, dtype=torch.bfloat16)
    close(ops.frame_attention(frames, 6, 16), REGISTRY["frame_attention"].reference(frames, 6, 16))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: the interpreter does not share work between warps")
@pytest.mark.parametrize("patches", [16, 64, 128])
@pytest.mark.parametrize("count", [1, 2])
def test_attention_of_frames_smaller_than_the_tiles(patches: int, count: int) -> None:
    frames = rand(count, 64 * (patches + 2), 384, dtype=torch.bfloat16)
    close(ops.frame_attention(frames, 64, 2), REGISTRY["frame_attention"].reference(frames, 64, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: a CUDA kernel")
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize(("candidates", "heads"), [(1, 1), (6, 16), (30, 16)])
@pytest.mark.parametrize("spread", [1.0, 5.0])
def test_attention_on_hopper(count: int, candidates: int, heads: int, spread: float) -> None:
    """Scores that differ little, and some that are far above those before them."""
    hopper = importlib.import_module("taktline_kernels.cuda.frame_attention").attention
    frames = (spread * rand(count, candidates * 258, 3 * heads * 64)).bfloat16()
    found = hopper(frames, candidates, heads, None, config={})
    expected = REGISTRY["frame_attention"].reference(frames, candidates, heads)
    boundary = candidates * 256
    close(found[:boundary], expected[:boundary])
    close(found[boundary:], expected[boundary:])
    assert torch.equal(found, hopper(frames, candidates, heads, None, config={}))
    unit = spread * 2.0**-6
    eight = hopper(frames, candidates, heads, unit, config={})
    assert eight.dtype == ops.FP8
    close(eight.float() * unit, expected.float(), 0.04)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, ops.FP8])
def test_gelu(dtype: torch.dtype) -> None:
    x, offset = rand(9, 160, dtype=torch.bfloat16), rand(160)
    actual = kernels.gelu(x, offset, dtype, config={})
    expected = REGISTRY["frame_gelu"].reference(x, offset, dtype)
    if dtype == ops.FP8:
        same_quantised(actual, expected)
    else:
        close(actual[0], expected[0])


def test_energy() -> None:
    out, offset, goal = rand(3 * 16, 88), rand(88), rand(16, 88)
    actual = kernels.energy(out, offset, goal, 3, 1e-5, config={})
    close(actual, REGISTRY["frame_energy"].reference(out, offset, goal, 3, 1e-5))
    assert torch.equal(actual, kernels.energy(out, offset, goal, 3, 1e-5, config={}))


def test_rows_and_candidates_are_two_views() -> None:
    rows = rand(3 * 18, 5)
    assert torch.equal(ops.as_rows(ops.by_candidate(rows, 3)), rows)
    assert torch.equal(ops.by_candidate(rows, 3)[1, :16], rows[16:32])
    assert torch.equal(ops.by_candidate(rows, 3)[1, 16:], rows[50:52])
