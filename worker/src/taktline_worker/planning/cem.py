"""The cross-entropy method with the official planner's semantics: fit a normal to the elites, keep some of the old."""

from __future__ import annotations

import torch
from torch import Tensor

from taktline_worker.planning.optimiser import ActionSpace, Belief, controlled


def elites(energies: Tensor, count: int) -> Tensor:
    """Indices (count,) of the lowest energies (candidates,), rising; ties go to the lower index.

    A stable sort, because the tie order of top-k is not defined and may differ between devices.
    """
    return torch.sort(energies, stable=True).indices[:count]


class CrossEntropy:
    """Cross-entropy updates in one controlled space."""

    def __init__(self, space: ActionSpace, elites: int) -> None:
        self._space = space
        self._elites = elites

    def update(self, belief: Belief, actions: Tensor, energies: Tensor) -> Belief:
        """See `Optimiser`. Sums run in fp64 over the elites in their order, then round once."""
        best = controlled(actions.index_select(0, elites(energies, self._elites))).double()
        mean, std = best.mean(dim=0), best.std(dim=0, correction=1)
        return self._space.mixed(belief, mean.to(belief.mean.dtype), std.to(belief.std.dtype))
