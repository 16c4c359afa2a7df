"""Searches that a budget ends, and smaller ones, through a real gateway whose T_sync is far beyond those budgets."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from taktline import Robot
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.messages import Search
from taktline_worker.server import ServeOptions, Worker

ROUNDS = 20
SEARCH = {"candidates": 64, "rounds": ROUNDS}


@pytest.fixture(scope="module")
def worker(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = kit.folder(tmp_path_factory.mktemp("budgets") / "planner")
    made = Worker(kit.config(folder, search=SEARCH, buckets=(1,)), ServeOptions("127.0.0.1:0", linger_s=0.0))
    made.start()
    yield made
    made.drain()


@pytest.fixture(scope="module")
def gateway(kit: Any, worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with kit.gateway(worker.port, tmp_path_factory.mktemp("gateway")) as url:
        yield url


def ask(kit: Any, robot: Robot, budget_ms: float, search: Search | None = None) -> Any:
    given = kit.inputs("full")
    images = {"camera": given["frame"].numpy(), "goal": given["goal"].numpy()}
    pose = given["pose"].numpy()
    return robot.act(images, pose, "reach the goal image", budget_ms=budget_ms, seed=30, search=search)


def test_a_worker_tells_what_a_round_is_of_its_search(gateway: str) -> None:
    with Robot(gateway, "planner", uuid.uuid4().hex) as robot:
        own = robot.info().search
    assert own is not None
    assert (own.candidates, own.rounds, own.horizon, own.anytime, own.unit) == (64, ROUNDS, 2, False, 32)
    assert 0.5 / ROUNDS < own.round_share <= 1.0 / ROUNDS


@pytest.mark.parametrize("transport", ["stream", "http"])
@pytest.mark.parametrize(
    ("share", "search", "stopped"),
    [
        (0.25, Search(anytime=True), "budget"),
        (0.5, Search(rounds=3), "rounds"),
        (0.5, Search(candidates=32, rounds=4), "rounds"),
    ],
)
def test_less_than_the_deployments_search_is_admitted(
    kit: Any, gateway: str, transport: str, share: float, search: Search, stopped: str
) -> None:
    """Budgets are shares of T_sync, so that a slow machine asks for the same."""
    with Robot(gateway, "planner", uuid.uuid4().hex, transport=transport) as robot:
        whole_ms = robot.info().t_sync[0].median_ms
        began = time.monotonic()
        chunk = ask(kit, robot, share * whole_ms, search)
        took_ms = 1e3 * (time.monotonic() - began)
    assert chunk.plan is not None
    assert chunk.plan.stopped == stopped
    assert took_ms <= share * whole_ms
    rounds = chunk.plan.energies.shape[0]
    assert 1 <= rounds < ROUNDS if search.rounds is None else rounds == search.rounds


def test_a_search_budget_ends_it_long_before_the_deadline(kit: Any, gateway: str) -> None:
    with Robot(gateway, "planner", uuid.uuid4().hex) as robot:
        whole_ms = robot.info().t_sync[0].median_ms
        began = time.monotonic()
        chunk = ask(kit, robot, 0.6 * whole_ms, Search(budget_ms=0.2 * whole_ms))
        took_ms = 1e3 * (time.monotonic() - began)
    assert chunk.plan is not None
    assert chunk.plan.stopped == "budget"
    assert took_ms <= 0.4 * whole_ms


@pytest.mark.parametrize("search", [None, Search(rounds=15), Search(anytime=True), Search(budget_ms=60_000.0)])
def test_what_cannot_be_made_is_refused_at_once(kit: Any, gateway: str, search: Search | None) -> None:
    """The whole search, most of it and one of a longer limit in a third of its time; anytime in part of a round."""
    with Robot(gateway, "planner", uuid.uuid4().hex) as robot:
        own, whole_ms = robot.info().search, robot.info().t_sync[0].median_ms
        assert own is not None
        cut = search is not None and search.anytime
        ask(kit, robot, 4.0 * whole_ms, Search(rounds=1))  # a worker that has idled is tried against its table
        began = time.monotonic()
        with pytest.raises(TaktlineError) as caught:
            ask(kit, robot, (0.3 * own.round_share if cut else 0.3) * whole_ms, search)
        took_ms = 1e3 * (time.monotonic() - began)
    assert caught.value.code is ErrorCode.DEADLINE_UNREACHABLE
    assert took_ms < 0.2 * whole_ms


def test_more_than_the_limits_is_told_so_and_not_that_it_is_late(kit: Any, gateway: str) -> None:
    with Robot(gateway, "planner", uuid.uuid4().hex) as robot, pytest.raises(TaktlineError) as caught:
        ask(kit, robot, 2.0 * robot.info().t_sync[0].median_ms, Search(rounds=100_000))
    assert caught.value.code is ErrorCode.SEARCH_INVALID
