"""JPEGs in native threads: the bits of libjpeg-turbo or none, whatever the file, and nothing lost on the way."""

from __future__ import annotations

import io
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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

from tests.waiting import until

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


@pytest.fixture(autouse=True)
def nobodys() -> Iterator[None]:
    """Each test is the first that asks for the process's threads."""
    jpeg_threads.jpeg_threads.cache_clear()
    yield
    jpeg_threads.jpeg_threads.cache_clear()


def decoded(threads: JpegThreads, files: list[bytes]) -> Iterator[NDArray[np.uint8] | None]:
    """All of the files in one go; None for each that is refused."""
    there = tuple(file for file in files if file)
    batch = threads.batch(there)
    memory = [
        None if shape is None or shape[0] * shape[1] > 1 << 20 else jpeg_threads.new_memory(shape)
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


@pytest.mark.parametrize("colours", SUBSAMPLINGS)
def test_a_large_frame_that_is_alone_has_two_painters(threads: JpegThreads, colours: str) -> None:
    """And a damaged one none too few: whoever waits for it is told."""
    draw, painters = np.random.default_rng(2), set()
    for height, width in ((480, 640), (367, 411), (300, 1000)):
        file = jpeg(picture("camera", height, width, 7), quality=85, subsampling=SUBSAMPLINGS[colours])
        for damage in range(6):
            sent = bytearray(file)
            for _ in range(damage):
                sent[int(draw.integers(0, len(sent)))] = int(draw.integers(0, 256))
            batch = threads.batch((bytes(sent),))
            memory = [None if shape != (height, width, 3) else jpeg_threads.new_memory(shape) for shape in batch.shapes]
            time.sleep(0.01)  # all threads are at rest then
            (frame,) = threads.begin(batch, memory)
            assert damage or frame is not None
            if frame is None:
                continue
            painters.add(batch.jobs[0].painters)
            pixels = frame.pixels.numpy() if frame.decoded() else None
            assert damage or pixels is not None
            if pixels is not None:
                assert np.array_equal(pixels, decode_image("front", EncodedImage("jpeg", bytes(sent))))
    assert 2 in painters


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
            memory = [jpeg_threads.new_memory((480, 640, 3)) for _ in range(3)]
            begun = threads.begin(threads.batch(tuple(bytes(bytearray(file)) for _ in memory)), memory)  # nobody else's
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
    with monkeypatch.context() as nowhere, caplog.at_level(logging.WARNING):
        nowhere.setenv("PATH", "")
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
    begun = engine.begin_frames(
        [(name, (one.encoding, one.shape, memoryview(one.data))) for name, one in images.items()]
    )
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
        hits = cache.hits
        again = as_they_come(engine, plain)
        assert all(image.begun.was_known for image in again.values())
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
    camera = engine.adapter.description.cameras[0]
    engine.adapter.processor._max_pixels = 60 * 80 - 1
    others = [raw, png, ("jpeg", (), strip), ("jpeg", (), large), ("jpeg", (), b"")]
    assert engine.begin_frames([(camera, frame) for frame in others]) == [None] * 5
    engine.adapter.processor._max_pixels += 1
    unknown, known = engine.begin_frames([("no_camera", ("jpeg", (), large)), (camera, ("jpeg", (), large))])
    assert unknown is None
    assert known is not None
    engine.adapter.processor.raw = False
    assert engine.begin_frames([(camera, ("jpeg", (), large))]) == [None]


def resident_mib() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def test_what_large_frames_need_is_given_back(threads: JpegThreads) -> None:
    side = 4000
    file = jpeg(np.zeros((side, side, 3), np.uint8), subsampling=0)
    before = resident_mib()
    begun = threads.begin(threads.batch((file,)), [jpeg_threads.new_memory((side, side, 3))])
    assert all(frame is not None and frame.decoded() for frame in begun)
    del begun
    list(decoded(threads, [jpeg(picture("smooth", 40, 40, 1))]))  # and forget those before
    until(lambda: resident_mib() < before + 40, "memory given back", 20.0)


def test_more_tables_than_a_frame_can_use_are_refused(threads: JpegThreads) -> None:
    file = jpeg(picture("camera", 40, 56, 1))
    table = b"\xff\xc4\x00\x14\x11\x01" + bytes(15) + b"\x01"  # one code, which the file's own replaces
    more = [file[:20] + number * table + file[20:] for number in (4, 5)]
    four, five = decoded(threads, more)
    assert four is not None
    assert np.array_equal(four, simplejpeg.decode_jpeg(file, "RGB"))
    assert five is None


def test_a_child_refuses_what_it_has_no_threads_for(threads: JpegThreads) -> None:
    file = jpeg(picture("camera", 40, 56, 1))
    batch = threads.batch((file,))
    job = jpeg_threads._Job()
    child = os.fork()
    if not child:
        signal.alarm(20)  # waiting for ever is what it must not do
        good = False
        try:
            begun = threads.begin(batch, [jpeg_threads.new_memory((40, 56, 3))])
            late = jpeg_threads.BegunFrame(torch.empty(0), 0, threads, job)
            good = threads.batch((file,)).shapes == [None] and begun == [None] and not late.decoded()
        finally:
            os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert next(decoded(threads, [file])) is not None


def folders_left() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("taktline-c-")}


def test_a_compiler_that_cannot_run_or_makes_something_else_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    compiler = tmp_path / "cc"
    compiler.write_text("#!/no/such/interpreter\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert jpeg_threads.jpeg_threads() is None
    assert "No such file" in caplog.text
    real = shutil.which("cc") or shutil.which("gcc")
    compiler.write_text(
        f'#!/bin/sh\nfor out; do test "$last" = -o && break; last=$out; done\n'
        f'echo "int other;" | {real} -shared -fPIC -x c - -o "$out"\n'
    )
    jpeg_threads.jpeg_threads.cache_clear()
    assert jpeg_threads.jpeg_threads() is None
    assert "another one" in caplog.text
    assert not folders_left()


def test_threads_are_as_many_as_are_asked_for(threads: JpegThreads) -> None:
    assert threads._quick.taktline_jpeg_threads(1) >= 4
    assert len(os.listdir("/proc/self/task")) > 4


def test_all_policies_of_a_process_share_its_threads() -> None:
    first = jpeg_threads.jpeg_threads()
    assert first is not None
    there = len(os.listdir("/proc/self/task"))
    assert jpeg_threads.jpeg_threads() is first
    assert len(os.listdir("/proc/self/task")) == there


def test_a_compiler_with_words_is_run_as_a_shell_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, said = tmp_path / "cache it", tmp_path / "said"
    launcher.write_text(f'#!/bin/sh\necho "$1" > "{said}"\nexec "$@"\n')
    launcher.chmod(0o755)
    real = shutil.which("cc") or shutil.which("gcc")
    monkeypatch.setenv("CC", f"'{launcher}' {real}")
    JpegThreads(1)
    assert said.read_text().strip() == real


def test_a_compiler_that_is_not_there_is_said_and_the_usual_one_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    JpegThreads(1)
    assert "no-such-compiler -m64" in caplog.text
    monkeypatch.setenv("CC", "cc '")
    with pytest.raises(OSError, match="no command"):
        JpegThreads(1)
