"""What a search needs of a world model: scores of candidates in fixed micro-batches, and where a plan leads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scene:
    """What one plan starts from and is to reach, encoded once.

    Attributes:
        latent: the present, in the world model's own shape and dtype.
        goal: the goal, likewise.
        pose: (7,) fp32 or fp64, the end effector now.
    """

    latent: Tensor
    goal: Tensor
    pose: Tensor


class WorldModel(Protocol):
    """A model that predicts the outcome of actions and measures its distance to a goal.

    A micro-batch is the unit of computation: always `micro_batch` candidates of one robot, whatever else runs. Kernels
    may round by batch shape, so this is what makes a plan independent of ranks and of other robots.
    """

    @property
    def device(self) -> torch.device:
        """Where the scenes, actions and energies live."""

    @property
    def dtype(self) -> torch.dtype:
        """Of actions and energies: fp32, or fp64 in checks."""

    @property
    def micro_batch(self) -> int:
        """Candidates of one unit."""

    def prepare(self, scene: Scene) -> Any:
        """What every unit of a plan shares, computed once a plan."""

    def score(self, prepared: Any, actions: Tensor, energies: Tensor) -> None:
        """Writes the energies of one unit without waiting for the device.

        Args:
            prepared: from `prepare`.
            actions: (micro_batch, horizon, 7).
            energies: (micro_batch,), overwritten.
        """

    def poses(self, scene: Scene, actions: Tensor) -> Tensor:
        """Poses (horizon, 7) after each of the actions (horizon, 7), as the model integrates them."""

    def synchronize(self) -> None:
        """Waits for the device; only searches that watch a clock call it."""
