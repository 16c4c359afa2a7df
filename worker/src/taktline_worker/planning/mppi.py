"""Model-predictive path integral: every candidate moves the mean, weighted by its energy; the deviation stays."""

from __future__ import annotations

import torch
from torch import Tensor

from taktline_worker.planning.optimiser import ActionSpace, Belief, controlled


class PathIntegral:
    """Softmax-weighted updates in one controlled space.

    Args:
        temperature: the softmax's, as a share of the round's standard deviation of energies, because the scale of a
            latent distance says nothing by itself.
    """

    def __init__(self, space: ActionSpace, temperature: float) -> None:
        self._space = space
        self._temperature = temperature

    def update(self, belief: Belief, actions: Tensor, energies: Tensor) -> Belief:
        """See `Optimiser`. Weights and sums in fp64."""
        wide = energies.double()
        scale = self._temperature * wide.std().clamp_min(torch.finfo(torch.float64).tiny)
        weights = torch.softmax(-(wide - wide.min()) / scale, dim=0)
        mean = (weights[:, None, None] * controlled(actions).double()).sum(dim=0)
        return self._space.mixed(belief, mean.to(belief.mean.dtype), belief.std)
