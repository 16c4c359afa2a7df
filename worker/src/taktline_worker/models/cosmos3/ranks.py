"""The processes of a Cosmos3 mesh on one machine: started by rank 0, joined, and all replaced when one is lost.

Unlike a planner, rank 0 cannot go on alone: it holds a part of the weights. Requests are refused until a new group has
loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import EngineConfig

from taktline_worker.models.cosmos3.graphs import GraphRunner
from taktline_worker.models.cosmos3.mesh import Mesh, ProcessGroupMesh, Split
from taktline_worker.models.cosmos3.orders import dismiss
from taktline_worker.planning import ranks as processes
from taktline_worker.planning.mesh import Mesh as Control

Member = Callable[[Mesh], GraphRunner]
"""Makes a rank's runner for the mesh that it has joined; the weights are loaded before."""


@dataclass(frozen=True, slots=True)
class Joined:
    """One generation of the group: what orders travel on, and what the computation uses."""

    control: Control
    mesh: Mesh


class PolicyRanks(processes.FollowerRanks):
    """Rank 0's view of the others, one process for each further device.

    Args:
        config: of the worker; the others load their own share of the same policy.
        branches: 2 where the branches of guidance are on different ranks.
        shards: ranks of one branch.

    Raises:
        TaktlineError: CONFIG_INVALID where there are fewer devices than ranks, or a rank refuses to start.
    """

    meanwhile = "requests are refused"
    whose = "the policy"

    def __init__(self, config: EngineConfig, branches: int, shards: int, split: Split, device: torch.device) -> None:
        size = branches * shards
        check_devices(size, device)
        self._form = branches, shards, split
        self._group: Joined | None = None
        super().__init__(config, size, device)

    @property
    def joined(self) -> Joined:
        """The group as it was joined at the start."""
        assert self._group is not None
        return self._group

    def take(self) -> Joined | None:
        """The group, joined again where a new one has loaded meanwhile; None while there is none."""
        return self._group if self.mesh().size == self.size else None

    def _join(self) -> None:
        super()._join()
        assert self._mesh is not None
        self._group = Joined(self._mesh, ProcessGroupMesh(*self._form))

    def _leave(self) -> None:
        self._group = None
        super()._leave()

    def _dismiss(self, mesh: Control) -> None:
        dismiss(mesh)


def check_devices(size: int, device: torch.device) -> None:
    """Raises CONFIG_INVALID where there are fewer GPUs than ranks."""
    if device.type != "cuda":
        return
    listed = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    visible = len(listed) or torch.cuda.device_count()
    if visible < size:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"engine.parallel asks for {size} ranks (cfg x tp), and {visible} GPUs are visible",
            "give the pod one GPU for each rank, or lower engine.parallel.cfg or tp",
        )
