"""The deadline scheduler of one policy: pure decisions over tickets and workers, with the time handed in.

Nothing here does I/O or reads a clock. The caller tells what happened (`submit`, `cancel`, `finished`, `failed`) and
asks `poll(now)` what to do: which batches to send to which worker, which tickets to refuse and why, and when to ask
again. docs/scheduling.md describes the algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from taktline_gateway.arrivals import Arrivals
from taktline_gateway.company import Company
from taktline_gateway.composition import compose
from taktline_gateway.deadline_queue import DeadlineQueue, Priority, Ticket
from taktline_gateway.decisions import Plan, Refusal, Refused
from taktline_gateway.fleet import TRIAL_AFTER_S, Fleet
from taktline_gateway.long_shot import LongShot
from taktline_gateway.overload import price_hz
from taktline_gateway.queue_books import QueueBooks
from taktline_gateway.service_times import ServiceTimes
from taktline_gateway.table_trial import TableTrial
from taktline_gateway.worker_state import Batch, WorkerState

__all__ = ["TRIAL_AFTER_S", "Batch", "Plan", "Refusal", "Refused", "Scheduler"]

AHEAD_SERVED = 0.25
"""So much of the work ahead of a ticket counts when it is admitted: of those ahead many may be lost, and leave."""
DROPS_A_POLL = 4
"""Tickets refused in one decision; none in one that starts a batch, which waits for none. The next follows at once."""


class Scheduler:
    """Earliest deadline first within priority and share, batches by measured times, work-conserving over workers."""

    def __init__(
        self,
        *,
        max_batch: int,
        max_wait_s: float,
        max_queued: int = 10_000,
        goes_elsewhere: Callable[[Ticket], bool] = lambda _: False,
    ) -> None:
        """`goes_elsewhere` says of a ticket whether another policy may take it when it is refused here."""
        self.max_batch = max_batch
        self.max_wait_s = max_wait_s
        self.max_queued = max_queued
        self.queue = DeadlineQueue()
        self.fleet = Fleet()
        self.arrivals = Arrivals()
        self._books = QueueBooks(self.queue)
        self._company = Company(self.arrivals)
        self._in_flight = 0
        self._displaced: list[Refused] = []
        self._trial = TableTrial(self.fleet)
        self._long = LongShot(self.fleet, self.arrivals, goes_elsewhere)

    # ----- workers

    def add_worker(
        self, name: str, times: ServiceTimes, now: float = 0.0, cheaper: tuple[ServiceTimes, ...] = ()
    ) -> None:
        """Makes a worker available; `cheaper` are its times when degraded."""
        self.fleet.add(name, (times, *cheaper), now)
        self._company.forget()

    def set_cheaper(self, name: str, cheaper: tuple[ServiceTimes, ...]) -> None:
        """What a worker may be asked for below full quality has changed; a batch in flight stays as it is."""
        worker = self.fleet.get(name)
        if worker is not None:
            worker.levels = (worker.times, *cheaper)
            self._company.forget()

    def remove_worker(self, name: str) -> None:
        """No more batches go to this worker; a batch in flight is the caller's to finish."""
        self.fleet.remove(name)

    def workers(self) -> Iterable[str]:
        """Names of the workers that may get batches."""
        return self.fleet.names()

    def worker_state(self, name: str, now: float) -> str:
        """What a worker does: busy, suspended (it failed and rests), idle, or down where it is not known here."""
        worker = self.fleet.get(name)
        if worker is None:
            return "down"
        if worker.busy_until is not None:
            return "busy"
        return "suspended" if worker.suspended_until > now else "idle"

    def times(self, name: str) -> ServiceTimes | None:
        """The times that a worker's batches are predicted by; None where it is not known here."""
        worker = self.fleet.get(name)
        return None if worker is None else worker.times

    def finished(
        self,
        batch: Batch,
        seconds: float,
        inference_s: float | None = None,
        outside_s: float = 0.0,
        waited_s: float | None = None,
        *,
        measured: bool = True,
    ) -> None:
        """A batch came back: its worker is free and its times are updated.

        A worker that left during the batch and came again is another one here: what the old one's batch does says
        nothing of the batch that the new one has.

        Args:
            seconds: from send to answer.
            inference_s: the worker's own part of that, where it told; the rest is the network's.
            outside_s: the part of `seconds` that its engine did not need, during which it could run another batch.
            waited_s: the part that it waited at the worker for the batch before it, where that told.
            measured: whether the engine ran; a batch of refusals teaches the table nothing, nor does one with more
                than actions in it.
        """
        self._in_flight -= len(batch.tickets)
        released = self.fleet.release(batch, batch.sent_at + seconds)
        if released is not None:
            worker, flight = released
            if waited_s is None:
                waited_s = flight.began - batch.sent_at
            worker.busyness.note(flight.began, seconds - waited_s)
            worker.probation = False
            if measured:
                worker.learn(flight, seconds, inference_s, outside_s, waited_s)
            if worker.trial:  # its table may have been rescaled
                self._company.forget()
            worker.trial = False
        self._books.settle()
        if released is not None and not released[0].flights and not len(self.queue):
            self._books.forgive()  # with another batch on it, it does not idle: some of that one may have come late

    def failed(self, batch: Batch, suspended_until: float) -> None:
        """A batch failed or hung: its worker gets nothing before `suspended_until`, then a batch of one."""
        self._in_flight -= len(batch.tickets)
        released = self.fleet.release(batch, None)
        if released is not None:
            worker, _ = released
            worker.trial = False
            worker.suspended_until = suspended_until
            worker.probation = True
            self._company.forget()

    # ----- tickets

    def submit(self, ticket: Ticket, now: float) -> tuple[Refused | None, Ticket | None]:
        """Admits a ticket or refuses it at once.

        A ticket is refused only where no worker could meet its deadline, by the median times, if it served no more than
        `AHEAD_SERVED` of those ahead of it first; `poll` refuses who gets no slot before its last start, or gives way
        to a higher class or share in a full queue. Beside the queue one is kept against the table (`table_trial`), and
        one that may be quick for once (`long_shot`).

        Returns: (refusal or None, the older ticket of the same robot that this one supersedes or None).
        """
        self.fleet.reckon(ticket)
        self.arrivals.note(ticket.source, now, self.max_wait_s, ticket.last_due - now)
        if ticket.priority <= Priority.PRODUCTION:
            self.arrivals.note_budget(ticket.last_due - now, now)
        if not len(self.fleet):
            return Refused(ticket, Refusal.NO_WORKER, None, 1.0), None
        older = self.queue.queued(ticket.source)
        rank = self._books.ask(ticket, now)
        ahead = self.queue.ahead_of(ticket.due, rank)
        if older is not None and (older.rank, older.due) <= (rank, ticket.due):
            ahead -= 1
        completion = self.fleet.predicted_completion(
            AHEAD_SERVED * ahead * self.queue.usual_share, now, share=ticket.share
        )
        if completion > ticket.deadline:
            tried, chanced = self._trial.of(ticket.source), self._long.of(ticket.source)
            if not len(self.queue) and self._trial.take(ticket, now):
                return None, tried or (self._long.drop() if chanced is not None else None)
            # Those who wait go before it: behind more than a batch of them it has no chance worth keeping it for.
            near = older is None and tried is None and len(self.queue) < self.max_batch * len(self.fleet)
            behind_s = completion - self.fleet.predicted_completion(0, now) if near and len(self.queue) else 0.0
            if near and self._long.take(ticket, now, behind_s, chanced):
                return None, chanced
            self._books.turn_away(ticket)
            return Refused(ticket, Refusal.UNREACHABLE, completion, max(0.001, completion - ticket.deadline)), None
        if older is None and len(self.queue) >= self.max_queued:
            last = self._books.displace(rank)
            full = Refused(last or ticket, Refusal.QUEUE_FULL, completion, max(0.001, completion - now))
            if last is None:
                return full, None
            self._displaced.append(full)
        older = self.waits(ticket.source)
        self._put_in(ticket, rank)
        return None, older

    def resubmit(self, ticket: Ticket, now: float, avoid: str = "") -> bool:
        """Queues a ticket of a failed or silent batch again, unless a newer one waits or no other worker can make it.

        An older one that waits leaves, as on `submit`; ask `waits` before.

        Args:
            avoid: the worker that has the ticket and does not answer; it does not count as one that could.
        """
        if self._newer(ticket) is not None or not len(self.fleet):
            return False
        rank = self._books.rank(ticket, now)
        ahead = self.queue.usual_share * self.queue.ahead_of(ticket.due, rank)
        if self.fleet.predicted_completion(AHEAD_SERVED * ahead, now, avoid, ticket.share) > ticket.deadline:
            return False
        ticket.attempts += 1
        self._put_in(ticket, rank)
        return True

    def requeue(self, ticket: Ticket, now: float) -> Ticket | None:
        """As `resubmit`, of one that its worker had not begun; where a newer one of its robot waits, gives that one."""
        newer = self._newer(ticket)
        if newer is None:
            self._put_in(ticket, self._books.rank(ticket, now))
        return newer

    def waits(self, source: tuple[str, str]) -> Ticket | None:
        """What waits of a robot."""
        return self._trial.of(source) or self.queue.queued(source) or self._long.of(source)

    def _newer(self, ticket: Ticket) -> Ticket | None:
        waits = self.waits(ticket.source)
        return waits if waits is not None and waits.arrived_at >= ticket.arrived_at else None

    def _put_in(self, ticket: Ticket, rank: int) -> None:
        if (older := self.waits(ticket.source)) is not None:
            self.cancel(older)
        self._books.add(ticket, rank)

    def cancel(self, ticket: Ticket) -> bool:
        """Takes a ticket out of the queue; False where it is not queued (in flight or done)."""
        for held in (self._trial, self._long):
            if ticket is held.ticket:
                held.drop()
                return True
        return self._books.remove(ticket)

    @property
    def depth(self) -> int:
        """How many tickets have been admitted and are on no worker."""
        return len(self.queue) + (self._trial.ticket is not None) + (self._long.ticket is not None)

    def waiting(self) -> list[Ticket]:
        """Those tickets, in service order."""
        return [*(ticket for ticket in (self._trial.ticket, self._long.ticket) if ticket is not None), *self.queue]

    # ----- decisions

    def poll(self, now: float) -> Plan:
        """Decides for this instant. Each refused or sent ticket has left the queue when this returns."""
        batches = self._launch_trial(now)
        silent = [worker.flights[0].batch for worker in self.fleet.fall_silent(now)]
        recalled = self.fleet.recall()
        expired = []
        for ticket, may_end in self.fleet.expire(now):
            self._books.turn_away(ticket)
            expired.append(Refused(ticket, Refusal.UNREACHABLE, may_end, max(0.001, may_end - now)))
        for back in recalled:
            self._in_flight -= len(back.tickets)
            self._books.take_back(back.tickets)
        wake_at = math.inf
        if len(self.queue):
            moved = self._books.aged(now)
            if moved is not None:
                self._move_up(moved, now)
            idle = self.fleet.idle(now)
            for position, worker in enumerate(idle):
                batch, later = self._batch_for(worker, len(idle) - position, now)
                if batch is not None:
                    batches.append(batch)
                    if not len(self.queue):
                        break
                elif later is not None:
                    wake_at = later
                    break
        fastest = self.fleet.fastest_s()
        refused, self._displaced = self._displaced + ([] if batches else self._drop_unreachable(fastest, now)), []
        if not batches and not len(self.queue):
            batches = self._try(now)
        wake = self._next_wake(wake_at, fastest, now)
        return Plan(tuple(batches), tuple(refused), wake, tuple(silent), tuple(recalled), tuple(expired))

    def _launch_trial(self, now: float) -> list[Batch]:
        batch = self._trial.launch(now)
        if batch is not None:
            self._in_flight += 1
            return [batch]
        if (ticket := self._trial.drop()) is not None:  # its worker left within this turn: it queues like any other
            self._books.add(ticket, self._books.rank(ticket, now))
        return []

    def _try(self, now: float) -> list[Batch]:
        """The ticket that nobody is expected to make goes to a worker that has nothing else to do."""
        worker = self._long.worker(now)
        ticket = None if worker is None else self._long.drop()
        if worker is None or ticket is None:
            return []
        self._in_flight += 1
        return [worker.launch((ticket,), worker.quickest, now)]

    def _batch_for(self, worker: WorkerState, idle: int, now: float) -> tuple[Batch | None, float | None]:
        # Idle workers share what waits: two small batches in parallel beat one large one.
        share = -(-len(self.queue) // idle)
        limit = 1 if worker.probation else max(1, min(share, self.max_batch, worker.times.max_batch))
        # Behind a batch, its time counts from when it would begin to hold up the engine.
        begins = max(now, worker.flights[0].end - worker.times.hidden_s(limit)) if worker.flights else now
        if self.fleet.sooner_elsewhere(worker, len(self.queue), begins):
            return None, None
        if len(self.queue) == 1 and not self.max_wait_s and len(worker.levels) == 1:
            return self._send_the_only(worker, begins, now), None
        price = price_hz(
            self._books.lost,
            worker.busyness.share(now),
            self.arrivals.usual_budget_s,
            self.arrivals.budget_spread_s,
            self.arrivals.tightest_s(now),
            worker.times,
            limit,
        )
        most, oldest = 1 if worker.probation else self.max_batch, self.queue.first_came
        choice = compose(
            self.queue,
            worker.levels,
            begins,
            limit,
            arrivals=self.arrivals,
            workers=max(1, len(self.fleet)),
            asked_at=now,
            price_hz=price,
            company_until=lambda dues, going: self._company.until(
                dues,
                going,
                oldest,
                worker.times,
                most,
                workers=len(self.fleet),
                in_flight=self._in_flight,
                max_wait_s=self.max_wait_s,
                begins=begins,
                price_hz=price,
                now=now,
            ),
            foresees=lambda dues: self._company.foreseen(
                dues, oldest, worker.times, most, len(self.fleet), self.max_wait_s, begins=begins, now=now
            ),
        )
        if not choice.tickets:  # it waits, or what this worker cannot make is left for a faster one
            return None, choice.wait_until
        self._books.take(choice.slices, choice.tickets)
        self._in_flight += len(choice.tickets)
        return worker.launch(choice.tickets, choice.level, now), None

    def _send_the_only(self, worker: WorkerState, begins: float, now: float) -> Batch | None:
        """What `compose` comes to where nobody may be waited for and quality cannot be lowered: it goes, or is late."""
        ticket = self.queue.earliest()
        if ticket is None or ticket.due < begins + worker.times.median[1]:
            return None
        self._books.take(((ticket.rank, 0, 1),), (ticket,))
        self._in_flight += 1
        return worker.launch((ticket,), 0, now)

    def _drop_unreachable(self, fastest: float, now: float) -> list[Refused]:
        """Refuses tickets whose last possible start has passed, earliest first."""
        refused: list[Refused] = []
        if self._long.ends_at <= now and (given_up := self._long.drop()) is not None:
            refused.append(self._lost(given_up, fastest, now))
        while (ticket := self.queue.earliest()) is not None and ticket.due < now + fastest:
            if ticket.due < ticket.last_due:  # moved up by ageing, and passed over: its deadline still stands
                self._move_up(ticket, now)
                continue
            self._books.remove(ticket)
            if self._long.take(ticket, now):
                continue
            refused.append(self._lost(ticket, fastest, now))
            if len(refused) == DROPS_A_POLL:
                break
        return refused

    def _lost(self, ticket: Ticket, retry_s: float, now: float) -> Refused:
        self._books.turn_away(ticket)
        completion = self.fleet.predicted_completion(0, now, share=ticket.share) if len(self.fleet) else None
        reason = Refusal.NO_WORKER if completion is None else Refusal.UNREACHABLE
        return Refused(ticket, reason, completion, max(0.001, retry_s))

    def _move_up(self, ticket: Ticket, now: float) -> None:
        """Puts a ticket among production's, due when the longest batch that may run now has ended and a next one."""
        due = min(ticket.last_due, now + 2.0 * self.fleet.longest_s())
        self._books.move_up(ticket, max(now + self.fleet.fastest_s(), due))

    def _next_wake(self, wake_at: float, fastest: float, now: float) -> float | None:
        ticket = self.queue.earliest() if len(self.queue) else None
        if ticket is not None:
            # Just past the last start, so that a ticket on the edge still gets its chance.
            wake_at = min(wake_at, ticket.due - fastest + 1e-4)
        wake_at = min(wake_at, self._long.ends_at + 1e-4, self.fleet.next_event(now, queued=ticket is not None))
        return None if wake_at == math.inf else wake_at
