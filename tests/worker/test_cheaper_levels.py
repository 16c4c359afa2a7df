"""Fewer solver steps on request: the same answer as a policy that was loaded with so few, measured and announced."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from taktline_protocol import ErrorCode, TaktlineError, worker_pb2, worker_pb2_grpc
from taktline_protocol.rpc import policy_info
from taktline_worker.engine import Engine, Item
from taktline_worker.models.pi.adapter import load
from taktline_worker.server import ServeOptions, Worker


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_fewer_steps_give_what_a_policy_of_so_few_steps_gives(
    family: str, folders: Any, config_of: Any, observations: Any, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    path = folders.lerobot(tmp_path / "policy", family)
    adapter = load(config_of(path, family, solver_steps=10, cheaper_steps=(5, 2)))
    assert adapter.cheaper_steps == (5, 2)
    rows = [adapter.begin(observations.make(family, seed=seed), pool).result() for seed in (1, 2)]
    full = adapter.finish(rows, adapter.run(rows, 2))
    for steps in (5, 2):
        own = load(config_of(path, family, solver_steps=steps))
        expected = own.finish(rows, own.run(rows, 2))
        got = adapter.finish(rows, adapter.run_cheaper(rows, 2, steps))
        for mine, theirs, whole in zip(got, expected, full, strict=True):
            assert isinstance(mine, np.ndarray)
            # openpi's running sum of -1/N rounds differently in N steps and in every n-th of them.
            np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-5)
            assert not np.array_equal(mine, whole)


@pytest.mark.parametrize("wrong", [3, 10, 20])
def test_only_proper_divisors_are_taken(wrong: int, folders: Any, config_of: Any, tmp_path: Path) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi05")
    with pytest.raises(TaktlineError, match="proper divisor") as caught:
        load(config_of(path, solver_steps=10, cheaper_steps=(wrong,)))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "5, 2, 1" in caught.value.next_step


def test_every_level_is_measured(folders: Any, config_of: Any, observations: Any, tmp_path: Path) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi05")
    engine = Engine(load(config_of(path, solver_steps=4, cheaper_steps=(2, 1))), (1, 2))
    try:
        full = engine.calibrate()
        assert list(engine.cheaper) == [2, 1]
        assert [[time.batch for time in times] for times in (full, *engine.cheaper.values())] == [[1, 2]] * 3
        item = Item(observations.make("pi05", seed=1))
        answers = [engine.infer([item], steps=steps).outcomes[0] for steps in (0, 2, 1)]
        assert all(isinstance(answer, np.ndarray) for answer in answers)
        assert not np.array_equal(answers[0], answers[1])
    finally:
        engine.close()


@pytest.fixture
def stub(folders: Any, config_of: Any, tmp_path: Path) -> Iterator[Any]:
    path = folders.lerobot(tmp_path / "policy", "pi05")
    worker = Worker(
        config_of(path, solver_steps=2, cheaper_steps=(1,), buckets=(1,)), ServeOptions("127.0.0.1:0", linger_s=0)
    )
    worker.start()
    with grpc.insecure_channel(f"127.0.0.1:{worker.port}") as channel:
        yield worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
    worker.drain()


def test_the_rpc_announces_the_levels_and_refuses_others(stub: Any) -> None:
    info = policy_info(stub.Info(worker_pb2.InfoRequest()))
    assert [level.solver_steps for level in info.cheaper] == [1]
    assert info.cheaper[0].t_sync[0].median_ms > 0
    request = worker_pb2.InferRequest(policy=info.policy, items=[worker_pb2.InferItem(request_id="a")], solver_steps=7)
    error = stub.Infer(request).results[0].error
    assert error.code == "worker_unavailable"
    assert "7 solver steps" in error.message
