"""`taktline checkpoint inspect` on folders of the families that are not π."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from taktline_worker.inspect_command import app
from typer.testing import CliRunner

PLANNER = Path(__file__).resolve().parents[1] / "golden" / "vjepa2_ac_tiny" / "full"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["inspect", *(str(one) for one in arguments)])


def test_a_groot_folder_and_each_embodiment(kit: Any, tmp_path: Path) -> None:
    folder = kit.folder(tmp_path / "groot", description="two arms")
    shown = run(folder)
    assert shown.exit_code == 0, shown.output
    for text in ("gr00t-n1.7", "two arms", "slot 3; cameras exterior@-15, exterior", "eef_9d 9 relative", "50 ms"):
        assert text in shown.output
    report = json.loads(run(folder, "--json", "--statistics", "libero_sim").output)
    assert report["usable"] is True
    assert report["cameras"] == ["image", "wrist_image"]
    assert (report["state_dim"], report["action_dim"], report["horizon"]) == (4, 4, 6)
    assert list(report["sha256"]) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "nvidia/Cosmos-Reason2-2B"),
        (lambda folder: (folder / "statistics.json").write_text("{}"), "is for no embodiment"),
    ],
)
def test_a_bad_groot_folder_is_refused_with_the_next_step(kit: Any, tmp_path: Path, spoil: Any, said: str) -> None:
    folder = kit.folder(tmp_path / "groot")
    spoil(folder)
    for chosen in (("--statistics", "libero_sim"), ()):
        shown = run(folder, *chosen, "--quick")
        assert shown.exit_code == 1
        assert said in shown.output.replace("\n", " ")


def test_a_planner_folder(tmp_path: Path) -> None:
    stated = {"architecture": {"image_size": 128, "encoder_heads": 2, "predictor_heads": 2}}
    for name in ("checkpoint.pt", "checkpoint.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "checkpoint.pt":
            shutil.copy(PLANNER / name, folder / name)
        else:
            towers = torch.load(PLANNER / "checkpoint.pt", weights_only=True)
            save_file(
                {f"{tower}.{key}": value for tower in towers for key, value in towers[tower].items()}, folder / name
            )
        (folder / "taktline.json").write_text(json.dumps(stated))
        report = json.loads(run(folder, "--json").output)
        assert report["family"] == "vjepa2-ac"
        assert report["usable"] is True
        assert report["cameras"] == ["camera", "goal"]
        (folder / "taktline.json").unlink()
        assert run(folder).exit_code == 1
