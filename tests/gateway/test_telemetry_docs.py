"""docs/observability.md lists every metric as the catalogue has it, and names only fields and spans that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "observability.md").read_text()


def test_the_reference_of_metrics_is_the_catalogues():
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "metrics_reference.py"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert made in PAGE, "run: python tools/metrics_reference.py, and paste it into the page"


def test_metrics_named_in_the_on_call_page_exist():
    from taktline_protocol.metrics import BY_NAME

    page = (ROOT / "docs" / "on-call.md").read_text()
    named = set(re.findall(r"\btaktline_[a-z_]+", page)) - {"taktline_worker_"}
    known = set(BY_NAME) | {f"{name}_{part}" for name in BY_NAME for part in ("bucket", "count", "sum")}
    assert named
    assert named <= known
