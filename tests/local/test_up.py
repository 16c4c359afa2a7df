"""`taktline up`: real workers and gateway from one file, every failure in one line, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from taktline_local import up
from taktline_local.stack import planned_pods, split_next_step
from taktline_protocol.errors import ErrorCode, TaktlineError

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "pi05_tiny" / "lerobot_folder"
TAKTLINE = Path(sys.executable).with_name("taktline")
POLICY = """
apiVersion: taktline.dev/v1alpha1
kind: PolicyDeployment
metadata: {{name: tiny}}
spec:
  model: {{family: pi05, source: {{path: {path}}}}}
  engine: {{precision: fp32, buckets: [1]}}
  pools: [{{name: cpu, accelerator: cpu, minReplicas: 1, maxReplicas: 1}}]
  slo: {{controlBudgetMs: 500}}
"""


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    """A PolicyDeployment beside a servable tiny checkpoint, named by a relative path."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN, checkpoint, ignore=shutil.ignore_patterns("case_*"))
    (checkpoint / "taktline.json").write_text('{"architecture": {"vision_heads": 2}, "control_period_ms": 50}')
    file = tmp_path / "tiny.yaml"
    file.write_text(POLICY.format(path="checkpoint"))
    return file


class Running:
    """`taktline up` in a process of its own, its stderr read as it comes."""

    def __init__(self, *arguments: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [TAKTLINE, "up", *arguments], cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.said += self.process.stderr

    def wait_for(self, pattern: str) -> re.Match[str]:
        for _ in range(1200):
            for line in list(self.said):
                if found := re.search(pattern, line):
                    return found
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise AssertionError(f"never said {pattern!r}: {''.join(self.said)}")

    def finish(self) -> int:
        code = self.process.wait(60)
        self._reader.join(10)
        return code


Starter = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    started: list[Running] = []

    def run(*arguments: str) -> Running:
        started.append(Running(*arguments, folder=tmp_path))
        return started[-1]

    yield run
    for running in started:
        running.process.kill()
        running.process.wait()


def running_processes(log_folder: Path) -> set[int]:
    text = (log_folder / "events.log").read_text()
    found = {int(number) for number in re.findall(r"Started process (\d+)", text)}
    return {number for number in found if Path(f"/proc/{number}").exists()}


@pytest.mark.slow
def test_serves_survives_a_dead_worker_and_leaves_nothing(policy_file: Path, tmp_path: Path, start: Starter) -> None:
    logs = tmp_path / "logs"
    running = start(str(policy_file), "--serve", "--port", "0", "--logs", str(logs))
    url = running.wait_for(r"serving tiny at (\S+);").group(1)
    assert [item["policy"] for item in httpx.get(f"{url}/v1/policies").json()["policies"]] == ["tiny"]
    assert httpx.get(f"{url}/readyz").status_code == 200

    worker = int(re.search(r"tiny-cpu-0 Started: Started process (\d+)", (logs / "events.log").read_text()).group(1))  # type: ignore[union-attr]
    os.kill(worker, signal.SIGKILL)
    running.wait_for("tiny-cpu-0 is not ready any more")
    running.wait_for("tiny-cpu-0 is ready again")

    gateway = int(re.search(r"gateway Started: Started process (\d+)", (logs / "events.log").read_text()).group(1))  # type: ignore[union-attr]
    os.kill(gateway, signal.SIGKILL)
    running.wait_for("gateway (is not ready any more|died)")
    running.wait_for(r"gateway (died \(read \S+\) and )?is ready again")
    assert httpx.get(f"{url}/readyz").status_code == 200

    assert len(running_processes(logs)) == 2
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 0
    assert running_processes(logs) == set()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/readyz")


def test_a_ctrl_c_while_the_file_is_read_is_no_fault_of_the_file(policy_file: Path, start: Starter) -> None:
    running = start(str(policy_file), "--serve", "--port", "0")
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
    end = time.monotonic() + 60

    def planning() -> bool:
        found = [Path(f"/proc/{number}/cmdline") for number in children.read_text().split()]
        return any("taktline-operator" in line.read_text() for line in found if line.exists())

    while not planning():
        assert time.monotonic() < end, "the operator's plan was never asked for"
        time.sleep(0.01)
    os.killpg(running.process.pid, signal.SIGINT)  # as a terminal does
    assert running.finish() == up.INTERRUPTED
    assert "config_invalid" not in "\n".join(running.said)


def test_refusing_worker_is_quoted(policy_file: Path, tmp_path: Path, start: Starter) -> None:
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(b"\0" * 100)
    running = start(str(policy_file), "--serve", "--port", "0", "--logs", str(tmp_path / "logs"))
    assert running.finish() == 1
    last = running.said[-1]
    assert last.startswith("taktline: worker_failed: tiny-cpu-0 ended with exit code 2:")
    assert "model.safetensors" in last
    assert running_processes(tmp_path / "logs") == set()


def test_killed_up_takes_its_processes_with_it(policy_file: Path, tmp_path: Path, start: Starter) -> None:
    logs = tmp_path / "logs"
    running = start(str(policy_file), "--serve", "--port", "0", "--logs", str(logs))
    for _ in range(600):
        if (logs / "events.log").exists() and "Started process" in (logs / "events.log").read_text():
            break
        time.sleep(0.1)
    assert running_processes(logs)
    running.process.kill()
    running.process.wait()
    for _ in range(100):
        if not running_processes(logs):
            return
        time.sleep(0.1)
    raise AssertionError("a worker outlived the killed command")


def test_port_in_use_is_one_line_with_the_next_step(policy_file: Path, tmp_path: Path, start: Starter) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        running = start(str(policy_file), "--serve", "--port", str(port), "--logs", str(tmp_path / "logs"))
        assert running.finish() == 1
    assert f"port {port}" in running.said[-1]
    assert "--port" in running.said[-1]
    assert len(running.said) == 1, "nothing is announced that does not come"
    assert not (tmp_path / "logs").exists(), "and nothing is left behind"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("kind: [", "is no YAML at line 1, column 8"),
        ("metadata: {name: tiny}\n spec: 1\n", "(correct that line and try again)"),
        ("", "holds no PolicyDeployment"),
        (POLICY.format(path="missing").replace("pi05", "pi99"), "family"),
        (POLICY.format(path="missing"), "does not exist"),
    ],
    ids=["no YAML", "a wrong indent", "empty", "unknown family", "no such folder"],
)
def test_bad_files_are_one_line(content: str, words: str, tmp_path: Path, start: Starter) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    running = start(str(file), "--serve", "--port", "0", "--logs", str(tmp_path / "logs"))
    assert running.finish() == 1
    assert words in running.said[-1]
    assert len(re.findall(r"\(correct |\(name ", running.said[-1])) <= 1, "one next step"
    assert not any("Traceback" in line for line in running.said)


def test_missing_file_is_one_line(start: Starter) -> None:
    running = start("nowhere.yaml")
    assert running.finish() == 1
    assert "".join(running.said).startswith("taktline: config_invalid: there is no file nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("it broke (mend it)", ("it broke", "mend it")),
        ("f(x) broke (mend f(x) or g)", ("f(x) broke", "mend f(x) or g")),
        ("it broke", ("it broke", "")),
        ("it (only) broke", ("it (only) broke", "")),
        ("(all)", ("(all)", "")),
        ("never closed) ", ("never closed) ", "")),
        ("", ("", "")),
    ],
)
def test_a_printed_error_is_taken_apart_again(text: str, parts: tuple[str, str]) -> None:
    assert split_next_step(text) == parts


def test_choice_of_policy() -> None:
    assert up.choose_policy(["a"], None) == "a"
    assert up.choose_policy(["a", "b"], "b") == "b"
    for policies, asked in ((["a", "b"], None), (["a"], "c")):
        with pytest.raises(TaktlineError, match="--policy one of: a") as caught:
            up.choose_policy(policies, asked)
        assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.fixture
def stand_in_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program named like the robots' one, which records its arguments and does what FLEET says."""
    program = tmp_path / "bin" / "taktline-demo"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n$FLEET\n')
    program.chmod(0o755)
    monkeypatch.setattr("taktline_local.node.default_search_path", lambda: f"{program.parent}:{os.environ['PATH']}")
    return tmp_path / "arguments"


async def test_stand_in_fleet_decides_the_exit_code(stand_in_fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET", "exit 4")
    code = await up.run_fleet("http://gateway", "tiny", 3, ["--episodes", "2"], asyncio.Event())
    assert code == 4
    words = stand_in_fleet.read_text().split()  # noqa: ASYNC240
    assert words == ["fleet", "--url", "http://gateway", "--policy", "tiny", "--robots", "3", "--episodes", "2"]


async def test_interrupt_ends_the_stand_in_fleet(stand_in_fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET", "sleep 600")
    interrupted = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, interrupted.set)
    assert await up.run_fleet("http://gateway", "tiny", 3, [], interrupted) == 130


@pytest.mark.parametrize("kind", ["StatefulSet", "LeaderWorkerSet", "RayService"])
def test_a_worker_of_several_pods_is_refused_with_what_to_leave_out(kind: str) -> None:
    group = {"kind": kind, "metadata": {"name": "planner-mesh-0"}, "spec": {}}
    with pytest.raises(TaktlineError, match="is several pods") as caught:
        planned_pods([group], None)
    assert "gpusPerNode" in caught.value.next_step


def test_logs_of_another_run_are_not_mixed_with_this_ones(policy_file: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "events.log").write_text("of yesterday")
    command = [TAKTLINE, "up", str(policy_file), "--port", "0", "--logs", str(logs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "has the logs of another run" in done.stderr
    assert "--logs" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_for_logs_that_cannot_be_made_is_said_in_one_line(policy_file: Path, tmp_path: Path) -> None:
    command = [TAKTLINE, "up", str(policy_file), "--port", "0", "--logs", str(policy_file / "logs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"taktline: config_invalid: {policy_file / 'logs'} cannot be used: Not a directory")
    assert done.stderr.count("\n") == 1
