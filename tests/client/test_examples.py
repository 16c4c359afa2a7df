"""Each example is run as it stands, against a real gateway before the mirror worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_every_example_says_how_it_is_run():
    assert len(EXAMPLES) == 3
    for example in EXAMPLES:
        assert f"python {example.name} " in example.read_text()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_without_a_gateway_says_so_in_one_line(example):
    command = [sys.executable, str(example), "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("gateway_unreachable: the gateway at http://127.0.0.1:9 cannot be reached")
    assert "Traceback" not in done.stderr
