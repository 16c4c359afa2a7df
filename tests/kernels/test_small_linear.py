"""Linear layers for few rows and attention in one kernel: the Triton kernels against the torch references."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from taktline_kernels.ops.dispatch import REGISTRY
from torch import Tensor

small = importlib.import_module("taktline_kernels.triton_impl.small_linear")
masked = importlib.import_module("taktline_kernels.triton_impl.masked_attention")
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# The interpreter multiplies bf16 matrices as the integers they are stored in.
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
BAR = 6e-3 if HAS_GPU else 3e-6
CUTS = [
    {},
    {"split": 3, "block_k": 32},
    {"block_n": 16, "block_k": 16},
    {"block_n": 32, "split": 2, "ahead": 0},
    {"block_n": 32, "block_k": 32, "split": 2, "copy": 1},
    {"block_n": 16, "block_k": 64, "split": 2, "copy": 1},
]


COMPILED = """
import triton
import triton.language as tl
from taktline_kernels.triton_impl.part_sums import activated
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def kernel(source, out):
    at = tl.arange(0, 128)
    x = tl.load(source + at)
    tl.store(out + at, activated(x, 2))

source = ASTSource(kernel, {"source": "*fp32", "out": "*fp32"}, {})
print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


def rand(*shape: int, seed: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def distance(actual: Tensor, expected: Tensor) -> float:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rest", ["nothing", "bias", "gelu", "all"])
def test_a_linear_layer_and_what_follows_it(rest: str, cut: dict[str, int]) -> None:
    x, weight = rand(3, 7, 104, seed=1), rand(72, 104, seed=2)
    bias = None if rest == "nothing" else rand(72, seed=3)
    whole = rest == "all"
    gate = rand(72, seed=4, dtype=torch.float32) if whole else None
    residual = rand(3, 7, 72, seed=5) if whole else None
    arguments: tuple[Any, ...] = (x, weight, bias, "gelu" if rest in ("gelu", "all") else "none", gate, residual)
    expected = REGISTRY["linear"].reference(*arguments)
    assert distance(small.linear(*arguments, config=cut), expected) < BAR


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("biased", [True, False])
def test_the_norm_behind_a_residual_add_sums_the_parts(biased: bool, cut: dict[str, int]) -> None:
    x, weight = rand(2, 5, 96, seed=1), rand(72, 96, seed=2)
    residual, bias = rand(2, 5, 72, seed=3), rand(72, seed=4) if biased else None
    scale, shift = (rand(72, seed=seed, dtype=torch.float32) for seed in (5, 6))
    arguments = (x, weight, bias, residual, scale, shift, 1e-5)
    expected = REGISTRY["linear_add_layer_norm"].reference(*arguments)
    for actual, reference in zip(small.linear_add_layer_norm(*arguments, config=cut), expected, strict=True):
        assert distance(actual, reference) < BAR


@pytest.mark.parametrize("cut", [*CUTS, {"block_m": 16, "split": 2, "block_k": 32}, {"block_m": 32, "copy": 1}])
def test_the_rms_norm_behind_a_residual_add_in_fp32(cut: dict[str, int]) -> None:
    x, weight = rand(3, 17, 96, seed=1), rand(72, 96, seed=2)
    residual, scale = (rand(*shape, seed=3, dtype=torch.float32) for shape in ((3, 17, 72), (72,)))
    arguments = (x, weight, residual, scale, 1e-6)
    expected = REGISTRY["linear_add_rms_norm"].reference(*arguments)
    for actual, reference in zip(small.linear_add_rms_norm(*arguments, config=cut), expected, strict=True):
        assert distance(actual, reference) < BAR


def test_many_rows_go_in_blocks() -> None:
    x, weight, bias = rand(150, 64, seed=1), rand(40, 64, seed=2), rand(40, seed=3)
    arguments: tuple[Any, ...] = (x, weight, bias, "relu", None, None)
    expected = REGISTRY["linear"].reference(*arguments)
    for cut in ({}, {"block_m": 64, "block_k": 32}, {"block_m": 32, "copy": 1, "block_k": 32, "split": 2}):
        assert distance(small.linear(*arguments, config=cut), expected) < BAR


@pytest.mark.parametrize("cut", CUTS)
def test_relu_of_what_is_no_number_is_none(cut: dict[str, int]) -> None:
    x, weight, bias = rand(5, 64, seed=1), rand(40, 64, seed=2), rand(40, seed=3)
    x[2] = torch.nan
    found = small.linear(x, weight, bias, "relu", None, None, config=cut)
    assert torch.equal(found.isnan().any(1).cpu(), torch.arange(5) == 2)
    assert found[2].isnan().all()


def test_relu_keeps_what_is_no_number_as_compiled(tmp_path: Path) -> None:
    """Interpreted, a maximum keeps it whatever is asked for: what a GPU runs is compiled here, and not run."""
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = [line.split()[0] for line in ran.stdout.splitlines() if line.strip().startswith("max")]
    assert set(found) == {"max.NaN.f32"}


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x, weight = rand(60, 128, seed=1), rand(40, 128, seed=2)
    changed = torch.cat((x[:20], rand(40, 128, seed=3)))
    for cut in ({}, {"split": 2, "block_k": 32}):
        whole, other = (small.linear(each, weight, None, "none", None, None, config=cut) for each in (x, changed))
        assert torch.equal(whole[:20], other[:20])
        assert not torch.equal(whole[20:], other[20:])


def test_more_rows_than_the_kernel_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 1024, not 1025"):
        small.linear(rand(1025, 16, seed=1), rand(16, 16, seed=2), None, "none", None, None, config={})


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "width", "causal", "left_out", "block"),
    [
        (41, 41, 2, 48, False, False, 64),
        (41, 30, 2, 48, False, True, 16),
        (70, 70, 4, 16, True, False, 32),
        (5, 64, 4, 24, False, True, 16),
    ],
)
def test_attention(queries: int, keys: int, heads: int, width: int, causal: bool, left_out: bool, block: int) -> None:
    q = rand(2, queries, heads, width, seed=1)
    k, v = rand(2, keys, 2, 2, width, seed=2).unbind(2)
    valid = None
    if left_out:
        valid = torch.arange(keys, device=DEVICE)[None] < torch.tensor([[keys - 3], [1]], device=DEVICE)
    expected = REGISTRY["attention"].reference(q, k, v, valid, causal)
    actual = masked.attention(q, k, v, valid, causal, config={"block_m": block, "block_n": block})
    assert distance(actual, expected) < BAR


def test_a_gate_behind_attention() -> None:
    q, wide = rand(2, 41, 4, 16, seed=1), rand(2, 41, 100, seed=3)
    k, v = rand(2, 41, 2, 2, 16, seed=2).unbind(2)
    gate = wide[..., 8:72]  # tokens lie further apart than what they hold
    expected = REGISTRY["attention"].reference(q, k, v, None, True) * torch.sigmoid(gate.float()).view(q.shape)
    reference = REGISTRY["attention"].reference(q, k, v, None, True, gate)
    assert distance(reference, expected.to(DTYPE)) < BAR
    assert distance(masked.attention(q, k, v, None, True, gate, config={"block_m": 16}), expected.to(DTYPE)) < BAR


def test_a_row_without_any_key_is_finite_and_changes_no_other() -> None:
    q, k, v = (rand(2, 4, 2, 16, seed=seed) for seed in (1, 2, 3))
    valid = torch.tensor([[True, True, False, True], [False] * 4], device=DEVICE)
    actual = masked.attention(q, k, v, valid, False, config={})
    assert torch.isfinite(actual).all()
    alone = REGISTRY["attention"].reference(q[:1], k[:1], v[:1], valid[:1], False)
    assert distance(actual[:1], alone) < BAR


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
def test_overlapping_launches_of_a_block_wait_for_each_other() -> None:
    """GR00T's head at one robot, twice in a graph: whatever a kernel reads ahead of its turn must not be too early."""
    sizes = {"qkv": (4608, 1536), "out": (1536, 1536), "fc1": (6144, 1536), "fc2": (1536, 6144)}
    layers = {
        name: (rand(*size, seed=index) * 0.02, rand(size[0], seed=index + 9) * 0.1)
        for index, (name, size) in enumerate(sizes.items())
    }
    norm = [rand(1536, seed=seed, dtype=torch.float32) for seed in (20, 21)]
    given = [rand(1, 41, 1536, seed=seed) for seed in (22, 23)]
    copied = {"copy": 1} if torch.cuda.get_device_capability()[0] >= 9 else {}

    def block(x: Tensor, n: Tensor, run: Any) -> tuple[Tensor, Tensor]:
        q, k, v = run("linear", n, *layers["qkv"], "none", None, None).view(1, 41, 3, 32, 48).unbind(2)
        attended = run("attention", q, k, v, None, False).flatten(2)
        x, n = run("linear_add_layer_norm", attended, *layers["out"], x, *norm, 1e-5)
        hidden = run("linear", n, *layers["fc1"], "gelu", None, None)
        out: tuple[Tensor, Tensor] = run("linear_add_layer_norm", hidden, *layers["fc2"], x, *norm, 1e-5)
        return out

    def kernels(name: str, *arguments: Any) -> Any:
        if name == "attention":
            return masked.attention(*arguments, config={})
        if name == "linear":
            return small.linear(*arguments, config={"block_n": 64, "num_warps": 8})
        return small.linear_add_layer_norm(*arguments, config={"split": 6, "block_k": 256, "num_stages": 2, **copied})

    def twice(run: Any) -> Tensor:
        x, n = block(given[0], given[1], run)
        return block(x, n, run)[0]

    wanted = twice(lambda name, *arguments: REGISTRY[name].reference(*arguments))
    alone = twice(kernels)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = twice(kernels)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, alone)
    assert distance(alone, wanted) < 1e-2
