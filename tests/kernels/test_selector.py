"""The selector: rules, bounds, fall-back and what it says about them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from taktline_kernels import selector as selector_module
from taktline_kernels.gpu_table import _LIMITS, GPU_KERNELS
from taktline_kernels.ops.dispatch import REGISTRY, Op, one_kernel
from taktline_kernels.selector import NO_TABLE, KernelSelector, Rule, parse_table

TABLE = """
[[rule]]
op = "linear"
kernel = "small"
dtype = "bfloat16"
bounds = { m = [1, 64] }
config = { block = 16 }
measured = "3 us"

[[rule]]
op = "linear"
kernel = "large"
"""


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> KernelSelector:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    return KernelSelector({"h200": parse_table(TABLE)})


def test_first_covering_rule_wins(h200: KernelSelector) -> None:
    cuda = torch.device("cuda", 0)
    small = h200.choose("linear", {"m": 64}, torch.bfloat16, cuda)
    assert (small.kernel, dict(small.config)) == ("small", {"block": 16})
    assert h200.choose("linear", {"m": 65}, torch.bfloat16, cuda).kernel == "large"
    assert h200.choose("linear", {"m": 64}, torch.float32, cuda).kernel == "large"
    assert [row[0] for row in h200.explain()] == ["linear"] * 3
    assert any("3 us" in row[3].reason for row in h200.explain())


def test_unknown_op_falls_back_and_says_so_once(h200: KernelSelector, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for rows in (1, 2):
            assert h200.choose("geglu", {"rows": rows}, torch.bfloat16, torch.device("cuda", 0)).kernel == "torch"
    assert len(caplog.records) == 1


def test_unknown_gpu_runs_defaults_and_says_which(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """References where there are any, else kernels that any GPU has; the log says both, `explain` each."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary 9000")
    monkeypatch.setattr(selector_module, "_shared_bytes", lambda device: 99 << 10)
    selector, gpu = KernelSelector(), torch.device("cuda", 0)
    with caplog.at_level(logging.WARNING):
        assert selector.choose("linear", {"m": 1}, torch.bfloat16, gpu).kernel == "torch"
        attention = {"batch": 1, "rows": 8, "cache": 9, "heads": 8, "head_dim": 256, "dense": 1}
        shapes = {"attention_cached": attention, "linear_geglu": {"m": 900, "n": 256, "k": 64}}
        for op in GPU_KERNELS:
            choice = selector.choose(op, shapes.get(op, {"m": 1, "n": 8, "k": 8}), torch.bfloat16, gpu)
            assert choice.kernel in ("triton", "cublas", "cublaslt", "separate"), "no kernel that is for Hopper alone"
            assert "Imaginary 9000" in choice.reason or "one kernel" in choice.reason
    assert [record.message for record in caplog.records] == [NO_TABLE]
    assert "those that exist on a GPU only" in NO_TABLE
    told = {op: choice for op, _, _, choice in selector.explain()}
    assert told["attention_cached"].config == {"block_n": 32}, "a small GPU's blocks, as they are launched"
    assert told["rope_cache"].kernel == "triton"


def test_a_rule_whose_kernel_is_not_written_for_a_call_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `explain` names is what runs: the selector knows what a kernel takes, and nobody decides after it."""
    table = """
[[rule]]
op = "linear_geglu"
kernel = "hopper"
bounds = { m = [300, 1000] }

[[rule]]
op = "attention_cached"
kernel = "hopper"

[[rule]]
op = "attention_cached"
kernel = "triton"
config = { block_m = 64 }
"""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    selector, gpu = KernelSelector({"h200": parse_table(table)}), torch.device("cuda", 0)
    fits = {"m": 768, "n": 16384, "k": 2048}
    assert selector.choose("linear_geglu", fits, torch.bfloat16, gpu).kernel == "hopper"
    for other in ({"n": 16384 + 64}, {"k": 2048 + 32}):
        assert selector.choose("linear_geglu", {**fits, **other}, torch.bfloat16, gpu).kernel == "cublas"
    shape = {"batch": 1, "rows": 800, "cache": 900, "heads": 8, "head_dim": 256, "dense": 1}
    assert selector.choose("attention_cached", shape, torch.bfloat16, gpu).kernel == "hopper"
    for other in ({"heads": 4}, {"head_dim": 128}, {"dense": 0}):
        choice = selector.choose("attention_cached", {**shape, **other}, torch.bfloat16, gpu)
        assert (choice.kernel, dict(choice.config)) == ("triton", {"block_m": 64})
    assert selector.choose("attention_cached", shape, torch.float32, gpu).kernel == "triton"


def test_cpu_runs_the_reference() -> None:
    assert KernelSelector().choose("linear", {"m": 1}, torch.float32, torch.device("cpu")).kernel == "torch"


@pytest.mark.parametrize("text", ['[[rule]]\nop = "x"', '[[rule]]\nop = "x"\nkernel = "y"\nbounds = { m = 3 }'])
def test_bad_table_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"rule needs op and kernel|must be"):
        parse_table(text)


def test_packaged_tables_name_known_kernels() -> None:
    import pkgutil
    from importlib import import_module, resources

    package = import_module("taktline_kernels.ops")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        import_module(module.name)  # it may register operations
    for file in resources.files("taktline_kernels").joinpath("tables").iterdir():
        if file.name.endswith(".toml"):
            for rule in parse_table(file.read_text(encoding="utf-8")):
                known = REGISTRY[rule.op].implementations() if rule.op in REGISTRY else GPU_KERNELS[rule.op]
                assert rule.kernel in known, rule
                assert rule.measured, rule


def test_every_rule_of_a_packaged_table_can_decide_a_call() -> None:
    from importlib import resources

    for file in resources.files("taktline_kernels").joinpath("tables").iterdir():
        if file.name.endswith(".toml"):
            rules = parse_table(file.read_text(encoding="utf-8"))
            dead = [(place, rule) for place, rule in enumerate(rules) if _shadowed(rule, rules[:place])]
            assert not dead, file.name
    few = Rule("probe", "a", "bfloat16", {"m": (1, 64)})
    assert _shadowed(Rule("probe", "b", "bfloat16", {"m": (8, 8), "n": (1, 2)}), [few])
    assert _shadowed(Rule("probe", "b", "bfloat16"), [Rule("probe", "a")])
    for other in (Rule("probe", "b"), Rule("probe", "b", "bfloat16", {"m": (8, 65)}), Rule("other", "b", "bfloat16")):
        assert not _shadowed(other, [few])


def _shadowed(rule: Rule, before: Sequence[Rule]) -> bool:
    """Whether one of the rules before it decides all its calls; a kernel that refuses some shapes leaves them."""
    return any(
        (first.op, first.dtype or rule.dtype) == (rule.op, rule.dtype)
        and ((first.op, first.kernel) not in _LIMITS or first.kernel == rule.kernel)
        and all(
            name in rule.bounds and low <= rule.bounds[name][0] and rule.bounds[name][1] <= high
            for name, (low, high) in first.bounds.items()
        )
        for first in before
    )


def test_an_input_to_differentiate_runs_the_reference() -> None:
    op = Op("probe", lambda x: x * 2, {"gone": "taktline_kernels.no_such_module:probe"})
    x = torch.ones(2, requires_grad=True)
    op.run({"m": 2}, x, x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


def test_a_table_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('[[rule]]\nop = "probe"\nkernel = "mine"\nmeasured = "1 us"')
    monkeypatch.setenv("TAKTLINE_KERNEL_TABLE", str(path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    gpu = torch.device("cuda", 0)
    choice = KernelSelector().choose("probe", {"m": 1}, torch.float32, gpu)
    assert (choice.kernel, choice.reason) == ("mine", f"table {path}: 1 us")
    assert KernelSelector().choose("other", {"m": 1}, torch.float32, gpu).kernel == "torch"
    selector = KernelSelector()
    monkeypatch.delenv("TAKTLINE_KERNEL_TABLE")
    assert selector.choose("probe", {"m": 1}, torch.float32, gpu).reason == "no rule of table h200 covers it"
    monkeypatch.setenv("TAKTLINE_KERNEL_TABLE", str(path))
    again = selector.choose("probe", {"m": 1}, torch.float32, gpu)
    assert again == choice, "what the shipped table had decided is not kept"
    assert [one for *_, one in selector.explain()] == [choice]
    monkeypatch.setenv("TAKTLINE_KERNEL_TABLE", str(tmp_path / "gone.toml"))
    with pytest.raises(FileNotFoundError):
        KernelSelector().choose("probe", {"m": 1}, torch.float32, gpu)


def test_missing_module_falls_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    op = Op("probe", lambda x: x + 1, {"gone": "taktline_kernels.no_such_module:probe"})
    selector = KernelSelector({"h200": parse_table('[[rule]]\nop = "probe"\nkernel = "gone"')})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("taktline_kernels.ops.dispatch.default_selector", lambda: selector)

    class Like:
        dtype, device, requires_grad = torch.float32, torch.device("cuda", 0), False

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert op.run({"m": 1}, Like(), 1) == 2
    assert len(caplog.records) == 1
    assert "cannot be loaded" in caplog.records[0].message
    ((_, _, _, told),) = selector.explain()
    assert told.kernel == "torch", "what runs, not what the table wanted"
    assert "kernel gone cannot be loaded" in told.reason


def test_operations_with_one_kernel_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    selector = KernelSelector()
    monkeypatch.setattr("taktline_kernels.ops.dispatch.default_selector", lambda: selector)

    def rope_cache(x: torch.Tensor, *, suffix: bool) -> float:
        return float(x.sum()) + suffix

    assert one_kernel(rope_cache)(torch.ones(2, 3), suffix=True) == 7.0
    ((op, shape, _, _),) = selector.explain()
    assert (op, shape) == ("rope_cache", "rows=2 width=3")


def test_every_operation_of_a_gpu_is_in_the_selectors_list() -> None:
    pytest.importorskip("triton")
    from taktline_kernels import gpu

    helpers = {"CACHE_MARGIN", "ByteWeight", "Fp8Rows", "byte_weight", "pack_gate_up", "quantise_weight"}
    asks_as = {
        "linear": "product",
        "linear_add_layer_norm": "product_add_layer_norm",
        "linear_bytes": "byte_product",
        "linear_geglu_bytes": "byte_product",
        "attention_cached_fp8": "attention_cached",
        "layer_norm": "stream_layer_norm",
        "linear_add_rms_norm": "linear_add_rms_norm",
    }
    for name in set(gpu.__all__) - helpers:
        assert asks_as.get(name, name) in {**GPU_KERNELS, **REGISTRY}, name
