"""Which pool gets a policy's workers: the cheapest one that keeps the control budget for the demand there is.

The control-time roofline decides: once L_inference fits into the time that the environment leaves, a faster
accelerator makes no robot faster, so speed beyond the budget is not bought. A pool is left at once where it breaks the
budget; for a lower cost only when the gain is large and has lasted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from taktline_protocol.messages import BucketTime

from taktline_operator.capacity import OVERHEAD_SHARE as OVERHEAD_SHARE
from taktline_operator.capacity import Load, meets, workers_for
from taktline_operator.rollout import seconds_between
from taktline_operator.scaling_spec import Placement
from taktline_operator.spec import Pool


class State(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """status.placement; the CRD describes the fields."""

    pool: str = ""
    message: str = ""
    better_pool: str = ""
    better_since: str = ""


class Offer(NamedTuple):
    """What one pool offers: the rank of its kind (0 keeps the budget, 1 unknown, 2 breaks it), cost, and why."""

    pool: Pool
    rank: int
    cost: float
    why: str


def offers(
    pools: Sequence[Pool],
    tables: Mapping[str, Sequence[BucketTime]],
    budget_ms: float,
    load: Load,
    max_batch: int,
    utilisation: float,
    lanes: int = 1,
) -> list[Offer]:
    """All pools, the best first; equal ones in the order written. A worker runs `lanes` batches at a time."""
    found = []
    for pool in pools:
        times = tables.get(pool.name) or [
            BucketTime(batch=time.batch, median_ms=time.median_ms, p99_ms=time.p99_ms) for time in pool.profile
        ]
        if not times:
            found.append(Offer(pool, 1, pool.cost_per_hour, "not measured yet: give it a worker or a profile"))
            continue
        alone_ms = min(times, key=lambda time: time.batch).p99_ms
        overhead_ms = OVERHEAD_SHARE * budget_ms
        fit = f"T_sync(1) {alone_ms:.3g} ms and {overhead_ms:.3g} ms on the way, of {budget_ms:g} ms"
        if not meets(times, budget_ms, overhead_ms):
            found.append(Offer(pool, 2, math.inf, f"breaks the budget: {fit}"))
            continue
        needed = workers_for(load, times, max_batch, utilisation, lanes)
        count = max(1, math.ceil((needed or 0.0) - 1e-9))
        cost = count * pool.cost_per_hour
        found.append(Offer(pool, 0, cost, f"{count} x {pool.cost_per_hour:g} = {cost:g} an hour ({fit})"))
    return sorted(found, key=lambda offer: (offer.rank, offer.cost))


def choose(state: State, placement: Placement, found: Sequence[Offer], now: str) -> State:
    """The pool to fill first, with hysteresis."""
    best = found[0]
    present = next((offer for offer in found if offer.pool.name == state.pool), None)
    if present is None or present.rank == 2 > best.rank or present.rank == 1 > best.rank:
        return State(pool=best.pool.name, message=explained(best, found))
    gain = 1.0 - best.cost / present.cost if present.cost > 0 and present.rank == 0 == best.rank else 0.0
    if best.pool.name == state.pool or gain < placement.gain_percent / 100 or gain <= 0.0:
        return State(pool=state.pool, message=state.message) if state.better_pool else state
    since = state.better_since if state.better_pool == best.pool.name else now
    if seconds_between(since, now) < placement.hold_seconds:
        return msgspec.structs.replace(state, better_pool=best.pool.name, better_since=since)
    return State(pool=best.pool.name, message=explained(best, found))


def order(state: State, found: Sequence[Offer]) -> list[Pool]:
    """Pools in the order to fill them: the chosen one, then the others as they compare."""
    return [offer.pool for offer in sorted(found, key=lambda offer: offer.pool.name != state.pool)]


def explained(best: Offer, found: Sequence[Offer]) -> str:
    """The comparison in one sentence for each pool."""
    kinds = ("keeps the budget at the lowest cost", "is the only one left to try", "is the least slow")
    parts = [f"{offer.pool.name}: {offer.why}" for offer in found]
    return f"{best.pool.name} {kinds[best.rank]}; " + "; ".join(parts)
