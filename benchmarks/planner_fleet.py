"""Plans per second of one device that serves several robots at once, with plans checked against those made alone.

`benchmarks/planner.py --fleet` runs it at the published size on a GPU; the functions run on any device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from taktline_worker.planning.search import Plan, Problem, search
from taktline_worker.planning.world import WorldModel

ROBOTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class FleetTime:
    """Some robots' plans side by side.

    Attributes:
        seconds: of all of them together, sorted.
        equal: whether those plans that were also made alone have the same bits.
    """

    robots: int
    seconds: tuple[float, ...]
    equal: bool

    @property
    def plans_per_s(self) -> float:
        """Plans that end in a second, by the median."""
        return self.robots / statistics.median(self.seconds)


def fleet_times(
    world: WorldModel,
    problem: Callable[[int], Problem],
    runs: int,
    robots: Sequence[int] = ROBOTS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[FleetTime]:
    """Searches for each number of robots at once, after those of each number's last robot alone.

    Args:
        problem: of robot i.
    """
    alone = {count: search(world, [problem(count - 1)])[0] for count in robots}
    found = []
    for count in robots:
        problems = [problem(index) for index in range(count)]
        seconds: list[float] = []
        plans: list[Plan] = []
        for _ in range(runs):
            world.synchronize()
            began = clock()
            plans = search(world, problems)
            world.synchronize()
            seconds.append(clock() - began)
        equal = all(same(plans[last - 1], one) for last, one in alone.items() if last <= count)
        found.append(FleetTime(count, tuple(sorted(seconds)), equal))
    return found


def same(one: Plan, other: Plan) -> bool:
    """Whether two plans have the same bits."""
    return torch.equal(one.actions, other.actions) and torch.equal(one.energies, other.energies)
