"""Which sessions are written to the store when not all can be, and what is kept of a write that failed."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from redis.exceptions import ConnectionError as Gone
from taktline_gateway.stream import endpoint
from taktline_gateway.stream import store as stores
from taktline_gateway.stream.sessions import HeldFrame, Session
from taktline_gateway.stream.store import SessionStore
from taktline_protocol.messages import Image

SIZE = 1_000


class Redis:
    """Takes what is written, in pipelines; refuses from the write `gone_at` on."""

    def __init__(self) -> None:
        self.writes: list[list[str]] = []
        self.pings = 0
        self.gone_at = 1 << 30

    def pipeline(self, transaction: bool) -> Pipeline:
        return Pipeline(self)

    async def ping(self) -> None:
        self.pings += 1


class Pipeline:
    def __init__(self, redis: Redis) -> None:
        self._redis, self._keys = redis, []

    def set(self, key: str, body: bytes, ex: int) -> None:
        self._keys.append(key)

    async def execute(self) -> None:
        if len(self._redis.writes) >= self._redis.gone_at:
            raise Gone
        self._redis.writes.append(self._keys)


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(stores, "FLUSH_BYTES", 3 * SIZE)
    made = SessionStore("redis://127.0.0.1:1", 30.0)
    made._redis = Redis()
    return made


def fleet(count: int) -> list[Session]:
    frame = HeldFrame(b"f", Image("jpeg", bytes(SIZE)))
    return [
        Session("p", f"r{n}", f"r{n}", "s", bytes([n]), held={"front": frame}, held_bytes=SIZE) for n in range(count)
    ]


def names(store: SessionStore, sessions: list[Session]) -> list[list[int]]:
    keys = [stores._key(session.token) for session in sessions]
    return [[keys.index(key) for key in write] for write in store._redis.writes]


async def test_no_session_waits_for_ever_behind_those_that_change_all_the_time(store):
    sessions = fleet(8)
    for _ in range(4):
        for session in sessions:
            session.changed = True
        await store.flush(sessions)
    assert names(store, sessions) == [[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 2, 3]]
    for session in sessions:
        session.changed = session is sessions[0]
    await store.flush(sessions)
    await store.flush(sessions)
    assert (names(store, sessions)[4:], store._redis.pings) == ([[0]], 1)


async def test_the_last_write_is_of_all_in_pieces_that_a_link_carries_in_time(store):
    sessions = fleet(8)
    await store.flush(sessions, everything=True)
    assert names(store, sessions) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert not any(session.changed for session in sessions)


async def test_a_store_that_goes_amid_it_leaves_the_rest_to_be_written(store):
    sessions = fleet(8)
    store._redis.gone_at = 1
    await store.flush(sessions, everything=True)
    assert [session.changed for session in sessions] == [False] * 3 + [True] * 5
    assert not store.up


async def test_a_cancellation_that_redis_client_takes_for_its_timeout_is_said_again(monkeypatch):
    """A drain hung for ever, its client ports open: the keeper of the store had swallowed the one cancellation."""
    monkeypatch.setattr(endpoint, "CANCEL_AGAIN_S", 0.01)
    heard = []

    async def keeper() -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                heard.append("cancelled")
                if len(heard) == 3:
                    raise

    tasks = [asyncio.create_task(keeper()), asyncio.create_task(asyncio.sleep(3600))]
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await endpoint.end(tasks)
    assert heard == ["cancelled"] * 3
    assert all(task.cancelled() for task in tasks)
    await endpoint.end([])


async def test_a_task_that_hears_no_cancellation_is_left_and_said(monkeypatch, caplog):
    monkeypatch.setattr(endpoint, "CANCEL_AGAIN_S", 0.01)
    stop = asyncio.Event()

    async def deaf() -> None:
        while not stop.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await stop.wait()

    task = asyncio.create_task(deaf(), name="deaf")
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await endpoint.end([task])
    assert [record.tasks_left for record in caplog.records] == [["deaf"]]
    stop.set()
    await task
