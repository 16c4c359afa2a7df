"""The selector: rules, bounds, fall-back and what it says about them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from taktline_kernels.gpu_table import GPU_KERNELS
from taktline_kernels.ops.dispatch import REGISTRY, Op
from taktline_kernels.selector import KernelSelector, parse_table

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


def test_unknown_gpu_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary 9000")
    with caplog.at_level(logging.WARNING):
        choice = KernelSelector().choose("linear", {"m": 1}, torch.bfloat16, torch.device("cuda", 0))
    assert choice.kernel == "torch"
    assert "no kernel table for this GPU" in caplog.records[0].message


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
        assert op.run({"m": 1}, Like(), 1) == 2
    assert "cannot be loaded" in caplog.records[0].message
