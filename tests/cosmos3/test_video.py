"""Imagined videos as files: readable by other programs, near the pixels, within their limits."""

from __future__ import annotations

import io

import av
import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.models.cosmos3 import video
from taktline_worker.observation import ImagineInput


def moving(frames: int = 9, height: int = 96, width: int = 128) -> NDArray[np.uint8]:
    """A smooth picture that moves, as codecs expect."""
    y, x = np.mgrid[:height, :width]
    found = [
        np.stack([127 + 120 * np.sin((x + 3 * t) / 19), 127 + 120 * np.cos((y + t) / 17), 2.0 * y + t], axis=-1)
        for t in range(frames)
    ]
    return np.clip(np.stack(found), 0, 255).astype(np.uint8)


def psnr(found: NDArray[np.uint8], expected: NDArray[np.uint8]) -> float:
    return float(10 * np.log10(255**2 / np.mean((found.astype(float) - expected) ** 2)))


def test_an_mp4_has_every_frame_at_its_time() -> None:
    pixels = moving()
    (data,) = video.encode_video(pixels, ImagineInput("mp4"), 15.0)
    assert data[4:8] == b"ftyp"
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        assert stream.average_rate == 15
        assert stream.codec_context.name == "h264"
        assert stream.codec_context.pix_fmt == "yuv420p"
        found = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
    assert found.shape == pixels.shape
    assert psnr(found, pixels) > 30


def test_frames_are_jpegs() -> None:
    pixels = moving()
    found = video.encode_video(pixels, ImagineInput("frames"), 15.0)
    assert len(found) == len(pixels)
    for data, expected in zip(found, pixels, strict=True):
        frame = cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
        assert psnr(frame, expected) > 30


@pytest.mark.parametrize("kind", ["mp4", "frames"])
def test_frames_are_scaled_down_to_what_is_asked(kind: str) -> None:
    found = video.encode_video(moving(height=96, width=130), ImagineInput(kind, height=48), 15.0)
    if kind == "frames":
        assert cv2.imdecode(np.frombuffer(found[0], np.uint8), cv2.IMREAD_COLOR).shape == (48, 65, 3)
        return
    with av.open(io.BytesIO(found[0])) as container:
        # Two pixels share a colour: odd sides lose one.
        assert (container.streams.video[0].height, container.streams.video[0].width) == (48, 64)


def test_pixels_are_cut_off_as_the_official_server_does() -> None:
    given = torch.tensor([-1.5, -1.0, -0.999, 0.0, 0.999, 1.0, 2.0]).view(1, 1, 1, 7).expand(3, 1, 1, 7)
    found = video.to_pixels(given)
    assert found.shape == (1, 1, 7, 3)
    assert found[0, 0, :, 0].tolist() == [0, 0, 0, 127, 254, 255, 255]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (ImagineInput("gif"), "'gif'"),
        (ImagineInput("mp4", height=8), "height is 8"),
        (ImagineInput("frames", height=541), "height is 541"),
    ],
)
def test_what_cannot_be_made_is_refused_beforehand(asked: ImagineInput, said: str) -> None:
    with pytest.raises(TaktlineError) as refused:
        video.check(asked, 540)
    assert refused.value.code is ErrorCode.IMAGINE_INVALID
    assert said in refused.value.message
    video.check(ImagineInput("mp4", height=540), 540)


def test_an_answer_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "MAX_VIDEO_BYTES", 10_000)
    with pytest.raises(TaktlineError) as refused:
        video.encode_video(moving(), ImagineInput("frames"), 15.0)
    assert refused.value.code is ErrorCode.IMAGINE_INVALID
    assert "the limit is 10000" in refused.value.message
    assert "imagine.height" in refused.value.next_step
