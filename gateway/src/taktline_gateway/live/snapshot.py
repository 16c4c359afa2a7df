"""What the live page is told: every policy at this instant, and what came since the page was last told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from taktline_protocol import PolicyInfo

from taktline_gateway.live.recent import KEPT, WINDOW_S, Recent
from taktline_gateway.telemetry import Levels

POLICIES_SHOWN = 200
WORKERS_SHOWN = 64
POINTS = 64
"""Margins and cycles of one policy in one message; of more, an even choice is sent, and every late one that fits."""
TIMES_SHOWN = 16


def policy_snapshot(info: PolicyInfo, levels: Levels, recent: Recent, after: int) -> dict[str, Any]:
    """One policy, in at most a few KiB.

    Args:
        after: serial number up to which margins and cycles have been told.
    """
    margins = [(margin, cause) for serial, margin, cause, _ in recent.margins if serial > after]
    cycles = [(x, y) for serial, x, y, _ in recent.cycles if serial > after]
    return {
        "name": info.policy,
        "family": info.family,
        "revision": info.revision,
        "ready": info.ready,
        "budget_ms": info.control_budget_ms,
        "chunk_ms": round(1e3 * info.horizon * info.dt_s, 1),
        "depth": levels.depth,
        "in_flight": levels.in_flight,
        "pools": dict(sorted(levels.usable.items())),
        "workers": [
            {"address": worker.address, "pool": worker.pool, "revision": worker.revision, "state": worker.state}
            for worker in levels.workers[:WORKERS_SHOWN]
        ],
        "hidden_workers": max(0, len(levels.workers) - WORKERS_SHOWN),
        "t_sync": _times(levels),
        "codes": recent.codes,
        "misses": recent.misses,
        "margins": [[_short(margin), cause] for margin, cause in _chosen(margins, POINTS)],
        "cycles": [[_short(x), _short(y)] for x, y in _even(cycles, POINTS)],
        "lost_points": max(0, recent.serial - after - KEPT),
    }


def past(recent: Recent, until: int, points: int) -> dict[str, Any] | None:
    """What a page that has just been opened did not see of the last minute; None where nothing happened.

    Args:
        until: serial number up to which margins and cycles are meant.
        points: at most so many of each.
    """
    now = recent.clock()
    begin = now - WINDOW_S
    mark = next((mark for mark in recent.marks if mark[0] >= begin), None)
    if mark is None:
        return None

    def age_ms(at: float) -> int:
        return round(1e3 * (now - at))

    margins = [(m, cause, at) for serial, m, cause, at in recent.minute_margins if serial <= until and at >= begin]
    shown = sorted(_chosen(margins, points), key=lambda point: point[2])
    cycles = [(at, x, y) for serial, x, y, at in recent.minute_cycles if serial <= until and at >= begin]
    return {
        "age_ms": age_ms(mark[0]),
        "ok": mark[1],
        "misses": mark[2],
        "margins": [[age_ms(at), _short(margin), cause] for margin, cause, at in shown],
        "cycles": [[age_ms(at), _short(x), _short(y)] for at, x, y in _even(cycles, points)],
    }


def _times(levels: Levels) -> list[list[Any]]:
    """Pool, batch, median and tail in ms; of several workers of a pool the slowest."""
    slowest: dict[tuple[str, int], tuple[float, float]] = {}
    for time in levels.predicted:
        key = (time.pool, time.batch)
        slowest[key] = max(slowest.get(key, (0.0, 0.0)), (time.median_ms, time.tail_ms))
    shown = sorted(slowest.items())[:TIMES_SHOWN]
    return [[pool, batch, round(median, 2), round(tail, 2)] for (pool, batch), (median, tail) in shown]


def _short(value: float) -> float:
    """Four digits are more than a pixel shows."""
    return float(f"{value:.4g}") if math.isfinite(value) else 0.0


def _chosen(margins: Sequence[tuple[Any, ...]], count: int) -> list[tuple[Any, ...]]:
    """At most `count` of (margin, cause, ...): up to half of them late ones, and evenly chosen for the rest.

    So late ones are told more often than they came: whoever counts weighs both kinds by how many there were.
    """
    late = _even([point for point in margins if point[1]], count // 2)
    return [*_even([point for point in margins if not point[1]], count - len(late)), *late]


def _even(points: Sequence[tuple[Any, ...]], count: int) -> list[tuple[Any, ...]]:
    """At most `count` of the points, evenly chosen, the last one among them."""
    if len(points) <= count:
        return list(points)
    return [points[(index + 1) * len(points) // count - 1] for index in range(count)]
