"""The planner on Ray Serve, run by its benchmark where Ray is installed: same plans, also with a replica lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from taktline_protocol.deployment import ParallelOptions

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "taktline" / "ray-worker"
NO_NETWORK = ("dns error", "error sending request", "failed to fetch", "timed out", "connection refused", "unreachable")


@pytest.fixture(scope="module")
def ray_python() -> str:
    """The Python of an environment with the worker and its `ray` extra, as the lock file has them.

    Kept outside the repository and linked from the package cache, so that it costs seconds once and nothing later.
    """
    uv = subprocess.run([str(ROOT / "tools" / "find-uv")], capture_output=True, text=True).stdout.strip()
    assert uv, "uv is missing: run `make setup`"
    command = [uv, "sync", "--frozen", "--package", "taktline-worker", "--extra", "ray", "--no-dev", "--quiet"]
    environment = os.environ | {"UV_PROJECT_ENVIRONMENT": str(CACHE), "UV_PYTHON": sys.executable}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode and any(reason in done.stderr.lower() for reason in NO_NETWORK):
        pytest.skip(f"the package index cannot be reached: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    return str(CACHE / "bin" / "python")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_plans_are_those_of_one_process_also_with_a_replica_killed(ray_python: str, kit: Any, tmp_path: Path) -> None:
    config = kit.config(kit.folder(tmp_path / "planner"), parallel=ParallelOptions(search=2))
    (tmp_path / "engine.json").write_bytes(msgspec.json.encode(config))
    command = [ray_python, str(ROOT / "benchmarks" / "planner_ray.py"), str(tmp_path / "engine.json")]
    command += ["--plans", "2", "--kill", "--object-store-mb", "100", "--out", str(tmp_path / "found.json")]
    with (tmp_path / "log").open("w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=400)
    if done.returncode == 75:
        pytest.skip("Ray gives its own processes 30 s to start, and this machine is too busy for that")
    assert done.returncode == 0, (tmp_path / "log").read_text()[-5000:]
    (row,) = json.loads((tmp_path / "found.json").read_text())
    assert row["bench"] == "planner-ray"
    found = row["details"]
    assert found["equal"]
    assert found["rounds"] == 2 * 4
    assert found["replicas"] == 2
    assert found["rounds_with_a_replica_asked_twice"] == 0
    assert 0 < found["ray_ms"] < found["round_ms"]
    assert found["equal_with_a_replica_lost"]
    assert found["victim_took_part"]
    assert found["victim_was_lost_in_the_plan"]
    assert found["replicas_after"] == 2
    assert found["equal_after"]
    assert found["code_of_a_budget_too_short"] in ("deadline_expired", "deadline_unreachable")


def test_without_ray_the_command_says_what_to_install(tmp_path: Path) -> None:
    """The workspace's own environment has no Ray, as a worker without the extra."""
    command = [sys.executable, "-m", "taktline_worker.ray", "--config", str(tmp_path / "engine.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "install taktline-worker[ray]" in done.stderr


REFUSALS = [
    ({"config": "absent.json"}, "absent.json is no engine config"),
    ({"config": "engine.json", "replica": 2}, "unknown field `replica`"),
    ({"config": "engine.json", "tls_key": "key.pem"}, "tls_cert and tls_key go together"),
    ({"config": "pi0.json"}, "only vjepa2-ac runs on Ray Serve"),
    ({"config": "dp.json"}, "set engine.parallel.search"),
]
SCRIPT = """
import json, sys
from taktline_protocol import TaktlineError
from taktline_worker.ray import app
for args in json.loads(sys.argv[1]):
    try:
        app(args)
        print("built")
    except TaktlineError as error:
        print(f"{error.code.value}: {error}")
"""


def test_arguments_that_do_not_fit_are_refused_before_anything_is_deployed(
    ray_python: str, kit: Any, tmp_path: Path
) -> None:
    config = kit.config(kit.folder(tmp_path / "planner"))
    other = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, family="pi0"))
    side_by_side = msgspec.structs.replace(config.engine, parallel=ParallelOptions(dp=2))
    written = {"engine": config, "pi0": other, "dp": msgspec.structs.replace(config, engine=side_by_side)}
    for name, content in written.items():
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(content))
    given = [args for args, _ in REFUSALS] + [{"config": "engine.json"}]
    done = subprocess.run([ray_python, "-c", SCRIPT, json.dumps(given)], cwd=tmp_path, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(given), done.stderr
    assert lines[-1] == "built"
    for line, (_, reason) in zip(lines, REFUSALS, strict=False):
        assert line.startswith("config_invalid")
        assert reason in line


DEVICES = """
import ray, torch
from taktline_protocol import TaktlineError
from taktline_worker.ray.application import world_device
torch.cuda.is_available = lambda: False
print(world_device("auto"), world_device("cuda"))
ray.is_initialized = lambda: True
for resources in ({"CPU": 8.0}, {"CPU": 8.0, "GPU": 2.0}):
    ray.cluster_resources = lambda: resources
    try:
        print(world_device("auto"), world_device("cpu"))
    except TaktlineError as error:
        print(error)
"""


def test_a_head_without_a_gpu_does_not_put_the_world_models_on_cpus(ray_python: str) -> None:
    done = subprocess.run([ray_python, "-c", DEVICES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    here, refused, found = done.stdout.splitlines()
    assert here == "cpu cuda"  # before Ray runs, this machine is its cluster
    assert refused.startswith("config_invalid: engine.device is auto, and the Ray cluster has no GPU")
    assert found == "cuda cpu"
