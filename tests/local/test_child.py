"""Child processes end whole: with grace, with their group, and with a parent that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from taktline_local.child import Child, tail

from tests.waiting import until


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_exit_codes_are_those_of_containers(tmp_path: Path) -> None:
    log = tmp_path / "log"
    plain = Child(["sh", "-c", "echo out; echo err >&2; exit 3"], log=log)
    until(lambda: plain.exit_code() is not None, "the end of a process")
    assert plain.exit_code() == 3
    assert log.read_text() == "out\nerr\n"
    killed = Child(["sh", "-c", "kill -9 $$"], log=log)
    until(lambda: killed.exit_code() is not None, "the end of a killed process")
    assert killed.exit_code() == 137
    absent = Child(["no-such-program"], log=log)
    until(lambda: absent.exit_code() is not None, "the end of what is no program")
    assert absent.exit_code() == 127
    assert "no-such-program" in tail(log)


def test_stop_asks_first_and_kills_afterwards(tmp_path: Path) -> None:
    polite = Child(["sh", "-c", "trap 'exit 7' TERM; echo up; while :; do sleep 0.1; done"], log=tmp_path / "polite")
    until(lambda: "up" in tail(polite.log), "its first line")
    assert polite.stop_blocking(30) == 7
    deaf = Child(["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done"], log=tmp_path / "deaf")
    until(lambda: "up" in tail(deaf.log), "its first line")
    assert deaf.stop_blocking(0.2) == 137


def test_what_a_process_leaves_running_goes_with_it(tmp_path: Path) -> None:
    child = Child(["sh", "-c", "sleep 600 & echo $!"], log=tmp_path / "log")
    until(lambda: child.exit_code() is not None, "the end of the process")
    left = int(tail(child.log))
    until(lambda: gone(left), "the end of what it left running")


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from taktline_local.child import Child\n"
        "child = Child(['sleep', '600'], log=Path(sys.argv[1])); print(child.pid, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        process = int(parent.stdout.readline())
        assert not gone(process)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        until(lambda: gone(process), "the end of the child")
