"""The bucketed runner of GR00T: padding and rows of other layouts change no answer; on a GPU, the graphs themselves."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from taktline_worker.bucket_graphs import TEXT_ROOM
from taktline_worker.models.groot.batch import GrootRow
from taktline_worker.models.groot.graphs import GrootGraphs
from taktline_worker.models.groot.rtc import RtcRow
from taktline_worker.models.groot.runner import GrootRunner
from taktline_worker.rtc import RtcPlan
from torch import Tensor


def row_like(row: GrootRow, words: int, seed: int) -> GrootRow:
    """Another robot's row of the same images' layout, with a longer or shorter instruction."""
    generator = torch.Generator().manual_seed(seed)
    text = np.full(words, 7, np.int64)
    return dataclasses.replace(
        row,
        patches=tuple(torch.randn(one.shape, generator=generator) for one in row.patches),
        tokens=np.concatenate((row.tokens[:-1], text, row.tokens[-1:])),
        noise=torch.randn(row.noise.shape, generator=generator),
        state=torch.randn(row.state.shape, generator=generator),
    )


def with_tail(row: GrootRow) -> GrootRow:
    strength = torch.ones_like(row.noise)
    strength[:2] = 0.0
    return dataclasses.replace(row, rtc=RtcRow(torch.full_like(row.noise, 0.3), strength, RtcPlan(2, 2)))


@pytest.fixture(scope="module")
def eager(kit: Any) -> GrootRunner:
    return kit.runner()


@pytest.fixture(scope="module")
def row(kit: Any) -> GrootRow:
    return kit.case("case_b1")[1][0]


def alone(eager: GrootRunner, rows: list[GrootRow]) -> Tensor:
    return torch.cat([eager.run([one]) for one in rows])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_padding_changes_no_answer(kit: Any, eager: GrootRunner, row: GrootRow, count: int) -> None:
    graphs = GrootGraphs(eager, row, (1, 2, 4))
    rows = [row_like(row, 5 * index, index) for index in range(count)]
    rows[-1] = with_tail(rows[-1])
    assert graphs.bucket_for(rows) is not None
    assert kit.distance(graphs.run(rows), alone(eager, rows)) < 1e-6
    # What a larger batch left in the buffers reaches no later one.
    assert kit.distance(graphs.run(rows[:1]), alone(eager, rows[:1])) < 1e-6


def test_the_smallest_bucket_that_holds_a_batch(eager: GrootRunner, row: GrootRow) -> None:
    graphs = GrootGraphs(eager, row, (4, 1))
    assert [bucket.rows for bucket in graphs.buckets] == [1, 1, 1, 4, 4, 4]
    short, middle = graphs.bucket_for([row]), graphs.bucket_for([row, row_like(row, TEXT_ROOM[0], 1)])
    assert short is not None
    assert middle is not None
    assert (short.rows, middle.rows, middle.slots - short.slots) == (1, 4, TEXT_ROOM[1] - TEXT_ROOM[0])


def test_other_layouts_run_eagerly_and_are_named(
    kit: Any, eager: GrootRunner, row: GrootRow, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = GrootGraphs(eager, row, (2,))
    other = kit.case("case_b2")[1][0]
    assert other.grids != row.grids
    long, many = row_like(row, TEXT_ROOM[-1] + 1, 2), [row] * 3
    with caplog.at_level(logging.WARNING):
        for rows in ([other], [row, other], [long], many):
            assert graphs.bucket_for(rows) is None
            assert kit.distance(graphs.run(rows), alone(eager, rows)) < 1e-6
    named = [record for record in caplog.records if "no captured graph" in record.message]
    assert [record.reason for record in named] == ["layout", "tokens", "rows"], "once for each, however often it comes"


def test_tables_that_graphs_read_stay_and_others_go(
    eager: GrootRunner, row: GrootRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = GrootRunner(eager.weights, eager.architecture)
    grid = row.grids[0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(own, "device", SimpleNamespace(type="cuda"))
        patch.setattr(own, "_made", lambda grid, images: (torch.zeros(images), torch.zeros(1), torch.zeros(1)))
        read = own.tables(grid, 1)
    made = [own.tables(grid, images) for images in range(2, 200)]
    assert own.tables(grid, 1) is read
    assert own.tables(grid, 199) is made[-1]
    assert own.tables(grid, 2) is not made[0]
    assert len(own._tables) < 40


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_replays_equal_the_eager_answer_and_allocate_nothing(kit: Any, row: GrootRow) -> None:
    eager = kit.runner(torch.bfloat16, torch.device("cuda"))
    graphs = GrootGraphs(eager, row, (1, 4))
    graphs.capture()
    assert set(graphs.captured) == set(graphs.buckets)
    rows = [row_like(row, 3 * index, index) for index in range(3)]
    first = graphs.run(rows)
    held = torch.cuda.memory_stats()["allocation.all.allocated"]
    again = [graphs.run(rows) for _ in range(3)]
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == held
    assert all(torch.equal(first, other) for other in again)
    exact = alone(kit.runner(torch.float32, torch.device("cuda")), rows)
    assert kit.distance(first, exact) <= 1.25 * kit.distance(alone(eager, rows), exact)
