"""Bad observations: each gets its own typed error, and its neighbours in the batch get their actions."""

from __future__ import annotations

import dataclasses
import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.engine import Engine, Item
from taktline_worker.models.pi.adapter import load
from taktline_worker.models.pi.normalise import Normaliser
from taktline_worker.observation import EncodedImage, decode_image


@pytest.fixture(scope="module")
def engine(folders: Any, config_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = folders.lerobot(tmp_path_factory.mktemp("engine") / "policy", "pi05")
    # Two solver steps: these tests are about what surrounds the network.
    made = Engine(load(config_of(path, solver_steps=2)), (1, 2, 4), decode_threads=2)
    yield made
    made.close()


def _png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds hardly any data: decoding it would allocate the claimed pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def _sixteen_bit_png() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(stream, "PNG")
    return stream.getvalue()


def _large_jpeg() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (10000, 6000), (10, 20, 30)).save(stream, "JPEG", quality=10)
    return stream.getvalue()


def _bad_images(good: EncodedImage) -> dict[str, tuple[EncodedImage, ErrorCode]]:
    corrupt, large = ErrorCode.IMAGE_CORRUPT, ErrorCode.IMAGE_TOO_LARGE
    return {
        "truncated jpeg": (EncodedImage("jpeg", good.data[: len(good.data) // 2]), corrupt),
        "jpeg header only": (EncodedImage("jpeg", good.data[:20]), corrupt),
        "no bytes": (EncodedImage("jpeg", b""), corrupt),
        "not a jpeg": (EncodedImage("jpeg", b"hello" * 100), corrupt),
        "png called jpeg": (EncodedImage("jpeg", _png_header(8, 8)), corrupt),
        "png with too little data": (EncodedImage("png", _png_header(64, 64)), corrupt),
        "png of 16 bits": (EncodedImage("png", _sixteen_bit_png()), corrupt),
        "unknown encoding": (EncodedImage("webp", good.data), corrupt),
        "raw without shape": (EncodedImage("raw", b"\0" * 300), corrupt),
        "raw of wrong size": (EncodedImage("raw", b"\0" * 300, (10, 11, 3)), corrupt),
        "raw with four channels": (EncodedImage("raw", b"\0" * 400, (10, 10, 4)), corrupt),
        "raw with a zero side": (EncodedImage("raw", b"\0", (0, 10, 3)), corrupt),
        "60 megapixel jpeg": (EncodedImage("jpeg", _large_jpeg()), large),
        "60 megapixel png": (EncodedImage("png", _png_header(10000, 6000)), large),
        "400 megapixel png": (EncodedImage("png", _png_header(20000, 20000)), large),
        "raw that claims 60 megapixels": (EncodedImage("raw", b"\0" * 30, (6000, 10000, 3)), large),
    }


def _outcome(engine: Engine, observations: Any, bad: Any, code: ErrorCode) -> TaktlineError:
    """Runs the bad observation between two good ones and checks all three outcomes."""
    good = observations.make()
    alone = engine.infer([Item(good)] * 2).outcomes
    first, error, last = engine.infer([Item(good), Item(bad), Item(good)]).outcomes
    assert isinstance(error, TaktlineError)
    assert error.code is code, error
    assert error.next_step
    for neighbour in (first, last):
        assert isinstance(neighbour, np.ndarray)
        assert np.array_equal(neighbour, alone[0])
    return error


@pytest.mark.parametrize("name", sorted(_bad_images(EncodedImage("jpeg", b"x" * 40))))
def test_bad_images(engine: Engine, observations: Any, name: str) -> None:
    image, code = _bad_images(observations.image("jpeg"))[name]
    observation = observations.make()
    bad = observations.make(images={**observation.images, "left_wrist_0_rgb": image})
    error = _outcome(engine, observations, bad, code)
    assert "left_wrist_0_rgb" in error.message


def test_size_is_read_from_the_header_alone(observations: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Image.Image) -> None:
        raise AssertionError("pixels were decoded")

    from PIL import ImageFile

    monkeypatch.setattr(ImageFile.ImageFile, "load", forbidden)
    with pytest.raises(TaktlineError) as caught:
        decode_image("front", EncodedImage("png", _png_header(10000, 6000)))
    assert caught.value.code is ErrorCode.IMAGE_TOO_LARGE
    with pytest.raises(TaktlineError) as caught:
        decode_image("front", observations.image("png", 10, 11), max_pixels=109)
    assert caught.value.code is ErrorCode.IMAGE_TOO_LARGE


def test_the_limit_comes_from_the_engine_config(
    folders: Any, config_of: Any, tmp_path: Any, observations: Any, pool: Any
) -> None:
    adapter = load(config_of(folders.lerobot(tmp_path / "policy", "pi05"), max_image_pixels=48 * 64 - 1))
    with pytest.raises(TaktlineError) as caught:
        adapter.begin(observations.make(), pool).result()
    assert caught.value.code is ErrorCode.IMAGE_TOO_LARGE


class NoPool:
    """Decodes nothing."""

    def submit(self, *_: Any) -> None:
        raise AssertionError("a frame was handed out for decoding")


@pytest.mark.parametrize("state", [[float("nan")] * 6, [0.0], [1e300] * 6])
def test_whose_state_is_refused_has_no_frame_decoded(
    folders: Any, config_of: Any, tmp_path: Any, observations: Any, state: list[float]
) -> None:
    adapter = load(config_of(folders.lerobot(tmp_path / "policy", "pi05")))
    with pytest.raises(TaktlineError) as caught:
        adapter.begin(observations.make(state=np.array(state)), NoPool())
    assert caught.value.code is ErrorCode.STATE_INVALID
    with pytest.raises(AssertionError, match="handed out"):
        adapter.begin(observations.make(), NoPool())


@pytest.mark.parametrize("kind", ["png", "raw"])
def test_lossless_frames_arrive_as_sent(observations: Any, kind: str) -> None:
    raw = observations.image("raw", 12, 20, seed=3)
    expected = np.frombuffer(raw.data, np.uint8).reshape(12, 20, 3)
    assert np.array_equal(decode_image("front", observations.image(kind, 12, 20, seed=3)), expected)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_other_pixel_formats_become_rgb(mode: str) -> None:
    stream = io.BytesIO()
    image = Image.new("RGB", (9, 7), (204, 204, 204)).convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    image.save(stream, kind)
    frame = decode_image("front", EncodedImage(kind.lower(), stream.getvalue()))
    assert frame.shape == (7, 9, 3)
    assert np.abs(frame.astype(int) - 204).max() <= 3


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize(
    "how",
    [{"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"progressive": True}, {"restart_marker_rows": 1}],
)
def test_a_jpeg_has_the_pixels_that_pillow_gives(mode: str, how: dict[str, Any]) -> None:
    coarse = np.random.default_rng(5).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((75, 53), Image.Resampling.BICUBIC).convert(mode)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=85, **how)
    data = memoryview(stream.getvalue())  # as frames arrive from a gateway
    expected = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    frame = decode_image("front", EncodedImage("jpeg", data))
    assert np.array_equal(frame, expected)
    # What follows the picture is no fault of it, for either decoder.
    assert np.array_equal(decode_image("front", EncodedImage("jpeg", bytes(data) + b"more")), expected)


def _with_entry(index: int, value: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    state = np.zeros(8, np.float32)
    state[index] = value
    return state


@pytest.mark.parametrize(
    "state",
    [
        _with_entry(3, float("nan")),
        _with_entry(0, float("inf")),
        _with_entry(0, -float("inf")),
        _with_entry(5, 3e38),
        np.zeros(7, np.float32),
        np.zeros(9, np.float32),
        np.zeros(0, np.float32),
        np.zeros((1, 8), np.float32),
        np.float32(1),
    ],
    ids=["nan", "inf", "-inf", "overflow", "short", "long", "empty", "matrix", "scalar"],
)
def test_bad_states(engine: Engine, observations: Any, state: Any) -> None:
    _outcome(engine, observations, observations.make(state=np.asarray(state)), ErrorCode.STATE_INVALID)


def test_a_state_beyond_float32_is_refused_whatever_the_statistics(
    engine: Engine, observations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics as wide bring it back within the network's range; relative actions would not be in the robot's."""
    processor = engine.adapter.processor
    width = processor.conventions.state_dim
    wide = Normaliser("MEAN_STD", np.zeros(width), np.full(width, 1e39), 1e-8, False)
    monkeypatch.setattr(processor, "conventions", dataclasses.replace(processor.conventions, state_normaliser=wide))
    state = _with_entry(0, 0.0).astype(np.float64)
    state[0] = 1e39
    _outcome(engine, observations, observations.make(state=state), ErrorCode.STATE_INVALID)


@pytest.mark.parametrize(
    "text", ["", "  \n\t ", "x" * 10_000, "lift the cup " * 40], ids=["empty", "blank", "10000", "tokens"]
)
def test_bad_instructions(engine: Engine, observations: Any, text: str) -> None:
    _outcome(engine, observations, observations.make(instruction=text), ErrorCode.INSTRUCTION_INVALID)


def test_missing_unknown_and_doubled_cameras(engine: Engine, observations: Any) -> None:
    good = observations.make()
    image = observations.image("png")
    fewer = {name: frame for name, frame in good.images.items() if name != "base_0_rgb"}
    error = _outcome(engine, observations, observations.make(images=fewer), ErrorCode.CAMERA_MISSING)
    assert "base_0_rgb" in error.message
    _outcome(engine, observations, observations.make(images={}), ErrorCode.CAMERA_MISSING)
    more = {**good.images, "elbow": image}
    error = _outcome(engine, observations, observations.make(images=more), ErrorCode.CAMERA_UNKNOWN)
    assert "elbow" in error.message
    twice = {**good.images, "observation.images.base_0_rgb": image}
    _outcome(engine, observations, observations.make(images=twice), ErrorCode.CAMERA_UNKNOWN)


def test_declared_empty_cameras_cannot_be_sent(
    folders: Any, config_of: Any, tmp_path: Any, observations: Any, pool: Any
) -> None:
    adapter = load(config_of(folders.lerobot(tmp_path / "policy", "pi0"), "pi0"))
    good = observations.make("pi0")
    assert adapter.begin(good, pool).result().row.pixels.shape[0] == 2
    with pytest.raises(TaktlineError) as caught:
        adapter.begin(
            observations.make("pi0", images={**good.images, "empty_camera_0": observations.image("png")}), pool
        )
    assert caught.value.code is ErrorCode.CAMERA_UNKNOWN


def test_a_masked_camera_changes_the_answer_and_its_slot_is_free(
    folders: Any, config_of: Any, tmp_path: Any, observations: Any, pool: Any
) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi05", optional_cameras=["left_wrist_0_rgb"])
    adapter = load(config_of(path))
    assert adapter.description.optional_cameras == ("left_wrist_0_rgb",)
    full = observations.make()
    fewer = observations.make(images={n: f for n, f in full.images.items() if n != "left_wrist_0_rgb"})
    outputs = [adapter.run([adapter.begin(o, pool).result()], 1) for o in (full, fewer)]
    assert not np.allclose(*outputs, atol=1e-3)


def test_a_batch_larger_than_the_largest_bucket_runs_in_parts(engine: Engine, observations: Any) -> None:
    result = engine.infer([Item(observations.make(seed=index)) for index in range(6)])
    assert result.bucket == 4
    assert all(isinstance(outcome, np.ndarray) for outcome in result.outcomes)
    alone = engine.infer([Item(observations.make(seed=5))]).outcomes[0]
    assert np.allclose(alone, result.outcomes[5], atol=1e-5)


def test_a_batch_of_bad_items_only_never_reaches_the_engine(
    engine: Engine, observations: Any, monkeypatch: Any
) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("the engine ran")

    monkeypatch.setattr(engine.adapter, "run", forbidden)
    result = engine.infer([Item(observations.make(instruction=""))])
    assert result.bucket == 0
    assert isinstance(result.outcomes[0], TaktlineError)


def test_an_engine_failure_is_an_error_of_each_row(engine: Engine, observations: Any, monkeypatch: Any) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.adapter, "run", broken)
    outcomes = engine.infer([Item(observations.make()), Item(observations.make(instruction=""))]).outcomes
    codes = [outcome.code for outcome in outcomes if isinstance(outcome, TaktlineError)]
    assert codes == [ErrorCode.WORKER_FAILED, ErrorCode.INSTRUCTION_INVALID]
    monkeypatch.undo()
    assert isinstance(engine.infer([Item(observations.make())]).outcomes[0], np.ndarray)
