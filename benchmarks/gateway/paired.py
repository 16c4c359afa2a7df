"""Whether one policy is behind another, by its differences over the same seeds."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

LEVEL = 5e-4
"""Mean shares that differ by no more (0.05 points) are level, whatever the seeds say."""
QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""97.5% quantile of Student's distribution with n - 1 degrees of freedom, by the number n of seeds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Mean of our share minus the other's over the seeds, and half of its 95% interval (Student's, paired)."""

    mean: float
    half: float

    @property
    def standing(self) -> str:
        """`ahead` where we are level or better; `tied` where we are below, but the interval holds 0; else `behind`."""
        if self.mean >= -LEVEL:
            return "ahead"
        return "tied" if self.mean + self.half >= 0.0 else "behind"


def difference(ours: Sequence[float], others: Sequence[float]) -> Difference:
    """Paired comparison of the shares of two policies, in the order of the same 2 to 10 seeds.

    Raises ValueError where the two differ in length, KeyError for another number of seeds.
    """
    each = [one - other for one, other in zip(ours, others, strict=True)]
    half = QUANTILES[len(each)] * statistics.stdev(each) / math.sqrt(len(each))
    return Difference(statistics.fmean(each), half)
