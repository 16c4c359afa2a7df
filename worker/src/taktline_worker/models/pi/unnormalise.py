"""Network outputs to robot units on the device that computed them, by the arithmetic that `normalise` states."""

from __future__ import annotations

import torch
from torch import Tensor

from taktline_worker.models.pi.normalise import Normaliser, restore


class Unnormaliser:
    """`Normaliser.inverse` of the first `width` numbers of an action, over tensors: the same operations, the same bits.

    Relative actions and ALOHA's joints come behind it (`PiProcessor.complete`): they need the observation's state.

    Attributes:
        dtype: of the result, which the statistics decide: float64 of openpi's, float32 of LeRobot's.
    """

    def __init__(self, normaliser: Normaliser, width: int, device: torch.device) -> None:
        self.width, self._widen = width, not normaliser.always_add_eps
        self.dtype = torch.float32
        self._terms: tuple[str, Tensor, Tensor] | None = None
        if normaliser.mode != "IDENTITY":
            rule, scale, offset = normaliser.restoring(width)
            self._terms = rule, torch.tensor(scale, device=device), torch.tensor(offset, device=device)
            self.dtype = torch.promote_types(self._terms[1].dtype, torch.float32)

    def __call__(self, actions: Tensor) -> Tensor:
        """fp32 (..., at least `width`) in the model's units -> (..., `width`) in robot units."""
        cut = actions[..., : self.width]
        if self._terms is None:
            return cut
        rule, scale, offset = self._terms
        restored: Tensor = restore(rule, cut.to(scale.dtype) if self._widen else cut, scale, offset)
        return restored
