"""Hand-off deadlines of clients that cannot state one, inferred from how often they ask. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub

ARRIVALS_KEPT = 9
"""Eight intervals: enough to shrug off a jittery one, few enough to follow a robot that changes its pace."""
PAUSE_CHUNKS = 2.0
"""A gap of more than so many chunks is a pause (a new episode), not the client's rhythm."""
PAUSE_FLOOR_S = 1.0
FEASIBLE_FACTOR = 2.0
UNKNOWN_CHUNK_MS = 1000.0
"""Stands in for the duration of a chunk while no worker has told its horizon and control period."""


def request_period_ms(arrivals: Sequence[float], chunk_ms: float) -> float | None:
    """The client's rhythm: median interval between its latest requests, back to its last pause.

    Args:
        arrivals: monotonic instants of its requests in seconds, oldest first.
        chunk_ms: duration of a whole chunk.

    Returns:
        The period in ms, None while there is no interval to go by.
    """
    pause_s = max(PAUSE_FLOOR_S, PAUSE_CHUNKS * chunk_ms / 1e3)
    intervals: list[float] = list(map(sub, arrivals[1:], arrivals))
    if not intervals:
        return None
    if max(intervals) > pause_s:
        last = max(index for index, interval in enumerate(intervals) if interval > pause_s)
        intervals = intervals[last + 1 :]
        if not intervals:
            return None
    intervals.sort()
    middle = len(intervals) // 2
    return 1e3 * (intervals[middle] if len(intervals) % 2 else 0.5 * (intervals[middle - 1] + intervals[middle]))


def chunk_duration_ms(horizon: int, dt_s: float, control_hz: float) -> float:
    """How long a chunk lasts on the robot: at `control_hz` where configured, else at the checkpoint's `dt_s`."""
    step_ms = 1e3 / control_hz if control_hz > 0 else 1e3 * dt_s
    return horizon * step_ms if horizon > 0 and step_ms > 0 else UNKNOWN_CHUNK_MS


def inferred_budget_ms(
    period_ms: float | None, chunk_ms: float, control_budget_ms: float, alone_ms: float, limit_ms: float
) -> float:
    """Milliseconds until the hand-off deadline of a client that does not say.

    A robot that asks every `period_ms` has executed so much of its chunk when it asks; what is left of the chunk is
    its time: chunk_ms - period_ms. Three bounds hold this guess in:

    - a robot without a rhythm (first request, or after a pause) stands still and loses nothing by waiting a chunk;
    - a robot that runs its chunk to the end before it asks has nothing left, and waits: its budget is the policy's
      declared control budget, or a chunk where none is declared, never zero;
    - a guess must not make a policy unusable: twice what an idle worker needs in the tail (`alone_ms`) is always given.

    Returns:
        The budget in ms, above 0 and at most `limit_ms`.
    """
    left_ms = chunk_ms if period_ms is None else chunk_ms - period_ms
    floor_ms = control_budget_ms if control_budget_ms > 0 else chunk_ms
    return min(limit_ms, max(left_ms, floor_ms, FEASIBLE_FACTOR * alone_ms))
