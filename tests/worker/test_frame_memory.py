"""Frames' memory that is used again: never by two frames at once, and no more of it kept than there should be."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from taktline_worker.engine import Engine, Item
from taktline_worker.models.pi.adapter import PiAdapter, load
from taktline_worker.models.pi.frame_memory import FrameMemory

SHAPE = (4, 6, 3)


def test_what_was_given_back_is_taken_again_and_nothing_else() -> None:
    memory = FrameMemory()
    first, second = memory.take(SHAPE), memory.take(SHAPE)
    assert first.data_ptr() != second.data_ptr()
    memory.give([first])
    assert memory.take((4, 5, 3)).data_ptr() != first.data_ptr()
    assert memory.take(SHAPE) is first
    assert memory.take(SHAPE).data_ptr() not in (first.data_ptr(), second.data_ptr())


def test_sizes_that_come_and_go_do_not_pile_up() -> None:
    memory = FrameMemory(kept_bytes=200)
    for width in range(1, 12):
        memory.give([torch.zeros(4, width, 3, dtype=torch.uint8)])
    kept = sum(frame.numel() for frames in memory._free.values() for frame in frames)
    assert kept == memory._bytes <= 200
    memory.give([torch.zeros(8, 11, 3, dtype=torch.uint8)])  # more than there may be by itself
    memory.give([torch.zeros(*SHAPE, dtype=torch.uint8)])
    assert [*memory._free] == [SHAPE]


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


@pytest.fixture
def engine(folders: Any, config_of: Any, tmp_path: Any) -> Any:
    seen.clear()
    processor = load(config_of(folders.lerobot(tmp_path / "policy", "pi05"), frame_cache_mb=0)).processor
    processor.raw = True
    made = Engine(PiAdapter(processor, Runner(), "fp32"), (1, 2), 2)
    yield made
    made.close()


def test_frames_of_batches_that_run_together_are_each_their_own(engine: Any, observations: Any) -> None:
    wanted = [observations.make(seed=seed) for seed in range(12)]
    expected = {}
    for observation in wanted:
        with ThreadPoolExecutor(2) as pool:
            row = engine.adapter.begin(observation, pool).result().row
        expected[id(observation)] = [frame.clone() for frame in row.raw]
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(lambda one: engine.infer([Item(one)]), wanted))
    assert all(isinstance(result.outcomes[0], np.ndarray) for result in results)
    assert {pixels(frames) for frames in seen} == {pixels(frames) for frames in expected.values()}
    free = [frame.data_ptr() for frames in engine.adapter.processor.frames._free.values() for frame in frames]
    assert len(free) == len(set(free))
    assert 0 < len(free) <= 4 * len(wanted[0].images), "memory is used again"
