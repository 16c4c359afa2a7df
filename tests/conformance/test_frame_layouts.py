"""Frames read by the layout of an earlier one: never anything but what reading them in full gives."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from taktline_gateway.compat.frame_layout import PATIENCE, FrameLayouts
from taktline_gateway.compat.observations import read_observation
from taktline_gateway.compat.wire_arrays import rebuild, unpack
from taktline_protocol import PolicyInfo, TaktlineError
from taktline_protocol.checks import check_observation
from taktline_protocol.deployment import ClientMapping
from taktline_protocol.limits import DEFAULT_LIMITS
from taktline_protocol.messages import Observation

INFO = PolicyInfo(policy="p", family="f", revision="r", ready=True, cameras=("front", "wrist"), state_dim=8)
MAPPING = ClientMapping()


def packed(array: np.ndarray, kind=bytes) -> dict:
    key = (lambda name: name.encode()) if kind is bytes else (lambda name: name)
    return {
        key("__ndarray__"): True,
        key("data"): array.tobytes(),
        key("dtype"): array.dtype.str,
        key("shape"): array.shape,
    }


def frame(seed: int, *, kind=bytes, prompt="pick up the block", side=6, state=None, **more) -> bytes:
    rng = np.random.default_rng(seed)
    cameras = {
        name: packed(rng.integers(0, 256, (side, side + 1, 3), dtype=np.uint8), kind) for name in ("front", "wrist")
    }
    vector = rng.normal(size=8) if state is None else state
    return msgspec.msgpack.encode({**cameras, **more, "state": packed(vector, kind), "prompt": prompt})


def in_full(body: bytes, mapping=MAPPING):
    value = unpack(body, DEFAULT_LIMITS)
    return value, read_observation(rebuild(value), mapping, INFO, "openpi")


def studied(body: bytes, mapping=MAPPING) -> FrameLayouts:
    layouts = FrameLayouts()
    value, read = in_full(body, mapping)
    layouts.study(body, value, read, INFO, mapping, DEFAULT_LIMITS)
    return layouts


def same(one, other) -> bool:
    pixels = [{name: (i.encoding, bytes(i.data), i.shape) for name, i in read.images.items()} for read in (one, other)]
    return pixels[0] == pixels[1] and one.state == other.state and one.instruction == other.instruction


@pytest.mark.parametrize("kind", [bytes, str])
def test_the_next_frame_of_a_robot_is_read_by_its_layout(kind):
    layouts = studied(frame(1, kind=kind))
    for seed in range(2, 8):
        body = frame(seed, kind=kind)
        found = layouts.read(body, INFO, MAPPING)
        assert found is not None
        assert same(found, in_full(body)[1])


def test_pixels_are_views_on_the_frame():
    body = frame(2)
    found = studied(frame(1)).read(body, INFO, MAPPING)
    assert all(image.data.obj is body for image in found.images.values())


def test_any_other_byte_anywhere_gives_what_reading_in_full_gives():
    layouts = studied(frame(1))
    rng = random.Random(5)
    original = frame(2)
    by_layout = 0
    for at in range(len(original)):
        for value in {rng.randrange(256) for _ in range(3)}:
            body = original[:at] + bytes((value,)) + original[at + 1 :]
            found = layouts.read(body, INFO, MAPPING)
            if found is None:
                continue
            by_layout += 1
            _, read = in_full(body)
            assert same(found, read), at
            check_observation(
                Observation(
                    robot_id="r",
                    seq=1,
                    captured_at=1.0,
                    budget_ms=100.0,
                    images={name: msgspec.structs.replace(i, data=bytes(i.data)) for name, i in found.images.items()},
                    state=found.state,
                    instruction=found.instruction,
                ),
                DEFAULT_LIMITS,
            )
    assert by_layout > len(original)


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": "pick up the crate"},
        {"side": 7},
        {"state": np.zeros(7)},
        {"state": np.full(8, np.nan)},
        {"state": np.zeros(8, np.float32)},
        {"more": 1},
    ],
)
def test_a_frame_that_differs_otherwise_is_read_in_full(other):
    assert studied(frame(1)).read(frame(2, **other), INFO, MAPPING) is None


def test_another_policy_or_mapping_is_read_in_full():
    layouts = studied(frame(1))
    assert layouts.read(frame(2), msgspec.structs.replace(INFO, cameras=("front",)), MAPPING) is None
    assert layouts.read(frame(2), INFO, ClientMapping(state=("state",))) is None


@pytest.mark.parametrize(
    "body",
    [
        # two states, of which the nested one counts for no layout
        frame(1, observation={"state": packed(np.zeros(8))}),
        frame(1, state=np.zeros(8, np.float32)),
        frame(1, state=np.zeros((1, 8))),
        msgspec.msgpack.encode(
            {
                "front": packed(np.zeros((6, 6, 3), np.float32)),
                "wrist": packed(np.zeros((6, 6, 3), np.uint8)),
                "state": packed(np.zeros(8)),
                "prompt": "go",
            }
        ),
    ],
)
def test_what_has_to_be_looked_at_each_time_has_no_layout(body):
    assert studied(body).read(body, INFO, MAPPING) is None


def test_the_same_content_twice_is_told_apart_by_its_place():
    """A frame whose state's bytes also occur within its pixels."""
    pixels = np.zeros((6, 7, 3), np.uint8)
    body = msgspec.msgpack.encode(
        {"front": packed(pixels), "wrist": packed(pixels), "state": packed(np.zeros(8)), "prompt": "go"}
    )
    layouts = studied(body)
    other = msgspec.msgpack.encode(
        {"front": packed(pixels + 1), "wrist": packed(pixels + 2), "state": packed(np.arange(8.0)), "prompt": "go"}
    )
    assert same(layouts.read(other, INFO, MAPPING), in_full(other)[1])


def test_keys_that_come_twice_have_no_layout():
    first, second = frame(1)[1:], frame(2)[1:]
    with pytest.raises(TaktlineError):
        in_full(b"\x88" + first + second[:-1])
    body = b"\x88" + first + second  # the later ones count
    assert studied(body).read(body, INFO, MAPPING) is None


def test_a_key_that_comes_twice_does_not_exchange_two_cameras():
    """A decoded map keeps the place of a key's first value and the content of its last."""
    head, cameras = frame(1)[:1], {name: packed(np.full((6, 7, 3), 9, np.uint8)) for name in ("wrist", "front")}
    rest = msgspec.msgpack.encode({**cameras, "state": packed(np.arange(8.0)), "prompt": "go"})[1:]
    body = b"\x85" + msgspec.msgpack.encode("front") + b"\x00" + rest
    assert head == b"\x84"
    assert list(in_full(body)[1].images) == ["front", "wrist"]
    assert studied(body).read(body, INFO, MAPPING) is None


def test_a_client_that_never_repeats_itself_is_not_studied_for_ever():
    layouts = FrameLayouts()
    for seed in range(PATIENCE + 3):
        body = frame(seed, prompt=f"task {'x' * seed}")
        assert layouts.read(body, INFO, MAPPING) is None
        value, read = in_full(body)
        before = layouts._layout
        layouts.study(body, value, read, INFO, MAPPING, DEFAULT_LIMITS)
        assert (layouts._layout is not before) == (seed < PATIENCE)
