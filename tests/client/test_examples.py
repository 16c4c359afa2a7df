"""Each example is run as it stands, against a real gateway before the mirror worker."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import taktline
from taktline.action_buffer import ActionBuffer
from taktline.robot_metrics import RobotMetrics
from taktline_protocol.messages import PolicyInfo, Timings

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "client" / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    from tests.gateway.conftest import Stack, free_port, until

    made = Stack(tmp_path_factory.mktemp("examples"))
    address = f"127.0.0.1:{free_port()}"
    worker = ROOT / "tests" / "conformance" / "mirror_worker.py"
    made.workers[address] = subprocess.Popen([sys.executable, str(worker), "--listen", address])
    made.routes.write_text(json.dumps({"routes": [{"policy": "mirror", "targets": [{"address": address}]}]}))
    made.start_gateway()
    until(lambda: made.policy("mirror").get("ready"), "the mirror worker being ready")
    yield made
    made.stop()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(mirror, example):
    command = [sys.executable, str(example), "--url", mirror.url, "--policy", "mirror", "--seconds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["hand_offs"] > 2
    assert said["moved"] > 20
    assert said["errors"] == {}
    client = said["client"]
    assert client["transport"] == "stream"
    assert client["chunks"] >= said["hand_offs"]
    assert client["cameras_referenced"] > 0, "each example has a camera that shows the same twice"
    assert client["clock"] is not None


class Stalling:
    """Stands in for `time`: nothing takes any, but for one stall of half a second."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Scene:
    """A robot with an answer to everything at once, and the times at which it was commanded."""

    def __init__(self, clock: Stalling) -> None:
        self.clock = clock
        self.commanded_at: list[float] = []
        self.metrics = RobotMetrics()
        self.waited = False
        """Whether a worker was waited for: until then a policy has no sizes and cameras to tell."""

    def info(self, *, wait_s: float = 0.0) -> PolicyInfo:
        if not wait_s and not self.waited:
            return PolicyInfo(policy="p", family="f", revision="r", ready=False)
        self.waited = True
        named = {"policy": "p", "family": "f", "revision": "r", "ready": True, "cameras": ("scene",)}
        return PolicyInfo(**named, state_dim=2, action_dim=2, horizon=50, dt_s=0.02)

    def ask(self, *_, captured_at: float, **__) -> Future:
        times = Timings(observe_ms=0.0, transfer_ms=0.0, queue_ms=0.0, inference_ms=0.0, actuate_ms=0.0)
        rows = np.zeros((50, 2), np.float32)
        answer: Future = Future()
        answer.set_result(
            taktline.Chunk(rows, 0.02, captured_at, captured_at + 1.0, times, 1.0, 1, "p", "r", "w", 1, "id")
        )
        return answer

    def command(self) -> None:
        self.commanded_at.append(self.clock.now)
        if len(self.commanded_at) == 30:
            self.clock.now += 0.5

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_what_an_example_missed_in_a_stall_is_not_commanded_all_at_once(example, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location(example.stem, example)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    clock = Stalling()
    scene = Scene(clock)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(taktline, "Robot", lambda *_, **__: scene)
    monkeypatch.setattr(taktline, "Player", partial(taktline.Player, clock=clock.monotonic))
    next_action = ActionBuffer.next_action

    def commanded(buffer: ActionBuffer):
        scene.command()
        return next_action(buffer)

    monkeypatch.setattr(ActionBuffer, "next_action", commanded)
    monkeypatch.setattr(sys, "argv", [str(example), "--seconds", "2"])
    module.main()
    assert len(scene.commanded_at) > 60
    assert json.loads(capsys.readouterr().out)["moved"] > 40, (
        "it began before its policy, and knows its cameras all the same"
    )
    gaps = np.diff(scene.commanded_at)
    assert gaps.max() == pytest.approx(0.5)
    assert np.sort(gaps)[:-1] == pytest.approx(0.02)


def test_every_example_says_how_it_is_run():
    assert len(EXAMPLES) == 3
    for example in EXAMPLES:
        assert f"python {example.name} " in example.read_text()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_without_a_gateway_says_so_in_one_line(example):
    command = [sys.executable, str(example), "--url", "http://127.0.0.1:9", "--wait", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    waits, said = done.stderr.splitlines()
    assert "waits up to 0.5 s for its gateway" in waits
    assert said.startswith("gateway_unreachable: the gateway at http://127.0.0.1:9 cannot be reached")
    assert "Traceback" not in done.stderr
