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
from taktline_worker.models.vjepa2_ac.adapter import VJepa2Adapter, load
from taktline_worker.planning.ranks import FollowerRanks

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


def answer(adapter: VJepa2Adapter, kit: Any, pool: Any, rounds: int = 4) -> Any:
    row = adapter.begin(kit.observe(), pool).result()
    row = replace(row, settings=replace(row.settings, rounds=rounds))
    (found,) = adapter.finish([row], adapter.run([row], 1))
    return found


def wait_for_mesh(ranks: FollowerRanks, size: int) -> None:
    ends = time.monotonic() + 120
    while ranks.mesh().size != size:
        assert time.monotonic() < ends, "the mesh was not made whole"
        time.sleep(0.2)


def test_all_ranks_share_a_plan_and_its_bytes_stay_the_same(kit: Any, alone: Any, shared: Any, pool: Any) -> None:
    assert shared.ranks.mesh().size == RANKS
    expected, found = (answer(adapter, kit, pool) for adapter in (alone, shared))
    assert np.array_equal(found.actions, expected.actions)
    assert np.array_equal(found.energies, expected.energies)


def test_a_rank_killed_in_a_plan_costs_no_robot_its_answer(kit: Any, alone: Any, shared: Any, pool: Any) -> None:
    expected = answer(alone, kit, pool, rounds=12)
    wait_for_mesh(shared.ranks, RANKS)
    victim = shared.ranks.pids()[0]
    killer = threading.Timer(0.1, os.kill, (victim, signal.SIGKILL))
    killer.start()
    found = answer(shared, kit, pool, rounds=12)
    killer.join()
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
