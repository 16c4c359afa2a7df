"""Sessions without a network: who may resume what, what is kept for whom, and that memory is bounded."""

from __future__ import annotations

import asyncio
import inspect
import logging
from types import SimpleNamespace

import pytest
from taktline_gateway.http_io import Exchange
from taktline_gateway.logs import _no_false_alarm
from taktline_gateway.pending import ClientGone
from taktline_gateway.stream.conversation import Conversation
from taktline_gateway.stream.endpoint import Streams
from taktline_gateway.stream.intake import Intake, _tell
from taktline_gateway.stream.sessions import Flight, HeldFrame, Session, Sessions
from taktline_gateway.stream.transport import StreamTransport
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.messages import Image
from taktline_protocol.stream import Hello
from taktline_protocol.stream_codec import decode_from_gateway
from uvicorn.config import Config
from uvicorn.server import ServerState

from tests.example_messages import CHUNK


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeLink:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.open = True
        self.was_replaced = False

    async def deliver(self, body: bytes) -> bool:
        if self.open:
            self.sent.append(body)
        return self.open

    def replaced(self) -> None:
        self.was_replaced = True

    def settled(self) -> None:
        pass


def hello(robot="arm", session="s", **changes) -> Hello:
    return Hello((1,), robot, session, **changes)


def frame(size: int, name: bytes = b"12345678") -> HeldFrame:
    return HeldFrame(name, Image("jpeg", bytes(size)))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(clock) -> Sessions:
    return Sessions(resume_s=30.0, held_bytes=1000, clock=clock)


def test_a_token_resumes_its_own_session_only(sessions):
    session = sessions.open("p", "arm", hello())
    sessions.away(session)
    token = session.token
    assert sessions.find("p", "arm", hello(token=b"x" * 16)) is None
    assert sessions.find("q", "arm", hello(token=token)) is None, "another policy"
    assert sessions.find("p", "other", hello("other", token=token)) is None, "another robot"
    assert sessions.find("p", "tenant/arm", hello(token=token)) is None, "another tenant's arm"
    assert sessions.find("p", "arm", hello(session="t", token=token)) is None, "another session"
    back = hello(token=token, seq=7)
    assert sessions.find("p", "arm", back) is session
    sessions.take(session, FakeLink(), back)
    assert session.seq == 7


def test_a_session_expires(sessions, clock):
    session = sessions.open("p", "arm", hello())
    sessions.hold(session, {"front": frame(10)}, "go")
    sessions.away(session)
    clock.now += 30.0
    assert sessions.expire() == []
    clock.now += 0.1
    assert sessions.find("p", "arm", hello(token=session.token)) is None, "also where nobody has looked yet"
    assert len(sessions) == 0
    assert sessions.held_bytes == 0


def test_a_session_whose_connection_lives_does_not_expire(sessions, clock):
    session = sessions.open("p", "arm", hello())
    session.link = FakeLink()
    clock.now += 1000.0
    assert sessions.expire() == []


async def test_an_answer_finds_the_connection_that_its_session_moved_to_meanwhile(sessions):
    session = sessions.open("p", "arm", hello())
    newer = FakeLink()

    class Stalls(FakeLink):
        async def deliver(self, body: bytes) -> bool:
            sessions.take(session, newer, hello(token=session.token))
            return False

    sessions.take(session, Stalls(), hello())
    await session.answer(1, b"answer")
    assert (newer.sent, session.kept) == ([b"answer"], None)


def test_names_of_cameras_are_no_way_to_fill_memory(clock):
    sessions = Sessions(resume_s=30.0, held_bytes=10_000, clock=clock, cameras=3)
    session = sessions.open("p", "arm", hello())
    for number in range(20):
        sessions.hold(session, {"front": frame(10), f"camera {number}": frame(100)}, None)
    assert list(session.held) == ["camera 18", "front", "camera 19"]
    assert sessions.held_bytes == session.held_bytes == 210


def test_a_newer_connection_takes_over(sessions):
    session = sessions.open("p", "arm", hello())
    link = session.link = FakeLink()
    again, newer = hello(token=session.token), FakeLink()
    assert sessions.find("p", "arm", again) is session
    assert session.link is link, "found is not taken"
    assert not link.was_replaced
    sessions.take(session, newer, again)
    assert link.was_replaced
    assert session.link is newer


def test_two_hellos_at_once_move_a_session_once(sessions):
    """Both find nothing here and ask the store; the one that comes second goes on with what the first took in."""
    both_ask = asyncio.Event()
    asked = []

    class Store:
        async def load(self, token: bytes) -> Session:
            asked.append(token)
            if len(asked) == 2:
                both_ask.set()
            await both_ask.wait()
            return Session("p", "arm", "arm", "s", token, 4, held={"front": frame(100)}, held_bytes=100)

    streams = SimpleNamespace(sessions=sessions, _store=Store())

    async def run():
        async def greet(link: FakeLink):
            said = hello(token=b"t" * 16)
            session, word = await Streams.find(streams, "p", "arm", said)
            sessions.take(session, link, said)
            return session, word

        links = FakeLink(), FakeLink()
        return links, await asyncio.gather(*map(greet, links))

    links, ((one, first), (other, second)) = asyncio.run(run())
    assert one is other
    assert {first, second} == {"moved", "resumed"}
    assert [link.was_replaced for link in links] == [link is not one.link for link in links]
    assert sessions.held_bytes == 100
    sessions.end(one)
    assert sessions.held_bytes == 0


def test_memory_is_taken_from_the_session_idle_longest(sessions):
    made = [sessions.open("p", f"arm-{n}", hello(f"arm-{n}")) for n in range(3)]
    for session in made:
        sessions.hold(session, {"front": frame(400)}, "go")
    assert [bool(session.held) for session in made] == [False, True, True]
    assert sessions.held_bytes == 800
    sessions.hold(made[1], {"front": frame(300)}, None)  # used again, and smaller
    assert sessions.held_bytes == 700
    sessions.hold(made[0], {"front": frame(400)}, None)
    assert [bool(session.held) for session in made] == [True, True, False]
    sessions.hold(made[0], {"wrist": frame(5000)}, None)
    assert made[0].held, "the one that sends keeps its own"
    assert sessions.held_bytes == 5400 == made[0].held_bytes
    sessions.end(made[0])
    assert sessions.held_bytes == 0


def test_answers_wait_for_the_next_connection_the_newest_only(sessions):
    session = sessions.open("p", "arm", hello())
    link = session.link = FakeLink()
    asyncio.run(session.answer(1, b"one"))
    assert (link.sent, session.kept) == ([b"one"], None)
    link.open = False
    asyncio.run(session.answer(3, b"three"))
    asyncio.run(session.answer(2, b"two"))
    assert session.kept == (3, b"three")


def test_what_is_queued_leaves_with_the_connection_or_on_request(sessions):
    session = sessions.open("p", "arm", hello())
    heard: list = []
    session.flights[4] = Flight(4, 0.0, "r", withdraw=lambda reason: bool(heard.append(reason)))
    session.flights[5] = Flight(5, 0.0, "r")  # not in the queue yet
    error = TaktlineError(ErrorCode.CANCELLED, "m", "n")
    session.cancel(5, error)
    session.cancel(9, error)
    assert heard == []
    session.cancel(4, error)
    sessions.away(session)
    assert heard == [error, None]


def test_in_a_full_window_what_is_queued_gives_way():
    session = Sessions(30.0, 1000, lambda: 0.0).open("p", "arm", hello())
    error = TaktlineError(ErrorCode.SUPERSEDED, "m", "n")
    assert session.make_room(1, error)
    session.flights[1] = Flight(1, 0.0, "r", withdraw=lambda reason: False)  # a worker has it
    assert not session.make_room(1, error)
    session.flights[2] = Flight(2, 0.0, "r", withdraw=lambda reason: True)
    assert session.make_room(2, error), "the queued one leaves"
    assert session.flights[2].gone
    assert session.make_room(2, error), "and takes no place while its refusal is on the way"
    session.flights[3] = Flight(3, 0.0, "r")
    assert session.make_room(2, error), "nor does one that has not come to the queue yet"
    heard: list = []
    session.flights[3].admitted(lambda reason: bool(heard.append(reason)))
    assert heard == [error]


def test_a_cancel_that_is_faster_than_the_queue_is_kept_for_it():
    flight = Flight(1, 0.0, "r")
    error = TaktlineError(ErrorCode.CANCELLED, "m", "n")
    flight.leave(error)
    heard: list = []
    flight.admitted(lambda reason: bool(heard.append(reason)))
    assert heard == [error]


@pytest.mark.parametrize("end", [ClientGone(), RuntimeError("a fault of the gateway")])
async def test_an_observation_that_ends_without_an_answer_is_settled(sessions, end):
    """A drain waits for the last unanswered observation; one that its robot left must not be waited for.

    A robot that is there hears of the gateway's own fault.
    """
    settled = []

    class Link(FakeLink):
        def settled(self) -> None:
            settled.append(len(session.flights))

    async def coming():
        raise end

    session = sessions.open("p", "arm", hello())
    sessions.take(session, Link(), hello())
    streams = SimpleNamespace(settings=None)
    caller = SimpleNamespace(principal=None, credential=None)
    made = Conversation(streams, "p", caller, None, None, lambda: None, lambda body: False, lambda hear: None)
    flight = session.flights[1] = Flight(1, 0.0, "r")
    serving = made._intake._serve(session, flight, Exchange({"headers": ()}), coming())
    await serving
    assert settled == [0]
    codes = [decode_from_gateway(body).code for body in session.link.sent]
    assert codes == ([] if isinstance(end, ClientGone) else ["internal"])


async def test_an_observation_sent_again_under_its_number_is_not_forgotten_with_the_first(sessions):
    session = sessions.open("p", "arm", hello())

    async def coming():
        raise ClientGone

    streams = SimpleNamespace(settings=None)
    caller = SimpleNamespace(principal=None, credential=None)
    made = Conversation(streams, "p", caller, None, None, lambda: None, lambda body: False, lambda hear: None)
    first, again = Flight(1, 0.0, "first"), Flight(1, 1.0, "again")
    session.flights[1] = again
    await made._intake._serve(session, first, Exchange({"headers": ()}), coming())
    assert session.flights == {1: again}


async def test_an_answer_told_to_a_connection_as_another_takes_over_is_sent_on_that_one_too(sessions):
    """The hello of a resumed session and the worker's response may be read in one turn: then it is promised."""

    class AtOnce(FakeLink):
        def deliver_at_once(self, body: bytes) -> bool:
            self.sent.append(body)
            return True

    old, new, chunk = AtOnce(), AtOnce(), CHUNK
    session = sessions.open("p", "arm", hello())
    sessions.take(session, old, hello())
    flight = session.flights[chunk.seq] = Flight(chunk.seq, 0.0, "r")
    flight.admitted(lambda reason: False)  # a worker has it
    response: asyncio.Future = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        Intake._serve(SimpleNamespace(), session, flight, Exchange({"headers": ()}), response)
    )
    await asyncio.sleep(0)
    promised: list[int] = []

    def greet() -> None:
        sessions.take(session, new, hello())
        promised.extend(session.coming())

    asyncio.get_running_loop().call_soon(greet)
    _tell(session, flight, chunk)
    response.set_result(chunk)
    await serving
    assert promised == [chunk.seq]
    assert [decode_from_gateway(body).seq for body in new.sent] == [chunk.seq]
    assert len(old.sent) == 1


def test_a_session_that_is_dropped_keeps_no_frame_that_comes_behind_it(sessions):
    session = sessions.open("p", "arm", hello())
    for _ in range(2):
        sessions.take(session, FakeLink(), hello())
    sessions.end(session)
    sessions.hold(session, {"front": frame(10)}, None)
    assert (len(sessions), sessions.held_bytes, session.held) == (0, 0, {})


def test_connections_that_come_and_go_fill_no_memory(clock):
    sessions = Sessions(resume_s=30.0, held_bytes=1000, clock=clock, most=3)
    live = sessions.open("p", "live", hello("live"))
    live.link = FakeLink()
    for number in range(10):
        session = sessions.open("p", f"arm-{number}", hello(f"arm-{number}"))
        sessions.hold(session, {"front": frame(10)}, "go")
        sessions.away(session)
    assert len(sessions) == 3
    assert live in list(sessions), "those that are connected stay"
    assert sessions.held_bytes == 20


class Written(asyncio.Transport):
    """Takes what is sent and is never closed by the other end."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""

    def write(self, data) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


@pytest.mark.parametrize("refuses", [True, False])
async def test_an_application_that_forgets_to_answer_is_logged_and_one_that_refuses_is_not(refuses, monkeypatch):
    errors = logging.getLogger("uvicorn.error")
    monkeypatch.setattr(errors, "filters", [_no_false_alarm])
    lines = []
    monkeypatch.setattr(errors, "handlers", [handler := logging.Handler()])
    handler.emit = lambda record: lines.append(record.getMessage())

    async def app(scope, receive, send) -> None:
        if refuses:
            await send({"type": "websocket.http.response.start", "status": 401, "headers": []})
            await send({"type": "websocket.http.response.body", "body": b"no"})

    config = Config(app=app, lifespan="off", log_config=None)
    config.load()
    made = StreamTransport(config=config, server_state=ServerState(), app_state={}, _loop=asyncio.get_running_loop())
    made.connection_made(transport := Written())
    made.data_received(
        b"GET /stream HTTP/1.1\r\nHost: gateway\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    await asyncio.gather(*made.tasks)
    assert transport.sent.startswith(b"HTTP/1.1 401" if refuses else b"HTTP/1.1 500")
    assert any("completing handshake" in line for line in lines) is not refuses


async def test_a_connection_that_is_lost_keeps_no_message():
    """Its parser remembers the last one, and is part of a cycle that the collector breaks only much later."""
    config = Config(app=lambda scope: None, lifespan="off")
    config.load()
    state = ServerState()
    made = StreamTransport(config=config, server_state=state, app_state={}, _loop=asyncio.get_running_loop())
    state.connections.add(made)
    assert inspect.getgeneratorstate(made.conn.parser) == inspect.GEN_SUSPENDED
    made.connection_lost(ConnectionResetError())
    assert inspect.getgeneratorstate(made.conn.parser) == inspect.GEN_CLOSED
    assert not state.connections
