"""Triton kernels against the torch references: in Triton's interpreter without a GPU, compiled with one."""

from __future__ import annotations

import importlib

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
norms = importlib.import_module("taktline_kernels.triton_impl.norms")
activations = importlib.import_module("taktline_kernels.triton_impl.activations")
attention = importlib.import_module("taktline_kernels.triton_impl.attention")
prefix_rows = importlib.import_module("taktline_kernels.triton_impl.prefix_rows")
rope_module = importlib.import_module("taktline_kernels.triton_impl.rope")
heads_module = importlib.import_module("taktline_kernels.triton_impl.heads")
fp8 = importlib.import_module("taktline_kernels.triton_impl.fp8")
head = importlib.import_module("taktline_kernels.triton_impl.action_head")

from taktline_kernels.ops.dispatch import REGISTRY  # noqa: E402

DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
# The interpreter multiplies bf16 matrices as the integers they are stored in: without a GPU the dots run in fp16.
DOT_DTYPES = DTYPES if HAS_GPU else [torch.float32, torch.float16]
GENERATOR = torch.Generator().manual_seed(7)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype).to(DEVICE)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < (3e-6 if dtype == torch.float32 else 6e-3), f"relative error {error:.3e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(3, 72), (5, 1152)])
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    x, y = rand(rows, width, dtype=dtype), rand(rows, width, dtype=dtype)
    weight, bias, gate = rand(width), rand(width), rand(width)
    for name, args in {
        "layer_norm": (x, weight, bias, 1e-6),
        "rms_norm": (x, weight, 1e-6),
        "ada_rms_norm": (x, weight, bias, 1e-6),
        "add_layer_norm": (x, y, weight, bias, 1e-6),
        "add_rms_norm": (x, y, weight, 1e-6),
        "gated_add_ada_rms_norm": (x, y, gate, weight, bias, 1e-6),
    }.items():
        expected = REGISTRY[name].reference(*args)
        actual = getattr(norms, name)(*args, config={})
        for a, e in zip(*(r if isinstance(r, tuple) else (r,) for r in (actual, expected)), strict=True):
            close(a, e, dtype)


@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_a_stream_in_fp32_keeps_its_sum_and_gives_a_norm_in_bf16(name: str) -> None:
    x, y, weight, bias = rand(5, 136), rand(5, 136, dtype=torch.bfloat16), rand(136), rand(136)
    args = (x, y, weight, bias, 1e-6) if name == "add_layer_norm" else (x, y, weight, 1e-6)
    expected = REGISTRY[name].reference(*args)
    for total, normed in (expected, getattr(norms, name)(*args, config={})):
        assert (total.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(total, x + y.float())
        close(normed, expected[1], torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_geglu(dtype: torch.dtype) -> None:
    x = rand(5, 2 * 136, dtype=dtype) * 3
    expected = REGISTRY["geglu"].reference(x)
    close(activations.geglu(x, config={"block": 64}), expected, dtype)
    paired = x.view(5, 2, 17, 8).transpose(1, 2).reshape(5, -1)
    close(activations.geglu(paired, config={"block": 64}, paired=True), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_relu(dtype: torch.dtype) -> None:
    x = rand(5, 3, 100, dtype=dtype) * 3
    close(activations.relu2(x, config={"block": 64}), REGISTRY["relu2"].reference(x), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    x = rand(5, 2 * 136, dtype=dtype) * 3
    close(activations.swiglu(x, config={"block": 64}), REGISTRY["swiglu"].reference(x), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "normed"), [(4, 2, 16, True), (3, 3, 24, False)])
def test_norm_and_rotation_of_heads(heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype) -> None:
    from taktline_kernels import ops

    qkv = rand(3, 5, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cos, sin = ops.rope_table(torch.arange(5, device=DEVICE), head_dim)
    weights = (rand(head_dim), rand(head_dim)) if normed else (None, None)
    expected, actual = qkv.clone(), qkv.clone()
    args = (*weights, cos, sin, heads, kv_heads, 1e-6)
    REGISTRY["norm_rotate"].reference(expected, *args)
    heads_module.norm_rotate(actual, *args, config={})
    close(actual, expected, dtype)
    wide = torch.cat((qkv, qkv[..., :head_dim]), dim=-1)  # rows that are part of longer ones
    for run in (REGISTRY["norm_rotate"].reference, lambda *a: heads_module.norm_rotate(*a, config={})):
        inside = wide.clone()
        run(inside[..., : qkv.shape[-1]], *args)
        close(inside[..., : qkv.shape[-1]], expected, dtype)
        assert torch.equal(inside[..., qkv.shape[-1] :], wide[..., qkv.shape[-1] :])
    values = slice(-kv_heads * head_dim, None)
    assert torch.equal(actual[..., values], qkv[..., values])
    with pytest.raises(ValueError, match="both"):
        heads_module.norm_rotate(actual, rand(head_dim), None, cos, sin, heads, kv_heads, 1e-6, config={})
    with pytest.raises(ValueError, match="over a table of 4"):
        ops.norm_rotate(qkv, None, None, cos[:4], sin[:4], heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_attention_prefix_and_suffix(splits: int, dtype: torch.dtype) -> None:
    config = {"block_m": 16, "block_n": 16, "splits": splits, "num_warps": 4}
    q, k, v = rand(2, 37, 4, 64, dtype=dtype), rand(2, 37, 1, 64, dtype=dtype), rand(2, 37, 1, 64, dtype=dtype)
    lengths = torch.tensor([37, 18], dtype=torch.int32, device=DEVICE)
    actual = attention.attention_prefix(q, k, v, lengths, config=config)
    expected = REGISTRY["attention_prefix"].reference(q, k, v, lengths)
    assert actual.isfinite().all()
    for row, length in enumerate([37, 18]):
        close(actual[row, :length], expected[row, :length], dtype)
    queries, more_k, more_v = (rand(2, 5, n, 64, dtype=dtype) for n in (4, 1, 1))
    args = (queries, k, v, lengths, more_k, more_v)
    close(attention.attention_suffix(*args, config=config), REGISTRY["attention_suffix"].reference(*args), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("suffix", [False, True])
@pytest.mark.parametrize("heads", [0, 4])
def test_rope_cache(heads: int, suffix: bool, dtype: torch.dtype) -> None:
    from taktline_kernels import ops

    tokens, width = 6, 32
    qkv = rand(2, tokens, (heads + 2) * width, dtype=dtype)
    lengths = torch.tensor([9, 4], dtype=torch.int32, device=DEVICE)
    cos, sin = ops.rope_table(torch.arange(32, device=DEVICE), width)
    k_cache, v_cache = (torch.zeros(2, 20, width, dtype=dtype, device=DEVICE) for _ in range(2))
    before = qkv.clone().unflatten(-1, (heads + 2, width))
    rope_module.rope_cache(qkv, k_cache, v_cache, cos, sin, lengths, heads=heads, suffix=suffix)
    start = lengths.long() if suffix else torch.zeros(2, dtype=torch.long, device=DEVICE)
    positions = start[:, None] + torch.arange(tokens, device=DEVICE)[None, :]
    turned = REGISTRY["rope"].reference(before[:, :, : heads + 1], cos[positions], sin[positions])
    if heads:
        close(qkv.unflatten(-1, (heads + 2, width))[:, :, :heads], turned[:, :, :heads], dtype)
    for row in range(2):
        close(k_cache[row, positions[row]], turned[row, :, heads], dtype)
        assert torch.equal(v_cache[row, positions[row]], before[row, :, heads + 1])
    assert k_cache.abs().sum(-1).count_nonzero() == 2 * tokens


@pytest.mark.parametrize("kind", ["plain", "gelu", "geglu", "swiglu", "relu2"])
def test_rows_in_fp8(kind: str) -> None:
    x = rand(5, 2 * 136, dtype=torch.bfloat16) * 3
    x[1] *= 1000
    x[2] = 0
    values, scales = fp8.quantise_rows(x, getattr(fp8, kind.upper()))
    wide = x.float()
    expected = {
        "plain": wide,
        "gelu": torch.nn.functional.gelu(wide, approximate="tanh"),
        "geglu": REGISTRY["geglu"].reference(wide),
        "swiglu": REGISTRY["swiglu"].reference(wide),
        "relu2": torch.nn.functional.relu(wide).square(),
    }[kind]
    check_fp8(values, scales, expected)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("add", [False, True])
def test_norms_in_fp8(kind: str, add: bool) -> None:
    x, y = rand(5, 1152, dtype=torch.bfloat16), rand(5, 1152, dtype=torch.bfloat16)
    weight, bias = rand(1152), rand(1152) if kind == "layer" else None
    total, values, scales = norms.norm_fp8(x, y if add else None, weight, bias, 1e-6)
    close(total, x + y if add else x, torch.bfloat16)
    args = (total.float(), weight) if bias is None else (total.float(), weight, bias)
    check_fp8(values, scales, REGISTRY[f"{kind}_norm"].reference(*args, 1e-6))


def check_fp8(values: torch.Tensor, scales: torch.Tensor, expected: torch.Tensor) -> None:
    """The largest of a row is 448, and each value is within half a step of e4m3: 1/16 of it, or 2^-10 below 2^-6.

    The interpreter loses the carry where a value is rounded up to a power of two (those are left out there), and cuts
    instead of rounding below 2^-6.
    """
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (expected.shape[0], 1)
    top = expected.abs().amax(dim=1, keepdim=True)
    assert torch.allclose(scales * 448, top.clamp_min(1e-30), rtol=1e-5)
    scaled = expected * (448 / top.clamp_min(1e-30))
    judged = torch.ones_like(scaled, dtype=torch.bool) if HAS_GPU else scaled.frexp().mantissa.abs() < 0.968
    error = (values.float() - scaled).abs()[judged]
    bound = torch.maximum(scaled.abs() / 16, torch.full_like(scaled, 2.0**-10 if HAS_GPU else 2.0**-9))[judged]
    assert bool((error <= bound * 1.001).all())
    full = top[:, 0] > 0
    assert torch.equal(values.float().abs().amax(dim=1)[full], torch.full_like(top[full, 0], 448.0))
    assert float((error > 0)[scaled[judged] != 0].float().mean()) > 0.5


@pytest.mark.parametrize("splits", [1, 3])
def test_the_first_token_alone(splits: int) -> None:
    """A first token that sees the prefix and itself, beside tokens that see it and each other."""
    config = {"block_m": 16, "block_n": 16, "splits": splits, "num_warps": 4}
    dtype = torch.bfloat16 if HAS_GPU else torch.float16
    q = rand(2, 6, 4, 64, dtype=dtype)
    k, v = rand(2, 60, 64, dtype=dtype), rand(2, 60, 64, dtype=dtype)
    lengths = torch.tensor([37, 18], dtype=torch.int32, device=DEVICE)
    actual = attention.attention_cached(q, k, v, lengths, 6, config=config, first_alone=True)
    for row, length in enumerate([37, 18]):
        for first, last, end in ((0, 1, length + 1), (1, 6, length + 6)):
            keys, values = k[row, None, :end, None], v[row, None, :end, None]
            valid = torch.tensor([end], dtype=torch.int32, device=DEVICE)
            expected = REGISTRY["attention_prefix"].reference(q[row, None, first:last], keys, values, valid)
            close(actual[row, None, first:last], expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_action_head_of_a_stream_with_a_token_before_each_chunk(dtype: torch.dtype) -> None:
    batch, tokens, width, dim = 2, 3, 256, 32
    hidden, update = rand(batch, tokens + 1, width, dtype=dtype), rand(batch, tokens + 1, width, dtype=dtype)
    actions, modulation, gate = rand(batch * tokens, dim), rand(3, width), rand(width)
    heads = (rand(width, dim), rand(width), rand(dim, width) / 16, rand(dim))
    outs = []
    for before, silu in ((1, True), (0, False)):
        parts = [t if before else t[:, 1:].contiguous() for t in (hidden, update)]
        out, target = actions.clone(), torch.empty(batch * tokens, width, dtype=torch.float32, device=DEVICE)
        head.action_head(
            out, target, *heads, hidden=parts[0], update=parts[1], modulation=modulation, gate=gate, dt=-0.1,
            last=False, before=before, silu=silu,
        )  # fmt: skip
        outs.append((out, target))
    assert torch.equal(outs[0][0], outs[1][0])
    close(outs[0][1], torch.nn.functional.silu(outs[1][1]), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_action_head(dtype: torch.dtype) -> None:
    rows, width, dim = 3, 256, 32
    hidden, update, actions = rand(rows, width, dtype=dtype), rand(rows, width, dtype=dtype), rand(rows, dim)
    modulation, gate = rand(3, width), rand(width)
    in_weight, in_bias, out_weight, out_bias = rand(width, dim), rand(width), rand(dim, width) / 16, rand(dim)
    _, normed = REGISTRY["gated_add_ada_rms_norm"].reference(hidden, update, gate, modulation[0], modulation[1], 1e-6)
    expected = actions - 0.1 * (normed.float() @ out_weight.T + out_bias)
    embedded = (expected @ in_weight.T + in_bias).to(dtype)
    target = torch.full((rows, width), float("nan"), dtype=dtype, device=DEVICE)
    out = actions.clone()
    heads = (in_weight, in_bias, out_weight, out_bias)
    head.action_head(
        out, target, *heads, hidden=hidden, update=update, modulation=modulation, gate=gate, dt=-0.1, last=False
    )
    close(out, expected, dtype)
    close(target, embedded, dtype)
    again = actions.clone()
    head.action_head(
        again, target, *heads, hidden=hidden, update=update, modulation=modulation, gate=gate, dt=-0.1, last=True
    )
    assert torch.equal(again, out)
    head.action_head(again, target, *heads, hidden=None, update=None, modulation=None, gate=None, dt=-0.1, last=False)
    assert torch.equal(again, out)
    close(target, embedded, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_action_head_drawn_to_a_target(dtype: torch.dtype) -> None:
    from taktline_kernels.guidance import Guidance

    rows, width, dim = 4, 256, 32
    hidden, update, actions = rand(rows, width, dtype=dtype), rand(rows, width, dtype=dtype), rand(rows, dim)
    heads = (rand(width, dim), rand(width), rand(dim, width) / 16, rand(dim))
    state = {"hidden": hidden, "update": update, "modulation": rand(2, width), "gate": rand(width)}
    target, embedded = rand(rows, dim), torch.empty(rows, width, dtype=dtype, device=DEVICE)
    influence = torch.tensor([1.0, 0.5, 0.0, 0.25], device=DEVICE)
    outs = []
    for guidance in (None, Guidance(target, influence, 0.7, 3.0)):
        outs.append(actions.clone())
        head.action_head(outs[-1], embedded, *heads, **state, dt=-0.1, last=True, guidance=guidance)
    plain, drawn = outs
    velocity = (plain - actions) / -0.1
    expected = actions - 0.1 * (velocity - 3.0 * (target - (actions - 0.7 * velocity)) * influence[:, None])
    assert float((drawn - expected).norm() / (expected - plain).norm()) < 1e-5
    assert torch.equal(drawn[2], plain[2]), "no influence changes no bit"


def test_attention_with_a_token_as_an_fp8_row() -> None:
    config = {"block_m": 16, "block_n": 16, "num_warps": 4}
    dtype = torch.bfloat16 if HAS_GPU else torch.float16
    q, k, v = rand(2, 7, 4, 64, dtype=dtype), rand(2, 40, 64, dtype=dtype), rand(2, 40, 64, dtype=dtype)
    lengths = torch.tensor([37, 18], dtype=torch.int32, device=DEVICE)
    plain = attention.attention_cached(q, k, v, lengths, 0, config=config)
    scales = torch.full((14, 1), float("nan"), device=DEVICE)
    rows = attention.attention_cached(q, k, v, lengths, 0, config=config, scales=scales)
    assert rows.dtype == torch.float8_e4m3fn
    expected = plain.float().view(14, 256)
    assert torch.allclose(scales * 448, expected.abs().amax(dim=1, keepdim=True), rtol=4e-3)
    error = rows.float().view(14, 256) * scales - expected
    judged = torch.ones_like(error, dtype=torch.bool) if HAS_GPU else (expected / scales).frexp().mantissa.abs() < 0.96
    assert float((error * judged).norm() / expected.norm()) < 0.04


@pytest.mark.parametrize("dtype", DTYPES)
def test_assembled_prefix(dtype: torch.dtype) -> None:
    images, embedding = rand(10, 72, dtype=dtype), rand(30, 72, dtype=dtype)
    tokens = torch.tensor([[3, 29, 0], [7, 7, 1]], device=DEVICE)
    source = torch.tensor([[0, 9, 10, 11, 12, 0], [4, 13, 14, 15, 2, 2]], device=DEVICE)
    actual = prefix_rows.assemble(images, embedding, tokens, source)
    text = (embedding.float() * 72**0.5).to(dtype)[tokens.flatten()]
    expected = torch.cat((images, text))[source]
    close(actual, expected, dtype)
    assert torch.equal(actual[0, :2], expected[0, :2])
