"""Files of every accepted layout load to the same weights; everything else is refused with the reason."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.checkpoint import file_sha256
from taktline_worker.models.registry import load_adapter
from taktline_worker.models.vjepa2_ac import rope
from taktline_worker.models.vjepa2_ac.config import (
    SidecarArchitecture,
    VJepa2Architecture,
    expected_encoder_shapes,
    expected_predictor_shapes,
    read_architecture,
)
from taktline_worker.models.vjepa2_ac.weights import open_checkpoint


@pytest.fixture(scope="module")
def published(kit: Any) -> Any:
    return open_checkpoint(kit.files["full"], kit.stated["full"])


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "checkpoint_trainer_style.pt"])
def test_other_prefixes_and_extra_entries_give_the_same_weights(
    kit: Any, published: Any, tmp_path: Path, name: str
) -> None:
    other = open_checkpoint(kit.other_form(name, tmp_path), kit.stated["full"])
    assert other.architecture == published.architecture
    for ours, theirs in ((other.encoder, published.encoder), (other.predictor, published.predictor)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_an_unzipped_torch_file_loads(kit: Any, published: Any, tmp_path: Path) -> None:
    content = torch.load(kit.files["full"], weights_only=True)
    torch.save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    other = open_checkpoint(tmp_path / "old.pt", kit.stated["full"])
    assert all(torch.equal(other.predictor[key], published.predictor[key]) for key in published.predictor)


def test_dimensions_come_from_the_shapes(published: Any) -> None:
    a = published.architecture
    assert (a.encoder_width, a.encoder_depth, a.encoder_mlp, a.encoder_head_dim) == (64, 2, 320, 32)
    assert (a.width, a.depth, a.mlp, a.head_dim) == (128, 2, 512, 64)
    assert (a.grid, a.tokens, a.frame_tokens) == (8, 64, 66)


def test_the_published_model_has_the_published_size() -> None:
    """Tensors and parameters of both towers, from shapes alone."""
    published = VJepa2Architecture(
        image_size=256, patch_size=16, encoder_width=1408, encoder_depth=40, encoder_heads=22, encoder_mlp=6144,
        width=1024, depth=24, heads=16, mlp=4096,
    )  # fmt: skip
    encoder, predictor = expected_encoder_shapes(published), expected_predictor_shapes(published)
    assert (len(encoder), len(predictor)) == (484, 300)
    assert sum(math.prod(shape) for shape in encoder.values()) == 1_012_173_952
    assert sum(math.prod(shape) for shape in predictor.values()) == 305_220_992
    assert (published.tokens, published.frame_tokens) == (256, 258)
    assert read_architecture(encoder, predictor, SidecarArchitecture()) == published  # nothing needs to be stated
    assert (rope.axis_width(published.head_dim), rope.axis_width(published.encoder_head_dim)) == (20, 20)


def _drop(content: Any) -> None:
    del content["predictor"]["module.predictor_proj.bias"]


def _poison(content: Any) -> None:
    content["encoder"]["module.norm.weight"][3] = float("nan")


def _reshape(content: Any) -> None:
    content["predictor"]["module.action_encoder.weight"] = torch.zeros(128, 8)


def _add(content: Any) -> None:
    content["predictor"]["module.mask_token"] = torch.zeros(1)


def _gap(content: Any) -> None:
    for key in [key for key in content["encoder"] if ".blocks.0." in key]:
        del content["encoder"][key]


def _twice(content: Any) -> None:
    content["encoder"]["norm.weight"] = content["encoder"]["module.norm.weight"].clone()


def _no_predictor(content: Any) -> None:
    content["target_encoder"] = content.pop("predictor")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_drop, "predictor_proj.bias"),
        (_poison, "norm.weight"),
        (_reshape, "(128, 8)"),
        (_add, "mask_token"),
        (_gap, "blocks"),
        (_twice, "two prefixes"),
        (_no_predictor, "'predictor'"),
    ],
)
def test_unfit_files_are_refused(kit: Any, tmp_path: Path, change: Callable[[Any], None], said: str) -> None:
    content = torch.load(kit.files["full"], weights_only=True)
    change(content)
    torch.save(content, tmp_path / "bad.pt")
    with pytest.raises(TaktlineError) as caught:
        open_checkpoint(tmp_path / "bad.pt", kit.stated["full"])
    assert caught.value.code is ErrorCode.CHECKPOINT_INVALID
    assert said in caught.value.message


class _Harmful:
    def __reduce__(self) -> Any:
        return (print, ("code of the file was run",))


def test_a_file_with_code_is_refused_and_not_run(tmp_path: Path, kit: Any, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"encoder": {}, "predictor": {}, "extra": _Harmful()}, tmp_path / "bad.pt")
    with pytest.raises(TaktlineError) as caught:
        open_checkpoint(tmp_path / "bad.pt", kit.stated["full"])
    assert caught.value.code is ErrorCode.CHECKPOINT_INVALID
    assert "was run" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["cut.pt", "cut.safetensors", "text.pt"])
def test_damaged_files_are_refused(kit: Any, tmp_path: Path, name: str) -> None:
    if name == "text.pt":
        (tmp_path / name).write_text("not a checkpoint")
    else:
        source = kit.files["full"] if name == "cut.pt" else kit.other_form("checkpoint.safetensors", tmp_path)
        whole = source.read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TaktlineError) as caught:
        open_checkpoint(tmp_path / name, kit.stated["full"])
    assert caught.value.code is ErrorCode.CHECKPOINT_INVALID


def test_heads_of_an_unpublished_width_must_be_stated(kit: Any) -> None:
    with pytest.raises(TaktlineError, match="nothing states its heads"):
        open_checkpoint(kit.files["full"], SidecarArchitecture(image_size=128))
    with pytest.raises(TaktlineError, match="do not divide"):
        open_checkpoint(kit.files["full"], SidecarArchitecture(128, 3, 2))
    with pytest.raises(TaktlineError, match="multiple of the patch"):
        open_checkpoint(kit.files["full"], SidecarArchitecture(100, 2, 2))


def test_a_folder_loads_through_the_registry(kit: Any, tmp_path: Path) -> None:
    folder = kit.folder(tmp_path / "planner", control_period_ms=200)
    digest = file_sha256(folder / "checkpoint.pt")
    adapter = load_adapter(kit.config(folder, sha256={"checkpoint.pt": digest}))
    description = adapter.description
    assert (description.family, description.cameras) == ("vjepa2-ac", ("camera", "goal"))
    assert (description.state_dim, description.action_dim, description.horizon) == (7, 7, 2)
    assert description.control_period_s == pytest.approx(0.2)
    longer = load_adapter(kit.config(folder, action_horizon=3, control_period_ms=250.0))
    assert (longer.description.horizon, longer.description.control_period_s) == (3, 0.25)


def _two_files(folder: Path) -> None:
    shutil.copy(folder / "checkpoint.pt", folder / "second.pth")


def _no_file(folder: Path) -> None:
    (folder / "checkpoint.pt").unlink()


def _unknown_field(folder: Path) -> None:
    (folder / "taktline.json").write_text(json.dumps({"horizons": 3}))


@pytest.mark.parametrize(
    ("break_it", "changes", "code"),
    [
        (_two_files, {}, ErrorCode.CHECKPOINT_INVALID),
        (_no_file, {}, ErrorCode.CHECKPOINT_INVALID),
        (_unknown_field, {}, ErrorCode.CONFIG_INVALID),
        (None, {"sha256": {"checkpoint.pt": "0" * 64}}, ErrorCode.CHECKPOINT_INVALID),
        (None, {"cameras": {"front": "camera"}}, ErrorCode.CONFIG_INVALID),
        (None, {"control_period_ms": 0.0}, ErrorCode.CONFIG_INVALID),
        (None, {"search": {"elites": 1}}, ErrorCode.SEARCH_INVALID),
        (None, {"search": {"candidates": 64, "max_candidates": 32}}, ErrorCode.SEARCH_INVALID),
        (None, {"search": {"pins": {"roll": 0.0}}}, ErrorCode.CONFIG_INVALID),
        (None, {"search": {"max_step_m": float("nan")}}, ErrorCode.SEARCH_INVALID),
    ],
)
def test_startup_refusals(
    kit: Any, tmp_path: Path, break_it: Callable[[Path], None] | None, changes: dict[str, Any], code: ErrorCode
) -> None:
    folder = kit.folder(tmp_path / "planner")
    if break_it is not None:
        break_it(folder)
    with pytest.raises(TaktlineError) as caught:
        load_adapter(kit.config(folder, **changes))
    assert caught.value.code is code
    assert caught.value.next_step


def test_safetensors_alone_in_a_folder(kit: Any, tmp_path: Path) -> None:
    folder = kit.folder(tmp_path / "planner", "checkpoint.safetensors")
    extra = load_file(folder / "checkpoint.safetensors") | {"target_encoder.x": torch.zeros(2)}
    save_file(extra, folder / "checkpoint.safetensors")
    assert load_adapter(kit.config(folder)).description.family == "vjepa2-ac"
