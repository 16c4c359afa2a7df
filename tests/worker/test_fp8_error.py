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
    assert {row["policy"] for row in rows} == {"pi0", "pi05", "gr00t-n1.7", "minicpm-robot"}
    backbones = [row for row in rows if not row["policy"].startswith("pi")]
    for bf16, fp8 in zip(backbones[::2], backbones[1::2], strict=True):
        assert (bf16["case"], bf16["dtype"], fp8["dtype"]) == (fp8["case"], "bf16", "fp8")
        # Random weights of the published widths amplify every rounding.
        widened = bf16["policy"] == "minicpm-robot"
        assert 1e-4 < bf16["relative"] < fp8["relative"] < (0.5 if widened else 0.15)
        assert fp8["cosine"] > (0.9 if widened else 0.99)
    rows = [row for row in rows if row["policy"].startswith("pi")]
    cases = {row["case"] for row in rows}
    assert len(cases) == 3
    for case in cases:
        found = {row["dtype"]: row["relative"] for row in rows if row["case"] == case}
        assert 1e-3 < found["bf16"] < found["bf16+int8-expert"] < found["bf16+fp8-expert"] < 0.1
        assert found["bf16"] < 1e-2 < found["fp8"] < found["fp8+int8-expert"] * 1.2 < 0.2
    assert all(row["cosine"] > (0.9999 if row["dtype"] == "bf16" else 0.99) for row in rows)
