"""The mesh as torchrun starts it: benchmarks/mesh_cosmos3.py on two processes of this machine, tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_processes_of_torchrun_give_what_one_gives_in_every_form(tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    script = ("benchmarks/mesh_cosmos3.py", "--tiny", "--only", "cosmos3-nano,cosmos3-edge", "--out", str(tmp_path))
    done = subprocess.run(
        [*launcher, *script],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "mesh_cosmos3_2.json").read_text())
    forms = [(row["details"]["cfg"], row["details"]["tp"], row["details"]["split"]) for row in rows]
    assert forms == 2 * [(2, 1, "tensor"), (1, 2, "sequence"), (1, 2, "tensor")]
    for row in rows:
        assert row["details"]["apart"] < 1e-5
        assert row["details"]["ranks_hold_the_same_bits"]
        assert row["gpus"] == 2
        assert row["median_ms"] > 0
