"""A second world model, in closed form: the energy is the distance of the last pose to a goal pose."""

from __future__ import annotations

from typing import Any

import torch
from taktline_worker.models.vjepa2_ac import poses
from taktline_worker.planning.world import Scene
from torch import Tensor


class PointWorld:
    """Integrates poses and measures metres (gripper included); scenes carry poses only.

    Attributes:
        units: (goal, actions) of every unit that was scored here.
        waits: how often the search waited for the device.
    """

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, micro_batch: int = 16) -> None:
        self.micro_batch = micro_batch
        self.units: list[tuple[Tensor, Tensor]] = []
        self.waits = 0

    def prepare(self, scene: Scene) -> Any:
        return scene

    def score(self, prepared: Any, actions: Tensor, energies: Tensor) -> None:
        assert actions.shape[0] == self.micro_batch
        self.units.append((prepared.goal, actions.clone()))
        pose = prepared.pose.expand(len(actions), -1)
        for step in range(actions.shape[1]):
            pose = poses.integrate(pose, actions[:, step])
        energies.copy_((pose - prepared.goal).square().sum(dim=1).sqrt())

    def poses(self, scene: Scene, actions: Tensor) -> Tensor:
        pose, found = scene.pose, []
        for action in actions:
            pose = poses.integrate(pose, action)
            found.append(pose)
        return torch.stack(found)

    def synchronize(self) -> None:
        self.waits += 1


def reach(x: float, y: float, z: float, gripper: float = 0.0) -> Scene:
    """From a fixed pose to one displaced by (x, y, z) metres and with another gripper."""
    start = torch.tensor([0.4, 0.0, 0.3, 0.1, 0.2, -0.3, 0.5])
    goal = start + torch.tensor([x, y, z, 0.0, 0.0, 0.0, gripper])
    return Scene(torch.zeros(1), goal, start)
