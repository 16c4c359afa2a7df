"""The log of a replica is read to its end, whatever is in it and wherever it can no longer be written."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from taktline_worker.replicas import child
from taktline_worker.replicas.child import Launch, Replica


class Broken(io.StringIO):
    """A standard error that takes nothing any more."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def write(self, _: str) -> int:
        raise self._error


def replica(tmp_path: Path, code: str) -> tuple[Replica, threading.Event]:
    """A replica that runs `code` and never serves; the event is set when it has ended."""
    ended = threading.Event()
    launch = Launch(0, (sys.executable, "-c", code), dict(os.environ), tmp_path / "socket", 5.0)
    return Replica(launch, lambda *_: None, lambda *_: ended.set()), ended


FULL = "import sys\nfor _ in range(4000):\n    print('x' * 100, file=sys.stderr, flush=True)\n"


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "no space"), BrokenPipeError(), ValueError("I/O operation on closed file")],
    ids=lambda error: type(error).__name__,
)
def test_a_log_that_cannot_be_written_stops_no_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """400 KB are more than a pipe holds: with nobody reading, the process would hang in its next line."""
    monkeypatch.setattr(sys, "stderr", Broken(error))
    made, ended = replica(tmp_path, FULL)
    made.start()
    try:
        assert ended.wait(60.0), "the replica hangs in its log"
    finally:
        monkeypatch.undo()
        made.stop()


def test_a_line_that_is_no_text_is_passed_on_and_the_refusal_behind_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    code = (
        "import sys\n"
        "sys.stderr.buffer.write(b'driver: \\xff\\xfe\\n')\n"
        "sys.stderr.buffer.write(b'taktline-worker: config_invalid: no such policy\\n')\n"
        "sys.stderr.flush()\nsys.exit(2)\n"
    )
    made, ended = replica(tmp_path, code)
    made.start()
    try:
        assert ended.wait(60.0)
        assert made.refusal == "taktline-worker: config_invalid: no such policy"
        assert "driver: \\xff\\xfe\n" in written.getvalue()
    finally:
        monkeypatch.undo()
        made.stop()


def test_what_a_replica_started_and_left_behind_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the replica's standard error open: the log has no end, and no new replica was started."""
    monkeypatch.setattr(child, "LOG_S", 0.1)
    left = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys\n"
        "made = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(left)!r}).write_text(str(made.pid))\n"
    )
    made, ended = replica(tmp_path, code)
    made.start()
    try:
        assert ended.wait(30.0), "the replica's end goes unnoticed"
        os.kill(int(left.read_text()), 0)
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)
        made.stop()
