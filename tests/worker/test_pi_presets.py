"""Every preset from a robot's observation to its actions, against openpi's transforms written out once more.

What each configuration trains with is stated here a second time, from openpi's `training/config.py` and the adapters of
its robots, so that no row of our table is compared with itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.models.pi.adapter import PiAdapter, load
from taktline_worker.models.pi.presets import PRESETS
from taktline_worker.observation import RtcInput

Array = NDArray[np.float64]
INSTRUCTION = "uncap the pen"


@dataclass(frozen=True)
class Robot:
    cameras: tuple[str, ...]
    state: int
    action: int
    joints: tuple[int, ...]
    """What is relative where actions are."""


ALOHA = Robot(("cam_high", "cam_left_wrist", "cam_right_wrist"), 14, 14, (*range(6), *range(7, 13)))
DROID = Robot(("exterior_image_1_left", "wrist_image_left"), 8, 8, tuple(range(7)))
LIBERO = Robot(("image", "wrist_image"), 8, 7, tuple(range(6)))


@dataclass(frozen=True)
class Stated:
    robot: Robot
    horizon: int
    prompt_tokens: int
    relative: bool = False
    state_in_prompt: bool = False
    in_pi_space: bool = False


_ALOHA_PI0 = Stated(ALOHA, 50, 48, relative=True, in_pi_space=True)
_ALOHA_PI05 = Stated(ALOHA, 50, 200, relative=True, state_in_prompt=True, in_pi_space=True)
STATED = {
    "pi0_aloha": _ALOHA_PI0,
    "pi0_aloha_towel": _ALOHA_PI0,
    "pi0_aloha_tupperware": _ALOHA_PI0,
    "pi0_aloha_pen_uncap": _ALOHA_PI0,
    "pi05_aloha": _ALOHA_PI05,
    "pi05_aloha_pen_uncap": _ALOHA_PI05,
    # Only `use_delta_joint_actions` is off; `adapt_to_pi` keeps its default, which is on.
    "pi0_aloha_sim": Stated(ALOHA, 50, 48, in_pi_space=True),
    "pi0_droid": Stated(DROID, 10, 48),
    "pi05_droid": Stated(DROID, 15, 200, state_in_prompt=True),
    "pi05_droid_finetune": Stated(DROID, 16, 200, state_in_prompt=True),
    "pi05_full_droid_finetune": Stated(DROID, 16, 200, relative=True, state_in_prompt=True),
    "pi05_droid_jointpos_polaris": Stated(DROID, 15, 200, relative=True, state_in_prompt=True),
    "pi0_droid_jointpos_polaris": Stated(DROID, 10, 100, relative=True),
    "pi0_libero": Stated(LIBERO, 50, 48, relative=True),
    "pi05_libero": Stated(LIBERO, 10, 200),
}


def statistics(robot: Robot) -> dict[str, dict[str, list[float]]]:
    """Of no symmetry, so that no dimension passes for another."""
    found = {}
    for feature, width, seed in (("state", robot.state, 1), ("actions", robot.action, 2)):
        generator = np.random.default_rng(seed)
        low, high = generator.uniform(-1.5, -0.5, width), generator.uniform(0.7, 1.9, width)
        mean, std = generator.uniform(-0.3, 0.3, width), generator.uniform(0.4, 0.9, width)
        found[feature] = {"mean": mean.tolist(), "std": std.tolist(), "q01": low.tolist(), "q99": high.tolist()}
    return found


def serve(name: str, folders: Any, config_of: Any, path: Path) -> PiAdapter:
    family = name.split("_")[0]
    folder = folders.openpi(path / "policy", family, statistics(STATED[name].robot), preset=name)
    return load(config_of(folder, family))


def policy_state(state: Array) -> Array:
    """openpi's `_decode_state`: joints flipped, grippers from their opening in metres to the linkage's angle."""
    found = state * np.array([1, -1, -1, 1, 1, 1, 1] * 2)
    for gripper in (6, 13):
        opening = found[gripper] * (0.05800 - 0.01844) + 0.01844
        angle = np.arcsin(np.clip((0.022**2 + opening**2 - 0.036**2) / (2 * 0.022 * opening), -1.0, 1.0))
        found[gripper] = (angle - 0.5476) / (1.6296 - 0.5476)
    return found


def robot_actions(actions: Array) -> Array:
    """openpi's `_encode_actions`."""
    found = actions * np.array([1, -1, -1, 1, 1, 1, 1, 1, -1, -1, 1, 1, 1, 1])
    for gripper in (6, 13):
        found[:, gripper] = (found[:, gripper] + 0.5476 + 0.6213) / (1.4910 + 0.6213)
    return found


def normalised(value: Array, numbers: dict[str, list[float]], family: str) -> Array:
    mean, std, q01, q99 = (np.array(numbers[name]) for name in ("mean", "std", "q01", "q99"))
    if family == "pi0":
        return np.asarray((value - mean) / (std + 1e-6))
    return np.asarray((value - q01) / (q99 - q01 + 1e-6) * 2.0 - 1.0)


def restored(value: Array, numbers: dict[str, list[float]], family: str) -> Array:
    mean, std, q01, q99 = (np.array(numbers[name]) for name in ("mean", "std", "q01", "q99"))
    if family == "pi0":
        return np.asarray(value * (std + 1e-6) + mean)
    return np.asarray((value + 1.0) / 2.0 * (q99 - q01 + 1e-6) + q01)


def observe(observations: Any, robot: Robot, **changes: Any) -> Any:
    images = {name: observations.image("png", 60, 80, seed=index) for index, name in enumerate(robot.cameras)}
    state = np.random.default_rng(5).uniform(0.1, 0.9, robot.state)
    return observations.make(**{"images": images, "state": state, "instruction": INSTRUCTION} | changes)


def test_every_preset_is_stated_here() -> None:
    assert STATED.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", sorted(STATED))
def test_state_in_and_actions_out(
    name: str, folders: Any, config_of: Any, observations: Any, pool: Any, tmp_path: Path
) -> None:
    stated, family = STATED[name], name.split("_")[0]
    robot, numbers = stated.robot, statistics(stated.robot)
    adapter = serve(name, folders, config_of, tmp_path)
    assert (*adapter.description.cameras, *adapter.description.optional_cameras) == robot.cameras
    assert adapter.processor.conventions.prompt_tokens == stated.prompt_tokens
    observation = observe(observations, robot)
    state = observation.state
    prepared = adapter.begin(observation, pool).result()

    seen = policy_state(state) if stated.in_pi_space else state
    inputs = normalised(seen, numbers["state"], family)
    if family == "pi0":
        assert prepared.row.state is not None
        np.testing.assert_allclose(prepared.row.state[: robot.state].numpy(), inputs, rtol=1e-5, atol=1e-6)
        assert not prepared.row.state[robot.state :].any()
    encode = adapter.processor._tokenizer.encode
    if stated.state_in_prompt:
        bins = np.digitize(inputs, np.linspace(-1, 1, 257)[:-1]) - 1
        said = encode(f"Task: {INSTRUCTION}, State: {' '.join(map(str, bins))};\nAction: ")
    else:
        said = encode(INSTRUCTION) + encode("\n")
    assert prepared.row.tokens.tolist() == [2, *said]

    outputs = adapter.run([prepared], 1)
    (actions,) = adapter.finish([prepared], outputs)
    assert isinstance(actions, np.ndarray)
    assert actions.shape == (stated.horizon, robot.action)
    network = outputs[0, :, : robot.action].double().numpy()
    expected = restored(network, numbers["actions"], family)
    if stated.relative:
        joints = list(robot.joints)
        expected[:, joints] += seen[joints]
    if stated.in_pi_space:
        expected = robot_actions(expected)
    np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-5)

    tail = RtcInput(actions[4:], delay=2)
    again = adapter.begin(observe(observations, robot, rtc=tail), pool).result().row
    assert again.rtc is not None
    np.testing.assert_allclose(again.rtc.target[: len(network) - 4, : robot.action], network[4:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(STATED))
def test_cameras(name: str, folders: Any, config_of: Any, observations: Any, pool: Any, tmp_path: Path) -> None:
    """Three slots in a fixed order; one that no camera fills is left out, and only ALOHA's wrists may be absent."""
    robot = STATED[name].robot
    adapter = serve(name, folders, config_of, tmp_path)
    whole = observe(observations, robot)
    row = adapter.begin(whole, pool).result().row
    assert len(row.pixels) == len(robot.cameras)
    for camera in robot.cameras:
        images = {key: image for key, image in whole.images.items() if key != camera}
        without = observe(observations, robot, images=images)
        if robot is ALOHA and camera != "cam_high":
            prepared = adapter.begin(without, pool).result()
            left = [index for index, key in enumerate(robot.cameras) if key != camera]
            assert np.array_equal(prepared.row.pixels, row.pixels[left])
            (actions,) = adapter.finish([prepared], adapter.run([prepared], 1))
            assert isinstance(actions, np.ndarray)
            continue
        with pytest.raises(TaktlineError) as caught:
            adapter.begin(without, pool)
        assert caught.value.code is ErrorCode.CAMERA_MISSING
    if robot is not ALOHA:
        third = whole.images | {"right_wrist_0_rgb": observations.image("png")}
        with pytest.raises(TaktlineError) as caught:
            adapter.begin(observe(observations, robot, images=third), pool)
        assert caught.value.code is ErrorCode.CAMERA_UNKNOWN
