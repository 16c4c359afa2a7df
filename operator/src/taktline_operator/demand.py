"""Turns the gateways' counters into demand: rates by deadline class, their growth, and the misses of the last minute.

Kept in memory only: after a restart the second look at the gateways has a rate again, and until then decisions stand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from taktline_protocol.measurements import GatewayMeasurements, PolicyMeasurement
from taktline_protocol.messages import BucketTime

from taktline_operator.capacity import Load
from taktline_operator.scaling import Demand

MEMORY_S = 60.0
RATE_S = 15.0  # rates are means over so long
SLOPE_S = 60.0


class _Sample(NamedTuple):
    at: float  # monotonic, s
    arrived: dict[float, int]
    missed: int
    seen: int


class DemandTracker:
    """What the gateways have counted, policy by policy."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, dict[str, PolicyMeasurement]]] = {}
        self._windows: dict[str, deque[_Sample]] = {}
        self._tables: dict[str, dict[str, tuple[BucketTime, ...]]] = {}
        self._workers: dict[str, dict[str, int]] = {}

    def take(self, answers: Sequence[GatewayMeasurements], now: float) -> None:
        """Take in one round of answers at monotonic instant `now`, in seconds."""
        for answer in answers:
            at, before = self._before.get(answer.instance, (answer.seconds, {}))
            current = {found.policy: found for found in answer.policies}
            self._before[answer.instance] = (answer.seconds, current)
            if answer.seconds <= at:
                continue  # first seen, or asked twice: no difference to take
            for policy, found in current.items():
                self._add(policy, found, before.get(policy), now)
        alive = {answer.instance for answer in answers}
        for instance in [instance for instance in self._before if instance not in alive]:
            del self._before[instance]
        for policy in {found.policy for answer in answers for found in answer.policies}:
            parts = [found for answer in answers for found in answer.policies if found.policy == policy]
            self._tables[policy] = _slowest(parts)
            self._workers[policy] = {
                pool.pool: max(other.workers for part in parts for other in part.pools if other.pool == pool.pool)
                for part in parts
                for pool in part.pools
            }

    def of(self, policy: str, now: float) -> Demand | None:
        """The demand of a policy; None before there is a difference to take it from."""
        window = self._windows.get(policy)
        if not window:
            return None
        self._forget(window, now)
        recent = [sample for sample in window if now - sample.at < RATE_S]
        if not window or not recent:
            return None
        load = _rates(recent, RATE_S if now - window[0].at >= RATE_S else max(1.0, now - window[0].at + _STEP_S))
        older = [sample for sample in window if now - sample.at >= SLOPE_S - RATE_S]
        slope = 0.0
        if older:
            then = _rates(older, RATE_S).total
            slope = max(0.0, (load.total - then) / (SLOPE_S - RATE_S))
        return Demand(load, slope, sum(s.missed for s in window), sum(s.seen for s in window))

    def times(self, policy: str) -> dict[str, tuple[BucketTime, ...]]:
        """T_sync tables by pool, of workers that the gateways know."""
        return self._tables.get(policy, {})

    def _add(self, policy: str, found: PolicyMeasurement, before: PolicyMeasurement | None, now: float) -> None:
        earlier = {part.up_to_ms: part.outcomes for part in before.demand} if before else {}
        arrived: dict[float, int] = {}
        missed = seen = 0
        for part in found.demand:
            then = earlier.get(part.up_to_ms)
            count = part.outcomes.total - (then.total if then else 0)
            missed += part.outcomes.missed - (then.missed if then else 0)
            seen += count
            arrived[part.up_to_ms] = count
        window = self._windows.setdefault(policy, deque())
        window.append(_Sample(now, arrived, missed, seen))
        self._forget(window, now)

    def _forget(self, window: deque[_Sample], now: float) -> None:
        while window and now - window[0].at >= MEMORY_S:
            window.popleft()


_STEP_S = 5.0


def _rates(samples: Iterable[_Sample], seconds: float) -> Load:
    rates: dict[float, float] = {}
    for sample in samples:
        for edge, count in sample.arrived.items():
            rates[edge] = rates.get(edge, 0.0) + count / seconds
    return Load(rates)


def _slowest(parts: Sequence[PolicyMeasurement]) -> dict[str, tuple[BucketTime, ...]]:
    tables: dict[str, dict[int, BucketTime]] = {}
    for part in parts:
        for pool in part.pools:
            table = tables.setdefault(pool.pool, {})
            for time in pool.t_sync:
                known = table.get(time.batch)
                if known is None or time.p99_ms > known.p99_ms:
                    table[time.batch] = time
    return {pool: tuple(table[batch] for batch in sorted(table)) for pool, table in tables.items() if table}
