"""The SDK on the oldest Python that it promises, which robots have: installed by itself, it drives a robot."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.client.test_examples import mirror  # noqa: F401 (a fixture)
from tests.conformance.conftest import NO_NETWORK

ROOT = Path(__file__).parents[2]
OLDEST = "3.10"


def oldest(uv: str) -> str | None:
    """An interpreter of that version: uv's, or one that pyenv has built."""
    found = subprocess.run(
        [uv, "python", "find", "--no-project", "--no-python-downloads", OLDEST], capture_output=True, text=True
    )
    if found.returncode == 0:
        return found.stdout.strip()
    built = sorted((Path.home() / ".pyenv" / "versions").glob(f"{OLDEST}.*/bin/python"))
    return str(built[-1]) if built else None


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """An interpreter of that version with the SDK and what it asks for, nothing else of ours."""
    uv = subprocess.run([str(ROOT / "tools" / "find-uv")], capture_output=True, text=True).stdout.strip()
    assert uv, "uv is missing: run `make setup`"
    found = oldest(uv)
    if found is None:
        pytest.skip(f"there is no Python {OLDEST} here: `uv python install {OLDEST}` brings one")
    folder = tmp_path_factory.mktemp("oldest") / "venv"
    made = folder / "bin" / "python"
    members = [str(ROOT / member) for member in ("protocol", "client")]
    for step in (
        [uv, "venv", "--quiet", "--no-project", "--python", found, str(folder)],
        [uv, "pip", "install", "--quiet", "--python", str(made), *members],
    ):
        done = subprocess.run(step, capture_output=True, text=True, timeout=240)
        if any(sign in done.stderr.lower() for sign in NO_NETWORK):
            pytest.skip("the package index cannot be reached")
        assert done.returncode == 0, done.stderr[-2000:]
    return made


def test_a_robot_is_driven_by_it(python, mirror):  # noqa: F811
    version = subprocess.run(
        [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
    ).stdout
    assert version.strip() == OLDEST
    example = ROOT / "client" / "examples" / "plain_python.py"
    command = [str(python), str(example), "--url", mirror.url, "--policy", "mirror", "--seconds", "1.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["client"]["transport"] == "stream"
    assert said["hand_offs"] > 2
    assert said["errors"] == {}


def test_its_command_runs(python):
    done = subprocess.run([str(python.parent / "taktline"), "version"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "taktline " in done.stdout
