"""Frames on their way out: names follow the content, what does not change is not encoded again."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from taktline.encoding import FrameEncoder
from taktline.held_frames import HeldFrames
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.image_fit import fit_frame
from taktline_protocol.images import jpeg_size
from taktline_protocol.messages import Image, ImageFit

NOISE = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)


def test_equal_content_has_one_name_and_other_content_another():
    encoder = FrameEncoder()
    name = encoder.encode({"c": NOISE})["c"].name
    assert encoder.encode({"c": NOISE.copy()})["c"].name == name
    changed = NOISE.copy()
    changed[47, 63, 2] ^= 1
    assert encoder.encode({"c": changed})["c"].name != name
    assert encoder.encode({"c": NOISE.reshape(64, 48, 3)})["c"].name != name, "the same bytes in another shape"
    assert encoder.encode({"c": Image("jpeg", NOISE.tobytes())})["c"].name != name, "or of another kind"
    assert encoder.encode({"c": NOISE[::2, ::2]})["c"].image.data == NOISE[::2, ::2].tobytes()


def test_jpeg_encoding_in_threads_keeps_the_picture():
    encoder = FrameEncoder(jpeg_quality=95)
    smooth = np.broadcast_to(np.arange(64, dtype=np.uint8)[None, :, None] * 3, (48, 64, 3)).copy()
    frames = asyncio.run(encoder.encode_async({"a": smooth, "b": NOISE, "done": b"\xff\xd8\xff"}))
    assert [frames[name].image.encoding for name in ("a", "b", "done")] == ["jpeg"] * 3
    assert jpeg_size(frames["a"].image.data) == (48, 64, 3)
    simplejpeg = pytest.importorskip("simplejpeg")
    assert np.abs(simplejpeg.decode_jpeg(frames["a"].image.data).astype(int) - smooth).max() <= 4
    assert frames["done"].image.data == b"\xff\xd8\xff", "what is encoded already passes"


def test_an_unchanged_camera_is_not_encoded_again():
    encoder = FrameEncoder(jpeg_quality=90)
    first = encoder.encode({"a": NOISE, "b": NOISE})
    second = encoder.encode({"a": NOISE.copy(), "b": NOISE + 1})
    assert second["a"] is first["a"]
    assert second["b"].name != first["b"].name


@pytest.mark.parametrize("quality", [None, 95])
def test_arrays_are_fitted_before_they_are_encoded(quality):
    encoder = FrameEncoder(quality)
    encoder.fit = ImageFit(height=32, width=32, filter="bilinear", letterbox=True)
    sent = asyncio.run(encoder.encode_async({"a": NOISE, "b": NOISE[::-1], "done": b"\xff\xd8\xff"}))
    assert sent["done"].image.data == b"\xff\xd8\xff", "what is encoded already passes"
    if quality is None:
        for camera, frame in (("a", NOISE), ("b", NOISE[::-1])):
            assert sent[camera].image == Image("raw", fit_frame(frame, encoder.fit).tobytes(), (32, 32, 3))
    else:
        assert jpeg_size(sent["a"].image.data) == (32, 32, 3)
    assert encoder.encode({"a": NOISE.copy()})["a"].name == sent["a"].name


@pytest.mark.parametrize("frame", [NOISE[..., 0], NOISE.astype(np.float32), NOISE[:0]])
def test_frames_that_cannot_be_encoded_name_their_camera(frame):
    with pytest.raises(TaktlineError, match="'a'") as caught:
        FrameEncoder(jpeg_quality=90).encode({"a": frame})
    assert caught.value.code is ErrorCode.IMAGE_CORRUPT


@pytest.mark.parametrize("quality", [0, 101])
def test_a_quality_that_is_none_is_refused_at_once(quality):
    with pytest.raises(TaktlineError) as caught:
        FrameEncoder(jpeg_quality=quality)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_what_is_held_is_referred_to_until_it_is_forgotten():
    encoder, held = FrameEncoder(), HeldFrames()
    frames = encoder.encode({"a": NOISE, "b": NOISE + 1})
    whole, unchanged, say = held.split(frames, "go")
    assert (set(whole), unchanged, say) == ({"a", "b"}, {}, True)
    held.sent(frames, "go", 1)
    assert held.split(frames, "go")[2] is True, "until it is known that it was taken"
    held.took(1)
    moved = encoder.encode({"a": NOISE, "b": NOISE + 2})
    whole, unchanged, say = held.split(moved, "go")
    assert (set(whole), unchanged, say) == ({"b"}, {"a": frames["a"].name}, False)
    assert held.split(frames, "stop")[2] is True
    held.sent(frames, "stop", 3)
    held.took(2)
    assert held.split(frames, "stop")[2] is held.split(frames, "go")[2] is True
    held.sent(frames, "stop", 4)
    held.took(4)
    assert held.split(frames, "stop")[2] is False
    held.begin({"b": frames["b"].name})
    assert set(held.split(frames, "go")[0]) == {"a"}
    held.forget()
    assert set(held.split(frames, "go")[0]) == {"a", "b"}
