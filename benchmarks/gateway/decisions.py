"""CPU time of the scheduler's operations with many observations queued: what each costs, and how it grows.

python -m benchmarks.gateway.decisions [--output FILE] [--rounds N] [--repeats N] [--workers N]

The queue is kept at its size while observations come, batches start and end, and some are cancelled, superseded or
refused, as in a gateway under heavy load. A `decision` is what one worker does next, its batch or its wait: one poll
divided by the workers that it decided for, its refusals included. `ask` is a robot's question at connect, with as many
promises as the queue has tickets.

Then fleets in a rhythm at 80% load, where a decision also looks at who is about to come: up to ten robots out of step
on one worker, for which it plans (`plan`), and up to 250 in step on one worker or several, where it weighs a wait
(`wait`). Only polls count that look at a rhythm; `queued` is the number of robots. With several workers one poll may
start a batch on one and weigh a wait for the next, which is two decisions; `wait, poll` is all of it.

CPU time of the thread. The same operations are run in the same order several times, and each one's least time counts:
what other processes do to the caches differs between the runs, what the operation itself costs does not. The garbage
collector is off, as its pauses belong to whatever allocated before. `reference` is a loop of 1,000 additions, timed in
between: figures of two runs compare only where it is alike. It took 28 to 31 us where nothing else ran, and 12 in an
earlier run, at another clock of the processor.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import heapq
import json
import math
import random
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from taktline_gateway.admissions import Admissions
from taktline_gateway.deadline_queue import Priority, Ticket
from taktline_gateway.phases import PhasePlanner
from taktline_gateway.rhythms import Coming
from taktline_gateway.scheduler import Batch, Scheduler
from taktline_gateway.service_times import ServiceTimes
from taktline_gateway.worker_state import WorkerState
from taktline_protocol.messages import AdmissionQuestion

from benchmarks.gateway.times import BUCKETS, ENGINES
from benchmarks.gateway.traces import FLEET_SHARE, fleet

MAX_BATCH = BUCKETS[-1]
MIXES = {
    "one class": (Priority.PRODUCTION,),
    "all classes": tuple(Priority),
}
FLEETS = (
    *((robots, 1, "plan") for robots in (4, 8, 10)),
    *((robots, 1, "wait") for robots in (8, 32, 128)),
    *((250, workers, "wait") for workers in (1, 2, 4, 8)),
)
"""(robots, workers, what their decisions look at)."""
FLEET_LOAD, WARM_TURNS = 0.8, 50
T = TypeVar("T")


class Deciding(Scheduler):
    """Counts the workers for which it decided on a batch or a wait."""

    decided = 0

    def _batch_for(self, worker: WorkerState, idle: int, now: float) -> tuple[Batch | None, float | None]:
        found = super()._batch_for(worker, idle, now)
        self.decided += found != (None, None)
        return found


class Load:
    """A scheduler that is kept at `queued` tickets, with its operations timed in microseconds of CPU time."""

    def __init__(self, queued: int, mix: str, workers: int, seed: int = 5) -> None:
        self.rng = random.Random(seed)
        self.spent: dict[str, list[float]] = defaultdict(list)
        self.now = 0.0
        self.mix = MIXES[mix]
        self.queued = queued
        self.robots = 0
        self.scheduler = Deciding(max_batch=MAX_BATCH, max_wait_s=0.005, max_queued=10 * queued)
        engine = ENGINES[0]
        # As fast as it takes to serve the whole queue within its deadlines, so that the queue is not simply refused.
        scale = queued / workers / engine.capacity_hz / 5.0
        table = [
            type(row)(batch=row.batch, median_ms=row.median_ms / scale, p99_ms=row.p99_ms / scale)
            for row in engine.table()
        ]
        for index in range(workers):
            self.scheduler.add_worker(f"w{index}", ServiceTimes(table, MAX_BATCH))
        while len(self.scheduler.queue) < queued:
            self.scheduler.queue.add(self.ticket(), None)
        self.admissions = Admissions(PhasePlanner())
        self.asked_at = 0.0
        for robot in range(queued):
            self._ask(robot, 0.0)

    def ticket(self, robot: str | None = None) -> Ticket:
        """A new observation with one to twenty seconds left."""
        self.robots += 1
        priority = self.rng.choice(self.mix)
        return Ticket(
            robot=robot or f"r{self.robots}",
            seq=self.robots,
            deadline=self.now + self.rng.uniform(1.0, 20.0),
            arrived_at=self.now,
            priority=priority,
            tenant=f"t{self.rng.randrange(8)}",
        )

    def timed(self, name: str, work: Callable[[], T]) -> T:
        """Runs one operation and notes its CPU time."""
        began = time.thread_time_ns()
        result = work()
        self.spent[name].append((time.thread_time_ns() - began) / 1e3)
        return result

    def reference(self) -> None:
        """Times a fixed piece of work."""

        def work() -> int:
            total = 0
            for number in range(1000):
                total += number
            return total

        self.timed("reference", work)

    def step(self) -> None:
        """Batches end, the next ones begin, and as many observations come as leave."""
        made = self.scheduler
        made.decided = 0
        plan = self.timed("poll", lambda: made.poll(self.now))
        self.spent["decision"].append(self.spent["poll"][-1] / max(1, made.decided))
        for batch in plan.batches:
            self.timed("finished", lambda batch=batch: self._finish(batch))  # type: ignore[misc]
        self.now = max([self.now, *(batch.predicted for batch in plan.batches)])
        for _ in range(200):
            if len(made.queue) >= self.queued:
                break
            one = self.ticket()
            self.timed("submit", lambda one=one: made.submit(one, self.now))  # type: ignore[misc]
        for choice in self.rng.sample(range(self.robots), 2):
            queued = made.queue.queued((f"t{choice % 8}", f"r{choice}"))
            if queued is not None:
                newer = self.ticket(queued.robot)
                newer.tenant, newer.source = queued.tenant, queued.source
                self.timed("supersede", lambda newer=newer: made.submit(newer, self.now))  # type: ignore[misc]
        self.reference()
        victim = made.queue.first(50)[-1]
        self.timed("cancel", lambda: made.cancel(victim))
        robot = self.rng.randrange(2 * self.queued)
        self.timed("ask", lambda: self._ask(robot, 0.001))

    def _ask(self, robot: int, step_s: float) -> None:
        """Robots ask whether there is room, as many within the promises' life as there are tickets."""
        self.asked_at += step_s
        question = AdmissionQuestion(robot_id=f"r{robot}", rate_hz=0.001, budget_ms=5_000.0 + robot)
        times = self.scheduler.times("w0")
        assert times is not None
        self.admissions.ask(("", question.robot_id), question, self.asked_at, 20.0, [times])

    def _finish(self, batch: Batch) -> None:
        seconds = (batch.predicted - self.now) * self.rng.lognormvariate(0.0, 0.03)
        self.scheduler.finished(batch, seconds)


def run(queued: int, mix: str, workers: int, rounds: int) -> dict[str, list[float]]:
    """CPU time of each operation of one run, us, by its kind and in the order in which they came."""
    load = Load(queued, mix, workers)
    for _ in range(50):
        load.step()
    load.spent.clear()
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        load.step()
    gc.enable()
    return load.spent


def look(robots: int, workers: int, *, in_step: bool, rounds: int) -> list[tuple[float, int]]:
    """CPU time of each of `rounds` polls that look at who is about to come, us, and for how many workers it decided."""
    engine, rng = ENGINES[0], random.Random(5)
    load = FLEET_LOAD * workers * engine.capacity_hz
    seconds = (WARM_TURNS + rounds) * robots / load  # a turn of the fleet has about one such poll, or more
    jobs = fleet("", load, 1.0, robots, FLEET_SHARE, jitter_ms=2.0 if in_step else None, duration_s=seconds).jobs
    scheduler = Deciding(max_batch=MAX_BATCH, max_wait_s=0.005)
    for index in range(workers):
        scheduler.add_worker(f"w{index}", ServiceTimes(engine.table(), MAX_BATCH))
    looks, coming_of = 0, scheduler.arrivals.coming

    def counted(*about: Any) -> Coming:
        nonlocal looks
        looks += 1
        return coming_of(*about)

    scheduler.arrivals.coming = counted  # type: ignore[method-assign]
    ended: list[tuple[float, int, Batch]] = []
    spent: list[tuple[float, int]] = []
    coming = deque(jobs)
    wake, warm_s = math.inf, WARM_TURNS * robots / load
    gc.collect()
    gc.disable()
    while coming and len(spent) < rounds:
        now = min(coming[0].arrival, ended[0][0] if ended else math.inf, wake)
        while coming and coming[0].arrival <= now:
            job = coming.popleft()
            scheduler.submit(Ticket(f"r{job.robot}", job.seq, job.deadline, now), now)
        while ended and ended[0][0] <= now:
            _, _, batch = heapq.heappop(ended)
            scheduler.finished(batch, now - batch.sent_at)
        scheduler.decided = 0
        before, began = looks, time.thread_time_ns()
        plan = scheduler.poll(now)
        took = (time.thread_time_ns() - began) / 1e3
        if looks > before and now > warm_s:
            spent.append((took, max(1, scheduler.decided)))
        for batch in plan.batches:
            ends_at = now + engine.draw_s(len(batch.tickets), rng)
            heapq.heappush(ended, (ends_at, batch.tickets[0].order, batch))
        wake = math.inf if plan.wake_at is None else max(plan.wake_at, now + 1e-6)
    gc.enable()
    return spent


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    """Runs every size and mix, prints the table, writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=5, help="runs of the same operations")
    parser.add_argument("--workers", type=int, action="append", help="how many before a long queue; 1 and 8 if absent")
    parser.add_argument("--fleets-only", action="store_true", help="only the looks at a rhythm")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    print(
        f"{'queued':>7} {'mix':<12} {'workers':>7} {'operation':<10} {'n':>7} {'p50 us':>8} {'p99 us':>8} {'p99.9':>8}"
    )

    def told(name: str, queued: int, mix: str, workers: int, runs: list[list[float]]) -> None:
        spent = [min(times) for times in zip(*runs, strict=True)]
        p50, p99, p999 = (percentile(spent, share) for share in (0.5, 0.99, 0.999))
        head = f"{queued:>7} {mix:<12} {workers:>7} {name:<10} {len(spent):>7}"
        print(f"{head} {p50:>8.1f} {p99:>8.1f} {p999:>8.1f}", flush=True)
        rows.append(
            {
                "bench": "gateway-decisions",
                "operation": name,
                "queued": queued,
                "mix": mix,
                "workers": workers,
                "median_us": round(p50, 2),
                "p99_us": round(p99, 2),
                "p999_us": round(p999, 2),
                "n": len(spent),
                "repeats": arguments.repeats,
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                "command": " ".join(["python -m benchmarks.gateway.decisions", *sys.argv[1:]]),
            }
        )

    for queued in () if arguments.fleets_only else (100, 1_000, 10_000):
        for mix in MIXES:
            for workers in arguments.workers or (1, 8):
                runs = [run(queued, mix, workers, arguments.rounds) for _ in range(arguments.repeats)]
                for name in sorted(runs[0]):
                    told(name, queued, mix, workers, [one[name] for one in runs])
    for robots, workers, name in FLEETS:
        step = name == "wait"
        mix = "in step" if step else "out of step"
        polls = [look(robots, workers, in_step=step, rounds=arguments.rounds) for _ in range(arguments.repeats)]
        told(name, robots, mix, workers, [[took / decided for took, decided in run] for run in polls])
        if workers > 1:
            told(f"{name}, poll", robots, mix, workers, [[took for took, _ in run] for run in polls])
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
