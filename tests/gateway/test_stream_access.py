"""A guarded gateway's streams: who is let in, whose session is whose, and a key revoked while its stream lives."""

from __future__ import annotations

import msgspec
import pytest
from taktline_gateway.access.access_file import AccessFile, Key, Tenant
from taktline_gateway.access.keys import new_key
from taktline_protocol.stream import Answer, Hello
from websockets.exceptions import InvalidStatus

from tests.gateway.conftest import Stack, until
from tests.gateway.stream_robot import StreamRobot


class Guarded:
    def __init__(self, folder) -> None:
        self.file = folder / "access.json"
        self.keys, self.kept = {}, {}
        for tenant in ("a", "b"):
            self.keys[tenant], self.kept[tenant] = new_key(f"key-{tenant}")
        self.allow("a", "b")
        self.stack = Stack(folder)
        self.stack.write_routes(self.stack.start_worker())
        self.stack.start_gateway("--access-file", str(self.file))
        self.stack.http.headers["authorization"] = f"Bearer {self.keys['a']}"
        self.stack.wait_workers(1)

    def allow(self, *tenants: str, rights: tuple[str, ...] = ("act",)) -> None:
        access = AccessFile(
            tenants=tuple(Tenant(name=tenant) for tenant in ("a", "b")),
            keys=tuple(Key(id=f"key-{t}", tenant=t, hash=self.kept[t], rights=rights) for t in tenants),
        )
        new = self.file.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(access))
        new.replace(self.file)

    def robot(self, tenant: str, name: str = "arm", **hello) -> StreamRobot:
        return StreamRobot(self.stack.url, name, headers={"authorization": f"Bearer {self.keys[tenant]}"}, **hello)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    made = Guarded(tmp_path_factory.mktemp("guarded-stream"))
    yield made
    made.stack.stop()


@pytest.mark.parametrize("headers", [None, {"authorization": "Bearer wrong"}])
def test_who_is_not_known_gets_no_stream(guarded, headers):
    with pytest.raises(InvalidStatus) as caught:
        StreamRobot(guarded.stack.url, headers=headers)
    assert caught.value.response.status_code == 401
    until(lambda: "connection rejected (401" in guarded.stack.log.read_text(), "the line about it")
    with pytest.raises(InvalidStatus):  # its line comes later than any that follows the first
        StreamRobot(guarded.stack.url, headers=headers)
    until(lambda: guarded.stack.log.read_text().count("connection rejected (401") >= 2, "the line about the second")
    assert "completing handshake" not in guarded.stack.log.read_text(), "a caller without a key is no fault of ours"


def test_a_key_that_is_revoked_before_hello_takes_over_no_session(guarded):
    robot = guarded.robot("b", "before")
    late = guarded.robot("b", "before", greet=False)
    guarded.allow("a")

    def refused():
        robot.observe()
        answer = robot.answer()
        return not isinstance(answer, Answer) and answer.code == "unauthenticated"

    until(refused, "the key being revoked")
    late.send(Hello((1,), "before", "session of before", token=robot.welcome.token))
    goodbye, close = late.goodbye()
    assert goodbye.code == "unauthenticated"
    assert close == (1008, "unauthenticated")
    assert refused(), "the older connection is still there to be answered"
    guarded.allow("a", "b")
    until(lambda: not refused(), "the key being known again")
    robot.close()


def test_two_tenants_may_each_have_a_robot_of_one_name(guarded):
    one, two = guarded.robot("a"), guarded.robot("b")
    for robot in (one, two):
        robot.observe()
        assert isinstance(robot.answer(), Answer)
    # The token of one tenant's session is worth nothing to the other.
    one.drop()
    thief = guarded.robot("b", "other", token=one.welcome.token)
    assert not thief.welcome.resumed
    again = guarded.robot("a", token=one.welcome.token, seq=one.seq)
    assert again.welcome.resumed
    for robot in (two, thief, again):
        robot.close()


def test_a_key_that_is_revoked_ends_what_its_stream_may_ask(guarded):
    robot = guarded.robot("b", "revoked")
    robot.observe()
    assert isinstance(robot.answer(), Answer)
    guarded.allow("a")

    def refused():
        robot.observe()
        answer = robot.answer()
        return not isinstance(answer, Answer) and answer.code == "unauthenticated"

    until(refused, "the key being refused")
    guarded.allow("a", "b")
    until(lambda: not refused(), "the key being known again")
    robot.close()
