"""The fused GPU operations against what they state in plain PyTorch: interpreted without a GPU, compiled with one."""

from __future__ import annotations

import importlib
from inspect import isfunction
from typing import Any

import pytest
import torch
from taktline_kernels import gpu_reference, ops
from taktline_kernels import selector as selector_module
from taktline_kernels.guidance import Guidance
from taktline_kernels.ops.dispatch import REGISTRY
from taktline_kernels.selector import Choice, KernelSelector
from torch import Tensor

gpu = importlib.import_module("taktline_kernels.gpu")
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# The interpreter multiplies bf16 matrices as the integers they are stored in.
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
BAR = 6e-3 if HAS_GPU else 3e-6
GENERATOR = torch.Generator().manual_seed(23)


def rand(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype).to(DEVICE)


def wide(*shape: int) -> Tensor:
    return rand(*shape, dtype=torch.float32)


def close(actual: Any, expected: Any) -> None:
    if isinstance(actual, gpu.Fp8Rows):
        assert torch.allclose(actual.scales, expected.scales, rtol=BAR)
        left, right = (rows.values.float().view(len(rows.scales), -1) * rows.scales for rows in (actual, expected))
        # A rounding apart in fp32, two values may be an FP8 step apart. The interpreter loses the carry of those that
        # are rounded up to a power of two, and leaves half of them.
        judged = torch.ones_like(left, dtype=torch.bool) if HAS_GPU else (left * 2 - right).abs() >= 1e-3 * right.abs()
        assert float(judged.float().mean()) > 0.9
        assert float(((left - right) * judged).norm() / right.norm()) < 0.02
        return
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert float((actual.double() - expected.double()).norm() / expected.double().norm()) < BAR


def same(name: str, *args: Any, **options: Any) -> None:
    actual, expected = (getattr(module, name)(*args, **options) for module in (gpu, gpu_reference))
    pairs = zip(actual, expected, strict=True) if isinstance(actual, tuple) else [(actual, expected)]
    for ours, theirs in pairs:
        close(ours, theirs)


def test_every_function_has_a_reference() -> None:
    here = {name for name, member in vars(gpu_reference).items() if isfunction(member) and not name.startswith("_")}
    assert {name for name in gpu.__all__ if isfunction(getattr(gpu, name))} == here


def test_products() -> None:
    x, weight, bias = rand(3, 5, 64), rand(32, 64), rand(32)
    same("linear", x, weight, bias)
    same("linear", x, weight)
    same("linear_geglu", x, gpu.pack_gate_up(weight))
    same("linear_swiglu", x, gpu.pack_gate_up(weight))


def test_products_with_the_norm_behind_them() -> None:
    x, weight, bias, scale, shift = rand(3, 5, 64), rand(32, 64), rand(32), wide(32), wide(32)
    for stream in (torch.float32, DTYPE):
        same("linear_add_layer_norm", x, weight, bias, rand(3, 5, 32, dtype=stream), scale, shift, 1e-6)
    same("linear_add_rms_norm", x, weight, rand(3, 5, 32), rand(32), 1e-6)


@pytest.mark.parametrize("kernel", ["small", "hopper", "cublaslt"])
def test_whatever_kernel_a_rule_names_is_run(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules of an operation hold for all policies, so none may be passed over for being another policy's."""

    class Rules(KernelSelector):
        def choose(self, op: str, *args: Any) -> Choice:
            return Choice(kernel, "", {"split": 2}) if op == "linear_add_rms_norm" else super().choose(op, *args)

    given: list[Any] = []
    monkeypatch.setattr(selector_module, "_default", Rules())
    monkeypatch.setitem(
        REGISTRY["linear_add_rms_norm"]._loaded, kernel, lambda *args, config: (given.append(config), *args)
    )
    x, weight, residual, norm = rand(3, 64), rand(32, 64), rand(3, 32), rand(32)
    assert gpu.linear_add_rms_norm(x, weight, residual, norm, 1e-6)[1:] == (x, weight, residual, norm, 1e-6)
    assert given == [{"split": 2}]


def test_what_the_library_would_read_wrongly_is_refused() -> None:
    cublaslt = pytest.importorskip("taktline_kernels.cuda.cublaslt")
    x, weight, residual, norm = rand(3, 64), rand(32, 64), rand(3, 32), rand(32)
    with pytest.raises(ValueError, match="contiguous"):
        cublaslt.linear(rand(64, 3).t(), weight, None, False, 0)
    with pytest.raises(ValueError, match="contiguous"):
        cublaslt.linear_add_rms_norm(rand(64, 3).t(), weight, residual, norm, 1e-6, {"parts": 2})
    for parts in (0, 3, 16):
        with pytest.raises(ValueError, match=f"{parts} parts of a depth of 64"):
            cublaslt.linear_add_rms_norm(x, weight, residual, norm, 1e-6, {"parts": parts})


@pytest.mark.parametrize("number_format", ["fp8", "int8"])
@pytest.mark.parametrize("channels", [48, 96])
def test_products_with_weights_of_a_byte(number_format: Any, channels: int) -> None:
    x = rand(2, 7, 520)
    weight = gpu.byte_weight(rand(channels, 520) * wide(channels, 1).to(DTYPE), number_format)
    same("linear_bytes", x, weight)
    same("linear_geglu_bytes", x, weight)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_products_of_a_gpu() -> None:
    x, weight, bias = rand(3, 5, 64), rand(32, 64), rand(32)
    same("linear_gelu", x, weight, bias)
    same("linear_fp8", gpu.quantise_rows(x), gpu.quantise_weight(weight), bias)


@pytest.mark.parametrize("stream", [torch.float32, DTYPE])
def test_norms(stream: torch.dtype) -> None:
    x, y, weight, bias = rand(6, 72, dtype=stream), rand(6, 72), wide(72), wide(72)
    for other in (None, y):
        same("layer_norm", x, other, weight, bias, 1e-6, DTYPE)
        same("layer_norm_fp8", x, other, weight, bias, 1e-6)
    same("rms_norm_fp8", rand(6, 72), y, weight, 1e-6)


def test_rows_in_fp8() -> None:
    for name in ("quantise_rows", "gelu_fp8", "geglu_fp8", "swiglu_fp8", "relu2_fp8"):
        same(name, rand(4, 96))


def test_prefix() -> None:
    source = torch.tensor([[0, 5, 6, 7], [3, 8, 2, 2]], device=DEVICE)
    tokens = torch.tensor([[4, 1], [9, 9]], device=DEVICE)
    same("assemble", rand(6, 40), rand(12, 40), tokens, source)


@pytest.mark.parametrize("suffix", [False, True])
def test_rotation_and_cache(suffix: bool) -> None:
    cos, sin = ops.rope_table(torch.arange(32, device=DEVICE), 32)
    lengths = torch.tensor([9, 4], dtype=torch.int32, device=DEVICE)
    qkv, results = rand(2, 6, 6 * 32), []
    for module in (gpu, gpu_reference):
        mine, keys, values = qkv.clone(), *(torch.zeros(2, 20, 32, dtype=DTYPE, device=DEVICE) for _ in "kv")
        module.rope_cache(mine, keys, values, cos, sin, lengths, heads=4, suffix=suffix)
        results.append((mine[:, :, : 4 * 32], keys, values))
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("first_alone", [False, True])
def test_attention_over_a_cache(first_alone: bool) -> None:
    q, cache = rand(2, 6, 4, 64), rand(2, 2 * 30 + gpu.CACHE_MARGIN, 64)
    keys, values = (part[:60].view(2, 30, 64) for part in cache)
    lengths = torch.tensor([17, 3], dtype=torch.int32, device=DEVICE)
    same("attention_cached", q, keys, values, lengths, 6, first_alone=first_alone)
    if not first_alone:
        same("attention_cached_fp8", q, keys, values, lengths, 6)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_between_two_solver_steps(last: bool, guided: bool) -> None:
    influence = torch.tensor([1.0, 0.5, 0.0, 0.25, 0.0, 1.0], device=DEVICE)
    guidance = Guidance(wide(6, 32), influence, 0.7, 3.0) if guided else None
    actions, hidden, update = wide(6, 32), rand(2, 4, 256), rand(2, 4, 256)
    projections = (wide(256, 32), wide(256), wide(32, 256) / 16, wide(32))
    results = []
    for module in (gpu, gpu_reference):
        mine, embedded = actions.clone(), torch.zeros(6, 256, device=DEVICE)
        module.action_head(
            mine, embedded, projections, hidden, update, (wide_scale, wide_shift), wide_gate,
            dt=-0.1, last=last, before=1, silu=True, guidance=guidance,
        )  # fmt: skip
        results.append((mine, embedded))
    for ours, theirs in zip(*results, strict=True):
        if theirs.any():
            close(ours, theirs)


wide_scale, wide_shift, wide_gate = wide(256), wide(256), wide(256)
