"""The script that says what FP8 does to actions, on the golden cases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_golden_cases(tmp_path: Path) -> None:
    pytest.importorskip("taktline_worker.models.pi.fp8")
    target = tmp_path / "rows.json"
    command = [sys.executable, "benchmarks/fp8_error.py", "--episodes", "0", "--json", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(target.read_text())
    assert {row["policy"] for row in rows} == {"pi0", "pi05"}
    for bf16, fp8 in zip(rows[::2], rows[1::2], strict=True):
        assert (bf16["case"], bf16["dtype"], fp8["dtype"]) == (fp8["case"], "bf16", "fp8")
        assert 1e-3 < bf16["relative"] < 1e-2 < fp8["relative"] < 0.15
        assert bf16["cosine"] > 0.9999
        assert fp8["cosine"] > 0.99
