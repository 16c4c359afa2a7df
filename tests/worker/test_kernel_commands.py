"""`taktline kernels`: recorded choices, candidates measured and refused, and a table that the selector reads back."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from taktline_kernels import selector as selector_module
from taktline_kernels.ops.dispatch import REGISTRY, Op, register
from taktline_kernels.selector import Choice, KernelSelector, parse_table
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.adapter import Phase
from taktline_worker.commands.kernels import app
from taktline_worker.models.pi.adapter import load
from taktline_worker.profiling import tuning
from taktline_worker.profiling.kernels import choice_by, packaged_table, record
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def folder(folders: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.lerobot(tmp_path_factory.mktemp("kernels") / "policy", "pi05")


def test_every_kind_of_call_is_recorded_once_with_its_count(folder: Path, config_of: Any) -> None:
    before = selector_module.default_selector(), Op.run
    calls = record(load(config_of(folder)).profile(), 2)
    assert (selector_module.default_selector(), Op.run) == before
    by_op: dict[str, int] = {}
    for call in calls:
        by_op[call.name] = by_op.get(call.name, 0) + call.calls
        assert call.choice.kernel == "torch"
        assert call.op is REGISTRY[call.name]
    assert len({call.key for call in calls}) == len(calls)
    architecture = load(config_of(folder)).processor.architecture
    assert by_op["euler_update"] == 10
    assert by_op["attention_vision"] == architecture.vision_layers
    assert by_op["attention_prefix"] == architecture.depth - 1
    assert by_op["attention_suffix"] == 10 * architecture.depth
    again = next(call for call in calls if call.name == "attention_suffix").again
    assert again is not None
    assert torch.equal(again(), again())


def test_what_another_gpu_would_run(folder: Path, config_of: Any) -> None:
    calls = record(load(config_of(folder, precision="bf16")).profile(), 1)
    rules = packaged_table("h200")
    choices = {call.name: choice_by(rules, "h200", call) for call in calls}
    assert choices["layer_norm"].kernel == "triton"
    assert choices["attention_vision"].kernel == "sdpa"
    assert "h200" in choices["attention_vision"].reason
    assert choices["euler_update"].kernel == "torch"
    with pytest.raises(TaktlineError) as caught:
        packaged_table("abacus")
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "h200" in caught.value.next_step


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """An operation with five accelerated versions, of which two are any good."""
    module = types.ModuleType("probe_kernels")
    monkeypatch.setitem(sys.modules, "probe_kernels", module)

    def version(shift: float) -> Callable[..., torch.Tensor]:
        return lambda x, config: x * 2 + shift

    def broken(x: torch.Tensor, config: Any) -> torch.Tensor:
        raise RuntimeError("made for other shapes")

    for name, function in {"fast": version(0), "slow": version(1e-7), "wrong": version(1.0), "broken": broken}.items():
        setattr(module, name, function)
    names = ("fast", "slow", "wrong", "broken")
    versions = {name: f"probe_kernels:{name}" for name in names} | {"absent": "no_such_module:x"}
    op = register("probe", lambda x: x * 2, versions)
    yield lambda x: op.run({"m": x.shape[0], "k": 3}, x, x)
    del REGISTRY["probe"]


class Subject:
    """Three calls of the probe, of two shapes."""

    def __init__(self, probe: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.probe = probe

    def phases(self, batch: int) -> list[Phase]:
        def run() -> None:
            for rows in (2, 5, 5):
                self.probe(torch.arange(3.0 * rows).view(rows, 3))

        return [Phase("only", run, 1.0, 1.0)]


def _microseconds(times: dict[str, float]) -> Callable[[Callable[[], Any]], float]:
    """A clock that knows each kernel by the choice that is forced while it is asked."""

    def measure(call: Callable[[], Any]) -> float:
        call()
        forced = selector_module.default_selector()
        assert isinstance(forced, tuning._Forced)
        return times[forced._choice.kernel] + (1.0 if dict(forced._key[1])["m"] == 5 else 0.0)

    return measure


def test_candidates_are_measured_and_bad_ones_refused(probe: Any) -> None:
    calls = record(Subject(probe), 1)
    assert [(call.shape["m"], call.calls) for call in calls] == [(2, 1), (5, 2)]
    said: list[str] = []
    results = tuning.tune(calls, _microseconds({"torch": 9.0, "fast": 3.0, "slow": 5.0}), said.append)
    assert len(said) == len(results) == 2
    for result in results:
        assert [each.kernel for each in result.candidates[:3]] == ["fast", "slow", "torch"]
        refused = {each.kernel: each.reason for each in result.candidates if each.us is None}
        assert set(refused) == {"wrong", "broken", "absent"}
        assert "away" in refused["wrong"]
        assert "made for other shapes" in refused["broken"]
        assert "no_such_module" in refused["absent"]


def test_some_operations_alone(probe: Any) -> None:
    calls = record(Subject(probe), 1)
    assert tuning.named(calls, []) == tuning.named(calls, ["probe"]) == calls
    with pytest.raises(TaktlineError, match="no operation 'prob'") as caught:
        tuning.named(calls, ["probe", "prob"])
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "probe" in caught.value.next_step


def test_what_runs_now_stays_unless_another_is_clearly_faster(probe: Any) -> None:
    calls = record(Subject(probe), 1)
    results = tuning.tune(calls, _microseconds({"torch": 3.0, "fast": 2.98, "slow": 5.0}), lambda text: None)
    assert [result.best.kernel for result in results] == ["torch", "torch"]


def test_the_table_makes_the_selector_choose_the_winners(
    probe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = record(Subject(probe), 1)
    results = tuning.tune(calls, _microseconds({"torch": 9.0, "fast": 3.0, "slow": 5.0}), lambda text: None)
    text = tuning.table(results, "NVIDIA H123", "the probe")
    assert "NVIDIA H123" in text.splitlines()[0]
    rules = parse_table(text)
    assert [dict(rule.bounds) for rule in rules] == [{"m": (2, 2), "k": (3, 3)}, {"m": (5, 5), "k": (3, 3)}, {}]
    assert "3.00 us; next slow 5.00" in rules[0].measured
    path = tmp_path / "h123.toml"
    path.write_text(text)
    monkeypatch.setenv("TAKTLINE_KERNEL_TABLE", str(path))
    for rows in (2, 5, 77):
        choice = KernelSelector().choose("probe", {"m": rows, "k": 3}, torch.float32, torch.device("cuda", 0))
        assert choice.kernel == "fast"


def test_settings_come_from_shipped_tables_and_the_grid() -> None:
    from taktline_worker.profiling.kernels import Recorded

    call = Recorded(
        "attention_cached",
        {"batch": 1, "rows": 400, "cache": 819},
        torch.bfloat16,
        torch.device("cpu"),
        Choice("triton", "now", {"block_m": 64, "block_n": 64, "splits": 13, "num_warps": 4, "num_stages": 2}),
    )
    found = list(tuning.candidates(call))
    assert found[0] == ("triton", dict(call.choice.config))
    assert len(found) == len({(kernel, tuple(sorted(config.items()))) for kernel, config in found}) >= 40
    assert ("triton", {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 2, "tma": 1}) in found


def test_commands(folder: Path) -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["explain", str(folder), "--batch", "2"], catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    for word in ("attention_vision", "torch", "reference"):
        assert word in shown.output
    listed = runner.invoke(app, ["explain", str(folder), "--table", "h200", "--json"], catch_exceptions=False)
    entries = json.loads(listed.stdout)
    assert {"op", "shape", "dtype", "calls", "kernel", "config", "reason"} == entries[0].keys()
    assert any(entry["kernel"] == "triton" for entry in entries)
    assert "bfloat16" in {entry["dtype"] for entry in entries}, "what a GPU serves in, not a CPU's default"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tuning_without_a_gpu_is_refused(folder: Path) -> None:
    done = CliRunner().invoke(app, ["tune", str(folder)])
    assert isinstance(done.exception, TaktlineError)
    assert "no CUDA device" in done.exception.message
    assert done.exception.next_step


@pytest.mark.gpu
def test_tuning_on_a_gpu(folder: Path, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    path = tmp_path / "table.toml"
    done = CliRunner().invoke(
        app,
        [
            *("tune", str(folder), "--batches", "1", "--runs", "3", "--precision", "fp32", "--out", str(path)),
            *("--ops", "layer_norm,geglu"),  # all of them compile for a minute and a half
        ],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    rules = parse_table(path.read_text())
    assert {rule.op for rule in rules} == {"layer_norm", "geglu"}
    assert all(rule.kernel in ("torch", "triton") and "us" in rule.measured for rule in rules if rule.bounds)
