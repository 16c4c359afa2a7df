"""How long a plan takes on W ranks: time(W) = rounds (r / eff(W) + c (W - 1)), eff(W) = W / (1 + a (W - 1)). Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from taktline_protocol import ErrorCode, TaktlineError


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """The three constants of one checkpoint, search size and kind of device.

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


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured plan: `seconds` for `rounds` on `ranks`."""

    ranks: int
    rounds: int
    seconds: float


def fit(measurements: Sequence[Measurement]) -> LatencyModel:
    """Least squares of the relative error, with r > 0, c >= 0 and a >= 0.

    The model is linear in (r, r a, c): seconds / rounds = r / W + r a (W - 1) / W + c (W - 1). A coefficient that the
    free fit makes negative is set to zero and the others are fitted again; the best of those fits is taken.

    Raises:
        TaktlineError: CONFIG_INVALID where a measurement is not positive, or where there are fewer than three world
            sizes, one of them 1: two unknowns beside r cannot be told apart from less.
    """
    if any(m.ranks < 1 or m.rounds < 1 or not (math.isfinite(m.seconds) and m.seconds > 0) for m in measurements):
        raise _error("a measurement has no ranks, no rounds or no time")
    sizes = {m.ranks for m in measurements}
    if 1 not in sizes or len(sizes) < 3:
        raise _error(f"measurements at {sorted(sizes)} ranks do not determine three constants")
    rows = [_row(m) for m in measurements]
    best: tuple[float, list[float]] | None = None
    for kept in ((0, 1, 2), (0, 1), (0, 2), (0,)):
        values = _least_squares([[row[i] for i in kept] for row in rows])
        if values is None or min(values) < 0 or values[0] <= 0:
            continue
        full = [0.0, 0.0, 0.0]
        for index, value in zip(kept, values, strict=True):
            full[index] = value
        error = sum((sum(c * v for c, v in zip(row, full, strict=True)) - 1.0) ** 2 for row in rows)
        if best is None or error < best[0]:
            best = (error, full)
    assert best is not None  # the fit of r alone is always positive
    round_s, loss_s, rank_s = best[1]
    return LatencyModel(round_s=round_s, rank_s=rank_s, loss=loss_s / round_s)


def _row(m: Measurement) -> list[float]:
    # Divided by the measured time of a round, so that every measurement weighs by its relative error.
    scale = m.rounds / m.seconds
    return [scale / m.ranks, scale * (m.ranks - 1) / m.ranks, scale * (m.ranks - 1)]


def _least_squares(rows: list[list[float]]) -> list[float] | None:
    """x of min |A x - 1|, by the normal equations; None where they are singular."""
    n = len(rows[0])
    system = [
        [sum(row[i] * row[j] for row in rows) for j in range(n)] + [sum(row[i] for row in rows)] for i in range(n)
    ]
    for column in range(n):
        pivot = max(range(column, n), key=lambda i: abs(system[i][column]))
        if abs(system[pivot][column]) < 1e-12:
            return None
        system[column], system[pivot] = system[pivot], system[column]
        for i in range(n):
            if i != column:
                factor = system[i][column] / system[column][column]
                system[i] = [a - factor * b for a, b in zip(system[i], system[column], strict=True)]
    return [system[i][n] / system[i][i] for i in range(n)]


def _error(message: str) -> TaktlineError:
    return TaktlineError(ErrorCode.CONFIG_INVALID, message, "measure plans on 1 rank and on at least two larger meshes")
