"""The batch times that the simulator plays with are those of the rows of record."""

import json
from pathlib import Path

import pytest

from benchmarks.gateway.times import ENGINES

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"
SHAPES = {
    "pi05-h200": ("engine_pi05.json", {"views": 3, "prompt_tokens": 1, "horizon": 50, "steps": 10}),
    "gr00t-n1.7-h200": ("engine_groot.json", {"images": 2, "tokens": 156, "horizon": 40, "steps": 4}),
    "cosmos3-nano-h200": ("engine_cosmos3_nano_batches.json", {"steps": 4, "passes": 8, "preset": "official"}),
}


@pytest.mark.parametrize("engine", [one for one in ENGINES if one.name.endswith("-h200")], ids=lambda one: one.name)
def test_our_own_times_are_near_the_rows_of_record(engine):
    file, shape = SHAPES[engine.name]
    rows = json.loads((MEASURED / file).read_text())
    found = {
        row["batch"]: row["median_ms"]
        for row in reversed(rows)
        if row["bench"] == "engine" and row["dtype"] == "bf16" and shape.items() <= row["shape"].items()
    }
    assert engine.source.startswith(file)
    # Beyond: play the benchmarks of docs/scheduling.md again with the new times.
    assert dict(engine.points) == pytest.approx(found, rel=0.05)
