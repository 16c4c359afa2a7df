"""Frames' memory that is used again: never by two frames at once, and no more of it kept than there should be."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from taktline_worker.engine import Engine, Item
from taktline_worker.frames import FrameCache
from taktline_worker.models.pi import frame_memory
from taktline_worker.models.pi.adapter import PiAdapter, load
from taktline_worker.models.pi.frame_memory import STOCK, FrameMemory, FramesAhead

from tests.waiting import until

SHAPE = (4, 6, 3)


def free_of(memory: FrameMemory) -> list[int]:
    """Addresses of all that waits for frames."""
    frames = [*memory._back, *(frame for frames in memory._free.values() for frame in frames)]
    return [frame.data_ptr() for frame in frames]


def test_what_nobody_refers_to_is_taken_again_and_nothing_else() -> None:
    memory = FrameMemory()
    first, second = memory.take(SHAPE), memory.take(SHAPE)
    places = first.data_ptr(), second.data_ptr()
    assert places[0] != places[1]
    kept, first = [first], second
    assert memory.take(SHAPE).data_ptr() not in places
    kept.clear()
    assert memory.take((4, 5, 3)).data_ptr() != places[0]
    taken = [memory.take(SHAPE) for _ in range(3)]
    assert places[0] in [frame.data_ptr() for frame in taken]
    assert len({frame.data_ptr() for frame in (*taken, first)}) == 4


def test_sizes_that_come_and_go_do_not_pile_up() -> None:
    memory = FrameMemory(kept_bytes=200)
    for width in range(1, 12):
        memory.take((4, width, 3))
    kept = sum(frame.numel() for frames in memory._free.values() for frame in frames)
    assert kept == memory._bytes <= 200
    memory.take((8, 11, 3))  # more than there may be by itself
    memory.take(SHAPE)
    memory.take((1, 1, 3))
    assert [*memory._free] == [SHAPE, (1, 1, 3)]


def test_the_shapes_taken_last_are_kept() -> None:
    memory = FrameMemory(kept_bytes=200)
    for width in (4, 5, 6):  # 48, 60 and 72 bytes
        memory.take((4, width, 3))
    memory.take((4, 4, 3))
    memory.take((4, 3, 3))
    assert list(memory._free) == [(4, 6, 3), (4, 4, 3), (4, 3, 3)]
    assert memory._bytes == 72 + 48 + 36


def test_what_comes_back_is_counted_though_nobody_takes_more() -> None:
    memory = FrameMemory(kept_bytes=200)
    taken = [memory.take(SHAPE) for _ in range(9)]
    taken.clear()
    assert memory._bytes == 2 * 72
    assert len(free_of(memory)) == 2


class Ran:
    """A batch on a device, which reads its frames as late as somebody waits for it, and once."""

    seconds = 0.0

    def __init__(self, frames: Any, rows: int) -> None:
        self._frames, self._rows, self._reading = frames, rows, threading.Lock()

    def wait(self) -> torch.Tensor:
        with self._reading:  # whoever waits for a place on the device waits for it, too
            if self._frames is not None:
                time.sleep(0.003)
                seen.append([frame.clone() for frame in self._frames])
            self._frames = None
        return torch.zeros(self._rows, 50, 7)


class Runner:
    """A runner that launches and does no more."""

    device, unnormalises = torch.device("cpu"), True

    def run(self, batch: Any) -> torch.Tensor:
        return self.launch(batch).wait()

    def draft(self, batch: Any) -> None:
        return None

    def launch(self, batch: Any, draft: Any = None) -> Ran:
        return Ran(batch.raw, batch.tokens.shape[0])


seen: list[list[torch.Tensor]] = []


def pixels(frames: list[torch.Tensor]) -> bytes:
    return b"".join(frame.numpy().tobytes() for frame in frames)


KEPT = 7
"""Frames that the cache holds, where there is one: fewer than come."""


@pytest.fixture(params=[0, KEPT])
def engine(folders: Any, config_of: Any, observations: Any, tmp_path: Any, request: pytest.FixtureRequest) -> Any:
    seen.clear()
    processor = load(config_of(folders.lerobot(tmp_path / "policy", "pi05"), frame_cache_mb=0)).processor
    with ThreadPoolExecutor(1) as pool:
        processor.raw = True
        frames = processor.begin(observations.make(), pool).result().row.raw
    processor.seen = FrameCache(request.param * max(frame.numel() for frame in frames))
    processor.raw = True
    made = Engine(PiAdapter(processor, Runner(), "fp32"), (1, 2), 2)
    yield made
    made.close()


def test_frames_of_batches_that_run_together_are_each_their_own(engine: Any, observations: Any) -> None:
    names, seeds = observations.make().images, itertools.count()
    wanted = [
        observations.make(images={name: observations.image("png", seed=next(seeds)) for name in names})
        for _ in range(12)
    ]
    expected = {}
    for observation in wanted:
        with ThreadPoolExecutor(2) as pool:
            row = engine.adapter.begin(observation, pool).result().row
        expected[id(observation)] = [frame.clone() for frame in row.raw]
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(lambda one: engine.infer([Item(one)]), wanted))
    assert all(isinstance(result.outcomes[0], np.ndarray) for result in results)
    assert {pixels(frames) for frames in seen} == {pixels(frames) for frames in expected.values()}
    memory, cache = engine.adapter.processor.frames, engine.adapter.processor.seen
    kept = {frame.data_ptr() for (frame, _), _ in cache._values.values()}
    assert bool(kept) == bool(cache.limit_bytes)
    free = free_of(memory)
    assert len(free) == len(set(free))
    assert not kept & set(free)
    assert 0 < len(free) <= 4 * len(wanted[0].images) + KEPT, "memory is used again"


def test_pinned_memory_is_got_ahead_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def new(shape: tuple[int, int, int]) -> torch.Tensor:
        made.append(threading.current_thread().name)
        return torch.empty(shape, dtype=torch.uint8)

    monkeypatch.setattr(frame_memory, "is_pinned", lambda _: True)
    monkeypatch.setattr(frame_memory, "new_frame", new)
    memory, taken = FrameMemory(), []
    for number in range(60):
        taken.append(memory.take(SHAPE))
        end = time.monotonic() + 30
        while memory._stocked and time.monotonic() < end:
            time.sleep(0.001)
        if number:
            assert made.count("MainThread") == 2, "whoever takes one does not wait for it, but for the first ones"
    assert len({frame.data_ptr() for frame in taken}) == len(taken)
    assert len(made) <= len(taken) + 2 * STOCK


def test_a_shape_that_comes_once_has_nothing_got_ahead_and_one_at_a_time_has(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, ahead = threading.Event(), []

    def new(shape: tuple[int, int, int]) -> torch.Tensor:
        if threading.current_thread().name == "frame memory":
            ahead.append(shape)
            assert go_on.wait(30)
        return torch.empty(shape, dtype=torch.uint8)

    monkeypatch.setattr(frame_memory, "is_pinned", lambda _: True)
    monkeypatch.setattr(frame_memory, "new_frame", new)
    memory = FrameMemory()
    for width in range(1, 200):
        memory.take((4, width, 3))
    assert not memory._stocked
    assert len(memory._taken) < 100
    kept = [memory.take((4, width, 3)) for width in (300, 300, 301, 301, 302, 302)]
    assert memory._stocked == {(4, 300, 3)}
    go_on.set()
    until(lambda: not memory._stocked, "what is got ahead")
    assert ahead == [(4, 300, 3)] * STOCK
    assert len(kept) == 6


@pytest.mark.parametrize("where", ["start", "new"])
def test_where_nothing_can_be_got_ahead_frames_are_got_as_they_come(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def new(shape: tuple[int, int, int]) -> torch.Tensor:
        if threading.current_thread().name == "frame memory":
            raise MemoryError("no page is left")
        return torch.empty(shape, dtype=torch.uint8)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("no thread is left")

    monkeypatch.setattr(frame_memory, "is_pinned", lambda _: True)
    monkeypatch.setattr(frame_memory, "new_frame", new)
    if where == "start":
        monkeypatch.setattr(threading.Thread, "start", start)
    memory, taken = FrameMemory(), []
    for _ in range(6):
        taken.append(memory.take(SHAPE))
        until(lambda: not memory._stocked, "the end of it")
    assert len({frame.data_ptr() for frame in taken}) == 6
    assert caplog.text.count("is left") == 1


def test_a_batch_without_begun_frames_forgets_nothing_of_what_was_got_ahead() -> None:
    ahead = FramesAhead(FrameMemory())
    ahead.look_ahead([SHAPE])
    ((got,),) = ahead._ahead.values()
    ahead.look_ahead([])
    assert SHAPE in ahead
    assert ahead.take(SHAPE) is got
