"""The constants of the latency model of plans (`taktline_protocol.search_latency`) from measured ones. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.search_latency import LatencyModel, whole_share


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured plan: `seconds` for `rounds` on `ranks`."""

    ranks: int
    rounds: int
    seconds: float


def fit(measurements: Sequence[Measurement], units: int) -> LatencyModel:
    """Least squares of the relative error, with r > 0, c >= 0 and a >= 0.

    The model is linear in (r, r a, c): seconds / rounds = r / W' + r a (W - 1) / W' + c (W - 1). A coefficient that the
    free fit makes negative is set to zero and the others are fitted again; the best of those fits is taken.

    Args:
        units: of one round of all measurements.

    Raises:
        TaktlineError: CONFIG_INVALID where a measurement is not positive, or where there are fewer than three world
            sizes, one of them 1: two unknowns beside r cannot be told apart from less.
    """
    if any(m.ranks < 1 or m.rounds < 1 or not (math.isfinite(m.seconds) and m.seconds > 0) for m in measurements):
        raise _error("a measurement has no ranks, no rounds or no time")
    sizes = {m.ranks for m in measurements}
    if 1 not in sizes or len(sizes) < 3:
        raise _error(f"measurements at {sorted(sizes)} ranks do not determine three constants")
    rows = [_row(m, whole_share(units, m.ranks)) for m in measurements]
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
    return LatencyModel(round_s=round_s, rank_s=rank_s, loss=loss_s / round_s, units=units)


def _row(m: Measurement, share: float) -> list[float]:
    # Divided by the measured time of a round, so that every measurement weighs by its relative error.
    scale = m.rounds / m.seconds
    return [scale / share, scale * (m.ranks - 1) / share, scale * (m.ranks - 1)]


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
