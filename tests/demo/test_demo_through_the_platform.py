"""The same seeds through gateway and worker processes, and with the worker's runner called directly, end alike."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from taktline.robot import list_policies
from taktline_demo.evaluation import evaluate
from taktline_demo.gateway_policy import gateway_act
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig
from taktline_protocol.errors import TaktlineError
from taktline_worker.models.pi.adapter import load
from taktline_worker.observation import EncodedImage, RobotInput

from tests.ports import free_port

FOLDER = Path(__file__).parents[2] / "demo" / "checkpoint"
SEEDS = range(900, 902)
START_S = 120.0


@pytest.fixture
def gateway(tmp_path):
    """URL of a real gateway before a real worker with the shipped checkpoint."""
    worker, front = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    model = {"family": "pi05", "path": str(FOLDER), "revision": "shipped"}
    engine = {"device": "cpu", "precision": "fp32", "buckets": [1]}
    (tmp_path / "engine.json").write_text(json.dumps({"policy": "demo", "model": model, "engine": engine}))
    (tmp_path / "routes.json").write_text(
        json.dumps({"routes": [{"policy": "demo", "family": "pi05", "targets": [{"address": worker}]}]})
    )
    scripts, environment = Path(sys.executable).parent, {**os.environ, "OMP_NUM_THREADS": "1"}
    commands = (
        [scripts / "taktline-worker", "serve", "--config", tmp_path / "engine.json", "--listen", worker],
        [scripts / "taktline-gateway", "serve", "--routes", tmp_path / "routes.json", "--listen", front],
    )
    with (tmp_path / "log").open("w") as log:
        processes = [subprocess.Popen(command, env=environment, stdout=log, stderr=log) for command in commands]
        try:
            end = time.monotonic() + START_S
            while not serves(f"http://{front}"):
                assert time.monotonic() < end, (tmp_path / "log").read_text()[-2000:]
                time.sleep(0.2)
            yield f"http://{front}"
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)


def serves(url):
    try:
        return any(policy.ready for policy in list_policies(url).policies)
    except TaktlineError:
        return False


@pytest.mark.slow
def test_success_through_the_gateway_equals_the_runner_s_own(gateway):
    model = ModelConfig(family="pi05", path=str(FOLDER), revision="shipped")
    adapter = load(EngineConfig(policy="demo", model=model, engine=EngineOptions(device="cpu", precision="fp32")))
    with ThreadPoolExecutor(2) as pool:

        def runner(images, state, instruction, seed):
            frames = {name: EncodedImage("jpeg", data) for name, data in images.items()}
            row = adapter.begin(RobotInput(frames, state, instruction, seed), pool).result()
            (actions,) = adapter.finish([row], adapter.run([row], 1))
            return actions

        direct = evaluate("runner", runner, SEEDS)
    served = evaluate("gateway", gateway_act(gateway, "demo"), SEEDS)
    assert served.episodes == direct.episodes
    assert served.successes() >= len(served.episodes) - 1
