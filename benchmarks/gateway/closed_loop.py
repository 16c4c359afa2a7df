"""A closed-loop simulation: robots that execute chunks, ask again in their rhythm, and may follow the gateway's hints.

A robot executes actions at its control rate and asks for the next chunk after `replan` of them. Its newest chunk lasts
until its capture plus the horizon, and that instant is the deadline of every observation it sends meanwhile. It asks
again one period later, or when the gateway's answer says. What counts is whether the buffer runs dry: a chunk that
comes to a dry buffer is a miss, and so is each observation made with a dry one. An observation that a newer one
supersedes is none, as long as the newer one is answered in time. A robot whose buffer is dry stands still, and asks
with one period of patience.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections.abc import Sequence

from taktline_gateway.phases import PhasePlanner

from benchmarks.gateway.peers import Ours, Policy
from benchmarks.gateway.times import Engine
from benchmarks.gateway.traces import Job


@dataclasses.dataclass(frozen=True, slots=True)
class Robot:
    """How one robot asks.

    Attributes:
        period_s: between two observations.
        horizon_s: how long a chunk lasts from its capture on.
        start_s: when it asks first.
        follows: whether it listens to hints.
    """

    period_s: float
    horizon_s: float
    start_s: float
    follows: bool = True


@dataclasses.dataclass(slots=True)
class Outcome:
    """What became of a fleet's requests in the measured part of the run."""

    asked: int = 0
    dry: int = 0
    batches: int = 0
    served: int = 0
    latencies_s: list[float] = dataclasses.field(default_factory=list)

    @property
    def share(self) -> float:
        """Observations whose robot did not run dry for want of their chunk, over all."""
        return 1.0 - min(1.0, self.dry / max(1, self.asked))

    def latency_ms(self, share: float) -> float:
        """The latency that `share` of the answered ones do not exceed."""
        ordered = sorted(self.latencies_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def fleet(
    robots: int,
    control_hz: float,
    replan: int,
    horizon: int = 50,
    *,
    in_step: bool,
    seed: int = 1,
    follows: bool = True,
) -> list[Robot]:
    """Robots of one kind; in step they all begin within 2 ms of one another, else anywhere in a period."""
    rng = random.Random(seed)
    period = replan / control_hz
    return [
        Robot(
            period, horizon / control_hz, abs(rng.gauss(0.0, 0.002)) if in_step else rng.uniform(0.0, period), follows
        )
        for _ in range(robots)
    ]


class Taktline(Ours):
    """The gateway's scheduler, with or without hints."""

    def __init__(self, engine: Engine, *, hints: bool, max_wait_s: float = 0.005) -> None:
        super().__init__(engine, max_wait_s)
        self.name = "Taktline + hints" if hints else "Taktline"
        self.phases = PhasePlanner() if hints else None

    def arrive(self, job: Job, now: float) -> None:
        """Admits or refuses."""
        if self.phases is not None:
            self.phases.arrived(("", str(job.robot)), now)
        super().arrive(job, now)

    def hint(self, job: Job, now: float) -> float | None:
        """When the robot's next observation should arrive."""
        if self.phases is None:
            return None
        slack = job.deadline - job.arrival - 2.0 * self.times.tail[self.times.max_batch]
        return self.phases.next_at(("", str(job.robot)), now, slack, self.times, 1)


def run(
    robots: Sequence[Robot],
    policy: Policy,
    engine: Engine,
    *,
    warm_s: float,
    measure_s: float,
    jitter_s: float = 0.002,
    seed: int = 11,
) -> Outcome:
    """Plays the fleet; only what is asked after `warm_s` counts."""
    rng = random.Random(seed)
    outcome = Outcome()
    coming = [(robot.start_s, index, 0) for index, robot in enumerate(robots)]
    heapq.heapify(coming)
    covered = [0.0] * len(robots)  # until when each robot's newest chunk lasts
    pending: dict[int, tuple[int, float]] = {}  # robot -> (turn, when it asks by itself)
    end = warm_s + measure_s
    running: list[Job] = []
    started = free_at = 0.0
    ask_at: float | None = None
    while True:
        moments = [coming[0][0]] if coming else []
        if running:
            moments.append(free_at)
        if ask_at is not None:
            moments.append(ask_at)
        if not moments or min(moments) > end + 5.0:
            return outcome
        now = min(moments)
        if running and now >= free_at:
            policy.finished(len(running), now - started)
            for job in running:
                outcome.dry += warm_s <= now < end and covered[job.robot] < now
                covered[job.robot] = max(covered[job.robot], job.arrival + robots[job.robot].horizon_s)
                if warm_s <= job.arrival < end:
                    outcome.served += 1
                    outcome.latencies_s.append(now - job.arrival)
                hint = policy.hint(job, now) if isinstance(policy, Taktline) and robots[job.robot].follows else None
                turn, _ = pending.get(job.robot, (-1, 0.0))
                if hint is not None and turn == job.seq + 1:
                    # The robot moves its next capture; the entry it stood under is skipped when it comes up.
                    at = max(now, hint + rng.gauss(0.0, jitter_s))
                    pending[job.robot] = (turn, at)
                    heapq.heappush(coming, (at, job.robot, turn))
            running = []
        while coming and coming[0][0] <= now:
            at, index, turn = heapq.heappop(coming)
            planned = pending.get(index)
            if planned is not None and (turn != planned[0] or abs(at - planned[1]) > 1e-12):
                continue
            if at >= end:
                pending[index] = (-2, 0.0)
                continue
            robot = robots[index]
            following = at + max(0.2 * robot.period_s, robot.period_s + rng.gauss(0.0, jitter_s))
            pending[index] = (turn + 1, following)
            heapq.heappush(coming, (following, index, turn + 1))
            outcome.asked += warm_s <= at < end
            dry = covered[index] <= at
            outcome.dry += dry and warm_s <= at < end
            policy.arrive(Job(index, turn, at, at + robot.period_s if dry else covered[index]), now)
        if not running:
            batch, ask_at = policy.next_batch(now)
            if batch:
                running, started = list(batch), now
                outcome.batches += 1
                free_at = now + engine.draw_s(len(batch), rng)
        if running:
            ask_at = policy.refuse(now)
        if ask_at is not None and ask_at <= now:
            ask_at = now + 1e-6
