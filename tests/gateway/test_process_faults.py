"""What a machine does to a gateway: logs that nobody reads, no descriptors left, files that cannot be read for once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from taktline_gateway import routes, tls
from taktline_gateway.access import control
from taktline_gateway.routes import FileChanges, file_identity, watch_routes
from taktline_protocol import ErrorCode, TaktlineError

from tests.gateway.certificates import Authority
from tests.gateway.conftest import free_port, until


def fault(cause: Exception | None, words: str = "m") -> TaktlineError:
    error = TaktlineError(ErrorCode.CONFIG_INVALID, words, "n")
    error.__cause__ = cause
    return error


# ----- files


def test_what_the_system_did_not_give_out_is_read_again_and_told_once():
    version = [1]
    changes = FileChanges(lambda: version[0])
    assert not changes.due()
    version[0] = 2
    assert changes.due()
    assert changes.failed(fault(OSError(24, "too many open files")))
    for _ in range(3):
        assert changes.due()
        assert not changes.failed(fault(OSError(24, "too many open files")))
    assert changes.due()
    assert not changes.due(), "it was read"
    version[0] = 3
    assert changes.due()
    assert changes.failed(fault(ValueError("no JSON"))), "another version is told again"
    assert not changes.due(), "what it says is wrong, and will be as long as nobody changes it"


def write_table(path: Path, policy: str) -> None:
    path.with_suffix(".new").write_text(json.dumps({"routes": [{"policy": policy}]}))
    path.with_suffix(".new").replace(path)


async def watched(path: Path, apply, steps, monkeypatch) -> None:
    """Watches while `steps` runs."""
    monkeypatch.setattr(routes, "POLL_S", 0.01)
    task = asyncio.create_task(watch_routes(path, FileChanges(lambda: file_identity(path)), apply))
    try:
        await steps()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def became(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.01)


async def test_a_routing_table_that_could_not_be_read_for_once_takes_effect_all_the_same(tmp_path, monkeypatch):
    path = tmp_path / "routes.json"
    write_table(path, "before")
    applied, tried = [], []
    read = Path.read_bytes

    def out_of_descriptors(self: Path) -> bytes:
        tried.append(self)
        if len(tried) <= 3:
            raise OSError(24, "Too many open files")
        return read(self)

    async def steps() -> None:
        await asyncio.sleep(0.05)
        assert applied == []
        monkeypatch.setattr(Path, "read_bytes", out_of_descriptors)
        write_table(path, "after")
        await became(lambda: applied)

    await watched(path, lambda table: applied.append(table.routes[0].policy), steps, monkeypatch)
    assert applied == ["after"]
    assert len(tried) == 4


async def test_a_table_that_cannot_be_applied_does_not_end_the_watching(tmp_path, monkeypatch, caplog):
    path = tmp_path / "routes.json"
    write_table(path, "before")
    applied = []

    def apply(table) -> None:
        if table.routes[0].policy == "worse":
            raise RuntimeError("a fault of ours")
        applied.append(table.routes[0].policy)

    async def steps() -> None:
        write_table(path, "worse")
        await became(lambda: "internal" in caplog.text)
        write_table(path, "better")
        await became(lambda: applied)

    await watched(path, apply, steps, monkeypatch)
    assert applied == ["better"]


def test_keys_that_are_taken_away_are_gone_though_their_file_could_not_be_read_at_first(bare_stack, monkeypatch):
    """The first look at the new file fails; without a second one the key would be good for ever."""
    path = bare_stack.folder / "access.json"
    path.write_text(json.dumps({"tenants": []}))
    made = control.AccessControl(path)
    looked = []
    real = control.read_access_file

    def busy(where: Path):
        looked.append(where)
        if len(looked) == 1:
            raise fault(OSError(5, "Input/output error"))
        return real(where)

    monkeypatch.setattr(control, "read_access_file", busy)
    monkeypatch.setattr(made, "_apply", lambda file: looked.append("applied"))

    async def look() -> None:
        os.utime(path, ns=(1, 1))
        made._look(path)
        assert looked == [path]
        made._look(path)
        made._look(path)
        await asyncio.gather(*made._closing)

    asyncio.run(look())
    assert looked == [path, path, "applied"]


@pytest.mark.parametrize("kind", ["server", "workers"])
def test_a_new_certificate_is_used_though_its_file_could_not_be_read_at_first(tmp_path, monkeypatch, kind):
    authority = Authority(tmp_path, "authority")
    cert, key = authority.issue("one")
    made = tls.ServerTls if kind == "server" else tls.WorkerTls
    name = "_server_context" if kind == "server" else "_channel_credentials"
    files = tls.TlsFiles(cert=cert, key=key, ca=authority.ca)
    found = made(files)
    real, calls = getattr(tls, name), []

    def busy(files):
        calls.append(1)
        if len(calls) == 1:
            raise fault(OSError(24, "Too many open files"))
        return real(files)

    monkeypatch.setattr(tls, name, busy)
    assert not found.refresh()
    os.utime(cert, ns=(1, 1))
    assert not found.refresh()
    assert found.refresh(), "the second look finds it"
    assert not found.refresh()


# ----- descriptors


LIMITS = """
import resource, sys
from taktline_gateway.connections import connections_within_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
print(connections_within_limit(int(sys.argv[3])), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "expected"),
    [
        (1024, 4096, 2000, (2000, 2256)),  # most distributions: a low soft limit, and room above
        (1024, 4096, 500, (500, 1024)),
        (1024, 1024, 2000, (768, 1024)),
        (1024, 1024, 768, (768, 1024)),
        (100, 100, 2000, (1, 100)),
    ],
)
def test_the_limit_of_descriptors_is_raised_for_as_many_connections_as_are_allowed(soft, hard, wanted, expected):
    command = [sys.executable, "-c", LIMITS, str(soft), str(hard), str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert tuple(map(int, done.stdout.split())) == expected


@contextlib.contextmanager
def gateway(stack, *, descriptors: int = 0, stderr: int | None = None):
    """A gateway of its own, with so few descriptors, or with another stderr."""
    port = free_port()
    stack.url = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).parent / "taktline-gateway"), "serve", "--routes", str(stack.routes)]
    command += ["--listen", f"127.0.0.1:{port}", "--drain-settle-s", "0"]

    def limit() -> None:
        if descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    stack.gateway = subprocess.Popen(
        command,
        stderr=stack.log.open("w") if stderr is None else stderr,
        preexec_fn=limit,
    )
    until(lambda: _listens(port), "the gateway listening")
    yield port


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def test_with_few_descriptors_who_is_too_many_is_told_so_and_robots_are_served(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker())
    with gateway(stack, descriptors=300) as port, contextlib.ExitStack() as held:
        stack.wait_workers(1)
        assert "few_descriptors" in stack.log.read_text()
        for _ in range(80):
            held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        surplus = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        assert b"too many connections" in surplus.recv(4096)
        assert stack.act(robot="a")[0] == 200, "on the connection that it has"


# ----- logs


def test_a_log_that_nobody_reads_holds_up_no_robot(bare_stack):
    """A pipe takes 64 KiB; a collector that hangs must not stop the gateway once it is full."""
    stack = bare_stack
    stack.write_routes(stack.start_worker())
    reads, writes = os.pipe()
    try:
        with gateway(stack, stderr=writes):
            stack.wait_workers(1)
            for _ in range(400):
                stack.act(robot="late", budget_ms=0.5)  # refused; or tried on the idle worker, and late: a line each
            assert stack.act(robot="a")[0] == 200
            before = os.read(reads, 1 << 20).decode()
            assert "request_refused" in before
            assert "log_lines_lost" not in before
            stack.act(robot="late", budget_ms=0.5)
            after = [json.loads(line) for line in os.read(reads, 1 << 20).decode().splitlines()]
            assert after[0]["message"] == "log_lines_lost"
            assert len(after) == 2
            assert after[0]["lines"] > 50
    finally:
        os.close(reads)
        os.close(writes)


# ----- signals


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_closed_terminal_drains_as_sigterm_does(bare_stack, number):
    stack = bare_stack
    stack.write_routes(stack.start_worker(t_sync="1:800"))
    stack.start_gateway("--drain-settle-s", "0")
    stack.wait_workers(1)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(stack.act, robot="a")
        until(lambda: stack.batches(), "the batch being on the worker")
        stack.gateway.send_signal(number)
        assert running.result()[0] == 200
    assert stack.gateway.wait(timeout=30) == 0


def test_under_nohup_a_closed_terminal_ends_nothing(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker(t_sync="1:20"))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; a child inherits it
    try:
        stack.start_gateway("--drain-settle-s", "0")
    finally:
        signal.signal(signal.SIGHUP, before)
    stack.wait_workers(1)
    stack.gateway.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        stack.gateway.wait(timeout=1)
    assert stack.act(robot="a")[0] == 200
