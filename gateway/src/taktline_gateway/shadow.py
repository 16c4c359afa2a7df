"""Compares a candidate's chunks with those of the serving revision, on mirrored live observations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from taktline_protocol.deployment import Candidate
from taktline_protocol.measurements import Shadow

WORST_RATIO = 1e9
"""Stands for a difference that no tolerance measures: another shape, or a zero tolerance that was broken."""


def difference(
    served: NDArray[np.generic], offered: NDArray[np.generic], candidate: Candidate
) -> tuple[float, float] | None:
    """How far two chunks (H, D) of one observation lie apart; None where their shapes differ.

    Returns:
        (the largest difference as a multiple of its dimension's tolerance, the largest difference in robot units).
        Both are exact zeros for equal chunks, so a tolerance of 0 asks for bit-equal actions.
    """
    if served.shape != offered.shape:
        return None
    rows = candidate.rows or served.shape[0]
    gap = np.abs(served[:rows].astype(np.float64) - offered[:rows].astype(np.float64))
    if candidate.tolerances and len(candidate.tolerances) != gap.shape[1]:
        return None
    allowed = np.asarray(candidate.tolerances or candidate.tolerance, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(gap == 0.0, 0.0, gap / allowed)
    worst = float(ratio.max(initial=0.0))
    return min(worst, WORST_RATIO), float(gap.max(initial=0.0))


def note(shadow: Shadow, found: tuple[float, float] | None) -> None:
    """Adds one comparison to the counts."""
    shadow.compared += 1
    if found is None:
        shadow.reshaped += 1
        shadow.ratio_max = WORST_RATIO
        return
    ratio, distance = found
    shadow.agreed += ratio <= 1.0
    shadow.ratio_sum += ratio
    shadow.ratio_max = max(shadow.ratio_max, ratio)
    shadow.distance_max = max(shadow.distance_max, distance)
