"""LeRobot's port keeps in bounds what robots pushed and did not pull, and what few bytes of a pickle stand for."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from taktline_gateway.compat import lerobot
from taktline_gateway.compat.lerobot import LerobotListener, _Session, peer_of
from taktline_gateway.compat.lerobot_pickle import Record, read_record
from taktline_gateway.compat.ports import Listen
from taktline_gateway.connections import ConnectionCounts, address_of, peers_at
from taktline_protocol import ErrorCode, TaktlineError


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


def doubled(times: int) -> bytes:
    """A list of one list twice, and so on: a few bytes whose text has 2^times parts."""
    steps = (b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(times))
    return b"]q\x00" + b"".join(steps)


NESTED = {"doubled": doubled(20), "deep": b"]" * 5_000 + b"a" * 4_999}


def refused_within_a_mebibyte(call) -> TaktlineError:
    tracemalloc.start()
    try:
        with pytest.raises(TaktlineError) as caught:
            call()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    return caught.value


@pytest.mark.parametrize("kind", NESTED)
def test_a_name_that_is_no_text_is_not_written_out(kind):
    """Before any credential was looked at, 220 bytes took the gateway's whole memory for the text of a refusal."""
    for data in (NESTED[kind] + b"\x8c\x01x\x93.", b"\x8c\x01x" + NESTED[kind] + b"\x93."):
        found = refused_within_a_mebibyte(lambda data=data: read_record(b"\x80\x04" + data, "RemotePolicyConfig"))
        assert found.code is ErrorCode.INVALID_BODY


async def test_a_policy_name_that_is_no_text_is_not_written_out(listener):
    listener._service.policies = lambda caller: ["pick"]
    model: list = []
    for _ in range(20):
        model = [model, model]
    found = refused_within_a_mebibyte(lambda: listener._policy(None, model))
    assert (found.code, "(list)" in found.message) == (ErrorCode.UNKNOWN_POLICY, True)


def test_state_names_that_are_one_long_text_are_not_written_out():
    session = _Session(None, "m", ("x" * 100_000,) * 1_000, {}, 8)
    found = refused_within_a_mebibyte(
        lambda: lerobot._observation(session, Record("TimedObservation", "m", {"observation": {}}))
    )
    assert found.code is ErrorCode.STATE_INVALID


@pytest.mark.parametrize("name", ["task", "front"])
@pytest.mark.parametrize("value", [{"a": "b"}, ["go"], (), b"go"], ids=lambda value: type(value).__name__)
def test_an_observation_holds_texts_numbers_and_arrays_and_nothing_that_could_nest(name, value):
    """Maps that share their entries were walked without end, and so was a list that holds itself."""
    session = _Session(None, "m", ("j",), {"front": "observation.images.front"}, 8)
    raw = {"j": 0.5, "task": "go", "front": np.zeros((2, 2, 3), np.uint8)}
    assert lerobot._observation(session, Record("TimedObservation", "m", {"observation": raw}))["task"] == "go"
    with pytest.raises(TaktlineError, match=f"'{name}' is a {type(value).__name__}") as caught:
        lerobot._observation(session, Record("TimedObservation", "m", {"observation": {**raw, name: value}}))
    assert caught.value.code is ErrorCode.INVALID_BODY


def test_peers_are_told_in_one_spelling_and_no_descriptor_is_kept():
    assert peer_of("ipv4:127.0.0.1:4711") == ("127.0.0.1", 4711)
    assert peer_of("ipv6:%5B::1%5D:4711") == ("::1", 4711)
    assert peer_of("ipv6:%5B::ffff:10.0.0.7%5D:4711") == ("10.0.0.7", 4711)
    assert peer_of("ipv6:%5Bfe80::1%25eth0%5D:4711") == (address_of("fe80::1"), 4711) == ("fe80::1", 4711)
    assert address_of("fe80::1%2") == "fe80::1"
    assert peer_of("unix:/run/x")[1] == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as robot, server.accept()[0]:
            before = len(os.listdir("/proc/self/fd"))
            assert peers_at(port) == {robot.getsockname()}
            assert len(os.listdir("/proc/self/fd")) == before
        assert peers_at(port) == set()


def test_without_a_descriptor_to_look_with_nobody_is_taken_for_gone(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:

            def no_more(file: int) -> int:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

            monkeypatch.setattr(os, "dup", no_more)
            with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                peers_at(port)


async def test_robots_are_followed_on_after_a_look_that_failed(listener, monkeypatch):
    looks = [OSError(errno.EMFILE, "no descriptor"), OSError(errno.EMFILE, "no descriptor"), {("10.0.0.1", 1)}]

    def look(port: int) -> set[tuple[str, int]]:
        found = looks.pop(0) if len(looks) > 1 else looks[0]
        if isinstance(found, OSError):
            assert len(listener._sessions) == 4, "nobody is forgotten"
            raise found
        return found

    monkeypatch.setattr(lerobot, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(lerobot, "peers_at", look)
    listener._remember("ipv4:10.0.0.1:1", _Session(None, "m", (), {}, 8))
    following = asyncio.create_task(listener._follow())
    async with asyncio.timeout(30):
        while len(listener._sessions) > 1:
            assert not following.done()
            await asyncio.sleep(0.01)
    following.cancel()
    assert list(listener._sessions) == ["ipv4:10.0.0.1:1"]


async def test_a_robot_whose_connection_has_ended_is_forgotten_with_what_it_had_pushed(listener, monkeypatch):
    """gRPC tells nobody that a connection has ended: sessions and their frames stayed until 4,096 others had come."""
    there = {("10.0.0.1", 1), ("10.0.0.3", 3)}
    monkeypatch.setattr(lerobot, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(lerobot, "peers_at", lambda port: there)
    for name in "abc":
        listener._forget(name)
    for number in (1, 2, 3):
        listener._remember(f"ipv4:10.0.0.{number}:{number}", _Session(None, "m", (), {}, 8))
        push(listener, f"ipv4:10.0.0.{number}:{number}", 10)
    following = asyncio.create_task(listener._follow())
    async with asyncio.timeout(30):
        while len(listener._sessions) > 2:  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.01)
    following.cancel()
    assert holds(listener) == {"ipv4:10.0.0.1:1": 10, "ipv4:10.0.0.3:3": 10}
