"""Weights of a byte a number: what is stored, and the product's kernel at every way of cutting it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from taktline_kernels import fp8_rows, gpu_reference
from torch import Tensor

kernel = importlib.import_module("taktline_kernels.triton_impl.byte_weights")
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# The interpreter multiplies bf16 matrices as the integers they are stored in.
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
BAR = 6e-3 if HAS_GPU else 3e-6
FORMATS = ("fp8", "int8")


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE).to(DEVICE)


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("number_format", FORMATS)
def test_a_row_keeps_its_own_scale(number_format: Any) -> None:
    weight = rand(6, 64, seed=1) * torch.tensor([1e-6, 1.0, 1e4, 1.0, 1.0, 0.0], device=DEVICE)[:, None]
    stored = fp8_rows.byte_weight(weight, number_format)
    assert stored.values.element_size() == 1
    assert stored.bytes == 6 * 64 + 6 * 4
    back = stored.values.float() * stored.scales[:, None]
    assert torch.isfinite(back).all()
    assert not back[5].any()
    # Half a step: of the row's largest with whole numbers, of the number itself with e4m3's three bits.
    step = weight.float().abs().amax(1, keepdim=True) / 254 if number_format == "int8" else weight.float().abs() / 16
    smallest = stored.scales[:, None] * 2**-10
    assert bool(((back - weight.float()).abs() <= step * 1.01 + smallest).all())
    top = weight[:5].float().abs().argmax(1)
    kept = back[:5].gather(1, top[:, None])
    assert torch.allclose(kept, weight[:5].float().gather(1, top[:, None]), rtol=1e-5)


@pytest.mark.parametrize("number_format", FORMATS)
def test_a_16_bit_number_holds_every_stored_value(number_format: Any) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    values = every.view(torch.float8_e4m3fn if number_format == "fp8" else torch.int8).float()
    values = values[torch.isfinite(values)]
    assert torch.equal(values.bfloat16().float(), values)


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize(
    "config",
    [{}, {"split": 1}, {"split": 3}, {"block_n": 16, "block_k": 32, "split": 4}, {"block_m": 16, "block_k": 512}],
)
@pytest.mark.parametrize("gated", [False, True])
def test_every_cut_gives_the_product(number_format: Any, config: dict[str, int], gated: bool) -> None:
    x, weight = rand(19, 300, seed=2), fp8_rows.byte_weight(rand(2 * 20, 300, seed=3), number_format)
    expected = (gpu_reference.linear_geglu_bytes if gated else gpu_reference.linear_bytes)(x, weight)
    actual = kernel.linear(x, weight, config, gated=gated)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert distance(actual, expected) < BAR


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x, weight = rand(70, 256, seed=4), fp8_rows.byte_weight(rand(24, 256, seed=5), "int8")
    whole = kernel.linear(x, weight, {"split": 2})
    assert torch.equal(kernel.linear(x[:3], weight, {"split": 2}), whole[:3])
    assert torch.equal(kernel.linear(x[64:], weight, {"split": 2}), whole[64:])


def test_the_cut_follows_the_weight_alone() -> None:
    published = {
        "qkv": (2560, 1024, 64, 3),
        "out": (1024, 2048, 64, 8),
        "gate_up": (4096, 1024, 32, 1),
        "down": (1024, 4096, 64, 8),
    }
    for name, (channels, depth, block, parts) in published.items():
        assert kernel._parts(channels, depth, block, 128) == parts, name
    assert kernel._parts(64, 100, 64, 128) == 1


_COMPILED = """
import json, sys
from dataclasses import asdict
import torch
from taktline_kernels import ahead
from taktline_kernels.fp8_rows import ByteWeight
from taktline_kernels.triton_impl import byte_weights
from torch._subclasses.fake_tensor import FakeTensorMode

dtype = getattr(torch, sys.argv[2])
with ahead.recording(sys.argv[1]) as ledger, FakeTensorMode():
    def product(channels, depth, **settings):
        weight = torch.empty(channels, depth, dtype=dtype, device="cuda")
        scales = torch.empty(channels, dtype=torch.float32, device="cuda")
        x = torch.empty(50, depth, dtype=torch.bfloat16, device="cuda")
        byte_weights.linear(x, ByteWeight(weight, scales), {}, **settings)

    product(1024, 4096)
    product(8192, 1024, gated=True)
json.dump([asdict(one) for one in ledger.kernels.values()], sys.stdout)
"""


@pytest.mark.parametrize(("arch", "stored"), [("sm_86", "int8"), ("sm_90", "float8_e4m3fn")])
def test_it_compiles_and_fits_where_it_is_meant_to_run(arch: str, stored: str) -> None:
    """An A40's blocks have the least shared memory of the GPUs that it is for."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILED, arch, stored],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {one["name"] for one in found} == {"_product_kernel", "_sum_kernel"}
    for one in found:
        assert not one["error"], one
        assert one["stack_bytes"] == 0, one
