"""The simulated cameras: they show the blocks, they need no GPU, and a missing library is named."""

import numpy as np
import pytest
from taktline_demo import rendering
from taktline_demo.arm import CAMERAS, COLOURS
from taktline_demo.environment import ReachEnvironment
from taktline_demo.expert import expert_chunk
from taktline_demo.jpeg import decode_jpeg, encode_jpeg
from taktline_demo.task import FRAME_PIXELS
from taktline_protocol.errors import ErrorCode, TaktlineError


def block_pixels(frame, colour):
    """Pixels in which the channel of `colour` stands out."""
    channels = frame.astype(int)
    own = COLOURS.index(colour)
    others = [channels[..., index] for index in range(3) if index != own]
    return int(np.sum(channels[..., own] > 60 + np.maximum(*others)))


@pytest.fixture(scope="module")
def environment():
    workcell = ReachEnvironment()
    yield workcell
    workcell.close()


def test_frames_have_the_policy_s_shape_and_are_not_blank(environment):
    environment.reset(0)
    frames = environment.frames()
    assert set(frames) == set(CAMERAS)
    for frame in frames.values():
        assert frame.shape == (FRAME_PIXELS, FRAME_PIXELS, 3)
        assert frame.dtype == np.uint8
        assert frame.std() > 5


def test_equal_states_give_equal_frames(environment):
    environment.reset(5)
    first = environment.frames()
    environment.reset(5)
    assert all(np.array_equal(first[name], frame) for name, frame in environment.frames().items())


def test_the_scene_camera_sees_every_block(environment):
    seen = dict.fromkeys(COLOURS, 0)
    for seed in range(20):
        environment.reset(seed)
        frame = environment.frames()["scene"]
        for colour in COLOURS:
            seen[colour] += block_pixels(frame, colour) >= 8
    # The arm may hide one now and then.
    assert all(count >= 18 for count in seen.values()), seen


def test_the_wrist_camera_sees_the_block_that_the_tip_is_at(environment):
    for seed, goal in enumerate(COLOURS):
        environment.reset(seed, goal)
        while not environment.outcome().done:
            environment.step(expert_chunk(environment.state(), environment.target(goal))[0])
        assert block_pixels(environment.frames()["wrist"], goal) >= 20


def test_jpeg_keeps_the_frame(environment):
    environment.reset(0)
    frame = environment.frames()["scene"]
    data = encode_jpeg(frame)
    assert data[:2] == b"\xff\xd8"
    assert len(data) < 5000
    assert np.abs(decode_jpeg(data).astype(int) - frame).mean() < 4


def test_the_first_software_library_that_loads_is_chosen(monkeypatch):
    monkeypatch.setattr(rendering, "_loads", lambda library: library == "EGL")
    assert rendering.select_backend(None) == "egl"
    monkeypatch.setattr(rendering, "_loads", lambda library: False)
    assert rendering.select_backend(None) == "disable"
    assert rendering.select_backend("glfw") == "glfw"


@pytest.mark.parametrize(
    ("backend", "package"), [("disable", "libosmesa6"), ("osmesa", "libosmesa6"), ("egl", "libegl1")]
)
def test_a_missing_library_is_refused_with_the_package_to_install(monkeypatch, backend, package):
    monkeypatch.setattr(rendering, "_loads", lambda library: False)
    with pytest.raises(TaktlineError) as caught:
        rendering.require_backend(backend)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert package in caught.value.next_step
