"""`taktline checkpoint inspect`: what it shows, what it finds, how it ends."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from taktline_worker.checkpoint import file_sha256
from taktline_worker.inspect_command import app
from typer.testing import CliRunner


def _inspect(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def policy(folders: Any, tmp_path: Path) -> Path:
    path: Path = folders.lerobot(tmp_path / "policy", "pi05", description="A tiny stand-in.")
    return path


def test_it_is_a_command_of_the_taktline_cli() -> None:
    (entry,) = [e for e in metadata.entry_points(group="taktline.commands") if e.name == "checkpoint"]
    assert entry.load() is app


def test_json_tells_everything(policy: Path) -> None:
    code, output = _inspect("--json", str(policy))
    report = json.loads(output)
    assert code == 0
    assert report["usable"] is True
    assert (report["family"], report["layout"], report["description"]) == ("pi05", "lerobot", "A tiny stand-in.")
    assert (report["state_dim"], report["action_dim"], report["horizon"]) == (8, 7, 10)
    assert report["cameras"] == ["base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"]
    assert report["dtypes"] == {"float32": 113}
    assert report["sha256"] == {"model.safetensors": file_sha256(policy / "model.safetensors")}
    assert report["control_period_ms"] == 50
    assert report["tokenizer"] == "tokenizer/tokenizer.json"
    assert report["prompt_tokens"] == 64
    statistics = load_file(policy / "policy_preprocessor_step_3_normalizer_processor.safetensors")
    shown = report["state_normalisation"]
    assert (shown["mode"], shown["width"]) == ("QUANTILES", 8)
    assert shown["low_range"][0] == pytest.approx(float(statistics["observation.state.q01"].min()))
    assert all(problem["severity"] == "note" for problem in report["problems"])


def test_parameters_are_counted_once(policy: Path) -> None:
    tensors = load_file(policy / "model.safetensors")
    expected = sum(tensor.numel() for name, tensor in tensors.items() if "lm_head" not in name)
    assert json.loads(_inspect("--json", str(policy))[1])["parameters"] == expected


def test_text_names_the_essentials(policy: Path) -> None:
    code, output = _inspect(str(policy))
    assert code == 0
    for word in ("pi05", "base_0_rgb", "QUANTILES", "10 actions", "50 ms", "a worker can serve this folder"):
        assert word in output


def test_a_broken_folder_ends_with_one_and_says_why(policy: Path) -> None:
    (policy / "policy_postprocessor_step_0_unnormalizer_processor.safetensors").unlink()
    code, output = _inspect(str(policy))
    assert code == 1
    assert "checkpoint_invalid" in output
    assert "unnormalizer" in output
    assert "a worker refuses this folder" in output
    report = json.loads(_inspect("--json", str(policy))[1])
    assert report["usable"] is False
    assert report["bytes"] > 0  # what could be read is still shown


def test_weights_that_are_not_finite_are_found_unless_quick(policy: Path) -> None:
    path = policy / "model.safetensors"
    tensors = load_file(path)
    tensors["model.action_in_proj.bias"][0] = float("nan")
    save_file(tensors, path)
    assert _inspect(str(policy))[0] == 1
    code, output = _inspect("--quick", "--json", str(policy))
    assert code == 0
    assert "sha256" not in json.loads(output)


def test_missing_control_period_and_flat_statistics_are_notes(folders: Any, tmp_path: Path) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi05", control_period_ms=None)
    name = path / "policy_preprocessor_step_3_normalizer_processor.safetensors"
    tensors = load_file(name)
    tensors["observation.state.q99"][2] = tensors["observation.state.q01"][2]
    save_file(tensors, name)
    code, output = _inspect("--json", str(path))
    report = json.loads(output)
    messages = " ".join(problem["message"] for problem in report["problems"])
    assert code == 0
    assert "control period" in messages
    assert "[2]" in messages


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_a_path_that_holds_no_checkpoint(tmp_path: Path, name: str) -> None:
    code, output = _inspect(str(tmp_path / name))
    assert code == 1
    assert "next:" in output


def test_a_folder_without_its_config_is_no_planners(folders: Any, tmp_path: Path) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi05")
    (path / "config.json").unlink()
    code, output = _inspect(str(path))
    assert code == 1
    assert "config.json" in output
    assert "planner.md" not in output


def test_an_openpi_folder(folders: Any, tmp_path: Path) -> None:
    report = json.loads(_inspect("--json", str(folders.openpi(tmp_path / "policy", preset="pi0_libero")))[1])
    assert (report["family"], report["layout"], report["resize"]) == ("pi0", "openpi", "pil")
    assert report["masked_cameras"] == ["right_wrist_0_rgb"]
    assert report["relative_actions"] == [True] * 6 + [False]
