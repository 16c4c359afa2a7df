"""The world model's products with what follows them: plain statements, and on Hopper one kernel each."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from taktline_kernels.ops import frame_products, frames
from taktline_kernels.ops.dispatch import REGISTRY
from taktline_kernels.ops.frame_products import Weights
from taktline_kernels.selector import parse_table
from torch import Tensor
from torch.nn import functional

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
GENERATOR = torch.Generator().manual_seed(17)
BAR = 4e-3
UNIT, ROWS_UNIT = 2.0**-5, 0.07
hopper = pytest.mark.skipif(
    not HAS_GPU or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU: its matrix units"
)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(DEVICE)


def error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def factored_angles() -> Tensor:
    """(2, 256, 64): elements turn by the frame, the row, the column (20 each), four by nothing."""
    steps = torch.arange(16)[:, None] * torch.rand(20, generator=GENERATOR)
    by_frame = torch.randn(1, 20, generator=GENERATOR).expand(256, -1)
    whole = torch.cat((by_frame, steps.repeat_interleave(16, dim=0), steps.repeat(16, 1), torch.zeros(256, 4)), dim=1)
    sign = torch.tensor([-1.0, 1.0]).repeat(32)
    return torch.stack((whole.cos(), whole.sin() * sign)).to(DEVICE)


class Case:
    """Rows of two kinds, and what their product with `weight` (n, k) is before anything follows it."""

    def __init__(self, kind: str, rows: int, n: int, k: int) -> None:
        weight, bias = (rand(n, k) / k**0.5).bfloat16(), 0.3 * rand(n)
        if kind == "e4m3":
            self.rows = frames.quantise_by(rand(rows, k), ROWS_UNIT)
            self.weights = Weights.quantised(weight, bias, ROWS_UNIT)
            values, scales = frames.quantise_rows(weight)
            self.product = (self.rows.float() * ROWS_UNIT) @ (values.float() * scales).t() + bias
        else:
            self.rows, self.weights = rand(rows, k).bfloat16(), Weights.of(weight, bias)
            self.product = self.rows.float() @ weight.float().t() + bias

    def turned(self, angles: Tensor, candidates: int) -> Tensor:
        turned = self.product.clone()
        cos, sin = (torch.cat((table, table[:1], table[:1])) for table in angles)
        REGISTRY["frame_rotate"].reference(turned, cos, sin, candidates)
        return turned


KINDS = ("plain", "e4m3")


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_that_turns_is_a_product_and_the_pass_that_turns(kind: str) -> None:
    candidates, angles = 2, factored_angles()
    case = Case(kind, candidates * 258, 3 * 256, 128)
    found = torch.empty_like(case.product)
    REGISTRY["frame_turned_product"].reference(case.rows, case.weights.in_pairs(), angles, candidates, found)
    assert error(found, case.turned(angles, candidates)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_and_gelu(kind: str) -> None:
    case = Case(kind, 6, 256, 128)
    expected = functional.gelu(case.product, approximate="tanh")
    unit = UNIT if kind == "e4m3" else None
    found = REGISTRY["frame_gelu_product"].reference(case.rows, case.weights.in_fours(), unit)
    assert found.dtype == case.rows.dtype
    assert error(found.float() * (unit or 1.0), expected) < (0.04 if unit else BAR)


class SumCase:
    """A product of e4m3 operands with scales of rows and of outputs, and a stream."""

    def __init__(self, rows: int, n: int, k: int) -> None:
        self.rows, self.scales = frames.quantise_rows(rand(rows, k))
        self.weight, scales = frames.quantise_rows(rand(n, k) / k**0.5)
        self.weight_scales = scales.t().contiguous()
        self.stream = rand(rows, n).bfloat16()
        self.product = (self.rows.float() * self.scales) @ (self.weight.float() * scales).t()
        self.exact = self.stream.float() + self.product
        self.rounded = self.stream + self.product.bfloat16()

    def add(self, kernel: Callable[..., object], **config: object) -> Tensor:
        found = self.stream.clone()
        kernel(self.rows, self.scales, self.weight, self.weight_scales, found, **config)
        return found


@pytest.mark.parametrize("rows", [1, 300])
def test_a_product_that_adds_onto_the_stream(rows: int) -> None:
    case = SumCase(rows, 256, 128)
    assert float((case.add(REGISTRY["frame_sum_product"].reference) == case.rounded).float().mean()) > 0.999


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(("rows", "depth"), [(516, 1024), (25800, 1024), (25800, 4096)])
def test_a_product_that_adds_onto_the_stream_on_hopper(rows: int, depth: int) -> None:
    case = SumCase(rows, 1024, depth)
    kernel = importlib.import_module("taktline_kernels.cuda.fp8_sum").sum_product
    found = case.add(kernel, config={})
    # The product and the sum are rounded to bf16, by 2^-8 of them at most, and sums of products are nearly in fp32.
    assert error(found.float(), case.exact) < BAR
    steps = (case.exact.abs() + case.product.abs()) * 2.0**-8
    assert bool(((found.float() - case.exact).abs() <= 2 * steps + 2.0**-7).all())
    assert torch.equal(found, case.add(kernel, config={}))
    assert torch.equal(found, case.add(frame_products.frame_sum_product))


def test_a_sum_product_refuses_what_it_would_read_wrongly() -> None:
    kernel = pytest.importorskip("taktline_kernels.cuda.fp8_sum").sum_product
    case = SumCase(4, 256, 128)
    wrong: dict[str, Tensor] = {
        "rows": case.rows.float(),
        "scales": case.scales.double(),
        "stream": case.stream.float(),
        "weight": case.weight.t().contiguous().t(),
    }
    for name, tensor in wrong.items():
        given = SumCase(4, 256, 128)
        setattr(given, name, tensor)
        with pytest.raises(ValueError, match="contiguous e4m3"):
            given.add(kernel, config={})


def test_a_sum_product_refuses_operands_that_do_not_fit() -> None:
    kernel = pytest.importorskip("taktline_kernels.cuda.fp8_sum").sum_product
    case, other = SumCase(300, 256, 128), SumCase(4, 128, 256)
    wrong: dict[str, Tensor] = {
        "rows": SumCase(300, 256, 64).rows,
        "scales": case.scales[:1],
        "weight": SumCase(300, 256, 64).weight,
        "weight_scales": other.weight_scales,
        "stream": case.stream[:4],
    }
    for name, tensor in wrong.items():
        given = SumCase(300, 256, 128)
        setattr(given, name, tensor)
        with pytest.raises(ValueError, match="got weights"):
            given.add(kernel, config={})


def test_threads_that_share_a_sum_product_keep_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads the scales' addresses from an operation that all calls of one shape share."""
    module = pytest.importorskip("taktline_kernels.cuda.fp8_sum")
    state: dict[int, object] = {}
    mixed: list[bool] = []

    def call(name: str, *arguments: Any) -> None:
        time.sleep(0.001)  # lets the other thread run
        if name == "cublasLtMatmulDescSetAttribute":
            state[arguments[1]] = arguments[2]._obj.value
        elif name == "cublasLtMatmul":
            weight, rows = arguments[3].value, arguments[5].value
            mixed.append(asked[weight, rows] != (state[17], state[18]))

    library = importlib.import_module("taktline_kernels.cuda.cublaslt")
    for name, stub in (("call", call), ("handle", lambda _: None), ("workspace", lambda *_: torch.empty(1))):
        monkeypatch.setattr(library, name, stub)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    product = object.__new__(module._SumProduct)
    for name in ("_device", "_operation", "_weight", "_x", "_out"):
        setattr(product, name, None)
    product.algorithms, product._alone = [SimpleNamespace(algorithm=module.ctypes.c_int())], threading.Lock()
    cases = [SumCase(4, 256, 128) for _ in range(2)]
    asked = {
        (one.weight.data_ptr(), one.rows.data_ptr()): (one.weight_scales.data_ptr(), one.scales.data_ptr())
        for one in cases
    }

    def work(case: SumCase) -> None:
        for _ in range(10):
            product.run(case.rows, case.scales, case.weight, case.weight_scales, case.stream)

    threads = [threading.Thread(target=work, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mixed == [False] * 20


def chosen(op: str, dtype: torch.dtype, **shape: int) -> str:
    """The kernel that an H200's table names."""
    text = resources.files("taktline_kernels").joinpath("tables", "h200.toml").read_text(encoding="utf-8")
    return next(rule.kernel for rule in parse_table(text) if rule.op == op and rule.matches(shape, dtype))


def test_the_table_names_kernels_for_what_they_take() -> None:
    """A call outside runs where there is no such limit, and raises nothing."""
    for k, kernel in ((1024, "cublaslt"), (4096, "cublaslt"), (1000, "torch"), (2048, "torch")):
        assert chosen("frame_sum_product", frames.FP8, rows=25800, n=1024, k=k) == kernel
    assert chosen("frame_sum_product", frames.FP8, rows=25800, n=1000, k=1024) == "torch"
    assert chosen("frame_sum_product", torch.bfloat16, rows=25800, n=1024, k=1024) == "torch"
    norm = {"rows": 25800, "width": 1024, "updates": 0, "offset": 1, "affine": 0, "keep": 0}
    assert chosen("frame_norm", torch.bfloat16, **norm, bytes=1) == "cuda_fp8"
    for other in ({"updates": 1}, {"offset": 0}, {"affine": 1}, {"keep": 1}, {"width": 512}):
        assert chosen("frame_norm", torch.bfloat16, **(norm | {"bytes": 1} | other)) == "triton"
    norm |= {"bytes": 2, "affine": 1}
    for updates, kernel in ((0, "triton"), (1, "cuda"), (2, "cuda")):
        assert chosen("frame_norm", torch.int16, **(norm | {"updates": updates, "keep": updates // 2})) == kernel
    assert chosen("frame_norm", torch.int16, **(norm | {"updates": 1, "affine": 0})) == "triton"


def test_the_norm_tells_the_table_all_that_its_rules_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, int]] = []
    monkeypatch.setattr(frames._NORM, "run", lambda shape, *_: told.append(dict(shape)))
    stream, vector = torch.zeros(2, 8), torch.zeros(8)
    frames.frame_norm(stream, (stream,), None, vector, vector, 1e-6, torch.bfloat16, keep=stream)
    frames.frame_norm(frames.split(stream), (), vector, None, None, 1e-6, frames.FP8)
    assert told == [
        {"rows": 2, "width": 8, "bytes": 2, "updates": 1, "offset": 0, "affine": 1, "keep": 1},
        {"rows": 2, "width": 8, "bytes": 1, "updates": 0, "offset": 1, "affine": 0, "keep": 0},
    ]


def test_products_refuse_what_they_would_read_or_write_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("taktline_kernels.cuda.wide_product")
    launched: list[int] = []
    monkeypatch.setattr(module.nvrtc, "processors", lambda device: 1)
    monkeypatch.setattr(module.nvrtc, "tensor_map", lambda *_: None)
    monkeypatch.setattr(module, "_kernel", lambda *_: SimpleNamespace(launch=lambda *_, **__: launched.append(1)))
    rows, angles = 258, factored_angles()
    plain, eight = Case("plain", rows, 768, 128), Case("e4m3", rows, 768, 128)
    out = torch.empty(rows, 768, dtype=torch.bfloat16, device=DEVICE)

    def turn(case: Case = plain, *, weights: Weights | None = None, **other: Any) -> None:
        given = {"rows": case.rows, "weights": weights or case.weights, "angles": angles, "candidates": 1, "out": out}
        module.turned_product(**(given | other), config={})

    for case, unit in ((plain, None), (eight, UNIT)):
        turn(case)
        module.gelu_product(case.rows, case.weights, unit, config={})
        with pytest.raises(ValueError, match="has a unit"):
            module.gelu_product(case.rows, case.weights, None if unit else UNIT, config={})
    assert len(launched) == 4
    for one, two in ((plain, eight), (eight, plain)):
        with pytest.raises(ValueError, match="of bf16, or of e4m3"):
            turn(one, weights=two.weights)
        with pytest.raises(ValueError, match="of bf16, or of e4m3"):
            module.gelu_product(one.rows, two.weights, UNIT if two is eight else None, config={})
        with pytest.raises(ValueError, match="of bf16, or of e4m3"):
            turn(one, weights=replace(one.weights, scales=two.weights.scales))
        narrow = Case("plain" if one is plain else "e4m3", rows, 768, 32)
        for shapes in ({"weights": narrow.weights}, {"rows": narrow.rows}):
            with pytest.raises(ValueError, match="does not fit"):
                turn(one, **shapes)
        with pytest.raises(ValueError, match="does not fit"):  # less than 128 bytes a row
            turn(narrow)
        for vector in ("bias", *(("scales",) if one is eight else ())):
            for wrong in (eight.weights.bias[:1], eight.weights.bias.double()):
                with pytest.raises(ValueError, match="768 biases"):
                    turn(one, weights=replace(one.weights, **{vector: wrong}))
    with pytest.raises(ValueError, match="does not fit"):
        turn(out=out[:257])
    gaps = torch.empty(rows, 256, dtype=torch.bfloat16, device=DEVICE)[:, ::2]
    with pytest.raises(ValueError, match="contiguous operands"):
        turn(rows=gaps)
    for wrongly in (
        {"angles": angles[:, :64]},
        {"angles": angles.double()},
        {"out": out.float()},
        {"candidates": 2},
    ):
        with pytest.raises(ValueError, match="turns candidates of 256"):
            turn(**wrongly)
    assert len(launched) == 4


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("candidates", "others"), [(1, 2), (3, 6), (100, 200), (1, 200)])
def test_a_product_that_turns_on_hopper(kind: str, candidates: int, others: int) -> None:
    kernel = importlib.import_module("taktline_kernels.cuda.wide_product").turned_product
    case, angles = Case(kind, candidates * 256 + others, 3072, 1024), factored_angles()
    found, again = (torch.empty(len(case.product), 3072, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    for out in (found, again):
        kernel(case.rows, case.weights.in_pairs(), angles, candidates, out, config={})
    expected = case.turned(angles, candidates)
    for part in range(3):
        columns = slice(part * 1024, (part + 1) * 1024)
        assert error(found[:, columns], expected[:, columns]) < BAR
    assert torch.equal(found, again)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "n"), [(2, 256), (1001, 512), (25800, 4096)])
def test_a_product_and_gelu_on_hopper(kind: str, rows: int, n: int) -> None:
    kernel = importlib.import_module("taktline_kernels.cuda.wide_product").gelu_product
    case = Case(kind, rows, n, 1024)
    unit = UNIT if kind == "e4m3" else None
    found = kernel(case.rows, case.weights.in_fours(), unit, config={})
    expected = functional.gelu(case.product, approximate="tanh")
    assert error(found.float() * (unit or 1.0), expected) < (0.04 if unit else BAR)
    if unit:
        # Sums are fp32, or nearly: what is left is the result's own rounding, one step where it falls between two.
        assert float((found.float() == frames.quantise_by(expected, unit).float()).float().mean()) > 0.9
