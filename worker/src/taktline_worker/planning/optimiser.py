"""What a search needs of an optimiser, and the controlled space that all of them sample: xyz deltas and the gripper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from taktline_worker.devices import sent
from taktline_worker.planning.settings import SearchSettings

CONTROLLED = 4
"""xyz and gripper; a planned action has 7 numbers, its rotation is always zero."""
ACTION = 7
_CLOSED = 1.0


@dataclass(frozen=True, slots=True)
class Belief:
    """A diagonal normal over sequences: mean and standard deviation, (horizon, 4) each, on the search's device."""

    mean: Tensor
    std: Tensor


class Optimiser(Protocol):
    """One way to improve a belief from scored samples. Stateless: nothing here may depend on ranks or neighbours."""

    def update(self, belief: Belief, actions: Tensor, energies: Tensor) -> Belief:
        """The next belief.

        Args:
            belief: the one that was sampled.
            actions: (candidates, horizon, 7) as scored.
            energies: (candidates,), lower is better.
        """


class ActionSpace:
    """The official planner's rules around the samples, as constants on one device."""

    def __init__(self, settings: SearchSettings, device: torch.device, dtype: torch.dtype) -> None:
        s = settings
        self._settings = s
        rows = (
            [s.max_step_m] * 3 + [s.gripper_clip],
            [s.max_step_m] * 3 + [1.0],
            [s.momentum_mean] * 3 + [s.momentum_mean_gripper],
            [s.momentum_std] * 3 + [s.momentum_std_gripper],
            [float(index in s.pins) for index in range(CONTROLLED)],
            [s.pins.get(index, 0.0) for index in range(CONTROLLED)],
        )
        # One copy, which waits for nothing that the device has to do.
        bounds, self.first_std, self.keep_mean, self.keep_std, pinned, self._pins = sent(
            torch.tensor(rows, dtype=dtype), device
        )
        self._low, self._high, self._pinned = -bounds, bounds, pinned != 0

    def first(self, previous: Tensor | None = None) -> Belief:
        """The belief before the first round: mean zero, or the tail of the previous plan; pins in both.

        Args:
            previous: (n, 7) the plan before this one, of which row 0 has been executed by now.
        """
        mean = torch.zeros(self._settings.horizon, CONTROLLED, dtype=self._pins.dtype, device=self._pins.device)
        if previous is not None:
            tail = controlled(sent(previous[1 : self._settings.horizon + 1], mean.device, mean.dtype))
            mean[: len(tail)] = torch.clamp(tail, self._low, self._high)
        mean = torch.where(self._pinned, self._pins, mean)
        return Belief(mean, self.first_std.expand_as(mean).clone())

    def sample(self, belief: Belief, noise: Tensor) -> Tensor:
        """Actions (candidates, horizon, 7) of standard normals `noise` (horizon, candidates, 4)."""
        samples = noise * belief.std[:, None] + belief.mean[:, None]
        samples = torch.clamp(samples, self._low, self._high)
        samples = torch.where(self._pinned, self._pins, samples)
        actions = samples.new_zeros(samples.shape[1], samples.shape[0], ACTION)
        actions[..., :3] = samples[..., :3].transpose(0, 1)
        actions[..., 6] = samples[..., 3].transpose(0, 1)
        if self._settings.close_gripper is not None:
            actions[:, self._settings.close_gripper :, 6] = _CLOSED
        return actions

    def mixed(self, belief: Belief, mean: Tensor, std: Tensor) -> Belief:
        """The fitted `mean` and `std` (horizon, 4) with the old belief's momentum; the deviation has no floor."""
        return Belief(
            mean * (1.0 - self.keep_mean) + belief.mean * self.keep_mean,
            std * (1.0 - self.keep_std) + belief.std * self.keep_std,
        )

    def answer(self, belief: Belief) -> Tensor:
        """The plan (horizon, 7): the mean, not the best sample, with gripper deltas in the dead zone dropped."""
        plan = belief.mean.new_zeros(belief.mean.shape[0], ACTION)
        plan[:, :3] = belief.mean[:, :3]
        gripper = belief.mean[:, 3]
        plan[:, 6] = torch.where(gripper.abs() < self._settings.gripper_dead_zone, torch.zeros_like(gripper), gripper)
        return plan

    def spread(self, belief: Belief) -> Tensor:
        """The largest standard deviation as a share of its first value, a scalar; pinned dimensions do not count."""
        share = torch.where(self._pinned, torch.zeros_like(belief.std), belief.std / self.first_std)
        return share.max()


def controlled(actions: Tensor) -> Tensor:
    """The four sampled numbers (..., 4) of actions (..., 7)."""
    return torch.cat((actions[..., :3], actions[..., 6:]), dim=-1)
