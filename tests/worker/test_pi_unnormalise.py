"""Robot units from where the actions were computed: the bits of the host's arithmetic, whichever side does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from taktline_worker.models.pi.adapter import PiAdapter, load
from taktline_worker.models.pi.normalise import Normaliser, identity
from taktline_worker.models.pi.runner import PiRunner
from taktline_worker.models.pi.unnormalise import Unnormaliser
from taktline_worker.observation import RtcInput

CPU = torch.device("cpu")


class InRobotUnits:
    """A runner that ends as the captured graphs do."""

    unnormalises = True

    def __init__(self, runner: PiRunner, unnormalise: Unnormaliser) -> None:
        self.runner, self.device, self._unnormalise = runner, runner.device, unnormalise

    def run(self, batch: Any) -> torch.Tensor:
        """(B, H, D)."""
        return self._unnormalise(self.runner.run(batch))


def statistics(dtype: Any, deviations: bool) -> tuple[Any, Any]:
    """Offsets of robots' sizes with upper ends or `deviations`; a constant dimension and one far from zero."""
    low = np.array([-1.5, 0.0, 1e-3, 250.0, -7.0, 4.0, 0.25, 0.0], dtype)
    high = np.array([2.5, 1.0, 2e-3, 260.0, -7.0, 4.5, 0.75, 1e-9], dtype)
    return low, (high - low if deviations else high)


@pytest.mark.parametrize("openpi", [False, True])
@pytest.mark.parametrize("mode", ["MEAN_STD", "QUANTILES", "MIN_MAX", "QUANTILE10"])
def test_the_bits_of_the_training_codes_arithmetic(mode: Any, openpi: bool) -> None:
    low, high = statistics(np.float64 if openpi else np.float32, mode == "MEAN_STD")
    made = Normaliser(mode, low, high, 1e-6 if openpi else 1e-8, openpi)
    actions = torch.randn(3, 50, 32, generator=torch.Generator().manual_seed(3))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there = Unnormaliser(made, 7, device)
    found = there(actions.to(device)).cpu()
    assert (found.shape, found.dtype) == ((3, 50, 7), torch.float64 if openpi else torch.float32)
    assert there.dtype == found.dtype
    host = made.inverse(actions[..., :7].numpy())
    assert host.dtype == found.numpy().dtype
    assert np.array_equal(host, found.numpy())
    # The same in float64 from the start, as far as the numbers that robots are sent can tell.
    x, low, high = actions[..., :7].double().numpy(), low[:7].astype(np.float64), high[:7].astype(np.float64)
    if mode == "MEAN_STD":
        exact, size = x * (high + (1e-6 if openpi else 0.0)) + low, np.abs(x) * high + np.abs(low)
    else:
        span = high - low + 1e-6 if openpi else np.where(high == low, 1e-8, high - low)
        exact, size = (x + 1) / 2 * span + low, (np.abs(x) + 1) * span + np.abs(low)
    assert float((np.abs(found.numpy() - exact) / size).max()) < 1e-6


def test_no_normalisation_changes_nothing() -> None:
    actions = torch.randn(2, 5, 32)
    there = Unnormaliser(identity(), 7, CPU)
    assert torch.equal(there(actions), actions[..., :7])
    assert there.dtype == torch.float32


@pytest.mark.parametrize("layout", ["lerobot", "openpi"])
def test_answers_do_not_depend_on_who_makes_robot_units(
    layout: str, tmp_path: Path, folders: Any, config_of: Any, observations: Any, pool: Any
) -> None:
    stated = {"action_horizon": 12, "relative_mask": [True] * 6 + [False], "adapt_to_pi": False}
    cameras = {"front": "base_0_rgb", "wrist": "left_wrist_0_rgb"}
    if layout == "lerobot":
        host = load(config_of(folders.lerobot(tmp_path / "p", "pi05")))
    else:
        host = load(config_of(folders.openpi(tmp_path / "p", cameras=cameras, **stated), "pi0"))
    conventions = host.processor.conventions
    assert conventions.action_normaliser.mode != "IDENTITY"
    there = Unnormaliser(conventions.action_normaliser, conventions.action_dim, CPU)
    assert isinstance(host.runner, PiRunner)
    graph = PiAdapter(host.processor, InRobotUnits(host.runner, there), "fp32")
    names = (*host.processor.required_cameras, *host.processor.optional_cameras)
    made = observations.make()
    frame = next(iter(made.images.values()))
    asked = [
        observations.make(seed=seed, images=dict.fromkeys(names, frame), state=np.full(conventions.state_dim, 0.1))
        for seed in (1, 2)
    ]
    rows = [host.begin(one, pool).result() for one in asked]
    outputs = graph.run(rows, 2)
    assert outputs.shape[-1] == conventions.action_dim
    for expected, found in zip(host.finish(rows, host.run(rows, 2)), graph.finish(rows, outputs), strict=True):
        assert isinstance(expected, np.ndarray)
        assert np.array_equal(expected, found)


def test_rows_that_run_apart_get_the_same_units(
    tmp_path: Path, folders: Any, config_of: Any, observations: Any, pool: Any
) -> None:
    """Captured graphs answer in robot units, the eager runner of guided rows does not: a batch must not mix them."""
    host = load(config_of(folders.lerobot(tmp_path / "p", "pi05")))
    conventions, runner = host.processor.conventions, host.runner
    assert isinstance(runner, PiRunner)
    there = Unnormaliser(conventions.action_normaliser, conventions.action_dim, CPU)
    graph = PiAdapter(host.processor, InRobotUnits(runner, there), "fp32", guided=runner)
    tail = RtcInput(np.zeros((6, conventions.action_dim), np.float32), delay=2)
    rows = [
        host.begin(observations.make(seed=seed, **({"rtc": tail} if seed == 2 else {})), pool).result()
        for seed in (1, 2, 3)
    ]
    expected, found = (adapter.finish(rows, adapter.run(rows, 3)) for adapter in (host, graph))
    assert graph.run(rows, 3).shape == (3, conventions.horizon, conventions.action_dim)
    for one, other in zip(expected, found, strict=True):
        left, right = (getattr(each, "actions", each) for each in (one, other))
        assert right == pytest.approx(left, abs=1e-4)
    alone = graph.finish(rows[1:2], graph.run(rows[1:2], 1))
    assert getattr(alone[0], "actions", None) == pytest.approx(getattr(expected[1], "actions", None), abs=1e-4)
