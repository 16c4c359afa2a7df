"""The trials of candidate revisions of all policies at this gateway: begun, promoted and ended by the routing table."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from taktline_protocol.deployment import Route
from taktline_protocol.measurements import GatewayMeasurements, PolicyMeasurement, PoolTimes
from taktline_protocol.messages import BucketTime, Observation

from taktline_gateway.canary import Canary, candidate_route
from taktline_gateway.demand import CountedWay, DemandCounts, Way
from taktline_gateway.lane import Lane
from taktline_gateway.logs import log
from taktline_gateway.telemetry import Levels

RETIRE_LIMIT_S = 30.0
RETIRE_POLL_S = 0.02
_logger = logging.getLogger(__name__)


class Trials:
    """Keeps a second lane for each candidate, and swaps it in, or out, without losing what is queued in either."""

    def __init__(self, lanes: dict[str, Lane], new_lane: Callable[[Route], Lane]) -> None:
        """`lanes` are the gateway's lanes by policy; a promotion replaces one of them."""
        self._lanes = lanes
        self._new_lane = new_lane
        self._canaries: dict[str, Canary] = {}
        self._demand: dict[str, DemandCounts] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._instance = os.urandom(8).hex()
        self._began_at = time.monotonic()

    def end_before(self, routes: Mapping[str, Route]) -> None:
        """Ends the trials that a new table no longer has; call it before the table is applied to the lanes.

        Where the table now serves the candidate's workers, its lane becomes the policy's: its workers are connected
        and warm, so no observation finds a lane without any.
        """
        for policy, canary in list(self._canaries.items()):
            route = routes.get(policy)
            if route is not None and route.candidate is not None and route.candidate.id == canary.candidate.id:
                continue
            del self._canaries[policy]
            tried = {target.address for target in canary.candidate.targets}
            promoted = route is not None and any(target.address in tried for target in route.targets)
            leaving = canary.lane
            if promoted and policy in self._lanes:
                leaving, self._lanes[policy] = self._lanes[policy], canary.lane
            else:
                canary.withdraw()
            log(_logger, logging.INFO, "trial_ended", policy=policy, trial=canary.candidate.id, promoted=promoted)
            self._spawn(self._retire(canary, leaving))
        for policy in self._demand.keys() - routes.keys():
            del self._demand[policy]

    def begin_after(self, routes: Mapping[str, Route]) -> None:
        """Begins new trials and hands changes to those under way; call it after the lanes have the table."""
        for policy, route in routes.items():
            if route.candidate is None:
                continue
            if policy in self._canaries:
                self._canaries[policy].apply(route)
            else:
                lane = self._new_lane(candidate_route(route))
                self._canaries[policy] = Canary(route, lane, lambda policy=policy: self._lanes.get(policy))  # type: ignore[misc]
            found = route.candidate
            log(
                _logger,
                logging.INFO,
                "trial_step",
                policy=policy,
                trial=found.id,
                step=found.step,
                revision=found.revision,
                weight=found.weight,
                mirror=found.mirror,
            )

    def way(self, policy: str, observation: Observation, robot: str) -> CountedWay:
        """What takes this observation of `robot` (its name among all tenants'); the policy must be one of the lanes."""
        canary = self._canaries.get(policy)
        way: Way = self._lanes[policy] if canary is None else canary.pick(observation, robot)
        counts = self._demand.get(policy)
        if counts is None:
            counts = self._demand[policy] = DemandCounts()
        return CountedWay(way, counts)

    def levels(self, policy: str) -> Levels:
        """Queue and workers of a policy, those of its candidate included; the policy must be one of the lanes."""
        levels, canary = self._lanes[policy].levels(), self._canaries.get(policy)
        return levels if canary is None else levels.with_candidate(canary.lane.levels())

    def measured(self) -> GatewayMeasurements:
        """Everything the operator asks this gateway for."""
        found = []
        for policy, lane in sorted(self._lanes.items()):
            canary, demand = self._canaries.get(policy), self._demand.get(policy)
            found.append(
                PolicyMeasurement(
                    policy=policy,
                    queued=lane.depth,
                    demand=demand.measured() if demand is not None else (),
                    pools=_pool_times(lane.levels()),
                    trial=canary.measured() if canary is not None else None,
                )
            )
        return GatewayMeasurements(
            instance=self._instance, seconds=time.monotonic() - self._began_at, policies=tuple(found)
        )

    async def close(self) -> None:
        """Ends all trials and closes their lanes."""
        for canary in self._canaries.values():
            await canary.close()
            await canary.lane.close()
        self._canaries.clear()
        for task in list(self._ending):
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _retire(self, canary: Canary, leaving: Lane) -> None:
        """Close a lane once what it holds is answered."""
        try:
            for _ in range(int(RETIRE_LIMIT_S / RETIRE_POLL_S)):
                if not leaving.unanswered:
                    break
                await asyncio.sleep(RETIRE_POLL_S)
        finally:
            await canary.close()
            await leaving.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _pool_times(levels: Levels) -> tuple[PoolTimes, ...]:
    """The pools of one policy; of several workers the slowest one speaks for its pool."""
    found = []
    for pool, workers in sorted(levels.usable.items()):
        slowest: dict[int, BucketTime] = {}
        for time_ in levels.predicted:
            if time_.pool == pool:
                known = slowest.get(time_.batch)
                if known is None or time_.tail_ms > known.p99_ms:
                    slowest[time_.batch] = BucketTime(
                        batch=time_.batch, median_ms=time_.median_ms, p99_ms=time_.tail_ms
                    )
        found.append(PoolTimes(pool=pool, workers=workers, t_sync=tuple(slowest[size] for size in sorted(slowest))))
    return tuple(found)
