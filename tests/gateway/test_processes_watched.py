"""Waiting for the processes of a benchmark: one that has ended is told at once, with the end of its log."""

from __future__ import annotations

import sys
import time

import pytest

from benchmarks.gateway.processes import Deployment, Server, ServerEndedError, until


def test_what_has_ended_is_not_waited_for(tmp_path):
    code = "import sys; print('x' * 5000); print('the cause of it'); sys.exit(3)"
    server = Server([sys.executable, "-c", code], tmp_path / "one.log")
    began = time.monotonic()
    with pytest.raises(ServerEndedError, match="the cause of it") as error:
        until(lambda: False, "the port answering", 600.0, lambda: [server])
    assert time.monotonic() - began < 300
    assert str(error.value).startswith("the port answering: a process has ended")
    assert "ended with 3" in str(error.value)
    assert len(str(error.value)) < 4000, "only the end of a long log"


def test_what_was_late_shows_its_log(tmp_path):
    code = "import time; print('still loading', flush=True); time.sleep(600)"
    server = Server([sys.executable, "-c", code], tmp_path / "one.log")
    try:
        until(lambda: "loading" in server.log.read_text(), "the log", servers=lambda: [server])
        with pytest.raises(TimeoutError, match="still loading"):
            until(lambda: False, "the port answering", 0.1, lambda: [server])
    finally:
        server.stop()


def test_a_gateway_that_cannot_start_is_told_with_every_log(tmp_path):
    deployment = Deployment(tmp_path)
    (tmp_path / "worker-of-another.log").write_text("no memory on the GPU")
    deployment.routes.write_text("not a table")
    deployment.start_gateway()
    try:
        with pytest.raises(ServerEndedError, match="the gateway having its worker") as error:
            deployment.until_ready(1, timeout_s=600.0)
    finally:
        deployment.stop()
    assert "config_invalid" in str(error.value)
    assert any("no memory on the GPU" in note for note in error.value.__notes__)
