"""JPEGs in native threads: the bits of libjpeg-turbo or none, whatever the file, and nothing lost on the way."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image
from taktline_protocol import ErrorCode
from taktline_worker import jpeg_threads
from taktline_worker.engine import Engine, Item
from taktline_worker.jpeg_threads import JpegThreads
from taktline_worker.models.pi.adapter import PiAdapter, load
from taktline_worker.observation import EncodedImage, decode_image

seen: list[list[torch.Tensor]] = []


class Runner:
    """A runner that looks at the frames and does no more."""

    device, unnormalises = torch.device("cpu"), True

    def run(self, batch: Any) -> torch.Tensor:
        seen.append(list(batch.raw))
        return torch.zeros(batch.tokens.shape[0], 50, 7)


SUBSAMPLINGS = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}


@pytest.fixture(scope="module")
def threads() -> JpegThreads:
    return JpegThreads(4)


def picture(kind: str, height: int, width: int, seed: int) -> NDArray[np.uint8]:
    draw = np.random.default_rng(seed)
    if kind == "noise":
        return draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
    coarse = Image.fromarray(draw.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
    if kind == "smooth":
        return smooth
    return (smooth + draw.normal(0, 6, smooth.shape)).clip(0, 255).astype(np.uint8)


def jpeg(pixels: NDArray[np.uint8], **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", **options)
    return stream.getvalue()


def decoded(threads: JpegThreads, files: list[bytes]) -> Iterator[NDArray[np.uint8] | None]:
    """All of the files in one go; None for each that is refused."""
    there = [file for file in files if file]
    batch = threads.batch(there)
    memory = [
        None if shape is None or shape[0] * shape[1] > 1 << 20 else torch.empty(shape, dtype=torch.uint8)
        for shape in batch.shapes
    ]
    begun = iter(threads.begin(batch, memory))
    for file in files:
        frame = next(begun) if file else None
        yield frame.pixels.numpy() if frame is not None and frame.decoded() else None


@pytest.mark.parametrize("kind", ["noise", "smooth", "camera"])
@pytest.mark.parametrize("colours", SUBSAMPLINGS)
@pytest.mark.parametrize("together", [1, 2, 9])
def test_the_bits_are_those_of_libjpeg_turbo(threads: JpegThreads, kind: str, colours: str, together: int) -> None:
    draw = np.random.default_rng(together)
    for number in range(6):
        files = []
        for _ in range(together):
            height, width = (int(side) for side in draw.integers(8, 150, 2))
            quality = int(draw.choice([10, 50, 75, 90, 95, 100]))
            shown = picture(kind, height, width, number)
            files.append(jpeg(shown, quality=quality, subsampling=SUBSAMPLINGS[colours], optimize=bool(number % 2)))
        for file, pixels in zip(files, decoded(threads, files), strict=True):
            assert pixels is not None
            assert np.array_equal(pixels, simplejpeg.decode_jpeg(file, "RGB"))


def test_a_file_that_is_damaged_is_refused_or_gives_the_same_bits(threads: JpegThreads) -> None:
    draw = np.random.default_rng(0)
    whole = [
        jpeg(picture("camera", 40, 56, seed), quality=80, subsampling=colours)
        for seed, colours in enumerate(SUBSAMPLINGS.values())
    ]
    accepted = 0
    for number in range(3000):
        file = bytearray(whole[number % len(whole)])
        for _ in range(int(draw.integers(0, 3))):
            file[int(draw.integers(0, len(file)))] = int(draw.choice([0, 255, int(draw.integers(0, 256))]))
        if not draw.integers(0, 5):
            del file[int(draw.integers(0, len(file))) :]
        (pixels,) = decoded(threads, [bytes(file)])
        if pixels is not None:
            accepted += 1
            assert np.array_equal(pixels, decode_image("front", EncodedImage("jpeg", bytes(file))))
    assert accepted > 500


@pytest.mark.parametrize(
    "odd",
    [
        {"progressive": True},
        {"restart_marker_rows": 1},
        {"quality": 1, "qtables": [[1] * 64, [255] * 64], "subsampling": 0, "noise": True},
        {"gray": True},
        {"cmyk": True},
        {"tiny": True},
        {"empty": True},
        {"extra": True},
    ],
    ids=lambda odd: next(iter(odd)),
)
def test_what_is_out_of_the_ordinary_is_left_to_others_or_the_same(threads: JpegThreads, odd: dict[str, Any]) -> None:
    shown = picture("noise" if odd.pop("noise", False) else "camera", 40, 56, 3)
    if odd.pop("gray", False):
        file = jpeg(shown[..., 0])
    elif odd.pop("cmyk", False):
        stream = io.BytesIO()
        Image.fromarray(shown).convert("CMYK").save(stream, "JPEG")
        file = stream.getvalue()
    elif odd.pop("tiny", False):
        file = jpeg(shown[:3, :3])
    elif odd.pop("empty", False):
        file = b""
    elif odd.pop("extra", False):
        file = jpeg(shown)[:-2] + b"\0\0\xff\xd9"
    else:
        file = jpeg(shown, **odd)
    (pixels,) = decoded(threads, [file])
    assert pixels is None or np.array_equal(pixels, decode_image("front", EncodedImage("jpeg", file)))


def test_frames_that_nobody_waits_for_are_decoded_all_the_same(threads: JpegThreads) -> None:
    file = jpeg(picture("camera", 480, 640, 1))
    expected = simplejpeg.decode_jpeg(file, "RGB")

    def many(_: int) -> bool:
        good = True
        for number in range(30):
            memory = [torch.empty(480, 640, 3, dtype=torch.uint8) for _ in range(3)]
            begun = threads.begin(threads.batch([bytes(bytearray(file)) for _ in memory]), memory)  # nobody else's
            if number % 3:
                good &= all(
                    frame is not None and frame.decoded() and np.array_equal(frame.pixels.numpy(), expected)
                    for frame in begun
                )
        return good

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(many, range(3)))


def test_where_there_is_no_compiler_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert jpeg_threads.jpeg_threads() is None
    assert "no-such-compiler" in caplog.text
    monkeypatch.setenv("CC", "false")
    with pytest.raises(OSError, match="fails on"):
        JpegThreads(1)


def test_other_bits_are_noticed_before_the_first_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *_: np.zeros((40, 56, 3), np.uint8))
    with pytest.raises(OSError, match="other bits"):
        JpegThreads(1)


@pytest.fixture(params=[0, 64])
def engine(
    folders: Any, config_of: Any, tmp_path: Any, threads: JpegThreads, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    processor = load(config_of(folders.lerobot(tmp_path / "policy", "pi05"), frame_cache_mb=request.param)).processor
    processor.raw, processor.native = True, threads
    made = Engine(PiAdapter(processor, Runner(), "fp32"), (1, 2), 2)
    yield made
    made.close()


def as_they_come(engine: Engine, images: dict[str, EncodedImage]) -> dict[str, EncodedImage]:
    """What the service makes of a batch's frames before it looks at anything else."""
    begun = engine.begin_frames([(one.encoding, one.shape, memoryview(one.data)) for one in images.values()])
    return {
        name: EncodedImage(one.encoding, memoryview(one.data), one.shape, early)
        for (name, one), early in zip(images.items(), begun, strict=True)
    }


def test_frames_begun_before_their_observation_are_its_row(engine: Engine, observations: Any) -> None:
    names = list(observations.make().images)
    for seed in range(6):
        plain = {
            name: EncodedImage("jpeg", jpeg(picture("camera", 60, 80, 10 * seed + at))) for at, name in enumerate(names)
        }
        images = as_they_come(engine, plain)
        assert all(image.begun is not None for image in images.values())
        seen.clear()
        result = engine.infer([Item(observations.make(images=images))])
        assert isinstance(result.outcomes[0], np.ndarray)
        (frames,) = seen
        for name, frame in zip(names, frames, strict=True):
            assert np.array_equal(frame.numpy(), decode_image(name, plain[name]))
    cache = engine.adapter.processor.seen
    if cache.limit_bytes:
        again = as_they_come(engine, plain)
        assert all(image.begun is None for image in again.values()), "it is known"
        hits = cache.hits
        engine.infer([Item(observations.make(images=again))])
        assert cache.hits == hits + len(names)


def test_a_frame_that_cannot_be_decoded_early_gets_its_own_word(engine: Engine, observations: Any) -> None:
    names = list(observations.make().images)
    good = jpeg(picture("camera", 60, 80, 1))
    damaged = good[: 4 * len(good) // 5]  # its headers are right
    images = as_they_come(engine, {name: EncodedImage("jpeg", damaged if name == names[0] else good) for name in names})
    assert images[names[0]].begun is not None
    bad, fine = engine.infer(
        [
            Item(observations.make(images=images)),
            Item(observations.make(images=as_they_come(engine, dict.fromkeys(names, EncodedImage("jpeg", good))))),
        ]
    ).outcomes
    assert bad.code is ErrorCode.IMAGE_CORRUPT
    assert names[0] in bad.message
    assert isinstance(fine, np.ndarray)


def test_begun_are_only_jpegs_that_will_be_taken(engine: Engine) -> None:
    raw, png, strip = ("raw", (2, 2, 3), bytes(12)), ("png", (), b"\x89PNG"), jpeg(picture("noise", 8, 4000, 1))
    large = jpeg(picture("smooth", 60, 80, 1))
    engine.adapter.processor._max_pixels = 60 * 80 - 1
    assert engine.begin_frames([raw, png, ("jpeg", (), strip), ("jpeg", (), large), ("jpeg", (), b"")]) == [None] * 5
    engine.adapter.processor._max_pixels += 1
    assert engine.begin_frames([("jpeg", (), large)])[0] is not None
    engine.adapter.processor.raw = False
    assert engine.begin_frames([("jpeg", (), large)]) == [None]


def test_threads_are_as_many_as_are_asked_for(threads: JpegThreads) -> None:
    assert threads._quick.taktline_jpeg_threads(1) >= 4
    assert len(os.listdir("/proc/self/task")) > 4
