"""Fewer solver steps or a shorter chunk on request: the answer of a policy loaded with so few, measured, announced."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from taktline_protocol import ErrorCode, TaktlineError, worker_pb2, worker_pb2_grpc
from taktline_protocol.rpc import policy_info
from taktline_worker.adapter import GuidedChunk, Level
from taktline_worker.engine import Engine, Item
from taktline_worker.models.pi.adapter import load
from taktline_worker.models.registry import load_adapter
from taktline_worker.observation import RtcInput
from taktline_worker.rtc import RtcSettings, cut_to
from taktline_worker.server import ServeOptions, Worker


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_fewer_steps_give_what_a_policy_of_so_few_steps_gives(
    family: str, folders: Any, config_of: Any, observations: Any, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    path = folders.lerobot(tmp_path / "policy", family)
    adapter = load(config_of(path, family, solver_steps=10, cheaper_steps=(5, 2)))
    assert list(adapter.cheaper) == [Level(solver_steps=5), Level(solver_steps=2)]
    rows = [adapter.begin(observations.make(family, seed=seed), pool).result() for seed in (1, 2)]
    full = adapter.finish(rows, adapter.run(rows, 2))
    for steps in (5, 2):
        own = load(config_of(path, family, solver_steps=steps))
        expected = own.finish(rows, own.run(rows, 2))
        cheap = adapter.cheaper[Level(solver_steps=steps)]
        got = cheap.finish(rows, cheap.run(rows, 2))
        for mine, theirs, whole in zip(got, expected, full, strict=True):
            assert isinstance(mine, np.ndarray)
            # openpi's running sum of -1/N rounds differently in N steps and in every n-th of them.
            np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-5)
            assert not np.array_equal(mine, whole)


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_a_shorter_chunk_is_that_of_a_policy_of_this_horizon_and_not_the_beginning_of_a_longer_one(
    family: str, folders: Any, config_of: Any, observations: Any, tmp_path: Path
) -> None:
    path = folders.lerobot(tmp_path / "policy", family)
    horizon = load(config_of(path, family)).description.horizon
    asked = [horizon // 2, 3]
    engine = Engine(load(config_of(path, family, shorter_horizons=tuple(asked))), (1, 2, 4))
    sent = [observations.make(family, seed=seed) for seed in (1, 2)]
    try:
        full = engine.infer([Item(one) for one in sent]).outcomes
        for rows in asked:
            own = Engine(load(config_of(path, family, action_horizon=rows)), (1, 2, 4))
            expected = own.infer([Item(one) for one in sent]).outcomes
            own.close()
            got = engine.infer([Item(one) for one in sent], level=Level(horizon=rows)).outcomes
            for mine, theirs, whole in zip(got, expected, full, strict=True):
                assert isinstance(mine, np.ndarray)
                assert mine.shape == (rows, whole.shape[1])
                np.testing.assert_array_equal(mine, theirs)
                assert not np.allclose(mine, whole[:rows], rtol=1e-4, atol=1e-4)
        assert engine.infer([Item(one) for one in sent]).outcomes[0].shape == full[0].shape
    finally:
        engine.close()


def test_a_shorter_chunk_is_measured_and_saves_time(folders: Any, config_of: Any, tmp_path: Path) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi05")
    config = config_of(path, action_horizon=512, solver_steps=10, shorter_horizons=(8,))
    engine = Engine(load(config), (1, 4))
    try:
        full = engine.calibrate()
        (short,) = engine.cheaper.values()
    finally:
        engine.close()
    assert list(engine.cheaper) == [Level(horizon=8)]
    assert [time.batch for time in short] == [1, 4]
    assert short[-1].median_ms < 0.8 * full[-1].median_ms


@pytest.mark.parametrize(
    ("rtc", "plan"),
    [
        (RtcInput(np.zeros((9, 7), np.float32), delay=2), (2, 4)),  # the tail goes on beyond the shorter chunk
        (RtcInput(np.zeros((3, 7), np.float32), delay=2), (2, 3)),
        (RtcInput(np.zeros((9, 7), np.float32), delay=3), (3, 4)),  # one action is left
        (RtcInput(np.zeros((9, 7), np.float32), delay=2, execution_horizon=6), (2, 2)),
        (RtcInput(np.zeros((9, 7), np.float32), delay=1, execution_horizon=2), (1, 2)),
        (RtcInput(np.zeros((9, 7), np.float32), delay=1, prefix_end=3), (1, 3)),
    ],
)
def test_what_a_robot_says_of_longer_chunks_fits_a_shorter_one(
    rtc: RtcInput, plan: tuple[int, int], folders: Any, config_of: Any, observations: Any, tmp_path: Path
) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi05")
    engine = Engine(load(config_of(path, shorter_horizons=(4,))), (1,))
    try:
        (chunk,) = engine.infer([Item(observations.make("pi05", seed=1, rtc=rtc))], level=Level(horizon=4)).outcomes
    finally:
        engine.close()
    assert isinstance(chunk, GuidedChunk), chunk
    assert (len(chunk.actions), chunk.delay, chunk.prefix_end) == (4, *plan)


@pytest.mark.parametrize(
    ("mode", "rows", "delay", "executed", "word"),
    [
        ("guided", 9, 4, None, "the delay is 4 actions, and the policy answers with chunks of 4 instead of 10"),
        ("guided", 2, 7, None, "the delay is 7 actions, and the policy answers with chunks of 4 instead of 10"),
        ("guided", 9, 11, None, "the delay is 11 actions, a chunk has 10"),
        ("guided", 9, 2, 9, "must lie between 2 and 8; it is 9"),
        ("guided", 11, 2, None, "1 to 10 float rows of 7"),
        ("guided", 9, None, None, "the delay is not stated"),
        ("trained", 9, 6, None, "trained for at most 5"),
        ("trained", 1, 2, None, "the delay is 2 actions, the tail holds 1"),
        ("trained", 9, 5, None, "answers with chunks of 4"),
    ],
)
def test_a_shorter_chunk_refuses_what_a_whole_one_does_and_what_it_would_be_too_late_for(
    mode: str, rows: int, delay: int | None, executed: int | None, word: str
) -> None:
    settings = RtcSettings("guided") if mode == "guided" else RtcSettings("trained", max_delay=5)
    sent = RtcInput(np.zeros((rows, 7), np.float32), delay=delay, execution_horizon=executed)
    with pytest.raises(TaktlineError, match=word) as caught:
        cut_to(sent, 4, settings, 10, 7)
    assert caught.value.code is ErrorCode.RTC_INVALID


def test_a_tail_is_checked_beyond_the_shorter_chunk(
    folders: Any, config_of: Any, observations: Any, tmp_path: Path
) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi05")
    tail = np.zeros((9, 7), np.float32)
    tail[8, 0] = np.nan
    engine = Engine(load(config_of(path, shorter_horizons=(4,))), (1,))
    try:
        for sent, word in ((RtcInput(tail, delay=2), r"tail\[8\]"), (RtcInput(tail[:8], delay=11), "a chunk has 10")):
            for level in (Level(), Level(horizon=4)):
                item = Item(observations.make("pi05", seed=1, rtc=sent))
                (refused,) = engine.infer([item], level=level).outcomes
                assert isinstance(refused, TaktlineError)
                assert refused.code is ErrorCode.RTC_INVALID
                assert re.search(word, str(refused))
    finally:
        engine.close()


@pytest.mark.parametrize(("wrong", "least"), [(10, 10), (11, 10)])
def test_a_chunk_that_is_not_shorter_is_no_level(
    wrong: int, least: int, folders: Any, config_of: Any, tmp_path: Path
) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi05")
    with pytest.raises(TaktlineError, match="not below the 10 actions") as caught:
        load(config_of(path, action_horizon=least, shorter_horizons=(wrong,)))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("option", ["cheaper_steps", "shorter_horizons"])
@pytest.mark.parametrize("family", ["gr00t-n1.7", "minicpm-robot", "cosmos3-nano", "vjepa2-ac"])
def test_families_of_one_quality_refuse_levels(family: str, option: str, config_of: Any, tmp_path: Path) -> None:
    with pytest.raises(TaktlineError, match=f"engine.{option} is set, and family {family}") as caught:
        load_adapter(config_of(tmp_path, family, **{option: (2,)}))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "pi0 and pi05" in caught.value.next_step


@pytest.mark.parametrize("wrong", [3, 10, 20])
def test_only_proper_divisors_are_taken(wrong: int, folders: Any, config_of: Any, tmp_path: Path) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi05")
    with pytest.raises(TaktlineError, match="proper divisor") as caught:
        load(config_of(path, solver_steps=10, cheaper_steps=(wrong,)))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "5, 2, 1" in caught.value.next_step


def test_every_level_is_measured(folders: Any, config_of: Any, observations: Any, tmp_path: Path) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi05")
    levels = [Level(solver_steps=2), Level(solver_steps=1), Level(horizon=3)]
    engine = Engine(load(config_of(path, solver_steps=4, cheaper_steps=(2, 1), shorter_horizons=(3,))), (1, 2))
    try:
        full = engine.calibrate()
        assert list(engine.cheaper) == levels
        assert [[time.batch for time in times] for times in (full, *engine.cheaper.values())] == [[1, 2]] * 4
        item = Item(observations.make("pi05", seed=1))
        answers = [engine.infer([item], level=level).outcomes[0] for level in (Level(), *levels)]
        assert all(isinstance(answer, np.ndarray) for answer in answers)
        assert not np.array_equal(answers[0], answers[1])
        with pytest.raises(KeyError):
            engine.infer([item], level=Level(2, 3))
    finally:
        engine.close()


@pytest.fixture
def stub(folders: Any, config_of: Any, tmp_path: Path) -> Iterator[Any]:
    path = folders.lerobot(tmp_path / "policy", "pi05")
    worker = Worker(
        config_of(path, solver_steps=2, cheaper_steps=(1,), shorter_horizons=(3,), buckets=(1,)),
        ServeOptions("127.0.0.1:0", linger_s=0),
    )
    worker.start()
    with grpc.insecure_channel(f"127.0.0.1:{worker.port}") as channel:
        yield worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
    worker.drain()


def test_the_rpc_announces_the_levels_and_refuses_others(stub: Any) -> None:
    info = policy_info(stub.Info(worker_pb2.InfoRequest()))
    assert [(level.solver_steps, level.action_horizon) for level in info.cheaper] == [(1, 0), (0, 3)]
    assert all(level.t_sync[0].median_ms > 0 for level in info.cheaper)
    for numbers, words in (
        ((7, 0), "7 solver steps"),
        ((0, 4), "chunks of 4"),
        ((1, 3), "1 solver steps and chunks of 3"),
    ):
        request = worker_pb2.InferRequest(policy=info.policy, items=[worker_pb2.InferItem(request_id="a")])
        request.solver_steps, request.action_horizon = numbers
        error = stub.Infer(request).results[0].error
        assert error.code == "worker_unavailable"
        assert words in error.message
