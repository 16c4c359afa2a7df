"""Plans over torch.distributed: the same bytes at 1, 2, 3, 4 and 8 ranks, and units shared without a gap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from taktline_worker.planning.mesh import share

SIZES = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("total", [1, 5, 8, 13])
def test_every_unit_is_scored_once(size: int, total: int) -> None:
    shares = [share(rank, size, total) for rank in range(size)]
    assert sorted(unit for part in shares for unit in part) == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One start of eight processes serves all tests here."""
    out = tmp_path_factory.mktemp("mesh")
    script = Path(__file__).with_name("mesh_ranks.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, str(script), str(out)], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((out / "plans.json").read_text())
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 fused", "fp8"])
@pytest.mark.parametrize("size", SIZES[1:])
def test_plans_are_bit_identical_at_every_world_size(plans: dict[str, Any], precision: str, size: int) -> None:
    """Actions, poses and the energies of every round, for three robots side by side, one of which searches by MPPI."""
    assert plans[f"{precision} {size}"] == plans[f"{precision} 1"]


def test_the_robots_searched_as_asked(plans: dict[str, Any]) -> None:
    first, second, third = plans["fp32 1"]
    assert (third["rounds"], third["stopped"]) == (3, "rounds")
    assert (first["rounds"], first["stopped"]) == (3, "rounds")
    # Rank 0's clock reads 0 to 1 and 2 to 3 s around its first two rounds; a third would end after 3.5.
    assert (second["rounds"], second["stopped"]) == (2, "budget")
    assert first["actions"] != second["actions"]


def test_precision_shows(plans: dict[str, Any]) -> None:
    named = [plans[f"{precision} 1"] for precision in ("fp32", "bf16", "bf16 fused", "fp8")]
    assert all(one != other for index, one in enumerate(named) for other in named[:index])


def test_a_lost_rank_costs_time_and_not_the_plan(plans: dict[str, Any]) -> None:
    """The plan in flight when a rank died, the next one, and one that never had a mesh."""
    assert plans["lost"] == plans["after"] == plans["alone"]
