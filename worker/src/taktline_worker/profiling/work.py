"""What a phase of an engine must compute and move at least: the engine's side of a roofline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Operations (a multiply-add is two) and the least bytes that must come from memory."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.bytes

    def floor_ms(self, flops_per_s: float, bytes_per_s: float) -> float:
        """The least time on a machine with these ceilings."""
        return 1e3 * max(self.flops / flops_per_s, self.bytes / bytes_per_s)
