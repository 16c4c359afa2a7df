"""How a solver step is drawn to the unexecuted tail of the last chunk (real-time chunking, arXiv 2506.07339)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Guidance:
    """One step's correction of the velocity: v - weight * influence * (target - (x - tau * v)).

    Attributes:
        target: (rows, action_dim) fp32, finite.
        influence: (rows,) fp32; 0 leaves a row's velocity as it is, bit by bit.
        tau: the step's time, 1 at noise.
        weight: of the whole step.
    """

    target: Tensor
    influence: Tensor
    tau: float
    weight: float

    def apply(self, x: Tensor, v: Tensor) -> Tensor:
        """The corrected velocity (rows, action_dim) at x."""
        return v - self.weight * ((self.target - (x - self.tau * v)) * self.influence[:, None])
