"""Whole checkpoint folders: raw frames, raw state and task text in, actions in robot units out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from taktline_worker.models.pi.adapter import PiAdapter, load
from taktline_worker.models.pi.pending import PreparedRow
from taktline_worker.observation import EncodedImage, RobotInput
from torch import Tensor

IMAGES = "raw.observation.images."
GATE = 3e-6


@pytest.fixture(scope="module")
def adapters(
    folders: Any, config_of: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], PiAdapter]:
    found = {}
    for family, optional in (("pi05", "left_wrist_0_rgb"), ("pi0", "image")):
        path = folders.lerobot(
            tmp_path_factory.mktemp(family) / "policy", family, optional_cameras=[f"observation.images.{optional}"]
        )
        for precision in ("fp32", "bf16"):
            found[family, precision] = load(config_of(path, family, precision=precision))
    return found


def _rows(adapter: PiAdapter, case: dict[str, Tensor], tasks: list[str], pool: Any) -> list[PreparedRow]:
    """Rows made from the raw request; only the noise is the case's own."""
    rows = []
    for index, task in enumerate(tasks):
        images = {
            key.removeprefix(IMAGES): EncodedImage("raw", value[index].numpy().tobytes(), tuple(value[index].shape))
            for key, value in case.items()
            if key.startswith(IMAGES)
        }
        state = case["raw.observation.state"][index].numpy()
        row = adapter.begin(RobotInput(images, state, task, seed=0), pool).result()
        rows.append(dataclasses.replace(row, row=dataclasses.replace(row.row, noise=case["noise"][index])))
    return rows


@pytest.mark.parametrize("case_name", ["case_b1", "case_b3"])
@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_raw_request_to_robot_actions(
    golden: Path, adapters: Any, pool: Any, distance: Any, family: str, case_name: str
) -> None:
    folder = golden / f"{family}_tiny" / "lerobot_folder"
    case = load_file(folder / f"{case_name}.safetensors")
    facts = json.loads((folder / "cases.json").read_text())[case_name]
    adapter = adapters[family, "fp32"]
    rows = _rows(adapter, case, facts["tasks"], pool)
    for index, prepared in enumerate(rows):
        count = int(case["token_mask"][index].sum())
        assert prepared.row.tokens.tolist() == case["tokens"][index, :count].tolist()
        assert len(prepared.row.tokens) == facts["valid_tokens"][index]
        normalised = adapter.processor.conventions.state_normaliser.forward(prepared.state)
        reference = case["state_normalised"][index].numpy()
        assert np.all(np.abs(normalised - reference) <= 1e-6 * np.maximum(1, np.abs(reference)))
        assert adapter.processor.prompt(facts["tasks"][index], normalised) == facts["prompts"][index]
        if family == "pi0":
            assert prepared.row.state is not None
            torch.testing.assert_close(prepared.row.state, case["state_padded"][index], atol=1e-6, rtol=1e-6)
        for slot, pixels in enumerate(prepared.row.pixels):
            if f"model_input_slot_{slot}" in case:
                torch.testing.assert_close(pixels, case[f"model_input_slot_{slot}"][index], atol=2e-6, rtol=0)

    outputs = adapter.run(rows, 4)
    runner = adapter.runner
    for index in range(len(rows)):
        mask = case["prefix_mask"][index]
        count = int(mask.sum())
        assert distance(runner.prefix[index, :count], case["prefix_embeddings"][index][mask]) <= GATE
        for layer, place in ((0, "first"), (-1, "last")):
            for ours, name in ((runner.keys, "key"), (runner.values, "value")):
                reference = case[f"prefix_{name}_{place}"][index, 0][mask]
                assert distance(ours[layer, index, :count], reference) <= GATE
    actions = adapter.finish(rows, outputs)
    assert distance(outputs, case["actions_padded"]) <= GATE
    for index, result in enumerate(actions):
        assert isinstance(result, np.ndarray)
        assert result.dtype == np.float32
        assert distance(torch.from_numpy(result), case["actions"][index]) <= GATE


@pytest.mark.parametrize("case_name", ["case_b1", "case_b3"])
@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_bf16_stays_near_fp32(
    golden: Path, adapters: Any, pool: Any, distance: Any, family: str, case_name: str
) -> None:
    folder = golden / f"{family}_tiny" / "lerobot_folder"
    case = load_file(folder / f"{case_name}.safetensors")
    facts = json.loads((folder / "cases.json").read_text())[case_name]
    adapter = adapters[family, "bf16"]
    rows = _rows(adapter, case, facts["tasks"], pool)
    outputs = adapter.run(rows, 4)[:, :, : case["actions_model"].shape[-1]]
    official = max(
        facts["bf16_vs_fp32_rel_l2"]["actions_model"], facts["bf16_rope_fp32_vs_fp32_rel_l2"]["actions_model"]
    )
    assert 1e-4 < distance(outputs, case["actions_model"]) <= 1.5 * official


def test_vision_tower_and_projector_match(golden: Path, adapters: Any, pool: Any, distance: Any) -> None:
    from taktline_worker.models.pi import modules

    folder = golden / "pi05_tiny" / "lerobot_folder"
    case = load_file(folder / "case_b1.safetensors")
    adapter = adapters["pi05", "fp32"]
    pixels = torch.cat([case[f"model_input_slot_{slot}"] for slot in range(3)])
    weights = adapter.runner.weights.vision
    assert distance(modules.vision_tower(weights, pixels, 2), case["vision_tower_out"][0]) <= GATE
    assert distance(modules.image_features(weights, pixels, 2), case["image_features"][0]) <= GATE


def test_noise_depends_on_the_seed_alone(adapters: Any, observations: Any, pool: Any) -> None:
    adapter = adapters["pi05", "fp32"]
    first, again, other = (adapter.begin(observations.make(seed=seed), pool).result().row.noise for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (10, 32)
    fresh = [adapter.begin(observations.make(seed=None), pool).result().row.noise for _ in range(2)]
    assert not torch.equal(*fresh)
    largest = adapter.begin(observations.make(seed=2**63 - 1), pool).result().row.noise
    assert torch.isfinite(largest).all()


def test_horizon_and_steps_can_be_overridden(
    folders: Any, config_of: Any, tmp_path: Path, observations: Any, pool: Any
) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi05")
    adapter = load(config_of(path, action_horizon=6, solver_steps=4, control_period_ms=20.0))
    rows = [adapter.begin(observations.make(), pool).result()]
    (actions,) = adapter.finish(rows, adapter.run(rows, 1))
    assert isinstance(actions, np.ndarray)
    assert actions.shape == (6, 7)
    assert adapter.runner.weights.times.tolist() == [1.0, 0.75, 0.5, 0.25]
    assert adapter.description.control_period_s == 0.02


def test_camera_mapping_renames_cameras(
    folders: Any, config_of: Any, tmp_path: Path, observations: Any, pool: Any
) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi05")
    names = {
        "front": "base_0_rgb",
        "left": "observation.images.left_wrist_0_rgb",
        "right": "right_wrist_0_rgb",
    }
    plain, mapped = load(config_of(path)), load(config_of(path, cameras=names))
    assert mapped.description.cameras == ("front", "left", "right")
    good = observations.make()
    # Sent in another order on purpose: the checkpoint's order decides.
    renamed = dataclasses.replace(
        good,
        images={robot: good.images[key.removeprefix("observation.images.")] for robot, key in reversed(names.items())},
    )
    results = []
    for adapter, observation in ((plain, good), (mapped, renamed)):
        rows = [adapter.begin(observation, pool).result()]
        results.append(adapter.run(rows, 1))
    assert torch.equal(*results)
