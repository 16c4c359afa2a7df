"""Recorded demonstrations: shapes, labels, and the file they are kept in."""

import numpy as np
from taktline_demo.arm import CAMERAS, COLOURS
from taktline_demo.demonstrations import Demonstrations
from taktline_demo.environment import ReachEnvironment
from taktline_demo.expert import expert_chunk
from taktline_demo.recording import record
from taktline_demo.task import FRAME_PIXELS, HORIZON


def test_every_observation_is_labelled_for_every_block(tmp_path):
    recorded = record(2, 50)
    count = len(recorded.states)
    assert count >= 4
    assert recorded.chunks.shape == (count, len(COLOURS), HORIZON, 4)
    assert set(recorded.episodes) == {50, 51}
    for name in CAMERAS:
        assert recorded.frames[name].shape == (count, FRAME_PIXELS, FRAME_PIXELS, 3)
    environment = ReachEnvironment()
    environment.reset(50)
    for index, colour in enumerate(COLOURS):
        wanted = expert_chunk(environment.state(), environment.target(colour))
        assert np.array_equal(recorded.chunks[0, index], wanted)
    path = tmp_path / "demonstrations.npz"
    recorded.save(path)
    read = Demonstrations.load(path)
    assert np.array_equal(read.states, recorded.states)
    assert np.array_equal(read.frames["wrist"], recorded.frames["wrist"])


def test_recording_repeats_itself():
    first, second = record(1, 9), record(1, 9)
    assert np.array_equal(first.chunks, second.chunks)
    assert np.array_equal(first.frames["scene"], second.frames["scene"])
