"""Frames seen before: exact reuse, bounded memory, counted hits, and no reuse where bits would differ."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from taktline_worker.frames import FrameCache, frame_key
from taktline_worker.models.pi import modules
from taktline_worker.models.pi.adapter import PiAdapter, load
from taktline_worker.models.pi.runner import PiRunner
from taktline_worker.observation import EncodedImage


def test_a_key_is_of_everything_that_decides_the_pixels() -> None:
    keys = {
        frame_key(image)
        for image in (
            EncodedImage("raw", bytes(12), (2, 2, 3)),
            EncodedImage("raw", bytes(12), (1, 4, 3)),
            EncodedImage("png", bytes(12)),
            EncodedImage("jpeg", bytes(12)),
            EncodedImage("jpeg", bytes(11) + b"\x01"),
        )
    }
    assert len(keys) == 5


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=60))
def test_memory_is_bounded_and_accounted(operations: list[tuple[int, int]]) -> None:
    cache: FrameCache[int] = FrameCache(100)
    kept: dict[bytes, int] = {}
    for key, size in operations:
        name = bytes([key])
        if cache.get(name) is None:
            kept.pop(name, None)
        cache.put(name, size, size)
        kept[name] = size
        assert cache.bytes <= 100
    assert cache.bytes == sum(size for name, size in kept.items() if cache.get(name) is not None)


def test_the_least_recently_used_goes_first_and_giants_are_not_kept() -> None:
    cache: FrameCache[str] = FrameCache(3)
    for key in (b"a", b"b", b"c"):
        cache.put(key, key.decode(), 1)
    assert cache.get(b"a") == "a"
    cache.put(b"d", "d", 1)
    assert (cache.get(b"b"), cache.get(b"a"), len(cache)) == (None, "a", 3)
    cache.put(b"e", "e", 4)
    assert (cache.get(b"e"), len(cache)) == (None, 3)


def test_threads_share_it() -> None:
    cache: FrameCache[int] = FrameCache(50)

    def work(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, 20, 400).tolist():
            if cache.get(bytes([number])) is None:
                cache.put(bytes([number]), number, 5)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.hits + cache.misses == 1600
    assert cache.bytes == 5 * len(cache) <= 50


@pytest.fixture(scope="module")
def paths(folders: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        family: folders.lerobot(tmp_path_factory.mktemp(family) / "policy", family, optional_cameras=cameras)
        for family, cameras in (("pi05", ["observation.images.left_wrist_0_rgb"]), ("pi0", []))
    }


def _answers(adapter: PiAdapter, *observations: Any, pool: Any) -> list[Any]:
    rows = [adapter.begin(observation, pool).result() for observation in observations]
    return list(adapter.finish(rows, adapter.run(rows, len(rows))))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_answers_are_the_same_bit_by_bit(
    paths: Any, config_of: Any, observations: Any, pool: Any, family: str, precision: str
) -> None:
    config = {"family": family, "precision": precision}
    with_cache = load(config_of(paths[family], **config))
    without = load(config_of(paths[family], **config, frame_cache_mb=0))
    assert with_cache.runner.seen is not None
    assert without.runner.seen is None
    images = observations.make(family).images
    names = list(images)
    moved = dict(images) | {names[0]: observations.image("png", seed=77)}
    batches = [
        [observations.make(family, seed=1)],
        [observations.make(family, seed=2), observations.make(family, seed=3)],  # all seen, twice
        [observations.make(family, seed=4, images=moved), observations.make(family, seed=1)],  # one camera is new
        [observations.make(family, seed=5, images=dict.fromkeys(names, moved[names[0]]))],  # one frame, all cameras
    ]
    for batch in batches:
        for reused, computed in zip(
            _answers(with_cache, *batch, pool=pool), _answers(without, *batch, pool=pool), strict=True
        ):
            assert np.array_equal(reused, computed)
    cameras = len(names)
    # One look-up for each distinct frame of a batch.
    assert with_cache.caches()["frame_features"] == (cameras + cameras + 1, cameras + 1)
    assert with_cache.caches()["frame_pixels"][0] == 6 * cameras - (cameras + 1)
    assert "frame_features" not in without.caches()
    assert without.caches()["frame_pixels"] == (0, 0)


def test_vision_runs_for_new_frames_only(
    paths: Any, config_of: Any, observations: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = load(config_of(paths["pi05"]))
    counts: list[int] = []
    compute = modules.image_features

    def counted(weights: Any, pixels: torch.Tensor, heads: int) -> torch.Tensor:
        counts.append(pixels.shape[0])
        return compute(weights, pixels, heads)

    monkeypatch.setattr(modules, "image_features", counted)
    images = dict(observations.make().images)
    _answers(adapter, observations.make(), pool=pool)
    _answers(adapter, observations.make(seed=9), pool=pool)
    images["left_wrist_0_rgb"] = observations.image("jpeg", seed=99)
    _answers(adapter, observations.make(images=images), pool=pool)
    del images["left_wrist_0_rgb"]
    _answers(adapter, observations.make(images=images), observations.make(images=images), pool=pool)
    assert counts == [3, 1]


def test_a_batch_larger_than_was_checked_is_computed_whole(
    paths: Any, config_of: Any, observations: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = load(config_of(paths["pi05"]))
    counts: list[int] = []
    compute = modules.image_features
    monkeypatch.setattr(modules, "image_features", lambda w, p, h: (counts.append(p.shape[0]), compute(w, p, h))[1])
    first = _answers(adapter, *[observations.make(seed=n) for n in range(2)], pool=pool)
    many = _answers(adapter, *[observations.make(seed=n) for n in range(4)], pool=pool)
    assert counts == [3, 12], "two observations have three distinct frames; four have twelve images, over the eight"
    assert np.allclose(first[0], many[0], atol=1e-5)


def test_calibration_never_profits(paths: Any, config_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """T_sync must be that of new frames, however often the measuring row is repeated."""
    adapter = load(config_of(paths["pi05"]))
    counts: list[int] = []
    compute = modules.image_features
    monkeypatch.setattr(modules, "image_features", lambda w, p, h: (counts.append(p.shape[0]), compute(w, p, h))[1])
    for _ in range(2):
        adapter.run([adapter.largest_row()] * 2, 2)
    assert counts == [6, 6]


def test_no_reuse_where_an_image_depends_on_the_others(
    paths: Any, config_of: Any, observations: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = modules.image_features
    monkeypatch.setattr(
        modules, "image_features", lambda w, p, h: compute(w, p, h) * (1.0 if p.shape[0] == 1 else 1.0 + 1e-6)
    )
    adapter = load(config_of(paths["pi05"]))
    assert isinstance(adapter.runner, PiRunner)
    assert adapter.runner.seen is None
    assert set(adapter.caches()) == {"frame_pixels"}
    assert _answers(adapter, observations.make(), pool=pool)[0].shape == (10, 7)


def test_memory_of_a_policy_is_bounded(paths: Any, config_of: Any, observations: Any, pool: Any) -> None:
    adapter = load(config_of(paths["pi05"], frame_cache_mb=1))
    frame = 4 * 3 * adapter.processor.architecture.image_size**2  # fp32
    most = 2**20 // frame
    for number in range(most + 5):
        images = {name: observations.image("raw", 8, 8, seed=number) for name in observations.make().images}
        adapter.begin(observations.make(images=images), pool).result()
    assert len(adapter.processor.seen) == most
    assert adapter.processor.seen.bytes == most * frame


def test_a_broken_frame_is_never_kept(paths: Any, config_of: Any, observations: Any, pool: Any) -> None:
    from taktline_protocol import TaktlineError

    adapter = load(config_of(paths["pi05"]))
    broken = dict(observations.make().images) | {"base_0_rgb": EncodedImage("jpeg", b"\xff\xd8 no image")}
    for _ in range(2):
        with pytest.raises(TaktlineError, match="base_0_rgb"):
            adapter.begin(observations.make(images=broken), pool).result()
    # The error does not wait for the frames beside it, which may still be under way.
    adapter.begin(observations.make(), pool).result()
    assert len(adapter.processor.seen) == 3
