"""A planner whose worker starts its own ranks: the same plans, also while one is dead, and a whole mesh again after."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import ParallelOptions
from taktline_worker.models.vjepa2_ac.adapter import VJepa2Adapter, load, problem_of
from taktline_worker.planning.ranks import FollowerRanks
from taktline_worker.planning.search import draw_noise, search

RANKS = 3


@pytest.fixture(scope="module")
def folder(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.folder(tmp_path_factory.mktemp("ranks") / "planner")


@pytest.fixture(scope="module")
def alone(kit: Any, folder: Path) -> VJepa2Adapter:
    return load(kit.config(folder))


@pytest.fixture(scope="module")
def shared(kit: Any, folder: Path) -> Iterator[VJepa2Adapter]:
    adapter = load(kit.config(folder, parallel=ParallelOptions(search=RANKS)))
    yield adapter
    pids = adapter.ranks.pids()
    adapter.close()
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def answer(adapter: VJepa2Adapter, kit: Any, pool: Any, rounds: int = 4, budget_s: float | None = None) -> Any:
    row = adapter.begin(kit.observe(), pool).result()
    row = replace(row, settings=replace(row.settings, rounds=rounds), budget_s=budget_s)
    (found,) = adapter.finish([row], adapter.run([row], 1))
    return found


def wait_for_mesh(ranks: FollowerRanks, size: int, without: int = 0) -> None:
    """Until all ranks share plans, another process in the place of `without`."""
    ends = time.monotonic() + 120
    while ranks.mesh().size != size or without in ranks.pids():
        assert time.monotonic() < ends, "the mesh was not made whole"
        time.sleep(0.2)


def test_all_ranks_share_a_plan_and_its_bytes_stay_the_same(kit: Any, alone: Any, shared: Any, pool: Any) -> None:
    assert shared.ranks.mesh().size == RANKS
    expected, found = (answer(adapter, kit, pool) for adapter in (alone, shared))
    assert np.array_equal(found.actions, expected.actions)
    assert np.array_equal(found.energies, expected.energies)


def test_a_rank_killed_in_a_plan_costs_no_robot_its_answer(
    kit: Any, alone: Any, shared: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(alone, kit, pool, rounds=12)
    wait_for_mesh(shared.ranks, RANKS)
    victim, score, scored = shared.ranks.pids()[0], shared.world.score, []

    def kill_then_score(*arguments: Any) -> None:
        if not scored:  # within the first round, which ends with what the victim has scored
            os.kill(victim, signal.SIGKILL)
        scored.append(arguments)
        score(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(shared.world, "score", kill_then_score)
        found = answer(shared, kit, pool, rounds=12)
    assert not shared.ordinary, "the plan was not disturbed: it lost nobody"
    assert np.array_equal(found.actions, expected.actions)
    ends = time.monotonic() + 60.0
    while Path(f"/proc/{victim}/exe").exists():  # a quick plan is over before the victim is
        assert time.monotonic() < ends, "the victim lives on"
        time.sleep(0.01)
    # Alone meanwhile, and a whole mesh of new processes in the end.
    assert np.array_equal(answer(shared, kit, pool, rounds=12).actions, expected.actions)
    wait_for_mesh(shared.ranks, RANKS)
    assert victim not in shared.ranks.pids()
    assert np.array_equal(answer(shared, kit, pool, rounds=12).actions, expected.actions)


def test_a_rank_that_dies_between_plans_is_replaced_too(kit: Any, alone: Any, shared: Any, pool: Any) -> None:
    wait_for_mesh(shared.ranks, RANKS)
    before = shared.ranks.pids()
    os.kill(before[-1], signal.SIGKILL)
    assert np.array_equal(answer(shared, kit, pool).actions, answer(alone, kit, pool).actions)
    wait_for_mesh(shared.ranks, RANKS)
    assert not set(before) & set(shared.ranks.pids())


def test_a_silent_rank_does_not_keep_a_plan_from_its_budget(kit: Any, alone: Any, shared: Any, pool: Any) -> None:
    """Its process is stopped: no connection closes and nothing fails, so nothing but the deadline ends the wait."""
    wait_for_mesh(shared.ranks, RANKS)
    victim = shared.ranks.pids()[0]
    stopper = threading.Timer(0.3, os.kill, (victim, signal.SIGSTOP))
    stopper.start()
    found = answer(shared, kit, pool, rounds=600, budget_s=3.0)
    stopper.join()
    if isinstance(found, TaktlineError):
        assert found.code is ErrorCode.WORKER_UNAVAILABLE
    else:  # the plan of the rounds that were whole
        rounds = len(found.energies)
        assert rounds < 600
        assert found.stopped == "budget"
        row = alone.begin(kit.observe(), pool).result()
        row = replace(row, settings=replace(row.settings, rounds=600))
        problem = problem_of(alone.world, row, None)
        noise = draw_noise(row.seed, row.settings)[:rounds]
        problem = replace(problem, settings=replace(row.settings, rounds=rounds), noise=noise)
        (expected,) = search(alone.world, [problem])
        assert np.array_equal(found.actions, expected.actions.numpy())
        assert np.array_equal(found.predicted_states, expected.poses.numpy())
    wait_for_mesh(shared.ranks, RANKS, without=victim)
    assert np.array_equal(answer(shared, kit, pool).actions, answer(alone, kit, pool).actions)


def test_a_plan_with_a_budget_does_not_wait_for_the_end_of_its_group(
    kit: Any, alone: Any, shared: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_mesh(shared.ranks, RANKS)
    held, ended = threading.Event(), threading.Event()
    end_followers = shared.ranks._end_followers

    def slow() -> None:
        held.wait(120)
        end_followers()
        ended.set()

    monkeypatch.setattr(shared.ranks, "_end_followers", slow)
    victim = shared.ranks.pids()[0]
    os.kill(victim, signal.SIGKILL)
    try:
        found = answer(shared, kit, pool, rounds=4, budget_s=60.0)
        assert not ended.is_set()
        assert np.array_equal(found.actions, answer(alone, kit, pool, rounds=4).actions)
    finally:
        held.set()
    wait_for_mesh(shared.ranks, RANKS, without=victim)


def test_followers_that_cannot_start_refuse_the_deployment(kit: Any, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(TaktlineError, match="rank 1 of the planner ended with code 1") as caught:
        load(kit.config(folder, parallel=ParallelOptions(search=2)))
    assert caught.value.code == ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("parallel", [ParallelOptions(tp=2), ParallelOptions(cfg=2), ParallelOptions(dp=2, search=2)])
def test_meshes_that_a_planner_does_not_have_are_refused(kit: Any, folder: Path, parallel: ParallelOptions) -> None:
    with pytest.raises(TaktlineError, match="a planner has either dp") as caught:
        load(kit.config(folder, parallel=parallel))
    assert caught.value.code == ErrorCode.CONFIG_INVALID
