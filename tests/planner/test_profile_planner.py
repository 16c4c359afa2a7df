"""`taktline profile-planner` on meshes of this machine's cores: equal plans, a fitted model, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from taktline_protocol import TaktlineError
from taktline_worker.commands.profile_planner import profile_planner
from taktline_worker.profiling.ranks import default_sizes
from typer.testing import CliRunner


@pytest.fixture
def command() -> Any:
    app = typer.Typer()
    app.command()(profile_planner)
    return lambda *arguments: CliRunner().invoke(app, [str(one) for one in arguments])


def test_a_planner_is_measured_fitted_and_drawn(kit: Any, command: Any, tmp_path: Path) -> None:
    folder = kit.folder(tmp_path / "planner")
    engine = tmp_path / "engine.json"
    engine.write_bytes(msgspec.json.encode(kit.config(folder)))
    result = command(
        *(engine, "--ranks", "1,2,3", "--rounds", 1, "--candidates", 96, "--runs", 1, "--device", "cpu"),
        *("--out", tmp_path / "out", "--deadline-ms", 3_600_000),
    )
    assert result.exit_code == 0, result.output
    assert "all meshes gave the same plan" in result.output
    assert "1 rank keep 3.6e+06 ms" in result.output
    written = json.loads((tmp_path / "out" / "planner.json").read_text())
    assert [one["ranks"] for one in written["measured"]] == [1, 2, 3]
    assert written["shape"] == {"candidates": 96, "units": 3, "rounds": 1, "horizon": 2}
    assert written["plans_equal"] is True
    assert written["model"]["round_s"] > 0
    assert (tmp_path / "out" / "planner.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_measured_unless_stated_divides_a_rounds_units(kit: Any, tmp_path: Path) -> None:
    config = kit.config(kit.folder(tmp_path / "planner"), {"micro_batch": 100}, device="cpu")
    sizes = {candidates: default_sizes(config, candidates) for candidates in (800, 900, 700, 200)}
    assert sizes == {800: [1, 2, 4], 900: [1, 3, 9], 700: [1, 2, 7], 200: [1, 2]}


def test_what_cannot_be_measured_is_refused(kit: Any, command: Any, tmp_path: Path) -> None:
    folder = kit.folder(tmp_path / "planner")
    result = command(folder, "--ranks", "1,2", "--device", "cpu")
    assert isinstance(result.exception, TaktlineError)
    assert "do not determine" in result.exception.message
    other = msgspec.structs.replace(kit.config(folder).model, family="pi05")
    (tmp_path / "engine.json").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(kit.config(folder), model=other))
    )
    result = command(tmp_path / "engine.json")
    assert isinstance(result.exception, TaktlineError)
    assert "does not plan" in result.exception.message
    for wrong in (("--ranks", "one"), ("--precision", "fp4"), ("--device", "tpu")):
        refused = command(folder, *wrong)
        assert refused.exit_code == 2
        assert wrong[0] in refused.output
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    result = command(tmp_path / "other")
    assert isinstance(result.exception, TaktlineError)
    assert "no world model" in result.exception.message
