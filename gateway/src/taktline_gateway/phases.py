"""De-phasing: when each robot should capture its next observation, so that the fleet fills batches evenly."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable

from taktline_protocol.messages import Observation

from taktline_gateway.service_times import ServiceTimes

ROOM = 1.1
"""A grid must take so many times the demand, so that one who missed a place finds another."""
SLOT_SLACK = 1.05
"""Length of a slot over the median duration of its batch."""
FLEX_SHARE = 0.25
"""How far an observation may be moved, as a share of its robot's period."""
PERIOD_WEIGHT = 0.25
GONE_PERIODS = 3.0
"""A robot that sent nothing for so many of its periods no longer counts."""
PERIOD_MAX_S = 30.0
"""Longer gaps are pauses and tell no rhythm: whoever comes back from one is new."""
DRIFT_MEMORY = 0.8
"""What of a robot's drift is remembered at its next observation; a lasting change of phase is forgotten."""
EARLY_CORRECTION = 0.2
"""What of that drift is made good each time: more keeps the rhythm better, less leaves more room to spread."""
DEAF_AFTER = 4
"""A robot that ignored so many hints running is planned around, and gets no more of them for a while."""
MIN_ROBOTS = 2


@dataclasses.dataclass(slots=True)
class _Robot:
    arrived_at: float
    period_s: float | None = None
    hinted_at: float | None = None  # the arrival that its last hint asked for
    drift_s: float = 0.0  # how much later than by its own rhythm it came lately
    deaf: int = 0
    share: float = 1.0  # of T_sync, what its answers need

    @property
    def load_hz(self) -> float:
        return self.share / self.period_s if self.period_s else 0.0


@dataclasses.dataclass(slots=True)
class Grid:
    """Slots of equal length on the gateway's clock, each with places for one batch."""

    batch: int
    slot_s: float


def grid_for(times: ServiceTimes, workers: int, demand_hz: float) -> Grid | None:
    """The smallest batch whose back-to-back rate leaves ROOM for the demand; None where no batch does.

    Small batches are done sooner: at a light load every robot gets a slot of its own, and only where the load needs
    the throughput of larger batches do robots come in groups.
    """
    for batch in times.buckets:
        size = min(batch, times.max_batch)
        slot_s = SLOT_SLACK * times.median[size]
        if workers * size / slot_s >= ROOM * demand_hz:
            return Grid(size * workers, slot_s)
    return None


class PhasePlanner:
    """Keeps a calendar of reserved places and gives each robot the nearest free one to when it would come anyway.

    Attributes:
        when_known: called with each robot whose rhythm has become known.
    """

    def __init__(self) -> None:
        self.when_known: Callable[[tuple[str, str]], None] = lambda _: None
        self._robots: OrderedDict[tuple[str, str], _Robot] = OrderedDict()
        self._demand_hz = 0.0
        self._grid: Grid | None = None
        self._taken: dict[int, int] = {}
        self._first = 0  # slots before this one are forgotten

    @property
    def demand_hz(self) -> float:
        """Observations a second that the robots' periods add up to, each counted by its share of T_sync."""
        return max(0.0, self._demand_hz)

    def load_hz(self, source: tuple[str, str]) -> float:
        """What one robot adds to `demand_hz`; 0 while its rhythm is not known."""
        robot = self._robots.get(source)
        return robot.load_hz if robot is not None else 0.0

    def arrived(self, source: tuple[str, str], now: float, share: float = 1.0) -> None:
        """An observation came that needs so much of T_sync: the robot's period, and whether it listens to hints."""
        robot = self._robots.get(source)
        if robot is not None and now - robot.arrived_at > PERIOD_MAX_S:
            self._drop(source, robot)
            robot = None
        if robot is None:
            self._robots[source] = _Robot(now)
            self._forget(now)
            return
        gap = now - robot.arrived_at
        robot.arrived_at = now
        self._robots.move_to_end(source)
        if gap <= 0:
            return
        before = robot.period_s
        if before is None or gap > GONE_PERIODS * before:  # new, or back from a pause
            after = gap
        else:
            # A period that hints have stretched or shortened is still the robot's own underneath.
            moved = robot.hinted_at is not None and robot.deaf == 0
            after = before if moved else before + PERIOD_WEIGHT * (gap - before)
        load_hz = robot.load_hz
        robot.period_s, robot.share = after, share
        self._demand_hz += robot.load_hz - load_hz
        if before is None:
            self.when_known(source)
        robot.drift_s = DRIFT_MEMORY * (robot.drift_s + gap - after)
        if robot.hinted_at is not None:
            slot_s = self._grid.slot_s if self._grid is not None else after
            on_time = abs(now - robot.hinted_at) <= 0.5 * slot_s
            robot.deaf = 0 if on_time else robot.deaf + 1
            robot.hinted_at = None
        self._forget(now)

    def next_at(
        self, source: tuple[str, str], now: float, slack_s: float, times: ServiceTimes, workers: int
    ) -> float | None:
        """When the robot's next observation should arrive; None where it is not known, or it makes no difference.

        Args:
            slack_s: what its budget leaves beyond a full batch and the one before it; a later observation eats it.
        """
        robot = self._robots.get(source)
        if robot is None or robot.period_s is None or len(self._robots) < MIN_ROBOTS:
            return None
        grid = self._grid_now(times, workers)
        if grid is None:
            return None
        # Whoever came early by hints before is let come later: on average a robot nearly keeps its own rhythm, and the
        # fleet does not ask for more than it would by itself.
        natural = max(now, robot.arrived_at + robot.period_s - EARLY_CORRECTION * min(0.0, robot.drift_s))
        flex_s = FLEX_SHARE * robot.period_s
        nearest = round(natural / grid.slot_s)
        if robot.deaf >= DEAF_AFTER:
            self._taken[nearest] = self._taken.get(nearest, 0) + 1
            robot.deaf += 1
            if robot.deaf >= 8 * DEAF_AFTER:
                robot.deaf = DEAF_AFTER - 1  # ask it once more
            return None
        earliest = math.ceil(max(now, natural - flex_s) / grid.slot_s)
        latest = math.floor((natural + min(flex_s, max(0.0, slack_s))) / grid.slot_s)
        # The nearest free place, the later of two equally near ones: it costs the worker less.
        for step in range(max(nearest - earliest, latest - nearest, 0) + 1):
            for slot in (nearest + step, nearest - step):
                if earliest <= slot <= latest and self._taken.get(slot, 0) < grid.batch:
                    self._taken[slot] = self._taken.get(slot, 0) + 1
                    robot.hinted_at = slot * grid.slot_s
                    return robot.hinted_at
        return None

    def _grid_now(self, times: ServiceTimes, workers: int) -> Grid | None:
        grid = self._grid
        # A grid is kept while it fits: every change of it moves the whole fleet.
        if grid is not None and grid.batch % max(1, workers) == 0:
            size = min(times.max_batch, grid.batch // max(1, workers))
            still = SLOT_SLACK * times.median[size]
            room = grid.batch / grid.slot_s
            if abs(still - grid.slot_s) <= 0.1 * grid.slot_s and ROOM * self.demand_hz <= room:
                smaller = grid_for(times, workers, 1.25 * self.demand_hz)
                if smaller is None or smaller.batch >= grid.batch:
                    return grid
        self._grid = grid_for(times, workers, self.demand_hz)
        self._taken.clear()
        return self._grid

    def _forget(self, now: float) -> None:
        while self._robots:
            source, robot = next(iter(self._robots.items()))
            if now - robot.arrived_at <= GONE_PERIODS * (robot.period_s or 1.0):
                break
            self._drop(source, robot)
        if self._grid is not None and len(self._taken) > 256:
            past = int(now / self._grid.slot_s)
            self._taken = {slot: count for slot, count in self._taken.items() if slot >= past}

    def _drop(self, source: tuple[str, str], robot: _Robot) -> None:
        self._demand_hz -= robot.load_hz
        del self._robots[source]


def next_observation_at_ms(observation: Observation, next_at: float | None, now: float) -> float | None:
    """When the robot should capture, in ms after `now`, for an arrival at `next_at`; None without one.

    Between capture and arrival are its own L_observe and about half of the round trip that it reports.
    """
    if next_at is None:
        return None
    sent_at = observation.captured_at if observation.sent_at is None else observation.sent_at
    on_the_way_ms = 1e3 * max(0.0, sent_at - observation.captured_at) + 0.5 * observation.network_ms
    return round(max(0.0, 1e3 * (next_at - now) - on_the_way_ms), 2)
