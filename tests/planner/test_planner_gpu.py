"""What only GPUs can show of a search: that no round waits for the device, and that two of them plan as one does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from taktline_protocol.deployment import ParallelOptions
from taktline_worker.models.vjepa2_ac.adapter import VJepa2Adapter, load, problem_of
from taktline_worker.planning.search import Searches

pytestmark = pytest.mark.gpu


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def loaded(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VJepa2Adapter]:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    folder = kit.folder(tmp_path_factory.mktemp("gpu") / "planner")
    adapter = load(kit.config(folder, device="cuda", precision="bf16"))
    yield adapter
    adapter.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a CPU waits for itself")
def test_waiting_would_be_noticed(waiting_is_an_error: None) -> None:
    with pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(1, device="cuda").item()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a CPU waits for itself")
@pytest.mark.parametrize("optimiser", ["cem", "mppi"])
def test_no_round_waits_for_the_device(
    kit: Any, loaded: VJepa2Adapter, pool: Any, waiting_is_an_error: None, optimiser: str
) -> None:
    """Two robots' frames, warm starts and poses go to the device, and all rounds run, without one wait."""
    world = loaded.world
    previous = torch.full((2, 7), 0.01)
    rows = []
    for seed in (1, 2):
        row = loaded.begin(kit.observe(seed=seed), pool).result()
        settings = replace(row.settings, optimiser=optimiser, pins={1: 0.02})
        rows.append(replace(row, settings=settings, previous=previous, pending=previous[:1]))
    searches = Searches(world, [problem_of(world, row, None) for row in rows])
    rounds = 0
    while searches.running:
        units = searches.sample()
        searches.fit(searches.score(range(units)))
        rounds += 1
    plans = searches.plans()
    torch.cuda.set_sync_debug_mode("default")
    assert rounds == 4
    assert all(torch.isfinite(plan.actions).all() for plan in plans)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_plan_what_one_does(kit: Any, loaded: VJepa2Adapter, pool: Any, tmp_path: Path) -> None:
    folder = kit.folder(tmp_path / "planner")
    parallel = ParallelOptions(search=2)
    shared = load(kit.config(folder, device="cuda", precision="bf16", parallel=parallel))
    try:
        assert shared.ranks.mesh().size == 2
        found = []
        for adapter in (loaded, shared):
            rows = [adapter.begin(kit.observe(seed=seed), pool).result() for seed in (1, 2)]
            found.append(adapter.finish(rows, adapter.run(rows, 2)))
    finally:
        shared.close()
    for one, two in zip(*found, strict=True):
        for name in ("actions", "energies", "predicted_states"):
            assert np.array_equal(getattr(one, name), getattr(two, name)), name
