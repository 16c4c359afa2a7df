"""The spellings and options of published checkpoints: names of tensors, tied embeddings, older processors, sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.models.pi.adapter import PiAdapter, load
from taktline_worker.models.pi.config import ArchitectureHints, PiArchitecture, expected_shapes, read_architecture
from taktline_worker.models.pi.keys import canonical_names, family_of

PUBLISHED = {
    "vision_layers": 27, "vision_width": 1152, "vision_heads": 16, "vision_mlp": 4304, "image_size": 224,
    "patch_size": 14, "depth": 18, "heads": 8, "head_dim": 256, "prefix_width": 2048, "prefix_mlp": 16384,
    "expert_width": 1024, "expert_mlp": 4096, "vocabulary": 257152, "action_width": 32,
}  # fmt: skip


@pytest.mark.parametrize(("family", "tensors", "millions"), [("pi05", 812, 3353.4), ("pi0", 777, 3238.0)])
def test_published_sizes_are_read_from_shapes_alone(family: Any, tensors: int, millions: float) -> None:
    published = PiArchitecture(family=family, **PUBLISHED)
    shapes = expected_shapes(published)
    assert len(shapes) + 1 == tensors  # the expert's unused lm_head is in the file too
    assert family_of(shapes) == family
    assert read_architecture(family, shapes, ArchitectureHints()) == published
    assert published.parameters / 1e6 == pytest.approx(millions, abs=0.05)


def _answer(path: Path, config_of: Any, observations: Any, pool: Any, family: str = "pi05") -> torch.Tensor:
    adapter: PiAdapter = load(config_of(path, family, solver_steps=2))
    return adapter.run([adapter.begin(observations.make(family), pool).result()], 1)


def _rename(path: Path, rename: Callable[[str], str | None]) -> None:
    stored = load_file(path / "model.safetensors")
    save_file(
        {new: tensor for name, tensor in stored.items() if (new := rename(name)) is not None},
        path / "model.safetensors",
    )


def _legacy(name: str) -> str:
    bare = name.removeprefix("model.").replace("paligemma.model.", "paligemma.")
    return bare.replace("language_model.", "language_model.model.").replace(
        "paligemma.lm_head", "paligemma.language_model.lm_head"
    )


SPELLINGS: dict[str, Callable[[str], str | None]] = {
    "without model.": lambda name: name.removeprefix("model."),
    "without vision_model.": lambda name: name.replace("vision_tower.vision_model.", "vision_tower."),
    "older Hugging Face": _legacy,
    "without lm_head": lambda name: None if "lm_head" in name else name,
    "embedding only as lm_head": lambda name: None if "embed_tokens" in name else name,
    "no unused expert head": lambda name: None if name.endswith("gemma_expert.lm_head.weight") else name,
}


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_every_spelling_gives_the_same_answer(
    folders: Any, config_of: Any, tmp_path: Path, observations: Any, pool: Any, family: str
) -> None:
    reference = _answer(folders.lerobot(tmp_path / "plain", family), config_of, observations, pool, family)
    for index, (spelling, rename) in enumerate(SPELLINGS.items()):
        path = folders.lerobot(tmp_path / str(index), family)
        _rename(path, rename)
        assert torch.equal(_answer(path, config_of, observations, pool, family), reference), spelling


def test_embed_tokens_wins_over_lm_head(
    folders: Any, config_of: Any, tmp_path: Path, observations: Any, pool: Any
) -> None:
    """LeRobot does not tie the two: what the prefix reads is embed_tokens."""
    path = folders.lerobot(tmp_path / "policy", "pi05")
    reference = _answer(path, config_of, observations, pool)
    stored = load_file(path / "model.safetensors")
    stored["model.paligemma_with_expert.paligemma.lm_head.weight"].zero_()
    save_file(stored, path / "model.safetensors")
    assert torch.equal(_answer(path, config_of, observations, pool), reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_stored_dtype_does_not_decide_the_running_one(
    folders: Any, config_of: Any, tmp_path: Path, observations: Any, pool: Any, dtype: torch.dtype, distance: Any
) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi05")
    reference = _answer(path, config_of, observations, pool)
    stored = load_file(path / "model.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in stored.items()}, path / "model.safetensors")
    assert load(config_of(path)).runner.dtype == torch.float32
    assert distance(_answer(path, config_of, observations, pool), reference) < 3e-2


def _edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_prompt_of_lerobot_up_to_v044(
    folders: Any, config_of: Any, tmp_path: Path, observations: Any, pool: Any
) -> None:
    current = load(config_of(folders.lerobot(tmp_path / "now", "pi05")))
    assert current.processor.conventions.state_prompt_width == 0
    path = folders.lerobot(tmp_path / "then", "pi05", state_prompt_width=32, truncate_prompt=True)
    legacy = load(config_of(path))
    normalised = legacy.processor.conventions.state_normaliser.forward(observations.make().state.astype("float64"))
    assert legacy.processor.prompt("go", normalised).endswith(f"{' 128' * 24};\nAction: ")
    assert legacy.processor.conventions.resize == "bilinear"


@pytest.mark.parametrize(("family", "width"), [("pi0", 32), ("pi05", 4)])
def test_padded_prompt_that_cannot_be(folders: Any, config_of: Any, tmp_path: Path, family: str, width: int) -> None:
    path = folders.lerobot(tmp_path / "policy", family, state_prompt_width=width)
    with pytest.raises(TaktlineError) as caught:
        load(config_of(path, family))
    assert caught.value.code is ErrorCode.CHECKPOINT_INVALID


def test_renamed_cameras_are_asked_for_under_the_robots_names(folders: Any, config_of: Any, tmp_path: Path) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi05")
    names = {"observation.images.front": "observation.images.base_0_rgb"}
    _edit(path / "policy_preprocessor.json", lambda c: c["steps"][0]["config"].update(rename_map=names))
    assert load(config_of(path)).description.cameras == ("front", "left_wrist_0_rgb", "right_wrist_0_rgb")


def test_relative_actions_mask_is_made_of_names(folders: Any, config_of: Any, tmp_path: Path) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi0")
    assert load(config_of(path, "pi0")).processor.conventions.relative_mask == (True,) * 6 + (False,)

    def rename_step(content: dict[str, Any]) -> None:
        step = next(s for s in content["steps"] if s["registry_name"] == "relative_actions_processor")
        step["registry_name"] = "delta_actions_processor"
        step["config"]["action_names"][2] = "Left_GRIPPER_finger"

    _edit(path / "policy_preprocessor.json", rename_step)
    mask = load(config_of(path, "pi0")).processor.conventions.relative_mask
    assert mask == (True, True, False, True, True, True, False)


def test_two_families_in_one_file_are_refused(golden: Path) -> None:
    names = set(load_file(golden / "pi05_tiny" / "model.safetensors")) | set(
        load_file(golden / "pi0_tiny" / "model.safetensors")
    )
    with pytest.raises(TaktlineError):
        family_of(canonical_names(sorted(names)).values())
