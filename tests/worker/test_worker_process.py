"""The worker as a process: refusals with exit code 2, serving, metrics, a drain on SIGTERM, a stop while loading."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from taktline_protocol import worker_pb2, worker_pb2_grpc
from taktline_worker.cli import main

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-c", "import sys; from taktline_worker.cli import main; sys.exit(main())"]


@contextmanager
def _serving(config: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int, list[dict[str, Any]]]]:
    """A process that has said it serves, its port and its log so far; killed at the end if it still runs."""
    process = subprocess.Popen(
        [*COMMAND, "serve", "--config", str(config), "--listen", "127.0.0.1:0", *options],
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    log: list[dict[str, Any]] = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            log.append(json.loads(line))
            if log[-1]["message"] == "serving":
                break
        else:
            raise AssertionError(f"the worker ended with {process.wait()}: {log}")
        yield process, log[-1]["port"], log
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture
def config_file(folders: Any, config_of: Any, tmp_path: Path) -> Path:
    config = config_of(folders.lerobot(tmp_path / "policy", "pi05"), solver_steps=1, buckets=(1,))
    path = tmp_path / "engine.json"
    path.write_bytes(msgspec.json.encode(config))
    return path


def test_serves_and_drains_on_sigterm(config_file: Path) -> None:
    with _serving(config_file, "--linger-s", "0") as (process, port, log):
        calibrated = [entry for entry in log if entry["message"] == "calibrated"]
        assert [entry["bucket"] for entry in calibrated] == [1]
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            info = worker_pb2_grpc.WorkerStub(channel).Info(worker_pb2.InfoRequest(), timeout=20)
        assert info.policy == "tiny"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr is not None
        messages = [json.loads(line)["message"] for line in process.stderr]
        assert messages == ["draining", "stopped"]


def test_a_signal_while_loading_ends_the_process(config_file: Path) -> None:
    content = json.loads(config_file.read_text())
    content["engine"] |= {"buckets": [64], "solver_steps": 200}  # a calibration that takes its time
    config_file.write_text(json.dumps(content))
    process = subprocess.Popen(
        [*COMMAND, "serve", "--config", str(config_file), "--listen", "127.0.0.1:0"],
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        assert process.stderr is not None
        assert any(json.loads(line)["message"] == "loaded" for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        rest = process.stderr.read()
    finally:
        process.kill()
    assert "stopped while loading" in rest
    assert "serving" not in rest


def _check_refusal(stderr: str) -> dict[str, Any]:
    """The one JSON log line beside the one plain line."""
    lines = stderr.splitlines()
    assert len(lines) == 2, stderr
    entry: dict[str, Any] = json.loads(lines[0])
    assert entry["level"] == "error"
    assert entry["next_step"]
    assert lines[1] == f"taktline-worker: {entry['code']}: {entry['message']} ({entry['next_step']})"
    return entry


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., dict[str, Any]]]:
    """Runs the command in this process, which must refuse; leaves logging and signals as they were."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run(config: Path, listen: str = "127.0.0.1:0") -> dict[str, Any]:
        assert main(["serve", "--config", str(config), "--listen", listen]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        return _check_refusal(captured.err)

    yield run
    root.handlers[:] = handlers
    root.setLevel(level)
    for number, handler in signals.items():
        signal.signal(number, handler)


def test_a_refused_checkpoint_ends_with_two(config_file: Path) -> None:
    weights = config_file.parent / "policy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    done = subprocess.run(
        [*COMMAND, "serve", "--config", str(config_file), "--listen", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    entry = _check_refusal(done.stderr)
    assert entry["code"] == "checkpoint_invalid"
    assert "model.safetensors" in entry["message"]


@pytest.mark.parametrize("text", [None, "{", '{"policy": "x"}', '{"policy": 3}'])
def test_an_engine_config_that_does_not_fit(tmp_path: Path, refuse: Any, text: str | None) -> None:
    path = tmp_path / "engine.json"
    if text is not None:
        path.write_text(text)
    entry = refuse(path)
    assert entry["code"] == "config_invalid"
    assert entry["message"].count(str(path)) == 1
    assert "Errno" not in entry["message"]


def test_a_port_that_is_taken(config_file: Path, refuse: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        entry = refuse(config_file, f"127.0.0.1:{port}")
    assert entry["code"] == "config_invalid"
    assert str(port) in entry["message"]


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:99999", ":1"])
def test_an_address_that_is_none(config_file: Path, refuse: Any, address: str) -> None:
    assert address in refuse(config_file, address)["message"]


def test_metrics_count_observations_by_outcome(config_file: Path, tmp_path: Path) -> None:
    with _serving(config_file, "--metrics-listen", "127.0.0.1:0") as (_, port, log):
        (address,) = [entry["address"] for entry in log if entry["message"] == "metrics"]
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            state = worker_pb2.Tensor(dtype="float32", shape=[8], data=bytes(32))
            item = worker_pb2.InferItem(request_id="q", instruction="lift", state=state)
            request = worker_pb2.InferRequest(policy="tiny", items=[item])
            worker_pb2_grpc.WorkerStub(channel).Infer(request, timeout=20)
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
            text = answer.read().decode()
    assert 'taktline_worker_items_total{code="camera_missing",policy="tiny"} 1.0' in text
    assert 'taktline_worker_calibration_ms{batch="1",policy="tiny",quantile="0.5"}' in text
    assert 'taktline_worker_info{device="cpu",family="pi05"' in text
