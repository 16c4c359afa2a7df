"""openpi folders: presets, statistics by asset, delta actions, ALOHA's joint space."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.models.pi import aloha
from taktline_worker.models.pi.adapter import PiAdapter, load
from taktline_worker.models.pi.presets import PRESETS, SLOTS
from taktline_worker.models.pi.weights import solver_times

STATED = {
    "action_horizon": 12,
    "relative_mask": [True] * 6 + [False],
    "adapt_to_pi": False,
    "cameras": {"front": "base_0_rgb", "wrist": "left_wrist_0_rgb"},
}


@pytest.fixture
def stated(folders: Any, config_of: Any, tmp_path: Path) -> PiAdapter:
    return load(config_of(folders.openpi(tmp_path / "policy", **STATED), "pi0"))


def test_conventions_of_a_folder_without_preset(stated: PiAdapter) -> None:
    conventions = stated.processor.conventions
    assert conventions.layout == "openpi"
    assert (conventions.state_dim, conventions.action_dim, conventions.horizon) == (8, 7, 12)
    assert (conventions.prompt, conventions.prompt_tokens, conventions.resize) == ("text_then_newline", 48, "pil")
    assert conventions.state_normaliser.mode == "MEAN_STD"
    assert conventions.state_normaliser.low.dtype == np.float64
    assert stated.description.cameras == ("front", "wrist")
    assert torch.equal(stated.runner.weights.times, solver_times(10, accumulate=True))


def test_raw_request_to_robot_actions(stated: PiAdapter, golden: Path, observations: Any, pool: Any) -> None:
    """The parts are each held to openpi's values elsewhere; here their order: normalise, run, restore, add state."""
    case = load_file(golden / "preprocess" / "openpi" / "values.safetensors")
    images = {"front": observations.image("png", 60, 80), "wrist": observations.image("png", 56, 56)}
    state = case["state"][1]
    prepared = stated.begin(observations.make(images=images, state=state, instruction="wipe the\ntable"), pool).result()
    assert prepared.row.tokens.tolist() == case["tokens.pi0.1"][case["token_mask.pi0.1"]].tolist()
    assert prepared.row.pixels.shape == (2, 3, 112, 112)
    assert prepared.row.state is not None
    reference = case["mean_std.state_normalised"][1]
    assert np.allclose(prepared.row.state[:8].numpy(), reference, rtol=1e-6, atol=1e-6)
    assert not prepared.row.state[8:].any()
    outputs = stated.run([prepared], 1)
    (actions,) = stated.finish([prepared], outputs)
    assert isinstance(actions, np.ndarray)
    assert actions.shape == (12, 7)
    statistics = json.loads((golden / "preprocess" / "openpi" / "norm_stats.json").read_text())["norm_stats"]["actions"]
    plain = outputs[0, :, :7].numpy() * (np.array(statistics["std"]) + 1e-6) + np.array(statistics["mean"])
    plain[:, :6] += state[:6]
    assert np.allclose(actions, plain, rtol=1e-6, atol=1e-6)


def _refused(config: Any, code: ErrorCode, *words: str) -> None:
    with pytest.raises(TaktlineError) as caught:
        load(config)
    assert caught.value.code is code
    for word in words:
        assert word in f"{caught.value.message} {caught.value.next_step}"


@pytest.mark.parametrize("name", sorted(STATED))
def test_what_no_file_tells_is_not_guessed(folders: Any, config_of: Any, tmp_path: Path, name: str) -> None:
    path = folders.openpi(tmp_path / "policy", **{key: value for key, value in STATED.items() if key != name})
    _refused(config_of(path, "pi0"), ErrorCode.CONFIG_INVALID, name, "preset")


def test_preset_states_everything(folders: Any, config_of: Any, tmp_path: Path) -> None:
    adapter = load(config_of(folders.openpi(tmp_path / "policy", preset="pi0_libero"), "pi0"))
    conventions = adapter.processor.conventions
    assert conventions.horizon == 50
    assert conventions.relative_mask == (True,) * 6 + (False,)
    assert adapter.description.cameras == ("image", "wrist_image")
    assert [slot.key for slot in conventions.slots if not slot.names] == ["right_wrist_0_rgb"]


@pytest.mark.parametrize(("preset", "word"), [("pi05_libero", "pi05"), ("pi0_moon", "unknown")])
def test_preset_that_does_not_fit(folders: Any, config_of: Any, tmp_path: Path, preset: str, word: str) -> None:
    _refused(config_of(folders.openpi(tmp_path / "policy", preset=preset), "pi0"), ErrorCode.CONFIG_INVALID, word)


def test_preset_of_another_robot_than_the_statistics(folders: Any, config_of: Any, tmp_path: Path) -> None:
    path = folders.openpi(tmp_path / "policy", preset="pi0_aloha")
    _refused(config_of(path, "pi0"), ErrorCode.CHECKPOINT_INVALID, "14", "statistics")


def test_statistics_are_chosen_by_asset(folders: Any, config_of: Any, tmp_path: Path) -> None:
    path = folders.openpi(tmp_path / "policy", **STATED)
    shutil.copytree(path / "assets" / "lab", path / "assets" / "other")
    _refused(config_of(path, "pi0"), ErrorCode.CHECKPOINT_INVALID, "lab/arm", "other/arm")
    load(config_of(path, "pi0", statistics="other/arm"))
    _refused(config_of(path, "pi0", statistics="nobody"), ErrorCode.CHECKPOINT_INVALID, "nobody")


def test_missing_statistics(folders: Any, config_of: Any, tmp_path: Path) -> None:
    path = folders.openpi(tmp_path / "policy", **STATED)
    (path / "assets" / "lab" / "arm" / "norm_stats.json").unlink()
    _refused(config_of(path, "pi0"), ErrorCode.CHECKPOINT_INVALID, "norm_stats.json")


@pytest.mark.parametrize(
    "field",
    [
        {"allow_missing_statistics": True},
        {"ignore_config_fields": ["x"]},
        {"legacy_letterbox": True},
        {"optional_cameras": ["left_wrist_0_rgb"]},
        {"state_prompt_width": 32},
    ],
    ids=str,
)
def test_a_field_of_the_other_layout_is_refused(
    folders: Any, config_of: Any, tmp_path: Path, field: dict[str, Any]
) -> None:
    """Whoever wrote it expects an effect, which it does not have here."""
    path = folders.openpi(tmp_path / "policy", **STATED, **field)
    _refused(config_of(path, "pi0"), ErrorCode.CONFIG_INVALID, *field, "openpi")


def test_quantiles_that_are_null(folders: Any, config_of: Any, tmp_path: Path) -> None:
    path = folders.openpi(tmp_path / "policy", **STATED, normalisation="QUANTILES")
    file = path / "assets" / "lab" / "arm" / "norm_stats.json"
    content = json.loads(file.read_text())
    content["norm_stats"]["state"]["q01"] = None
    file.write_text(json.dumps(content))
    _refused(config_of(path, "pi0"), ErrorCode.CHECKPOINT_INVALID, "q01")


def test_presets_name_known_slots_and_fit_their_robots() -> None:
    for name, preset in PRESETS.items():
        assert name.startswith(f"{preset.family}_"), name
        assert set(preset.cameras.values()) | set(preset.optional_slots) <= set(SLOTS)
        assert len(preset.relative_mask) in (0, preset.action_dim)
    assert PRESETS["pi05_libero"].state_in_prompt is False
    assert PRESETS["pi0_aloha"].relative_mask == ((True,) * 6 + (False,)) * 2


def test_aloha_state_and_actions() -> None:
    state = np.arange(14, dtype=np.float64) / 10
    converted = aloha.to_policy_state(state)
    signs = [1, -1, -1, 1, 1, 1, None, 1, -1, -1, 1, 1, 1, None]
    for index, sign in enumerate(signs):
        if sign is not None:
            assert converted[index] == sign * state[index]
    # The gripper by the linkage's own formula, spelled out for one value.
    opening = 0.6 * (0.05800 - 0.01844) + 0.01844
    angle = np.arcsin((0.022**2 + opening**2 - 0.036**2) / (2 * 0.022 * opening))
    assert converted[6] == pytest.approx((angle - 0.5476) / (1.6296 - 0.5476))
    actions = aloha.to_robot_actions(np.tile(state, (2, 1)))
    assert actions[1, 1] == -state[1]
    assert actions[0, 6] == pytest.approx((0.6 + 0.5476 + 0.6213) / (1.4910 + 0.6213))
    assert np.array_equal(state, np.arange(14) / 10)  # the caller's array is untouched
