"""Every benchmark that a page or a results file names still starts: what it imports of the product is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Scripts of the folder itself import each other by their bare names, as `python benchmarks/engine.py` has it.
IMPORT_ALL = """
import importlib, json, pathlib, sys
sys.path[:0] = ["benchmarks", "."]
failed = {}
for file in sorted(pathlib.Path("benchmarks").rglob("*.py")):
    parts = file.with_suffix("").parts
    try:
        importlib.import_module(parts[1] if len(parts) == 2 else ".".join(parts))
    except Exception as error:
        failed[str(file)] = repr(error)
print(json.dumps(failed))
"""


def test_every_benchmark_can_be_imported():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}
