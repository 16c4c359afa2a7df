"""The workers of one policy as the scheduler sees them: who is free when, who is silent, when work would be done."""

from __future__ import annotations

import math
from collections.abc import Iterable

from taktline_gateway.deadline_queue import Ticket
from taktline_gateway.service_times import ServiceTimes
from taktline_gateway.work import WHOLE
from taktline_gateway.worker_state import IN_FLIGHT, Batch, Flight, WorkerState

TRIAL_AFTER_S = 1.0
"""A worker that sat idle for so long while everything was refused gets a trial, so that its times can be corrected."""
LUCK = 2.0
"""How far below its median what is ahead of a ticket may end, in units of the way from there to the 99th percentile."""


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

    def release(self, batch: Batch, ended_at: float | None) -> tuple[WorkerState, Flight] | None:
        """Takes a batch off its worker; None where that left meanwhile, even if one of its name has come since."""
        worker = self._workers.get(batch.worker)
        flight = None if worker is None else worker.release(batch, ended_at)
        return None if worker is None or flight is None else (worker, flight)

    def names(self) -> Iterable[str]:
        """Names of the workers that may get batches."""
        return self._workers.keys()

    def states(self) -> Iterable[WorkerState]:
        """The workers themselves."""
        return self._workers.values()

    def idle(self, now: float) -> list[WorkerState]:
        """Workers that can start a batch now, the one that would finish a lone ticket first in front."""
        found = [worker for worker in self._workers.values() if worker.idle(now)]
        if len(found) > 1:
            found.sort(key=lambda worker: (worker.times.median[1], bool(worker.flights), worker.used_at))
        return found

    def fastest_s(self) -> float:
        """Median duration of the shortest batch that any worker runs."""
        return min((w.levels[w.quickest].median[1] for w in self._workers.values()), default=0.0)

    def luckiest_s(self) -> float:
        """What the shortest batch that any worker runs takes at least, but for one in a hundred."""
        quickest = [worker.levels[worker.quickest] for worker in self._workers.values()]
        return min((times.median[1] ** 2 / times.tail[1] for times in quickest), default=0.0)

    def luckiest_completion(self, now: float) -> float:
        """Before when no ticket that comes now can be done, by far: what is ahead of it and itself are `LUCK` quick.

        Where nothing is ahead of it, before when one in a hundred is done: it is tried at once or not at all.
        """
        found = math.inf
        for worker in self._workers.values():
            times = worker.levels[worker.quickest]
            if not worker.flights:
                found = min(found, worker.free_at(now) + times.median[1] ** 2 / times.tail[1])
                continue
            variance = times.variance[1]
            for flight in worker.flights:
                variance += (flight.tail_s - flight.batch.median_s) ** 2
            found = min(found, worker.free_at(now) + times.median[1] - LUCK * math.sqrt(variance))
        return found

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
            if max(other.busy_until - other.times.overlap_s, now) + other.times.median[queued] < here:
                return True
        return False

    def rusty(self, now: float) -> WorkerState | None:
        """An idle worker whose times nothing has confirmed for a while, the longest unused one; None without one."""
        idle = [
            worker
            for worker in self.idle(now)
            if not worker.flights and now - max(worker.used_at, worker.ended_at) >= TRIAL_AFTER_S
        ]
        return min(idle, key=lambda worker: worker.used_at, default=None)

    def recall(self) -> list[Batch]:
        """Batches taken back from silent workers, from behind the one in the engine."""
        silent = [worker for worker in self._workers.values() if worker.silent and len(worker.flights) == IN_FLIGHT]
        return [batch for worker in silent for batch in worker.recall()]

    def expire(self, now: float) -> list[tuple[Ticket, float]]:
        """Members of batches that wait behind late ones whose deadlines have just passed, and when those may end."""
        return [pair for worker in self._workers.values() for pair in worker.expire(now)]

    def fall_silent(self, now: float) -> list[WorkerState]:
        """Workers whose batch has just become overdue."""
        found = [worker for worker in self._workers.values() if worker.silent_at <= now and not worker.silent]
        for worker in found:
            worker.silent = True
        return found

    def next_event(self, now: float, *, queued: bool) -> float:
        """The next instant at which a worker's state changes by itself; infinite where none does.

        When it takes a batch matters only where something is queued.
        """
        moment = math.inf
        for worker in self._workers.values():
            if not worker.silent and worker.silent_at < moment:
                moment = worker.silent_at
            if worker.expiry_at < moment:
                moment = worker.expiry_at
            if queued and now < worker.open_at < moment:
                moment = worker.open_at
        return moment

    def reckon(self, ticket: Ticket) -> None:
        """Sets what its answer needs, and moves when it is due by how much less than T_sync that is.

        Of several workers', the quickest T_sync counts; where it needs more than that, the slowest.
        """
        ticket.share, moved_s = 1.0, 0.0
        if ticket.work is not WHOLE and self._workers:
            medians = [worker.levels[worker.quickest].median[1] for worker in self._workers.values()]
            ticket.share = ticket.work.needs(min(medians))
            moved_s = (1.0 - ticket.share) * (min(medians) if ticket.share < 1.0 else max(medians))
        ticket.due = ticket.last_due = ticket.deadline + moved_s

    def predicted_completion(self, ahead: float, now: float, without: str = "", share: float = 1.0) -> float:
        """A lower bound of the completion instant of a ticket with `ahead` tickets served before it.

        The ticket takes `share` of what T_sync says of one.

        The work ahead drains at every worker's best throughput, at whichever quality, from the moment it is free; no
        ticket is done before some worker has run a batch of one. Infinite where no worker is left. O(w log w) for w
        workers.
        """
        if len(self._workers) == 1:
            (worker,) = self._workers.values()
            if worker.name == without:
                return math.inf
            alone_s = worker.levels[worker.quickest].median[1]
            return worker.free_at(now) + max(share * alone_s, (ahead + share) / worker.best_rate if ahead else 0.0)
        free = sorted(
            ((worker.free_at(now), worker) for worker in self._workers.values() if worker.name != without),
            key=lambda pair: pair[0],
        )
        if not free:
            return math.inf
        alone = min(at + share * worker.levels[worker.quickest].median[1] for at, worker in free)
        if not ahead:
            return alone
        work = float(ahead + share)
        rate = 0.0
        drained = free[0][0]
        for at, worker in free:
            done = rate * (at - drained)
            if done >= work:
                break
            work -= done
            drained = at
            rate += worker.best_rate
        return max(alone, drained + work / rate)
