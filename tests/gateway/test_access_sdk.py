"""The SDK and the command line show a guarded gateway their key: given, from a file, from the environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from taktline import Access, AsyncRobot, Robot
from taktline_gateway.access.access_file import AccessFile, Key, Tenant
from taktline_gateway.access.keys import new_key
from taktline_protocol import ErrorCode, TaktlineError

from tests.gateway.conftest import Stack

TAKTLINE = str(Path(sys.executable).parent / "taktline")
FRAME = np.zeros((8, 8, 3), np.uint8)
SEEN = ({"front": FRAME, "wrist": FRAME}, [0.0] * 6, "go", 5_000.0)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded-sdk")
    key, kept = new_key("arm")
    (folder / "key").write_text(f"{key}\n")
    file = AccessFile(tenants=(Tenant(name="a"),), keys=(Key(id="arm", tenant="a", hash=kept),))
    (folder / "access.json").write_bytes(msgspec.json.encode(file))
    made = Stack(folder)
    made.write_routes(made.start_worker())
    made.start_gateway("--access-file", str(folder / "access.json"))
    made.key = key
    made.http.headers["authorization"] = f"Bearer {key}"
    made.wait_workers(1)
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in ("TAKTLINE_API_KEY", "TAKTLINE_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_the_key_as_argument(guarded):
    with Robot(guarded.url, "scripted", "one", api_key=guarded.key) as robot:
        assert robot.info().ready
        assert robot.act(*SEEN).actions.shape == (10, 6)


async def test_the_key_as_argument_for_asyncio(guarded):
    async with AsyncRobot(guarded.url, "scripted", "two", api_key=guarded.key) as robot:
        assert (await robot.act(*SEEN)).actions.shape == (10, 6)


def test_the_key_from_the_environment_and_from_a_file(guarded, monkeypatch):
    monkeypatch.setenv("TAKTLINE_API_KEY", guarded.key)
    with Robot(guarded.url, "scripted", "three") as robot:
        robot.act(*SEEN)
    monkeypatch.setenv("TAKTLINE_API_KEY", "wrong")
    monkeypatch.setenv("TAKTLINE_API_KEY_FILE", str(guarded.folder / "key"))
    with Robot(guarded.url, "scripted", "four") as robot:
        robot.act(*SEEN)
    with Robot(guarded.url, "scripted", "five", api_key="wrong") as robot, pytest.raises(TaktlineError) as caught:
        robot.act(*SEEN)
    assert caught.value.code is ErrorCode.UNAUTHENTICATED


def test_no_key_is_said_with_the_remedy(guarded):
    with Robot(guarded.url, "scripted", "six") as robot, pytest.raises(TaktlineError, match="API key") as caught:
        robot.act(*SEEN)
    assert caught.value.code is ErrorCode.UNAUTHENTICATED
    assert "TAKTLINE_API_KEY" in caught.value.next_step


def test_a_key_that_cannot_be_one_is_never_shown(tmp_path):
    for wrong in ("schlüssel", "line\nbreak"):
        with pytest.raises(TaktlineError) as caught:
            Access(api_key=wrong).headers()
        assert wrong not in str(caught.value)
        assert wrong not in repr(Access(api_key=wrong))
    with pytest.raises(TaktlineError, match="cannot be read"):
        Access(api_key_file=str(tmp_path / "absent")).headers()


def test_the_command_line(guarded):
    key_file = str(guarded.folder / "key")
    ask = [TAKTLINE, "policies", "--url", guarded.url]
    refused = subprocess.run(ask, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert "unauthenticated" in refused.stderr
    assert "--api-key-file" in refused.stderr
    done = subprocess.run([*ask, "--api-key-file", key_file], capture_output=True, text=True, timeout=60)
    assert "scripted: ready" in done.stdout, done.stderr
    bench = [TAKTLINE, "bench-http", "--policy", "scripted", "--duration", "0.3", "--clients", "1", "--side", "8"]
    done = subprocess.run(
        [*bench, "--url", guarded.url, "--api-key-file", key_file], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
