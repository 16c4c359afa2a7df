"""How long a planner's search takes on W ranks: time(W) = rounds (r / eff(W) + c (W - 1)). Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """The three constants of one checkpoint, search size and kind of device; eff(W) = W / (1 + a (W - 1)).

    Attributes:
        round_s: r, one round on one rank, in seconds.
        rank_s: c, what each further rank adds to a round (scatter, gather), in seconds.
        loss: a, the share of a rank that each further one loses to imbalance.
    """

    round_s: float
    rank_s: float
    loss: float

    def efficiency(self, ranks: int) -> float:
        """eff(W), the speed of W ranks in units of one."""
        return ranks / (1.0 + self.loss * (ranks - 1))

    def plan_s(self, ranks: int, rounds: int) -> float:
        """Seconds of a plan of `rounds` on `ranks`."""
        return rounds * (self.round_s / self.efficiency(ranks) + self.rank_s * (ranks - 1))

    def ranks_for(self, deadline_s: float, rounds: int, most: int) -> int | None:
        """The fewest ranks, at most `most`, whose plan ends within `deadline_s`; None where none do.

        More ranks are not always faster: the gather's share grows with them.
        """
        return next((ranks for ranks in range(1, most + 1) if self.plan_s(ranks, rounds) <= deadline_s), None)

    def fastest(self, rounds: int, most: int) -> int:
        """The number of ranks, at most `most`, whose plan ends first; of equal ones the fewest."""
        return min(range(1, most + 1), key=lambda ranks: self.plan_s(ranks, rounds))
