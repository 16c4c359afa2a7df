"""How long a planner's search takes on W ranks: time(W) = rounds (r / eff(W) + c (W - 1)). Pure.

A round is whole units of computation, dealt out one by one: with 8 of them 5 ranks are no faster than 4, for both take
the time of two units. So eff(W) = W' / (1 + a (W - 1)), W' = units / ceil(units / W).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

UNIT_ON_A_GPU, UNIT_ON_A_CPU = 100, 16
"""Candidates of one unit where the deployment does not say; 800 candidates are 8 units on GPUs: whole shares for 1, 2,
4 and 8 ranks."""


def unit_on(device: str) -> int:
    """Candidates of one unit on a kind of device, `cuda` or `cpu`, where the deployment does not say."""
    return UNIT_ON_A_GPU if device == "cuda" else UNIT_ON_A_CPU


def units_of(candidates: int, unit: int) -> int:
    """Units of one round; the last one is padded."""
    return -(-candidates // unit)


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """The constants of one checkpoint, search size and kind of device.

    Attributes:
        round_s: r, one round on one rank, in seconds.
        rank_s: c, what each further rank adds to a round (scatter, gather), in seconds.
        loss: a, the share of a rank that each further one loses to imbalance.
        units: of a round.
    """

    round_s: float
    rank_s: float
    loss: float
    units: int

    def efficiency(self, ranks: int) -> float:
        """eff(W), the speed of W ranks in units of one."""
        return whole_share(self.units, ranks) / (1.0 + self.loss * (ranks - 1))

    def plan_s(self, ranks: int, rounds: int) -> float:
        """Seconds of a plan of `rounds` on `ranks`."""
        return rounds * (self.round_s / self.efficiency(ranks) + self.rank_s * (ranks - 1))

    def useful(self, most: int) -> Iterator[int]:
        """The numbers of ranks up to `most` that make the largest share smaller, rising: others only wait for it."""
        largest = self.units + 1
        for ranks in range(1, most + 1):
            share = units_of(self.units, ranks)
            if share < largest:
                yield ranks
            largest = share

    def ranks_for(self, deadline_s: float, rounds: int, most: int) -> int | None:
        """The fewest ranks, at most `most`, whose plan ends within `deadline_s`; None where none do.

        More ranks are not always faster: the gather's share grows with them.
        """
        return next((ranks for ranks in self.useful(most) if self.plan_s(ranks, rounds) <= deadline_s), None)

    def fastest(self, rounds: int, most: int) -> int:
        """The number of ranks, at most `most`, whose plan ends first; of equal ones the fewest."""
        return min(self.useful(most), key=lambda ranks: self.plan_s(ranks, rounds))


def whole_share(units: int, ranks: int) -> float:
    """W', the speed of `ranks` that lose nothing but to shares of whole units."""
    return units / units_of(units, ranks)
