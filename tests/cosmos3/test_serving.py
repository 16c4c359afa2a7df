"""Cosmos3 behind the whole platform: a PolicyDeployment, `taktline up`, REST and the stream, video included."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import httpx
import numpy as np
import pytest
from taktline import ErrorCode, Imagine, Robot, TaktlineError
from taktline_protocol.deployment import WorldActionOptions
from taktline_worker.models.cosmos3.adapter import load

from tests.cosmos3.served_folders import STATE, TASK, engine_config, observe, pictures, save_policy

LIMIT_S = 240
BUDGET_MS = 120_000
POLICY = """
apiVersion: taktline.dev/v1alpha1
kind: PolicyDeployment
metadata: {name: cosmos}
spec:
  model: {family: cosmos3-nano, source: {path: checkpoint}}
  engine:
    precision: fp32
    buckets: [1, 2]
    parallel: {cfg: 2, tp: 1}
    worldAction: {imagine: true}
  pools: [{name: cpu, accelerator: cpu, minReplicas: 1, maxReplicas: 1}]
  slo: {controlBudgetMs: 2000}
"""


class Served:
    """`taktline up` of the deployment."""

    def __init__(self, folder: Path) -> None:
        (folder / "cosmos.yaml").write_text(POLICY)
        command = (str(Path(sys.executable).with_name("taktline")), "up", "cosmos.yaml", "--serve", "--port", "0")
        self.process = subprocess.Popen(
            [*command, "--logs", str(folder / "logs")],
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.folder = folder

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)

    def url(self) -> str:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end and self.process.poll() is None:
            for line in list(self.said):
                if found := re.search(r"serving cosmos at (\S+);", line):
                    return found.group(1)
            time.sleep(0.1)
        logs = "".join(path.read_text()[-3000:] for path in (self.folder / "logs").rglob("*.log"))
        raise AssertionError("".join(self.said) + logs)

    def ranks(self) -> list[int]:
        """Processes of the mesh besides rank 0: children of the worker."""
        events = (self.folder / "logs" / "events.log").read_text()
        worker = re.findall(r"cosmos-cpu-0 Started: Started process (\d+)", events)[-1]
        return [int(pid) for pid in Path(f"/proc/{worker}/task/{worker}/children").read_text().split()]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    save_policy(folder / "checkpoint")
    running = Served(folder)
    try:
        running.url()
        yield running
    finally:
        running.process.send_signal(signal.SIGINT)
        try:
            running.process.wait(60)
        finally:
            running.process.kill()


@pytest.fixture(scope="module")
def served(running: Served) -> tuple[str, Path]:
    """URL of the gateway, and the checkpoint."""
    return running.url(), running.folder / "checkpoint"


@pytest.fixture(scope="module")
def expected(served: tuple[str, Path]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What one process answers without any platform around it."""
    adapter = load(engine_config(served[1], world_action=WorldActionOptions(imagine=True)))
    with ThreadPoolExecutor(1) as pool:
        row = adapter.begin(observe(), pool).result()
    (actions,) = adapter.finish([row], adapter.run([row], 1))
    return actions  # type: ignore[return-value]


def near(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> bool:
    return bool(np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max())


def test_gateways_know_the_policy_and_its_times(served: tuple[str, Path]) -> None:
    (info,) = httpx.get(f"{served[0]}/v1/policies").json()["policies"]
    assert (info["family"], info["horizon"], info["action_dim"], info["state_dim"]) == ("cosmos3-nano", 8, 8, 8)
    assert info["dt_s"] == pytest.approx(1 / 15)
    assert [time["batch"] for time in info["t_sync"]] == [1, 2]
    assert all(0 < time["median_ms"] <= time["p99_ms"] for time in info["t_sync"])


@pytest.mark.parametrize("transport", ["http", "stream"])
def test_a_robot_gets_the_actions_of_one_process(
    served: tuple[str, Path], expected: np.ndarray[Any, Any], transport: str
) -> None:
    with Robot(served[0], "cosmos", f"arm-{transport}", transport=transport) as robot:  # type: ignore[arg-type]
        chunk = robot.act(pictures(), STATE, TASK, BUDGET_MS, seed=5)
        assert near(chunk.actions, expected)
        assert chunk.imagined is None
        shown = robot.act(pictures(), STATE, TASK, BUDGET_MS, seed=5, imagine=Imagine(format="frames", height=32))
        assert near(shown.actions, expected)
        assert shown.imagined is not None
        assert (shown.imagined.format, shown.imagined.fps, len(shown.imagined.parts)) == ("frames", 15.0, 9)
        frame = cv2.imdecode(np.frombuffer(shown.imagined.parts[0], np.uint8), cv2.IMREAD_COLOR)
        assert frame.shape[0] == 32
        with pytest.raises(TaktlineError) as refused:
            robot.act({"wrist_image_left": pictures()["wrist_image_left"]}, STATE, TASK, BUDGET_MS)
        assert refused.value.code == ErrorCode.CAMERA_MISSING
        with pytest.raises(TaktlineError) as refused:
            robot.act(pictures(), STATE, TASK, BUDGET_MS, imagine=Imagine(height=2000))
        assert refused.value.code == ErrorCode.IMAGINE_INVALID
        assert "80 pixels" in refused.value.next_step


def test_an_mp4_comes_as_base64_in_json(served: tuple[str, Path]) -> None:
    images = {
        name: {"encoding": "raw", "shape": list(frame.shape), "data": base64.b64encode(frame.tobytes()).decode()}
        for name, frame in pictures().items()
    }
    body = {
        "robot_id": "curl",
        "seq": 1,
        "captured_at": 0.0,
        "budget_ms": BUDGET_MS,
        "images": images,
        "state": STATE.tolist(),
        "instruction": TASK,
        "imagine": {"format": "mp4"},
    }
    answer = httpx.post(f"{served[0]}/v1/policies/cosmos/act", json=body, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text[:500]
    (part,) = answer.json()["imagined"]["parts"]
    assert base64.b64decode(part)[4:8] == b"ftyp"
    wrong = httpx.post(f"{served[0]}/v1/policies/cosmos/act", json=body | {"imagine": {"format": "gif"}}, timeout=60)
    assert wrong.status_code == 400
    assert "imagine" in wrong.json()["message"]


def test_the_command_line_writes_the_video(served: tuple[str, Path], tmp_path: Path) -> None:
    cameras = []
    for name, frame in pictures().items():
        cv2.imwrite(str(tmp_path / f"{name}.png"), cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
        cameras += ["--camera", f"{name}={tmp_path / name}.png"]
    taktline = str(Path(sys.executable).with_name("taktline"))
    command = [taktline, "act", "--policy", "cosmos", "--instruction", TASK, "--state", ",".join(map(str, STATE))]
    asked = ["--url", served[0], "--budget-ms", str(BUDGET_MS), "--imagine", str(tmp_path / "seen.mp4")]
    said = subprocess.run([*command, *cameras, *asked], capture_output=True, text=True, timeout=LIMIT_S)
    assert said.returncode == 0, said.stderr
    assert "imagined video, 15 frames a second" in said.stdout
    video = cv2.VideoCapture(str(tmp_path / "seen.mp4"))
    assert int(video.get(cv2.CAP_PROP_FRAME_COUNT)) == 9


def test_a_lost_rank_is_an_error_and_then_replaced(
    running: Served, served: tuple[str, Path], expected: np.ndarray[Any, Any]
) -> None:
    (before,) = running.ranks()
    os.kill(before, signal.SIGKILL)
    end = time.monotonic() + LIMIT_S
    codes = set()
    with Robot(served[0], "cosmos", "arm-lost", transport="http") as robot:
        while True:
            try:
                chunk = robot.act(pictures(), STATE, TASK, BUDGET_MS, seed=5)
            except TaktlineError as error:
                codes.add(error.code)
            else:
                if running.ranks() != [before]:
                    break
            assert time.monotonic() < end, codes
            time.sleep(0.2)
    assert near(chunk.actions, expected)
    # What the robot was told while the group was away, if it asked then.
    assert codes <= {ErrorCode.WORKER_FAILED, ErrorCode.WORKER_UNAVAILABLE, ErrorCode.DEADLINE_UNREACHABLE}
    (after,) = running.ranks()
    assert after != before
