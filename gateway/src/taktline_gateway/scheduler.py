"""The deadline scheduler of one policy: pure decisions over tickets and workers, with the time handed in.

Nothing here does I/O or reads a clock. The caller tells what happened (`submit`, `cancel`, `finished`, `failed`) and
asks `poll(now)` what to do: which batches to send to which worker, which tickets to refuse and why, and when to ask
again. docs/api.md describes the algorithm to its users.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum

from taktline_gateway.batching import LOOKAHEAD, choose_batch
from taktline_gateway.deadline_queue import DeadlineQueue, Ticket
from taktline_gateway.service_times import ServiceTimes

ACTIVE_ROBOT_S = 2.0
"""A robot that sent nothing for so long is not waited for."""
RATE_MEMORY_S = 1.0
"""Time constant of the arrival rate."""
LOSS_WEIGHT = 1 / 64
"""Weight of the newest ticket in the running share of refused ones."""
TRIAL_AFTER_S = 1.0
"""A worker that sat idle for so long while everything was refused gets a trial, so that its times can be corrected."""
COMPANY_WEIGHT = 1 / 32
"""Weight of the newest gap in the running share of arrivals that follow another within the wait."""


class Refusal(Enum):
    """Why a ticket leaves without an answer from a worker."""

    UNREACHABLE = "unreachable"
    NO_WORKER = "no_worker"
    QUEUE_FULL = "queue_full"


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """A ticket that will not be served, with the prediction behind that decision.

    Attributes:
        completion: predicted instant at which a worker's answer would be there; None where no worker is known.
        retry_s: after how long a new observation has a chance.
    """

    ticket: Ticket
    reason: Refusal
    completion: float | None
    retry_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Tickets to send to one worker now, in service order. `predicted` and `tail` are completion instants."""

    worker: str
    tickets: tuple[Ticket, ...]
    predicted: float
    tail: float


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, and when to ask again (None: at the next event)."""

    batches: tuple[Batch, ...]
    refused: tuple[Refused, ...]
    wake_at: float | None


@dataclasses.dataclass(slots=True)
class _Worker:
    name: str
    times: ServiceTimes
    busy_until: float | None = None  # predicted end of the batch in flight
    suspended_until: float = 0.0
    probation: bool = False  # failed last: it proves itself on a batch of one
    used_at: float = 0.0
    trial: bool = False  # the batch in flight was refused by the table and is sent to check it

    def free_at(self, now: float) -> float:
        free = self.suspended_until if self.busy_until is None else max(self.busy_until, self.suspended_until)
        return max(now, free)


class Scheduler:
    """Earliest deadline first within priority, batches by measured times, work-conserving over several workers."""

    def __init__(self, *, max_batch: int, max_wait_s: float, max_queued: int = 10_000) -> None:
        self.max_batch = max_batch
        self.max_wait_s = max_wait_s
        self.max_queued = max_queued
        self.queue = DeadlineQueue()
        self._workers: dict[str, _Worker] = {}
        self._robots: OrderedDict[str, float] = OrderedDict()
        self._in_flight = 0
        self._trial: Ticket | None = None
        self._last_arrival: float | None = None
        self._company = 0.0
        self._arrivals = _ArrivalRate()
        self._lost = 0.0

    # ----- workers

    def add_worker(self, name: str, times: ServiceTimes, now: float = 0.0) -> None:
        """Makes a worker available. One batch is in flight on it at a time."""
        self._workers[name] = _Worker(name, times, used_at=now)

    def remove_worker(self, name: str) -> None:
        """No more batches go to this worker; a batch in flight is the caller's to finish."""
        self._workers.pop(name, None)

    def workers(self) -> Iterable[str]:
        """Names of the workers that may get batches."""
        return self._workers.keys()

    def finished(self, name: str, size: int, seconds: float) -> None:
        """A batch came back after `seconds`: the worker is free and its times are updated."""
        self._in_flight -= size
        worker = self._workers.get(name)
        if worker is not None:
            worker.busy_until = None
            worker.probation = False
            if worker.trial and seconds < worker.times.median[1]:
                worker.times.rescale(seconds)
            worker.trial = False
            worker.times.record(min(size, worker.times.max_batch), seconds)

    def failed(self, name: str, size: int, suspended_until: float) -> None:
        """A batch failed or hung: the worker gets nothing before `suspended_until`, then a batch of one."""
        self._in_flight -= size
        worker = self._workers.get(name)
        if worker is not None:
            worker.busy_until = None
            worker.trial = False
            worker.suspended_until = suspended_until
            worker.probation = True

    # ----- tickets

    def submit(self, ticket: Ticket, now: float) -> tuple[Refused | None, Ticket | None]:
        """Admits a ticket or refuses it at once.

        A ticket is refused only where no schedule that keeps the tickets ahead of it could meet its deadline, by the
        median times; whoever is admitted and fails to get a slot is refused by `poll` when its last start passes.
        One in `TRIAL_AFTER_S` is admitted against the table where a worker sits idle: a table that refuses everything
        is never measured again, and may be wrong (calibrated on a busy machine, say).

        Returns:
            (refusal or None, the older ticket of the same robot that this one supersedes or None).
        """
        self._note_arrival(ticket.robot, now)
        older = self.queue.queued(ticket.robot)
        if not self._workers:
            return Refused(ticket, Refusal.NO_WORKER, None, 1.0), None
        ahead = self.queue.ahead_of(ticket.deadline, ticket.priority)
        if older is not None and (older.priority, older.deadline) <= (ticket.priority, ticket.deadline):
            ahead -= 1
        completion = self.predicted_completion(ahead, now)
        if completion > ticket.deadline:
            if self._trial is None and not len(self.queue) and self._rusty(now) is not None:
                self._trial = ticket
                return None, None
            self._note_outcome(lost=True)
            return Refused(ticket, Refusal.UNREACHABLE, completion, max(0.001, completion - ticket.deadline)), None
        if older is None and len(self.queue) >= self.max_queued:
            return Refused(ticket, Refusal.QUEUE_FULL, completion, max(0.001, completion - now)), None
        return None, self.queue.add(ticket)

    def resubmit(self, ticket: Ticket, now: float) -> bool:
        """Queues a ticket of a failed batch again where another worker can still make it and no newer one waits."""
        if self.queue.queued(ticket.robot) is not None or not self._workers:
            return False
        ahead = self.queue.ahead_of(ticket.deadline, ticket.priority)
        if self.predicted_completion(ahead, now) > ticket.deadline:
            return False
        ticket.attempts += 1
        self.queue.add(ticket)
        return True

    def cancel(self, ticket: Ticket) -> bool:
        """Takes a ticket out of the queue; False where it is not queued (in flight or done)."""
        if ticket is self._trial:
            self._trial = None
            return True
        return self.queue.remove(ticket)

    def predicted_completion(self, ahead: int, now: float) -> float:
        """A lower bound of the completion instant of a ticket with `ahead` tickets served before it.

        The work ahead drains at every worker's best throughput from the moment it is free; no ticket is done before
        some worker has run a batch of one. O(w log w) for w workers.
        """
        free = sorted(
            ((worker.free_at(now), worker.times) for worker in self._workers.values()), key=lambda pair: pair[0]
        )
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

    # ----- decisions

    def poll(self, now: float) -> Plan:
        """Decides for this instant. Each refused or sent ticket has left the queue when this returns."""
        refused = self._drop_unreachable(now)
        batches = self._launch_trial(now)
        wake_at: float | None = None
        idle = sorted(
            (
                worker
                for worker in self._workers.values()
                if worker.busy_until is None and worker.suspended_until <= now
            ),
            key=lambda worker: (worker.times.median[1], worker.used_at),
        )
        for position, worker in enumerate(idle):
            if not len(self.queue):
                break
            batch, later = self._batch_for(worker, len(idle) - position, now)
            if batch is not None:
                batches.append(batch)
            elif later is not None:
                wake_at = later
                break
        return Plan(tuple(batches), tuple(refused), self._next_wake(wake_at, now))

    def _rusty(self, now: float) -> _Worker | None:
        """An idle worker whose times nothing has confirmed for a while, the longest unused one; None without one."""
        idle = [
            worker
            for worker in self._workers.values()
            if worker.busy_until is None and worker.suspended_until <= now and now - worker.used_at >= TRIAL_AFTER_S
        ]
        return min(idle, key=lambda worker: worker.used_at, default=None)

    def _launch_trial(self, now: float) -> list[Batch]:
        ticket, self._trial = self._trial, None
        worker = self._rusty(now) if ticket is not None else None
        if ticket is None or worker is None:
            if ticket is not None:  # its worker left within this turn: it queues like any other
                self.queue.add(ticket)
            return []
        worker.trial = True
        return [self._launch(worker, [ticket], now)]

    def _launch(self, worker: _Worker, tickets: list[Ticket], now: float) -> Batch:
        size = len(tickets)
        self._in_flight += size
        worker.busy_until = now + worker.times.median[size]
        worker.used_at = now
        return Batch(worker.name, tuple(tickets), worker.busy_until, now + worker.times.tail[size])

    def _batch_for(self, worker: _Worker, idle: int, now: float) -> tuple[Batch | None, float | None]:
        queued = len(self.queue)
        # Idle workers share what waits: two small batches in parallel beat one large one.
        share = -(-queued // idle)
        limit = 1 if worker.probation else max(1, min(share, self.max_batch, worker.times.max_batch))
        soonest = now + worker.times.median[1]
        # What this worker cannot make is left for a faster one; `_drop_unreachable` has refused what none can.
        sight = [ticket for ticket in self.queue.first(LOOKAHEAD) if ticket.deadline >= soonest]
        if not sight:
            return None, None
        wait_until = self._worth_waiting(sight, worker.times, now)
        if wait_until is not None:
            return None, wait_until
        rate_hz = self._arrivals.rate_hz(now) / max(1, len(self._workers))
        start, size = choose_batch(
            [ticket.deadline for ticket in sight], now, worker.times, limit, rate_hz, queued - len(sight), self._lost
        )
        chosen = sight[start : start + size]
        for ticket in chosen:
            self.queue.remove(ticket)
            self._note_outcome(lost=False)
        return self._launch(worker, chosen, now), None

    def _worth_waiting(self, queued: list[Ticket], times: ServiceTimes, now: float) -> float | None:
        """Until when these tickets may wait for company; None to launch now.

        They wait only for robots that may still come, only where arrivals have been following one another within the
        wait, only if one batch could take them all and one more, never beyond the oldest one's wait, and never so long
        that one more member would make any of them late.
        """
        size = len(queued)
        if not self.max_wait_s or size >= min(self.max_batch, times.max_batch) or self._company < 0.5:
            return None
        self._forget_idle_robots(now)
        if len(self._robots) <= size + self._in_flight:
            return None
        latest = min(ticket.deadline for ticket in queued) - times.tail[size + 1]
        until = min(min(ticket.arrived_at for ticket in queued) + self.max_wait_s, latest)
        return until if until > now else None

    def _drop_unreachable(self, now: float) -> list[Refused]:
        """Refuses every ticket whose last possible start has passed, earliest deadline first."""
        refused: list[Refused] = []
        fastest = self._fastest_s()
        while (ticket := self.queue.earliest_deadline()) is not None and ticket.deadline < now + fastest:
            self.queue.remove(ticket)
            self._note_outcome(lost=True)
            reason = Refusal.UNREACHABLE if self._workers else Refusal.NO_WORKER
            completion = self.predicted_completion(0, now) if self._workers else None
            refused.append(Refused(ticket, reason, completion, max(0.001, fastest)))
        return refused

    def _next_wake(self, wake_at: float | None, now: float) -> float | None:
        times = [] if wake_at is None else [wake_at]
        ticket = self.queue.earliest_deadline()
        if ticket is not None:
            # Just past the last start, so that a ticket on the edge still gets its chance.
            times.append(ticket.deadline - self._fastest_s() + 1e-4)
            times.extend(worker.suspended_until for worker in self._workers.values() if worker.suspended_until > now)
        return min(times, default=None)

    def _fastest_s(self) -> float:
        return min((worker.times.median[1] for worker in self._workers.values()), default=0.0)

    def _note_outcome(self, *, lost: bool) -> None:
        self._lost += LOSS_WEIGHT * (float(lost) - self._lost)

    def _note_arrival(self, robot: str, now: float) -> None:
        if self._last_arrival is not None:
            follows = 1.0 if now - self._last_arrival <= self.max_wait_s else 0.0
            self._company += COMPANY_WEIGHT * (follows - self._company)
        self._last_arrival = now
        self._arrivals.note(now)
        self._robots[robot] = now
        self._robots.move_to_end(robot)
        self._forget_idle_robots(now)

    def _forget_idle_robots(self, now: float) -> None:
        while self._robots:
            robot, seen = next(iter(self._robots.items()))
            if now - seen <= ACTIVE_ROBOT_S:
                break
            del self._robots[robot]


class _ArrivalRate:
    """Arrivals a second, forgetting with a time constant of RATE_MEMORY_S."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._at = 0.0

    def note(self, now: float) -> None:
        self._rate = self.rate_hz(now) + 1.0 / RATE_MEMORY_S
        self._at = now

    def rate_hz(self, now: float) -> float:
        return self._rate * math.exp((self._at - now) / RATE_MEMORY_S)
