"""A row whose frames are being decoded: who decodes them, and when its prompt is tokenised."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from taktline_worker.models.pi import pending as pi_pending
from taktline_worker.models.pi import processor as pi_processor
from taktline_worker.models.pi.adapter import PiAdapter, load

from tests.waiting import until

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def adapter(folders: Any, config_of: Any, tmp_path_factory: pytest.TempPathFactory) -> PiAdapter:
    return load(config_of(folders.lerobot(tmp_path_factory.mktemp("pending") / "policy", "pi05"), frame_cache_mb=0))


def test_whoever_waits_for_frames_that_no_thread_has_begun_decodes_them(
    adapter: PiAdapter, observations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    observation = observations.make(seed=3)
    with ThreadPoolExecutor(4) as pool:
        expected = adapter.begin(observation, pool).result()
    threads = []
    decode = pi_processor.decode_image

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return decode(*arguments)

    monkeypatch.setattr(pi_processor, "decode_image", noted)
    occupied = threading.Event()
    with ThreadPoolExecutor(1, "pool") as pool, ThreadPoolExecutor(1, "waits") as waiting:
        pool.submit(occupied.wait, LIMIT_S)
        job = waiting.submit(adapter.begin(observation, pool).result)
        until(lambda: len(threads) == len(observation.images), "a thread for each frame")
        occupied.set()
        row = job.result(LIMIT_S)
    assert {name.split("_")[0] for name in threads} == {"waits"}
    assert torch.equal(row.row.pixels, expected.row.pixels)
    assert np.array_equal(row.row.tokens, expected.row.tokens)
    assert torch.equal(row.row.noise, expected.row.noise)


def test_the_prompt_is_tokenised_once_all_frames_are_being_decoded_and_before_they_are_there(
    adapter: PiAdapter, observations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pi_pending, "_BEGIN_LIMIT_S", LIMIT_S)
    monkeypatch.setattr(adapter.processor, "raw", True)
    observation, go_on = observations.make(), threading.Event()

    def decode(name: str, image: Any, most: int, memory: Any) -> Any:
        frame = memory((4, 4, 3))
        assert go_on.wait(LIMIT_S)
        return frame

    monkeypatch.setattr(pi_processor, "decode_image", decode)
    with ThreadPoolExecutor(len(observation.images)) as pool:
        pending = adapter.begin(observation, pool)
        pending.let_frames_begin()
        assert sorted(pending.begun) == sorted(observation.images)
        first = pending.without_frames()
        assert not any(frame.done() for frame in pending.pixels)
        go_on.set()
        row = pending.result().row
    assert len(row.raw) == len(observation.images)
    assert row.tokens is first.tokens
    assert row.noise is first.noise


@pytest.mark.parametrize("broken", [False, True])
def test_frames_that_were_seen_before_or_are_refused_are_not_waited_for(
    folders: Any, config_of: Any, observations: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    adapter = load(config_of(folders.lerobot(tmp_path / "policy", "pi05")))
    monkeypatch.setattr(adapter.processor, "raw", True)
    observation = observations.make()
    if broken:
        images = {name: pi_processor.EncodedImage("jpeg", b"nothing") for name in observation.images}
        observation = observations.make(images=images)
    with ThreadPoolExecutor(2) as pool:
        if not broken:
            adapter.begin(observation, pool).result()
        monkeypatch.setattr(pi_pending, "_BEGIN_LIMIT_S", 2.0)
        pending, began = adapter.begin(observation, pool), time.monotonic()
        pending.let_frames_begin()
        assert time.monotonic() - began < 2.0
        assert pending.begun == set(observation.images)


def test_frames_that_no_thread_is_free_for_are_not_waited_for(adapter: PiAdapter, observations: Any) -> None:
    occupied = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(occupied.wait, LIMIT_S)
        pending = adapter.begin(observations.make(), pool)
        pending.let_frames_begin()
        assert not any(frame.running() for frame in pending.pixels)
        pending.result()
        occupied.set()


def test_a_frame_that_is_refused_keeps_no_prompt_from_being_made(adapter: PiAdapter, observations: Any) -> None:
    observation = observations.make()
    broken = {name: pi_processor.EncodedImage("jpeg", b"nothing") for name in observation.images}
    with ThreadPoolExecutor(1) as pool:
        pending = adapter.begin(observations.make(images=broken), pool)
        assert pending.without_frames().tokens.size
        with pytest.raises(pi_processor.TaktlineError):
            pending.result()
