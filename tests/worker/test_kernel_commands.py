"""`taktline kernels`: recorded choices, what another GPU would run, and the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from taktline_kernels import selector as selector_module
from taktline_kernels.ops.dispatch import REGISTRY, Op
from taktline_kernels.selector import Choice, KernelSelector
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.adapter import Phase
from taktline_worker.commands.kernels import app
from taktline_worker.models.pi.adapter import load
from taktline_worker.profiling.kernels import choice_by, packaged_table, record, selecting_by
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


def test_a_call_that_runs_another_kernel_than_it_asked_for_is_counted_once() -> None:
    class Table(KernelSelector):
        def _decide(self, op: str, *call: Any) -> Choice:
            return Choice("absent", "table x: measured")

    op = Op("probe_absent", lambda x: x * 2, {"absent": "no_such_module:x"})
    x = torch.ones(1)

    class Subject:
        def phases(self, batch: int) -> list[Phase]:
            def run() -> None:
                for _ in range(2):
                    op.run({"m": batch}, x, x)
                for choice in (Choice("blocks", "first"), Choice("chain", "then")):
                    selector_module.default_selector().note("head", {"batch": batch}, x.dtype, x.device, choice)

            return [Phase("only", run, 1.0, 1.0)]

    with selecting_by(Table()):
        asked, told = record(Subject(), 1)  # type: ignore[arg-type]
    assert (asked.calls, asked.choice.kernel) == (2, "torch")
    assert "absent cannot be loaded" in asked.choice.reason
    assert (told.calls, told.choice.kernel) == (2, "chain")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tuning_without_a_gpu_is_refused(folder: Path) -> None:
    done = CliRunner().invoke(app, ["tune", str(folder)])
    assert isinstance(done.exception, TaktlineError)
    assert "no CUDA device" in done.exception.message
    assert done.exception.next_step
