"""Where prometheus and promtool are, and the committed dashboards."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder with prometheus and promtool, as `make test-tools` brings them."""
    printed = subprocess.run([ROOT / "tools/install-prometheus"], capture_output=True, text=True, check=True).stdout
    folder = Path(printed.strip())
    if not printed.strip() or not shutil.which("promtool", path=folder):
        pytest.skip("no prometheus here: put prometheus and promtool on PATH, or use Debian or Ubuntu with apt-get")
    return folder


def committed() -> dict[str, dict]:
    """The dashboards as they are in the repository, by file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted((ROOT / "dashboards/grafana").glob("*.json"))}


def panels(dashboard: dict) -> list[dict]:
    """The panels that show something."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]
