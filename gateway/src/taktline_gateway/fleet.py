"""The workers of one policy as the scheduler sees them: who is free when, who is silent, when work would be done."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from taktline_gateway.deadline_queue import Ticket
from taktline_gateway.overload import Busyness
from taktline_gateway.service_times import ServiceTimes

HANG_FACTOR = 5.0
"""A batch that takes longer than this many times its predicted tail hangs."""
HANG_FLOOR_S = 1.0
TRIAL_AFTER_S = 1.0
"""A worker that sat idle for so long while everything was refused gets a trial, so that its times can be corrected."""
SILENT_FACTOR = 1.5
SILENT_FLOOR_S = 0.005
"""A batch that takes longer than this many times its predicted tail, and so much more, makes its worker silent."""


@dataclasses.dataclass(slots=True)
class Batch:
    """Tickets to send to one worker now, in service order.

    Attributes:
        predicted: completion instant by the median; `tail` by the 99th percentile.
        hangs_at: the instant at which the batch is given up.
        level: index of the quality it is run at; 0 is full quality.
    """

    worker: str
    tickets: tuple[Ticket, ...]
    predicted: float
    tail: float
    hangs_at: float = math.inf
    level: int = 0


@dataclasses.dataclass(slots=True)
class WorkerState:
    """One worker, with at most one batch in flight.

    Attributes:
        levels: its times at full quality, then at each cheaper level, see `quality`.
        batch: the batch in flight.
        running: the times that this batch is predicted by.
        busy_until: predicted end of the batch in flight; None where it is idle.
        silent_at: the instant from which that batch counts as silent.
        silent: the batch is overdue, and its members were offered to the other workers.
        probation: it failed last: it proves itself on a batch of one.
        trial: the batch in flight was refused by the table and is sent to check it.
        busyness: how much of its recent time it was busy.
    """

    name: str
    levels: tuple[ServiceTimes, ...]
    batch: Batch | None = None
    running: ServiceTimes | None = None
    used_at: float = 0.0
    busy_until: float | None = None
    silent_at: float = math.inf
    silent: bool = False
    suspended_until: float = 0.0
    probation: bool = False
    trial: bool = False
    busyness: Busyness = dataclasses.field(default_factory=Busyness)

    @property
    def times(self) -> ServiceTimes:
        """Its times at full quality."""
        return self.levels[0]

    @property
    def cheapest(self) -> ServiceTimes:
        """Its times at the cheapest level."""
        return self.levels[-1]

    def free_at(self, now: float) -> float:
        """When it can start a batch. One that is overdue is expected to take as long again as it is overdue."""
        busy = self.busy_until
        if busy is None:
            return max(now, self.suspended_until)
        if busy < now:
            busy = now + (now - busy)
        return max(busy, self.suspended_until)

    def launch(self, tickets: tuple[Ticket, ...], level: int, now: float) -> Batch:
        """Starts a batch."""
        times, size = self.levels[level], len(tickets)
        tail_s = times.tail[size]
        self.busy_until = now + times.median[size]
        self.silent_at = now + SILENT_FACTOR * tail_s + SILENT_FLOOR_S
        self.used_at = now
        hangs_at = now + max(HANG_FLOOR_S, HANG_FACTOR * tail_s)
        patient = max((ticket.deadline for ticket in tickets if ticket.extra), default=None)
        if patient is not None:  # it may take as long as its robot waits
            hangs_at = self.silent_at = max(hangs_at, patient)
        self.batch = Batch(self.name, tickets, self.busy_until, now + tail_s, hangs_at, level)
        self.running = times
        return self.batch

    def idle(self, now: float) -> bool:
        """Whether it can start a batch now."""
        return self.busy_until is None and self.suspended_until <= now

    def release(self) -> None:
        """Its batch has ended."""
        self.batch = self.running = None
        self.busy_until = None
        self.silent_at = math.inf
        self.silent = False


class Fleet:
    """The workers by name. Costs grow with the number of workers, not with the queue."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerState] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def __contains__(self, name: str) -> bool:
        return name in self._workers

    def add(self, name: str, levels: tuple[ServiceTimes, ...], now: float) -> None:
        """Makes a worker available."""
        self._workers[name] = WorkerState(name, levels, used_at=now)

    def remove(self, name: str) -> None:
        """Takes a worker out; its batch in flight is the caller's to finish."""
        self._workers.pop(name, None)

    def get(self, name: str) -> WorkerState | None:
        """The worker, if it is known here."""
        return self._workers.get(name)

    def running(self, batch: Batch) -> WorkerState | None:
        """The worker that `batch` keeps busy; None where it left meanwhile, even if one of its name has come since."""
        worker = self._workers.get(batch.worker)
        return worker if worker is not None and worker.batch is batch else None

    def names(self) -> Iterable[str]:
        """Names of the workers that may get batches."""
        return self._workers.keys()

    def states(self) -> Iterable[WorkerState]:
        """The workers themselves."""
        return self._workers.values()

    def idle(self, now: float) -> list[WorkerState]:
        """Workers that can start a batch now, the one that would finish a lone ticket first in front."""
        found = [worker for worker in self._workers.values() if worker.busy_until is None and worker.idle(now)]
        if len(found) > 1:
            found.sort(key=lambda worker: (worker.times.median[1], worker.used_at))
        return found

    def fastest_s(self) -> float:
        """Median duration of the shortest batch that any worker runs."""
        return min((worker.levels[-1].median[1] for worker in self._workers.values()), default=0.0)

    def longest_s(self) -> float:
        """Tail duration of the longest batch that any worker runs."""
        return max((worker.times.tail[-1] for worker in self._workers.values()), default=0.0)

    def sooner_elsewhere(self, worker: WorkerState, queued: int, now: float) -> bool:
        """Whether a busy worker is predicted to have served all that waits before this idle one could.

        One observation goes to the worker that finishes it first, and that may be a fast one that is not free yet.
        """
        if len(self._workers) == 1:
            return False
        here = now + worker.times.median[min(queued, worker.times.max_batch)]
        for other in self._workers.values():
            if other.busy_until is None or other.silent or queued > other.times.max_batch:
                continue
            if max(other.busy_until, now) + other.times.median[queued] < here:
                return True
        return False

    def rusty(self, now: float) -> WorkerState | None:
        """An idle worker whose times nothing has confirmed for a while, the longest unused one; None without one."""
        idle = [worker for worker in self.idle(now) if now - worker.used_at >= TRIAL_AFTER_S]
        return min(idle, key=lambda worker: worker.used_at, default=None)

    def fall_silent(self, now: float) -> list[WorkerState]:
        """Workers whose batch has just become overdue."""
        found = [worker for worker in self._workers.values() if worker.silent_at <= now and not worker.silent]
        for worker in found:
            worker.silent = True
        return found

    def next_event(self, now: float, *, queued: bool) -> float:
        """The next instant at which a worker's state changes by itself; infinite where none does.

        The end of a rest matters only where something is queued.
        """
        moment = math.inf
        for worker in self._workers.values():
            if worker.busy_until is not None:
                if not worker.silent and worker.silent_at < moment:
                    moment = worker.silent_at
            elif queued and now < worker.suspended_until < moment:
                moment = worker.suspended_until
        return moment

    def predicted_completion(self, ahead: int, now: float, without: str = "") -> float:
        """A lower bound of the completion instant of a ticket with `ahead` tickets served before it.

        The work ahead drains at every worker's best throughput from the moment it is free; no ticket is done before
        some worker has run a batch of one. Infinite where no worker is left. O(w log w) for w workers.
        """
        if len(self._workers) == 1:
            (worker,) = self._workers.values()
            if worker.name == without:
                return math.inf
            at, times = worker.free_at(now), worker.cheapest
            return at + max(times.median[1], (ahead + 1) / times.best_rate if ahead else 0.0)
        free = sorted(
            ((worker.free_at(now), worker.cheapest) for worker in self._workers.values() if worker.name != without),
            key=lambda pair: pair[0],
        )
        if not free:
            return math.inf
        alone = min(at + times.median[1] for at, times in free)
        if not ahead:
            return alone
        work = float(ahead + 1)
        rate = 0.0
        drained = free[0][0]
        for at, times in free:
            done = rate * (at - drained)
            if done >= work:
                break
            work -= done
            drained = at
            rate += times.best_rate
        return max(alone, drained + work / rate)
