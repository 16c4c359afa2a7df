"""LeRobot's port keeps what robots pushed and did not pull within bounds, at the cost of the longest silent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from taktline_gateway.compat import lerobot
from taktline_gateway.compat.lerobot import LerobotListener, _Session
from taktline_gateway.compat.ports import Listen
from taktline_gateway.connections import ConnectionCounts
from taktline_protocol import TaktlineError


def caller(peer: str) -> SimpleNamespace:
    return SimpleNamespace(peer=lambda: peer)


@pytest.fixture
async def listener():
    made = LerobotListener(Listen("127.0.0.1", 0), SimpleNamespace(connections=ConnectionCounts(8, 8)), held_bytes=100)
    for name in "abc":
        made._remember(name, _Session(None, "m", (), {}, 8))
    yield made
    await made.close()


def holds(listener: LerobotListener) -> dict[str, int]:
    assert listener._held == sum(session.held for session in listener._sessions.values())
    assert all((session.newest is None) == (session.held == 0) for session in listener._sessions.values())
    return {name: session.held for name, session in listener._sessions.items()}


def push(listener: LerobotListener, name: str, size: int) -> None:
    listener._hold(listener._session(caller(name)), object(), size)


async def test_what_nobody_pulls_is_bounded_and_the_longest_silent_loses_it(listener):
    push(listener, "a", 40)
    push(listener, "b", 40)
    assert holds(listener) == {"c": 0, "a": 40, "b": 40}
    push(listener, "a", 50)  # replaces its own
    assert holds(listener) == {"c": 0, "b": 40, "a": 50}
    push(listener, "c", 30)
    assert holds(listener) == {"b": 0, "a": 50, "c": 30}
    push(listener, "b", 500)
    assert holds(listener) == {"a": 0, "c": 0, "b": 500}, "one that is larger than all may hold is held alone"
    listener._hold(listener._session(caller("b")), None, 0)
    assert holds(listener) == {"a": 0, "c": 0, "b": 0}


async def test_a_robot_that_is_forgotten_amid_a_pull_is_counted_out_once(listener):
    push(listener, "a", 40)
    session = listener._session(caller("a"))
    listener._forget("a")
    listener._hold(session, None, 0)
    assert holds(listener) == {"b": 0, "c": 0}
    with pytest.raises(TaktlineError):
        listener._session(caller("a"))


async def test_a_crowd_of_new_robots_does_not_push_out_one_that_is_at_work(listener, monkeypatch):
    monkeypatch.setattr(lerobot, "MAX_SESSIONS", 3)
    for number in range(10):
        push(listener, "a", 10)
        listener._remember(f"new {number}", _Session(None, "m", (), {}, 8))
    assert list(holds(listener)) == ["new 8", "a", "new 9"]
