"""Reading client observations: conventions, mappings, and that nothing but a TaktlineError escapes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_gateway.compat.observations import image_of, read_observation
from taktline_gateway.compat.wire_arrays import EncodedFrame
from taktline_protocol import PolicyInfo, TaktlineError
from taktline_protocol.deployment import ClientMapping

FRAME = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)


def info(*cameras, optional=()):
    return PolicyInfo(
        policy="p", family="f", revision="r", ready=True, cameras=cameras, optional_cameras=tuple(optional)
    )


def read(observation, policy, mapping=ClientMapping()):  # noqa: B008 (frozen)
    return read_observation(observation, mapping, policy, "openpi")


@pytest.mark.parametrize(
    ("sent", "camera"),
    [
        ("front", "front"),
        ("observation/front", "front"),
        ("observation.images.front", "front"),
        ("images/front", "front"),
        ("front", "observation.images.front"),
        ("observation/image", "base_0_rgb"),
        ("agentview", "image"),
        ("images/agentview", "observation/image"),
        ("observation/wrist_image_left", "left_wrist_0_rgb"),
        ("images/wrist", "wrist_image"),
        ("images/cam_right_wrist", "right_wrist_0_rgb"),
    ],
)
def test_a_conventional_name_finds_its_camera(sent, camera):
    got = read({sent: FRAME, "state": np.zeros(3), "prompt": "go"}, info(camera))
    assert list(got.images) == [camera]


def test_nested_and_joined_keys_are_one_and_twice_is_refused():
    nested = {"observation": {"front": FRAME}, "state": [1, 2.5], "prompt": "go"}
    assert list(read(nested, info("front")).images) == ["front"]
    with pytest.raises(TaktlineError, match="twice"):
        read(nested | {"observation/front": FRAME}, info("front"))


def test_own_name_wins_over_the_same_view_of_another_convention():
    sent = {"image": FRAME, "state": [0.0], "prompt": "go"}
    assert list(read(sent, info("image", optional=("base_0_rgb",))).images) == ["image"]


@pytest.mark.parametrize(
    ("cameras", "sent", "code"),
    [
        (("front", "wrist"), {"front": FRAME}, "camera_missing"),
        (("front",), {"front": FRAME, "rear": FRAME}, "camera_unknown"),
        (("base_0_rgb", "cam_high"), {"agentview": FRAME}, "camera_unknown"),  # either could be meant
        (("front",), {"front": FRAME, "observation/front": FRAME}, "camera_unknown"),
    ],
)
def test_images_are_never_assigned_by_guess(cameras, sent, code):
    with pytest.raises(TaktlineError) as refused:
        read(sent | {"state": [0.0], "prompt": "go"}, info(*cameras))
    assert refused.value.code.value == code


def test_a_camera_without_colours_is_named_as_what_it_is():
    with pytest.raises(TaktlineError) as refused:
        read({"observation/front": FRAME[..., 0], "state": [0.0], "prompt": "go"}, info("front"))
    assert refused.value.code.value == "camera_missing"
    assert refused.value.next_step == "'observation/front' is uint8 of shape (2, 4): send uint8 (height, width, 3)"


def test_mapping_reads_what_it_lists_and_nothing_else():
    mapping = ClientMapping(images={"cams/a": "front"}, state=("b", "a"), instruction="say", default_instruction="d")
    sent = {"cams": {"a": FRAME, "x": FRAME}, "a": [1.0], "b": np.array([2, 3], np.int32), "say": "hi", "prompt": "no"}
    got = read(sent, info("front"), mapping)
    assert list(got.images) == ["front"]
    assert got.state.to_numpy().tolist() == [2.0, 3.0, 1.0]
    assert got.instruction == "hi"
    assert read(sent | {"say": ""}, info("front"), mapping).instruction == "d"
    for key, code in (("cams", "camera_missing"), ("b", "state_invalid")):
        with pytest.raises(TaktlineError) as refused:
            read({name: value for name, value in sent.items() if name != key}, info("front"), mapping)
        assert refused.value.code.value == code


def test_frames_keep_their_pixels_whatever_their_layout():
    raw = FRAME.tobytes()
    assert image_of("c", FRAME).data == raw
    assert image_of("c", np.moveaxis(FRAME, 2, 0)).data == raw
    assert image_of("c", np.ascontiguousarray(np.moveaxis(FRAME, 2, 0))).data == raw
    assert image_of("c", FRAME[None, None]).data == raw
    assert image_of("c", FRAME).shape == (2, 4, 3)
    halves = np.array([[[0.0, 0.5, 1.0]]], np.float32)
    assert list(image_of("c", halves).data) == [0, 127, 255]
    assert image_of("c", EncodedFrame("png", b"x")).encoding == "png"


def test_a_frame_that_came_as_hwc_bytes_is_not_copied():
    arrived = FRAME.tobytes()
    assert image_of("c", np.ndarray((2, 4, 3), np.uint8, buffer=arrived)).data is arrived


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 4), np.uint8),
        np.zeros((2, 4, 4), np.uint8),
        np.zeros((2, 2, 4, 3), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros((2, 4, 3), np.int16),
        np.full((2, 4, 3), 1.5),
        np.full((2, 4, 3), -0.1),
        np.full((2, 4, 3), np.inf),
        "text",
        None,
    ],
)
def test_what_is_no_frame_is_refused(array):
    with pytest.raises(TaktlineError) as refused:
        image_of("c", array)
    assert refused.value.code.value == "image_corrupt"


VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.sampled_from([FRAME, np.zeros(3), np.array(1.0), np.zeros((0,)), np.zeros((1, 2)), EncodedFrame("jpeg", b"")])
)
KEYS = st.sampled_from(
    ["observation", "front", "image", "images", "state", "prompt", "observation/state", "joint_position", "task", "x"]
)
OBSERVATIONS = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=6),
    max_leaves=10,
)


@given(OBSERVATIONS, st.booleans())
@settings(deadline=None, max_examples=500)
def test_fuzz(observation, mapped):
    mapping = ClientMapping(images={"image": "front"}, state=("state", "x")) if mapped else ClientMapping()
    with contextlib.suppress(TaktlineError):
        read(observation, info("front", optional=("image",)), mapping)
