"""The gated delta net's operations: references against the token recurrence, Triton kernels against references."""

from __future__ import annotations

import importlib

import pytest
import torch
from taktline_kernels.ops.dispatch import REGISTRY
from torch import Tensor

kernels = importlib.import_module("taktline_kernels.triton_impl.delta")
gates = importlib.import_module("taktline_kernels.triton_impl.gates")
ops = importlib.import_module("taktline_kernels.ops.delta")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
# One token, less than a chunk, whole chunks, and one more.
LENGTHS = [1, 7, 16, 33, 64, 65]


def rand(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def given(length: int, dtype: torch.dtype, key: int = 16, value: int = 24, seed: int = 0) -> tuple[Tensor, ...]:
    """Two rows of three heads; decays from hardly any to nearly all."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (rand(generator, 2, length, 3, key, dtype=dtype) for _ in range(2))
    v = rand(generator, 2, length, 3, value, dtype=dtype)
    a, b = 2 * rand(generator, 2, length, 3), rand(generator, 2, length, 3)
    return q, k, v, a, b, -(0.5 + rand(generator, 3).abs()), 0.2 * rand(generator, 3)


def recurrence(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor) -> Tensor:
    """Token by token in fp64, as the rule is stated."""
    q, k, v, a, b, rate, dt_bias = (x.double() for x in (q, k, v, a, b, rate, dt_bias))
    decay, beta = rate * torch.nn.functional.softplus(a + dt_bias), torch.sigmoid(b)
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / q.shape[-1] ** 0.5
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    state = q.new_zeros(q.shape[0], q.shape[2], v.shape[-1], k.shape[-1])
    found = []
    for t in range(q.shape[1]):
        state = state * decay[:, t].exp()[..., None, None]
        missing = v[:, t] - torch.einsum("bhvk,bhk->bhv", state, k[:, t])
        state = state + (beta[:, t, :, None] * missing)[..., None] * k[:, t, :, None]
        found.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
    return torch.stack(found, dim=1)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_chunked_rule_is_the_recurrence(length: int, dtype: torch.dtype) -> None:
    args = given(length, dtype)
    found = ops.gated_delta_rule(*args)
    assert found.dtype == dtype
    assert error(found, recurrence(*args)) < (2e-6 if dtype == torch.float32 else 4e-3)  # the answer is rounded once


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("key", "value"), [(16, 24), (32, 32), (24, 48)])
def test_the_triton_rule_is_the_recurrence(length: int, key: int, value: int) -> None:
    args = given(length, torch.float32, key, value)
    found = kernels.gated_delta_rule(*args, config={})
    assert found.shape == (2, length, 3, value)
    assert error(found, recurrence(*args)) < 1e-5


@pytest.mark.parametrize("length", LENGTHS)
def test_the_triton_rule_in_bf16(length: int) -> None:
    args = given(length, torch.bfloat16)
    found = kernels.gated_delta_rule(*args, config={"value_block": 16})
    assert found.dtype == torch.bfloat16
    assert error(found, recurrence(*args)) < 1e-2


@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("length", [1, 33, 80])
def test_the_triton_rule_is_the_same_in_chunks_of_any_size(chunk: int, length: int) -> None:
    args = given(length, torch.float32)
    assert error(kernels.gated_delta_rule(*args, config={"chunk": chunk}), recurrence(*args)) < 1e-5


def test_the_triton_rule_reads_gates_that_are_part_of_a_wider_projection() -> None:
    q, k, v, a, b, rate, bias = given(20, torch.float32)
    wide = torch.cat((v.flatten(2), a, b), dim=-1)
    a, b = wide[..., -6:-3], wide[..., -3:]
    found = kernels.gated_delta_rule(q, k, v, a, b, rate, bias, config={})
    assert error(found, recurrence(q, k, v, a, b, rate, bias)) < 1e-5


@pytest.mark.parametrize("rule", ["reference", "triton"])
def test_hardly_decaying_and_repeated_keys_stay_exact(rule: str) -> None:
    """The system is worst where every key is the same and nothing is forgotten."""
    q, k, v, a, b, rate, bias = given(48, torch.float32, seed=3)
    k = k[:, :1].expand_as(k)
    args = (q, k, v, a, b.abs(), rate * 1e-4, bias)
    found = ops.gated_delta_rule(*args) if rule == "reference" else kernels.gated_delta_rule(*args, config={})
    assert error(found, recurrence(*args)) < 1e-4


def test_strong_decay_does_not_overflow() -> None:
    q, k, v, a, b, rate, bias = given(40, torch.float32)
    args = (q, k, v, a, b, rate * 50, bias)
    for found in (ops.gated_delta_rule(*args), kernels.gated_delta_rule(*args, config={})):
        assert found.isfinite().all()
        assert error(found, recurrence(*args)) < 2e-5  # sums of large logs cancel


@pytest.mark.parametrize("rule", ["reference", "triton"])
def test_a_token_sees_no_later_one(rule: str) -> None:
    args = given(37, torch.float32)
    run = ops.gated_delta_rule if rule == "reference" else lambda *a: kernels.gated_delta_rule(*a, config={})
    whole, part = run(*args), run(*(x[:, :21] for x in args[:5]), *args[5:])
    assert error(whole[:, :21], part) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 128])
def test_gated_norm(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, gate = (3 * rand(generator, 5, 3, width, dtype=dtype) for _ in range(2))
    weight = rand(generator, width)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    exact = exact * gate.double() * torch.sigmoid(gate.double())
    for found in (
        ops.rms_norm_silu_gate(x, weight, gate),
        gates.rms_norm_silu_gate(x, weight, gate, 1e-6, config={}),
    ):
        assert found.dtype == dtype
        assert error(found, exact) < (1e-6 if dtype == torch.float32 else 6e-3)


def test_gated_norm_of_a_part_of_a_wider_projection() -> None:
    generator = torch.Generator().manual_seed(5)
    x, wide = rand(generator, 2, 5, 3, 24), rand(generator, 2, 5, 100)
    gate, weight = wide[..., 4:76].view(2, 5, 3, 24), rand(generator, 24)
    expected = ops.rms_norm_silu_gate(x, weight, gate)
    for heads in (1, 2, 4):
        assert error(gates.rms_norm_silu_gate(x, weight, gate, 1e-6, config={"heads": heads}), expected) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 4, 19])
def test_convolution_and_split(tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    widths = (24, 24, 40)
    wide = rand(generator, 2, tokens, 100, dtype=dtype)
    x, weight = wide[..., :88], rand(generator, 88, 4, dtype=dtype)  # a part of a wider projection
    padded = torch.cat((x.new_zeros(2, 3, 88), x), dim=1).double()
    exact = sum(padded[:, tap : tap + tokens] * weight[:, tap].double() for tap in range(4))
    exact = exact * torch.sigmoid(exact)
    for found in (
        ops.conv_silu_split(x, weight, widths),
        kernels.conv_silu_split(x, weight, widths, config={"block": 32, "rows": 2}),
    ):
        assert [part.shape[-1] for part in found] == list(widths)
        assert all(part.is_contiguous() and part.dtype == dtype for part in found)
        assert error(torch.cat(found, dim=-1), exact) < (1e-6 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_gate_of_a_part_of_a_wider_projection(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    x, wide = rand(generator, 2, 5, 72, dtype=dtype), rand(generator, 2, 5, 100, dtype=dtype)
    exact = x.double() * torch.sigmoid(wide[..., 4:76].double())
    for gate in (
        wide[..., 4:76],
        wide[..., 4:76].contiguous(),
        wide[..., 4:76].transpose(0, 1).contiguous().transpose(0, 1),
    ):
        for found in (ops.sigmoid_gate(x, gate), gates.sigmoid_gate(x, gate, config={"block": 32})):
            assert found.dtype == dtype
            assert error(found, exact) < (1e-6 if dtype == torch.float32 else 6e-3)


def test_all_are_registered_with_a_kernel() -> None:
    for name in ("rms_norm_silu_gate", "conv_silu_split", "gated_delta_rule", "sigmoid_gate"):
        assert "triton" in REGISTRY[name].implementations()
        assert callable(REGISTRY[name].load("triton"))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_published_sizes_on_a_gpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (rand(generator, 1, 290, 16, 128, dtype=dtype) for _ in range(3))
    a, b = rand(generator, 1, 290, 16), rand(generator, 1, 290, 16)
    args = (q, k, v, a, b, -rand(generator, 16).abs(), rand(generator, 16))
    found = kernels.gated_delta_rule(*args, config={})
    assert error(found, recurrence(*args)) < (1e-5 if dtype == torch.float32 else 5e-3)
