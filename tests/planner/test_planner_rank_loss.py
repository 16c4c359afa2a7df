"""The script that kills a planner's rank in a plan: a small instance, ranks over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from taktline_protocol.deployment import ParallelOptions

from benchmarks import planner_rank_loss


def test_a_lost_rank_changes_no_plan(kit: Any, tmp_path: Path) -> None:
    config = kit.config(kit.folder(tmp_path / "planner"), parallel=ParallelOptions(search=2))
    found = planner_rank_loss.measure(config, rounds=6, budget_s=600.0)
    assert found["plan_that_lost_a_rank_is_equal"]
    assert found["plan_alone_is_equal"]
    assert found["plan_after_is_equal"]
    assert found["whole_again_after_s"] > 0
    assert found["budget"]["rounds"] == 6
    assert found["budget"]["code"] == ""
