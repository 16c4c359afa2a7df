"""What one worker of a pool can serve in time: from its measured T_sync table and the deadlines that robots leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from taktline_protocol.measurements import DEADLINE_CLASSES_MS
from taktline_protocol.messages import BucketTime

OVERHEAD_SHARE = 0.1  # of the control budget, for the way to the worker and back
OPEN_CLASS_MS = 2 * DEADLINE_CLASSES_MS[-1]


class Load(NamedTuple):
    """Demand by deadline class: upper edge of the time left at arrival, ms -> observations a second."""

    rates: Mapping[float, float]

    @property
    def total(self) -> float:
        """Observations a second."""
        return sum(self.rates.values())


def lower_edge(edge_ms: float) -> float:
    """The shortest time left in the class with this upper edge; 0 marks the open class."""
    if edge_ms <= 0:
        return DEADLINE_CLASSES_MS[-1]
    index = DEADLINE_CLASSES_MS.index(edge_ms) if edge_ms in DEADLINE_CLASSES_MS else 0
    return DEADLINE_CLASSES_MS[index - 1] if index else edge_ms / 2


def rate_within(times: Sequence[BucketTime], left_ms: float, max_batch: int) -> float:
    """Observations a second that one worker serves within `left_ms` of their arrival; 0 where not even one.

    An observation may find a batch that has just begun, so it waits for that one and runs in the next:
    T_sync(B) + T_sync(B) <= left_ms, in tails. Where only a batch of one on an idle worker makes it, the worker must be
    idle half of the time.
    """
    best = 0.0
    for time in times:
        if time.batch <= max_batch and 2.0 * time.p99_ms <= left_ms:
            best = max(best, 1e3 * time.batch / time.median_ms)
    if best == 0.0 and times:
        smallest = min(times, key=lambda time: time.batch)
        if smallest.p99_ms <= left_ms:
            best = 500.0 / smallest.median_ms
    return best


def workers_for(
    load: Load, times: Sequence[BucketTime], max_batch: int, utilisation: float, lanes: int = 1
) -> float | None:
    """Workers (not rounded) that serve `load` at this utilisation; None where a class cannot be met at all.

    Classes share workers, so what they need adds up. A class is taken at the middle of its edges. A worker runs `lanes`
    batches at a time, each in the time that the table says.
    """
    needed = 0.0
    for edge_ms, rate in load.rates.items():
        if rate <= 0.0:
            continue
        upper = edge_ms if edge_ms > 0 else OPEN_CLASS_MS
        rate_of_one = rate_within(times, (lower_edge(edge_ms) + upper) / 2, max_batch)
        if rate_of_one == 0.0:
            # What cannot be met must not swallow the pool; it is refused at the gateway whatever we do.
            continue
        needed += rate / rate_of_one
    if load.total > 0.0 and needed == 0.0:
        return None
    return needed / (utilisation * lanes)


def meets(times: Sequence[BucketTime], budget_ms: float, overhead_ms: float) -> bool:
    """Whether a pool keeps the control budget: a batch of one, in the tail, and what the way there and back takes."""
    if not times:
        return False
    return min(times, key=lambda time: time.batch).p99_ms + overhead_ms <= budget_ms
