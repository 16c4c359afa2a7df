"""Observations to rows and actions back: sizes, patches, prompts, statistics, relative parts, and every refusal."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import ParallelOptions, RtcOptions
from taktline_worker.models.groot.adapter import GrootAdapter, load
from taktline_worker.models.groot.embodiment import ImageTransform
from taktline_worker.models.groot.images import backbone_size, scaled, to_patches
from taktline_worker.models.groot.rotations import compose_poses, matrices
from taktline_worker.observation import EncodedImage

NAN = float("nan")
PUBLISHED = ImageTransform(256, (256, 256), 0.95)


@pytest.fixture(scope="module")
def folder(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.folder(tmp_path_factory.mktemp("groot") / "checkpoint")


@pytest.fixture(scope="module")
def libero(kit: Any, folder: Path) -> GrootAdapter:
    return load(kit.config(folder))


@pytest.fixture(scope="module")
def droid(kit: Any, folder: Path) -> GrootAdapter:
    return load(kit.config(folder, "droid"))


def test_frames_are_scaled_as_published(kit: Any) -> None:
    frame = np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    assert scaled(frame, PUBLISHED).shape == (256, 340, 3)
    assert scaled(frame.transpose(1, 0, 2), PUBLISHED).shape == (340, 256, 3)
    assert scaled(frame, ImageTransform(None, (256, 256), 230 / 256)).shape == (256, 256, 3)
    # An even picture stays what it is; the middle stays in the middle.
    assert (scaled(np.full((300, 400, 3), 77, np.uint8), PUBLISHED) == 77).all()
    dot = np.zeros((256, 256, 3), np.uint8)
    dot[120:136, 120:136] = 255
    light = scaled(dot, PUBLISHED)[..., 0].astype(float)
    assert np.allclose(
        [(np.arange(256) * light.sum(axis=axis)).sum() / light.sum() for axis in (0, 1)], 127.5, atol=0.6
    )


def test_backbone_sizes_are_those_of_transformers() -> None:
    official = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl").smart_resize
    random = np.random.default_rng(1)
    for height, width in [(256, 256), (256, 340), (96, 128), *random.integers(32, 3000, (200, 2)).tolist()]:
        expected = official(height, width, factor=32, min_pixels=65536, max_pixels=16777216)
        assert backbone_size(height, width, 32) == tuple(expected)


def test_patches_are_those_of_transformers() -> None:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    official = module.Qwen2VLImageProcessorPil(
        patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    frame = np.random.default_rng(3).integers(0, 256, (256, 320, 3), dtype=np.uint8)  # no size to change
    expected = official(images=[frame], return_tensors="pt")
    patches, grid = to_patches(frame, 16, 2, 2)
    assert expected["image_grid_thw"].tolist() == [[1, *grid]]
    assert torch.allclose(patches, expected["pixel_values"], atol=1e-6)


def test_patches_lie_block_by_block(kit: Any) -> None:
    frame = np.zeros((256, 512, 3), np.uint8)
    frame[16:32, 0:16, 1] = 255  # second patch row, first column: third patch of the first block
    patches, grid = to_patches(frame, 16, 2, 2)
    assert grid == (16, 32)
    assert patches.shape == (512, 3 * 2 * 16 * 16)
    lit = (patches.view(512, 3, 2, 256) == 1.0).all(dim=3)
    assert lit.nonzero().tolist() == [[2, 1, 0], [2, 1, 1]]
    assert set(patches.unique().tolist()) == {-1.0, 1.0}


def test_a_prompt_is_images_then_cleaned_text(kit: Any, libero: GrootAdapter, pool: Any) -> None:
    row = libero.begin(kit.observe(), pool).result().row
    assert row.grids == ((16, 22), (22, 16))
    tokens = row.tokens.tolist()
    assert tokens.count(500) == 2 * 16 * 22 // 4
    assert tokens[:6] == [501, *map(ord, "user\n")]
    assert tokens[6] == 498
    end = len(tokens) - 1 - tokens[::-1].index(499)
    assert "".join(map(chr, tokens[end + 1 : -2])) == "pick up the red block please"
    assert tokens[-2:] == [502, ord("\n")]


def test_state_parts_are_normalised_each_in_its_way(kit: Any, libero: GrootAdapter, droid: GrootAdapter) -> None:
    values = libero.processor.normalised(np.array([0.5, 5.0, 9.0, 0.05])).numpy()
    # 0.5 in [-1, 1]; 5.0 clipped; a constant dimension is 0; the gripper by mean 0.04 and deviation 0.02.
    assert values[:4] == pytest.approx([0.5, 1.0, 0.0, 0.5])
    assert not values[4:].any()
    turned = droid.processor.normalised(np.array([*[0.0] * 9, 1.0, -1.0, 0.7])).numpy()
    assert turned[9:13] == pytest.approx([0.5, -0.5, math.sin(0.7), math.cos(0.7)])


def test_absolute_actions_are_scaled_and_clipped(kit: Any, libero: GrootAdapter) -> None:
    network = torch.zeros(6, 20)
    network[0, :4] = torch.tensor([0.5, -9.0, 0.0, 1.0])
    actions = libero.processor.decode(network, np.zeros(4))
    assert actions.shape == (6, 4)
    assert actions.dtype == np.float32
    assert actions[0] == pytest.approx([0.1, -0.1, 0.2, 1.0])


def test_relative_actions_start_from_the_raw_state(kit: Any, droid: GrootAdapter) -> None:
    state = np.array([0.4, 0.1, 0.3, 0, 1, 0, -1, 0, 0, 0.5, -0.5, 0.0])  # turned by a quarter about z
    network = torch.zeros(6, 20)
    network[:, 0] = 1.0  # 0.1 m (0.2 with the outer bounds) along the hand's own x
    network[:, 3], network[:, 7] = 1.0, 1.0  # nearly no turn
    network[:, 9] = 1.0
    actions = droid.processor.decode(network, state)
    assert actions.shape == (4, 11)
    start = matrices(state[3:9])
    step = np.array([0.2, 0.0, 0.0])
    assert actions[0, :3] == pytest.approx(state[:3] + start @ step, abs=1e-6)
    assert matrices(actions[0, 3:9].astype(float)) == pytest.approx(start, abs=1e-6)
    # The bounds of the joints grow with the action: 0.1, 0.2, 0.3, 0.4 rad.
    assert actions[:, 9] == pytest.approx(0.5 + 0.1 * np.arange(1, 5), abs=1e-6)
    assert actions[:, 10] == pytest.approx(-0.5, abs=1e-6)


def test_poses_compose_like_matrices() -> None:
    random = np.random.default_rng(2)
    reference, relative = random.normal(size=9), random.normal(size=(5, 9))
    composed = compose_poses(reference, relative)

    def homogeneous(pose: Any) -> Any:
        return np.block([[matrices(pose[3:]), pose[:3, None]], [np.zeros((1, 3)), np.ones((1, 1))]])

    for before, after in zip(relative, composed, strict=True):
        assert homogeneous(after) == pytest.approx(homogeneous(reference) @ homogeneous(before), abs=1e-12)


def test_a_request_gets_actions_and_older_frames_are_cameras_of_their_own(
    kit: Any, libero: GrootAdapter, droid: GrootAdapter, pool: Any
) -> None:
    for adapter, changes in (
        (libero, {}),
        (droid, {"images": {"exterior@-15": kit.raw(), "exterior": kit.raw(seed=1)}, "state": np.ones(12)}),
    ):
        assert set(kit.observe(**changes).images) == set(adapter.description.cameras)
        row = adapter.begin(kit.observe(**changes), pool).result()
        again = adapter.begin(kit.observe(**changes), pool).result()
        (first,), (second,) = (adapter.finish([one], adapter.run([one], 1)) for one in (row, again))
        assert first.shape == (adapter.description.horizon, adapter.description.action_dim)
        assert np.array_equal(first, second)
        assert np.isfinite(first).all()
    assert droid.description.cameras == ("exterior@-15", "exterior")


def test_cameras_can_be_renamed_and_the_horizon_shortened(kit: Any, folder: Path, pool: Any) -> None:
    adapter = load(kit.config(folder, cameras={"front": "image", "hand": "wrist_image"}, action_horizon=2))
    assert adapter.description.cameras == ("front", "hand")
    row = adapter.begin(kit.observe(images={"front": kit.raw(), "hand": kit.raw()}), pool).result()
    (actions,) = adapter.finish([row], adapter.run([row], 1))
    assert actions.shape == (2, 4)
    assert adapter.run([adapter.largest_row()], 1).shape == (1, 6, 20)


BAD_OBSERVATIONS: dict[str, tuple[dict[str, Any], ErrorCode, str]] = {
    "no wrist camera": ({"images": {"image": "raw"}}, ErrorCode.CAMERA_MISSING, "wrist_image"),
    "too many cameras": (
        {"images": {"image": "raw", "wrist_image": "raw", "third": "raw"}},
        ErrorCode.CAMERA_UNKNOWN,
        "third",
    ),
    "a state of another robot": ({"state": np.zeros(7)}, ErrorCode.STATE_INVALID, "arm 3, gripper 1"),
    "NaN in the state": ({"state": np.array([0, 0, NAN, 0])}, ErrorCode.STATE_INVALID, r"\[2\]"),
    "a state beyond float32": ({"state": np.array([0, 0, 0, -1e39])}, ErrorCode.STATE_INVALID, r"\[3\]"),
    "no words": ({"instruction": " ,.!"}, ErrorCode.INSTRUCTION_INVALID, "empty"),
    "more characters than any prompt": ({"instruction": "a" * 5000}, ErrorCode.INSTRUCTION_INVALID, "5000"),
}


@pytest.mark.parametrize("name", BAD_OBSERVATIONS)
def test_bad_observations_are_refused(kit: Any, libero: GrootAdapter, pool: Any, name: str) -> None:
    changes, code, said = BAD_OBSERVATIONS[name]
    if "images" in changes:
        changes = changes | {"images": {camera: kit.raw() for camera in changes["images"]}}
    with pytest.raises(TaktlineError, match=said) as caught:
        libero.begin(kit.observe(**changes), pool)
    assert caught.value.code == code
    assert caught.value.next_step or code == ErrorCode.CAMERA_MISSING


def test_an_instruction_over_the_token_limit_and_a_broken_frame_are_refused(
    kit: Any, libero: GrootAdapter, pool: Any
) -> None:
    with pytest.raises(TaktlineError, match="the limit is 1024") as caught:
        libero.begin(kit.observe(instruction="grasp it " * 110), pool).result()
    assert caught.value.code == ErrorCode.INSTRUCTION_INVALID
    broken = EncodedImage("jpeg", b"\xff\xd8 no picture")
    with pytest.raises(TaktlineError) as caught:
        libero.begin(kit.observe(images={"image": broken, "wrist_image": kit.raw()}), pool).result()
    assert caught.value.code == ErrorCode.IMAGE_CORRUPT


def edit(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def without(*keys: str) -> Any:
    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


BAD_FOLDERS: dict[str, tuple[Any, str]] = {
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "nvidia/Cosmos-Reason2-2B"),
    "another model's tokenizer": (lambda f: None, "the backbone's is 500"),
    "a broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "is no tokenizer"),
    "no processor": (lambda f: (f / "processor_config.json").unlink(), "holds no processor_config.json"),
    "no statistics": (lambda f: (f / "statistics.json").unlink(), "holds no statistics.json"),
    "no statistics of one part": (
        lambda f: edit(f / "statistics.json", without("libero_sim", "action", "gripper")),
        "KeyError 'gripper'",
    ),
    "no embodiment ids": (lambda f: (f / "embodiment_id.json").unlink(), "holds no embodiment_id.json"),
    "a base model without this robot": (
        lambda f: edit(f / "embodiment_id.json", without("libero_sim")),
        "is for droid, not for 'libero_sim'",
    ),
    "a slot beyond the projectors": (
        lambda f: edit(f / "embodiment_id.json", lambda c: c.update(libero_sim=9)),
        "slot 9",
    ),
    "letterboxed training": (
        lambda f: edit(f / "processor_config.json", lambda c: c["processor_kwargs"].update(letter_box_transform=True)),
        "letter_box_transform",
    ),
    "another model": (lambda f: edit(f / "config.json", lambda c: c.update(model_type="Gr00tN1d6")), "Gr00tN1d6"),
    "a field that config.json lacks": (lambda f: edit(f / "config.json", without("select_layer")), "select_layer"),
    "layers that config.json does not have": (
        lambda f: edit(f / "config.json", lambda c: c["diffusion_model_cfg"].update(num_layers=6)),
        "has the unknown action_head.model.transformer_blocks.6",
    ),
    "no control period": (lambda f: (f / "taktline.json").unlink(), "control period is not stated"),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_bad_folders_are_refused_before_the_weights(kit: Any, tmp_path: Path, name: str) -> None:
    change, said = BAD_FOLDERS[name]
    folder = kit.folder(tmp_path / "checkpoint")
    if name == "another model's tokenizer":
        kit.tokenizer(folder / "tokenizer.json", image_id=510)
    change(folder)
    with pytest.raises(TaktlineError, match=said) as caught:
        load(kit.config(folder))
    assert caught.value.code in (ErrorCode.CHECKPOINT_INVALID, ErrorCode.CONFIG_INVALID)
    assert caught.value.next_step


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp8"},
        {"parallel": ParallelOptions(tp=2)},
        {"rtc": RtcOptions(mode="trained")},
        {"rtc": RtcOptions(schedule="linear")},
        {"solver_steps": 0},
        {"action_horizon": 7},
        {"control_period_ms": -1.0},
        {"cameras": {"front": "image"}},
    ],
)
def test_bad_options_are_refused(kit: Any, folder: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(TaktlineError) as caught:
        load(kit.config(folder, **changes))
    assert caught.value.code == ErrorCode.CONFIG_INVALID
    assert caught.value.next_step


def test_a_processor_folder_and_a_choice_of_one_need_no_words(kit: Any, tmp_path: Path) -> None:
    folder = kit.folder(tmp_path / "checkpoint")
    (folder / "processor").mkdir()
    for name in ("processor_config.json", "statistics.json", "embodiment_id.json", "tokenizer.json"):
        (folder / name).rename(folder / "processor" / name)
    with pytest.raises(TaktlineError, match="none is chosen"):
        load(kit.config(folder, tag=""))
    edit(folder / "processor" / "embodiment_id.json", without("droid"))
    adapter = load(kit.config(folder, tag=""))
    assert adapter.processor.embodiment.tag == "libero_sim"
    assert dataclasses.asdict(adapter.description)["control_period_s"] == 0.05
