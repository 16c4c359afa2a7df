"""Turns the gateways' counters into demand: rates by deadline class, their growth, and the misses of the last minute.

Kept in memory only: after a restart the second look at the gateways has a rate again, and until then decisions stand.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from taktline_protocol.measurements import GatewayMeasurements, PolicyMeasurement
from taktline_protocol.messages import BucketTime

from taktline_operator.capacity import Load
from taktline_operator.scaling import Demand

Json = dict[str, Any]
Key = tuple[str, str]  # namespace and name of a PolicyDeployment

MEMORY_S = 60.0
RATE_S = 15.0  # rates are means over so long
UNKNOWN_S = 20.0  # between two looks at the gateways for times that no status holds yet
TIMES_S = 600.0  # the same where all are known and nothing else asks


class _Sample(NamedTuple):
    at: float  # monotonic, s
    seconds: float  # that it covers, by the gateway's own clock
    arrived: dict[float, int]
    missed: int
    seen: int


def unmeasured(statuses: Mapping[Key, Json]) -> list[tuple[Key, str]]:
    """Policies and pools with a worker that serves whose batch times no status holds yet.

    Whether a control budget can be kept is told by them, also where nothing scales.

    Args:
        statuses: metadata and status of each PolicyDeployment.
    """
    found = []
    for key, live in statuses.items():
        status = live.get("status") or {}
        accepted = any(c["type"] == "Accepted" and c["status"] == "True" for c in status.get("conditions", []))
        if accepted:
            pools = [pool for pool in status.get("pools", []) if pool.get("ready") and "tSync" not in pool]
            found += [(key, str(pool["name"])) for pool in pools]
    return found


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
                self._add(policy, found, before.get(policy), now, answer.seconds - at)
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
        load = _rates(recent)
        newest = _rates(recent[-1:])
        if _is_surge(newest.total, load.total, recent[-1].seconds):
            # A shift has begun: the mean of the last seconds would hide it until it is late.
            load = Load({edge: rate * newest.total / load.total for edge, rate in load.rates.items()})
        before = [sample for sample in window if RATE_S <= now - sample.at < 2 * RATE_S]
        slope = 0.0
        if before:
            then = _rates(before).total
            if _is_surge(load.total, then, RATE_S):
                slope = (load.total - then) / RATE_S
        return Demand(load, slope, sum(s.missed for s in window), sum(s.seen for s in window))

    def times(self, policy: str) -> dict[str, tuple[BucketTime, ...]]:
        """T_sync tables by pool, of workers that the gateways know."""
        return self._tables.get(policy, {})

    def _add(
        self, policy: str, found: PolicyMeasurement, before: PolicyMeasurement | None, now: float, seconds: float
    ) -> None:
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
        window.append(_Sample(now, seconds, arrived, missed, seen))
        self._forget(window, now)

    def _forget(self, window: deque[_Sample], now: float) -> None:
        while window and now - window[0].at >= MEMORY_S:
            window.popleft()


def _rates(samples: Sequence[_Sample]) -> Load:
    seconds = sum({sample.at: sample.seconds for sample in samples}.values())  # gateways count side by side
    rates: dict[float, float] = {}
    for sample in samples:
        for edge, count in sample.arrived.items():
            rates[edge] = rates.get(edge, 0.0) + count / seconds
    return Load(rates)


def _is_surge(rate: float, before: float, seconds: float) -> bool:
    """Whether more arrive than chance explains: four standard deviations of the difference of two Poisson counts."""
    return before > 0.0 and (rate - before) * seconds > 4.0 * math.sqrt((rate + before) * seconds)


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
