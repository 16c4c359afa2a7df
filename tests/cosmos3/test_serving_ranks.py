"""A Cosmos3 policy on several processes: the answers of one, a lost rank, and what is refused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import ParallelOptions, WorldActionOptions
from taktline_worker.adapter import ImaginedChunk
from taktline_worker.models.cosmos3.adapter import Cosmos3Adapter, load
from taktline_worker.observation import ImagineInput

from tests.cosmos3.served_folders import engine_config, observe, save_policy

LIMIT_S = 200
IMAGINE = WorldActionOptions(imagine=True)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Cosmos3Adapter:
    return load(engine_config(folder, world_action=IMAGINE))


def answers(adapter: Cosmos3Adapter, pool: ThreadPoolExecutor, *changes: dict[str, Any]) -> list[Any]:
    rows = [adapter.begin(observe(**change), pool).result() for change in changes]
    return list(adapter.finish(rows, adapter.run(rows, len(rows))))


def test_a_robot_gets_actions_alone_or_with_the_video(alone: Cosmos3Adapter, pool: ThreadPoolExecutor) -> None:
    plain, shown = answers(alone, pool, {}, {"imagine": ImagineInput("frames", height=16)})
    assert plain.shape == (8, 8)
    assert isinstance(shown, ImaginedChunk)
    assert np.array_equal(plain, shown.actions)
    assert (shown.format, shown.fps, len(shown.parts)) == ("frames", 15.0, 9)
    (file,) = answers(alone, pool, {"imagine": ImagineInput("mp4")})
    assert file.parts[0][4:8] == b"ftyp"
    assert alone.description.imagines


def test_ranks_give_the_answer_of_one_and_come_back_when_one_is_lost(
    folder: Path, alone: Cosmos3Adapter, pool: ThreadPoolExecutor
) -> None:
    asked = {"imagine": ImagineInput("frames")}
    (expected,) = answers(alone, pool, asked)
    spread = load(engine_config(folder, parallel=ParallelOptions(cfg=2, tp=2), world_action=IMAGINE))
    try:
        ranks = spread.group.ranks
        assert ranks is not None
        pids = ranks.pids()
        assert len(pids) == 3
        (found,) = answers(spread, pool, asked)
        assert np.abs(found.actions - expected.actions).max() <= 1e-5 * np.abs(expected.actions).max()
        # Tiles are stitched; their pictures are near, their number is the same.
        assert len(found.parts) == len(expected.parts)
        os.kill(pids[-1], signal.SIGKILL)
        errors = []
        end = time.monotonic() + LIMIT_S
        while True:
            (answer,) = answers(spread, pool, {})
            if not isinstance(answer, TaktlineError) and ranks.pids() != pids:
                break
            if isinstance(answer, TaktlineError):
                errors.append(answer)
            assert time.monotonic() < end, errors[-3:]
            time.sleep(0.1)
        assert errors
        assert {error.code for error in errors} <= {ErrorCode.WORKER_FAILED, ErrorCode.WORKER_UNAVAILABLE}
        assert all(error.retry_after_ms and error.next_step for error in errors)
        assert np.abs(answer - expected.actions).max() <= 1e-5 * np.abs(expected.actions).max()
        assert len(set(ranks.pids()) & set(pids)) == 0
        after = ranks.pids()
    finally:
        spread.close()
    for pid in after:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("split", ["tensor", None])
def test_ranks_share_the_tokens_or_the_matrices(
    folder: Path, alone: Cosmos3Adapter, pool: ThreadPoolExecutor, split: Literal["tensor"] | None
) -> None:
    (expected,) = answers(alone, pool, {})
    shared = WorldActionOptions(split=split)
    spread = load(engine_config(folder, parallel=ParallelOptions(tp=2), world_action=shared))
    try:
        weight = spread.runner.weights.joint[0].out.weight
        # Where nothing is said and the weights fit each rank, as on a CPU, the tokens: all of them stay whole.
        assert weight.shape[1] == alone.runner.weights.joint[0].out.weight.shape[1] // (2 if split else 1)
        (found,) = answers(spread, pool, {})
    finally:
        spread.close()
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("parallel", "world_action", "said", "next_step"),
    [
        (
            ParallelOptions(tp=4),
            WorldActionOptions(split="tensor"),
            "parallel.tp is 4, which does not divide the 2 key heads",
            "1, 2",
        ),
        (ParallelOptions(cfg=2), WorldActionOptions(guidance=1.0), "no second branch", "guidance above 1"),
        (ParallelOptions(search=2), None, "for planners", "cfg and tp"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_loaded(
    folder: Path, parallel: ParallelOptions, world_action: WorldActionOptions | None, said: str, next_step: str
) -> None:
    with pytest.raises(TaktlineError) as refused:
        load(engine_config(folder, parallel=parallel, world_action=world_action))
    assert refused.value.code is ErrorCode.CONFIG_INVALID
    assert said in refused.value.message
    assert next_step in refused.value.next_step
