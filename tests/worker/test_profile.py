"""`taktline profile` and `taktline bench engine`: what is counted, what is computed of it, and what a person gets."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import QuantisationOptions
from taktline_worker.adapter import Phase
from taktline_worker.commands import bench, profile
from taktline_worker.models.pi import synthetic
from taktline_worker.models.pi.adapter import load
from taktline_worker.models.pi.profile import PiProfile
from taktline_worker.models.pi.synthetic import PI05
from taktline_worker.models.pi.work import phase_work
from taktline_worker.profiling import report
from taktline_worker.profiling.subject import Request, check_batches, open_subject
from taktline_worker.profiling.timing import Roofs, Times, measure, measure_roofs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer import Typer
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def folder(folders: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: folders.lerobot(tmp_path_factory.mktemp(family) / "policy", family) for family in ("pi05", "pi0")}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_operations_are_those_that_run(folder: Any, config_of: Any, family: str, batch: int) -> None:
    """PyTorch's own counter sees the same products; the small heads and tables are left out by design."""
    adapter = load(config_of(folder[family], family))
    for phase in adapter.profile(views=2, prompt_tokens=16).phases(batch):
        # Written as matrix products, because the counter does not know the CPU's attention kernel.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            phase.run()
        counted = counter.get_total_flops()
        # Padded prefix slots are computed and mean nothing; heads and time layers weigh more in a tiny policy.
        assert 0.75 * counted <= phase.flops <= 1.02 * counted, phase.name


def test_work_of_the_published_policy() -> None:
    """6.14 ms on an H200 at one row with three cameras: the sum that the goals were set from."""
    work = phase_work(PI05, batch=1, views=3, prompt=1, horizon=50, steps=10)
    floors = {name: part.floor_ms(790e12, 4.3e12) for name, part in work.items()}
    assert sum(floors.values()) == pytest.approx(6.07, abs=0.02)
    assert work["expert"].intensity < 790e12 / 4.3e12 < work["prefix"].intensity
    half = phase_work(PI05, batch=1, views=3, prompt=1, horizon=50, steps=10, weight_bytes={"prefix": 1.0})
    assert half["prefix"].bytes == work["prefix"].bytes / 2
    assert half["vision"] == work["vision"]


def test_times() -> None:
    assert Times((1.0, 2.0, 30.0)).median_ms == 2.0
    assert Times(tuple(float(n) for n in range(200))).p99_ms == 198.0
    calls: list[int] = []
    times = measure(lambda: calls.append(1), torch.device("cpu"), warm_up=2, runs=50, limit_s=0.0)
    assert (len(times.ms), len(calls)) == (3, 5)  # three at least, whatever the limit
    assert len(measure(lambda: None, torch.device("cpu"), warm_up=0, runs=7).ms) == 7


def test_roofs_are_measured() -> None:
    roofs = measure_roofs(torch.device("cpu"), torch.float32)
    assert roofs.flops_per_s > 1e8
    assert roofs.bytes_per_s > 1e8
    assert roofs.ridge == roofs.flops_per_s / roofs.bytes_per_s


class Subject:
    """Two phases of known work that take no time of their own."""

    policy, precision, device, captured = "pi05", "fp32", "cpu", False
    shape = {"views": 1, "prompt_tokens": 2}  # noqa: RUF012

    def phases(self, batch: int) -> list[Phase]:
        return [Phase("vision", lambda: None, 6e9 * batch, 1e9), Phase("expert", lambda: None, 1e9 * batch, 4e9)]

    def whole(self, batch: int) -> Any:
        return lambda: None


def test_what_is_computed_of_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "measure_roofs", lambda device, dtype: Roofs(6e12, 1e12))
    times = {True: Times((3.0, 4.0, 5.0)), False: Times((2.0, 3.0, 4.0))}
    order: list[bool] = []

    def scripted(call: Any, device: Any, **settings: Any) -> Times:
        order.append(len(order) % 3 == 0)  # the whole request first, then the two phases
        return times[order[-1]]

    monkeypatch.setattr(report, "measure", scripted)
    said: list[str] = []
    (row,) = report.profile(Subject(), [2], said.append)
    assert (row.bench, row.batch, row.median_ms, row.n, row.gpus) == ("profile", 2, 4.0, 3, 0)
    assert (row.t_amort_ms, row.q_per_s) == (2.0, 500.0)
    vision, expert = row.phases
    assert (vision.share, expert.share) == (0.5, 0.5)
    assert vision.tflops == pytest.approx(4.0)  # 12 GFLOP in 3 ms
    assert vision.floor_ms == pytest.approx(2.0)  # bound by products
    assert expert.floor_ms == pytest.approx(4.0)  # bound by memory
    assert vision.of_roof == pytest.approx(2.0 / 3.0)
    assert vision.mfu == pytest.approx(2.0 / 3.0)
    assert expert.mfu < expert.of_roof
    assert row.floor_ms == pytest.approx(6.0)
    assert said == ["the machine's roofs", "batch 2: whole request", "batch 2: vision", "batch 2: expert"]
    order.clear()
    (swept,) = report.sweep(Subject(), [2], said.append)
    assert (swept.bench, swept.floor_ms, swept.phases) == ("engine", pytest.approx(6.0), [])


def _run(command: Any, *arguments: str, group: str = "") -> Any:
    app = Typer()
    if group:
        app.add_typer(command, name=group)
        arguments = (group, *arguments)

        @app.callback()
        def root() -> None:
            """Keeps the group."""
    else:
        app.command()(command)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


FAST = ("--batches", "2,1", "--runs", "3", "--limit-s", "0")


def test_profile_command_writes_table_rows_and_figures(folder: Any, tmp_path: Path) -> None:
    out = tmp_path / "profile"
    done = _run(profile.profile, str(folder["pi05"]), *FAST, "--out", str(out), "--views", "1", "--prompt-tokens", "9")
    assert done.exit_code == 0, done.output
    for word in ("vision", "prefix", "expert", "request", "MFU", "of roof", "views 1, prompt tokens 9"):
        assert word in done.output
    rows = json.loads((out / "profile.json").read_text())
    assert [row["batch"] for row in rows] == [1, 2]
    assert {"bench", "policy", "shape", "batch", "dtype", "gpus", "median_ms", "p99_ms", "n", "peer", "peer_median_ms",
            "ratio", "floor_ms", "versions", "date", "command"} <= rows[0].keys()  # fmt: skip
    assert rows[0]["shape"] == {"views": 1, "prompt_tokens": 9, "horizon": 10, "steps": 10}
    assert sum(phase["share"] for phase in rows[0]["details"]["phases"]) == pytest.approx(1.0)
    assert (out / "profile.png").read_bytes().startswith(b"\x89PNG")
    picture = (out / "profile.svg").read_text()
    assert "<svg" in picture


def test_profile_command_as_json_without_figures(folder: Any, tmp_path: Path) -> None:
    done = _run(profile.profile, str(folder["pi0"]), *FAST, "--out", str(tmp_path), "--no-plot", "--json")
    assert [row["policy"] for row in json.loads(done.stdout)] == ["pi0", "pi0"]
    assert not (tmp_path / "profile.png").exists()


def test_bench_command(folder: Any, config_of: Any, tmp_path: Path) -> None:
    config = tmp_path / "engine.json"
    config.write_bytes(msgspec.json.encode(config_of(folder["pi05"], solver_steps=2)))
    done = _run(bench.app, "engine", str(config), *FAST, "--out", str(tmp_path / "rows.json"), group="bench")
    assert done.exit_code == 0, done.output
    for word in ("T_sync ms", "T_amort ms", "Q /s", "steps 2"):
        assert word in done.output
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["bench"], row["batch"]) for row in rows] == [("engine", 1), ("engine", 2)]
    for row in rows:
        assert row["details"]["q_per_s"] == pytest.approx(1e3 * row["batch"] / row["median_ms"])
        assert row["details"]["t_amort_ms"] == pytest.approx(row["median_ms"] / row["batch"])
    assert json.loads(_run(bench.app, "engine", str(config), *FAST, "--json", group="bench").stdout)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"policy": "/nowhere"}, "no checkpoint folder"),
        ({"policy": "random:pi9"}, "random policy"),
        ({"views": 9}, "9 cameras"),
        ({"prompt_tokens": 900}, "900 prompt tokens"),
        ({"precision": "bf16", "quantisation": "int8"}, "the engine runs on a cpu"),
        ({"quantisation": "fp8"}, "engine.precision is fp32"),
    ],
)
def test_refusals(folder: Any, changes: dict[str, Any], word: str) -> None:
    values = {"policy": str(folder["pi05"]), "batches": (1,)} | changes
    with pytest.raises(TaktlineError) as caught:
        open_subject(Request(**values))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert word in caught.value.message


def test_batches() -> None:
    assert check_batches([4, 1, 4]) == (1, 4)
    for wrong in ([], [0], [2000]):
        with pytest.raises(TaktlineError):
            check_batches(wrong)
    for wrong in (("--batches", "1;2"), ("--precision", "fp4"), ("--device", "tpu")):
        assert _run(bench.app, "engine", "x", *wrong, group="bench").exit_code == 2


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_random_policies_need_no_checkpoint(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    small = dataclasses.replace(
        PI05, family=family, vision_layers=2, vision_width=64, vision_heads=4, vision_mlp=96, image_size=56, depth=2,
        head_dim=16, prefix_width=64, prefix_mlp=96, expert_width=32, expert_mlp=64, vocabulary=300,
    )  # fmt: skip
    monkeypatch.setattr(synthetic, "PI05" if family == "pi05" else "PI0", small)
    subject = open_subject(
        Request(f"random:{family}", (1, 2), device="cpu", views=2, prompt_tokens=5, solver_steps=3, action_horizon=4)
    )
    assert (subject.policy, subject.precision) == (family, "fp32")
    assert subject.shape == {"views": 2, "prompt_tokens": 5, "horizon": 4, "steps": 3}
    assert [phase.name for phase in subject.phases(2)] == ["vision", "prefix", "expert"]
    subject.whole(2)()


def test_an_expert_stored_in_bytes_moves_half_of_it() -> None:
    stored = QuantisationOptions(expert="int8", max_batch=4)
    runner = SimpleNamespace(device=torch.device("cuda"))
    plain, small = (PiProfile(runner, PI05, 50, 10, 3, 200, "bf16", way) for way in (None, stored))
    assert (plain.precision, small.precision) == ("bf16", "bf16+int8-expert")
    before, after = plain.work(4)["expert"], small.work(4)["expert"]
    assert before.flops == after.flops
    # 311.4 million weights a step in two bytes, or in one with a scale of four bytes for 14,848 rows a layer.
    weights = 18 * (1024 * (2 * 2048 + 512) + 3 * 1024 * 4096)
    rows = 18 * (2048 + 512 + 1024 + 2 * 4096 + 1024)
    assert before.bytes - after.bytes == pytest.approx(10 * (weights - 4 * rows))
    assert small.work(8)["expert"].bytes == plain.work(8)["expert"].bytes
    assert small.work(4)["prefix"].bytes == plain.work(4)["prefix"].bytes


@pytest.mark.gpu
def test_phases_of_captured_graphs_add_up(golden: Path, network: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from taktline_worker.models.pi.graphs import Bucket, GraphRunner
    from taktline_worker.models.pi.profile import PiProfile
    from taktline_worker.models.pi.weights import BF16_VISION, on_device
    from taktline_worker.profiling.kernels import record

    folder = golden / "pi05_tiny" / "full_real_heads"
    heads = json.loads((folder / "config_tiny.json").read_text())["vision"]["num_attention_heads"]
    eager, architecture = network.load(folder / "model.safetensors", heads, BF16_VISION)
    runner = GraphRunner(on_device(eager.weights, torch.device("cuda")), architecture, 50, [Bucket(2, 2, 60)])
    runner.capture()
    subject = PiProfile(runner, architecture, 50, 10, 2, 60, "bf16")
    (row,) = report.profile(subject, [2], lambda text: None, runs=10)
    assert row.gpus == 1
    assert row.versions["gpu"]
    assert 0.5 * row.median_ms < sum(phase.ms for phase in row.phases) < 2.0 * row.median_ms
    assert all(0.0 < phase.of_roof <= 1.1 for phase in row.phases)
    calls = record(subject, 2)
    assert "attention_cached" in {call.name for call in calls}
    # The expert's chain is no call, and the frames' patches have one kernel, beside `gpu`'s.
    assert all(call.again is not None for call in calls if call.name not in ("expert", "patches"))


def test_threads_are_told_to_wait_as_a_workers_do_before_torch_is_loaded() -> None:
    """With threads that spin, a shared machine's figures are twenty times what a worker takes there."""
    lines = (
        "import os, sys",
        "from taktline_protocol import TaktlineError",
        "from taktline_worker.commands import bench, kernels, profile",
        "assert 'torch' not in sys.modules",
        "try:",
        "    profile.open_profile('nowhere', (1,), 'cpu', '', 0, 0, 0, 0)",
        "except TaktlineError:",
        "    print(os.environ['OMP_WAIT_POLICY'])",
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for said in ("", "ACTIVE"):
        told = environment | ({"OMP_WAIT_POLICY": said} if said else {})
        command = [sys.executable, "-c", "\n".join(lines)]
        done = subprocess.run(command, env=told, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == (said or "PASSIVE"), done.stderr
