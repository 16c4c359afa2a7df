"""One worker as the scheduler sees it: the batches on it, when each would end, what it takes next, what it teaches."""

from __future__ import annotations

import dataclasses
import math

from taktline_gateway.deadline_queue import Ticket
from taktline_gateway.overload import Busyness
from taktline_gateway.service_times import ServiceTimes
from taktline_gateway.work import Durations, durations

HANG_FACTOR = 5.0
"""A batch that takes longer than this many times its predicted tail hangs."""
HANG_FLOOR_S = 1.0
SILENT_FACTOR = 1.5
SILENT_FLOOR_S = 0.005
"""A batch that takes longer than this many times its predicted tail, and so much more, makes its worker silent."""
IN_FLIGHT = 2
"""Batches on a worker at most: one in its engine, and one whose frames travel and are decoded meanwhile."""


@dataclasses.dataclass(slots=True)
class Batch:
    """Tickets to send to one worker now, in service order.

    Attributes:
        predicted: completion instant by the median; `tail` by the 99th percentile.
        hangs_at: the instant at which the batch is given up.
        median_s: how long it takes by the median, without a wait for the batch before it.
        level: index of the quality it is run at; 0 is full quality.
    """

    worker: str
    tickets: tuple[Ticket, ...]
    predicted: float
    tail: float
    hangs_at: float = math.inf
    level: int = 0
    sent_at: float = 0.0
    median_s: float = 0.0


@dataclasses.dataclass(slots=True)
class Flight:
    """A batch on its worker.

    Attributes:
        times: the times that it is predicted by.
        takes: median and 99th percentile of its time: tables may change while it flies.
        hidden_s: how much of that passes while the batch before it still runs.
        began: from when its time counts: when it was sent, or would have been had the batch before it ended sooner.
        end: predicted end.
        silent_at: the instant from which it counts as silent.
        unexpired: members whose deadlines have not passed while it waited, the most urgent last.
    """

    batch: Batch
    times: ServiceTimes
    takes: Durations
    hidden_s: float
    began: float = 0.0
    end: float = 0.0
    silent_at: float = math.inf
    unexpired: list[Ticket] = dataclasses.field(default_factory=list)

    @property
    def tail_s(self) -> float:
        """The 99th percentile of its time."""
        return self.takes.tail_s

    def count_from(self, began: float) -> None:
        """Predicts it anew."""
        self.began = began
        self.end = began + self.batch.median_s
        self.silent_at = began + SILENT_FACTOR * self.tail_s + SILENT_FLOOR_S
        patient = max((ticket.deadline for ticket in self.batch.tickets if ticket.extra), default=None)
        if patient is not None:  # it may take as long as its robot waits
            self.silent_at = max(self.batch.hangs_at, patient)


@dataclasses.dataclass(slots=True)
class WorkerState:
    """One worker and the batches on it, which it runs one after the other.

    The next batch is sent `overlap_s` before the one in the engine is expected back: its frames travel and are decoded
    while that one runs, and the engine goes from one to the other. To the scheduler such a worker is free so much
    sooner, and each of its batches takes what it takes alone.

    Attributes:
        levels: its times at full quality, then at each cheaper level, see `quality`.
        used_at: when it was last given a batch; `ended_at`, when it last answered one.
        flights: the batches on it, in the order in which it runs them.
        silent: the first of them is overdue, and their members were offered to the other workers.
        probation: it failed last: it proves itself on a batch of one.
        trial: the batch in flight was refused by the table and is sent to check it.
        busyness: how much of its recent time it was busy.
    """

    name: str
    levels: tuple[ServiceTimes, ...]
    flights: list[Flight] = dataclasses.field(default_factory=list)
    used_at: float = 0.0
    ended_at: float = 0.0
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
    def quickest(self) -> int:
        """The level that a batch of one ends soonest at, the mildest of equals.

        Not always the last: fewer actions may save more of a full batch, and fewer steps more of a batch of one.
        """
        if len(self.levels) == 1:
            return 0
        found = 0
        for level, times in enumerate(self.levels):
            if times.median[1] < self.levels[found].median[1]:
                found = level
        return found

    @property
    def best_rate(self) -> float:
        """Its highest throughput at any level, in observations a second."""
        if len(self.levels) == 1:
            return self.levels[0].best_rate
        return max(times.best_rate for times in self.levels)

    @property
    def batch(self) -> Batch | None:
        """The batch that its engine runs."""
        return self.flights[0].batch if self.flights else None

    @property
    def busy_until(self) -> float | None:
        """Predicted end of all that it has; None where it has nothing."""
        return self.flights[-1].end if self.flights else None

    @property
    def silent_at(self) -> float:
        """The instant from which it counts as silent."""
        return self.flights[0].silent_at if self.flights else math.inf

    @property
    def open_at(self) -> float:
        """From when it takes a batch, by the clock alone; infinite where it must end one first."""
        if self.probation or self.trial:
            return math.inf if self.flights else self.suspended_until
        if not self.flights:
            return self.suspended_until
        if len(self.flights) == IN_FLIGHT or self.silent or not self.times.overlap_s:
            return math.inf
        return max(self.flights[0].end - self.times.overlap_s, self.suspended_until)

    def free_at(self, now: float) -> float:
        """When it can start a batch. One that is overdue is expected to take as long again as it is overdue."""
        busy = self.busy_until
        if busy is None:
            return max(now, self.suspended_until)
        if busy < now:
            busy = now + (now - busy)
        return max(now, busy - self.times.overlap_s, self.suspended_until)

    def launch(self, tickets: tuple[Ticket, ...], level: int, now: float) -> Batch:
        """Starts a batch."""
        times, size = self.levels[level], len(tickets)
        hidden_s = times.hidden_s(size)
        began = max(now, self.flights[0].end - hidden_s) if self.flights else now
        takes = durations(tickets, times, began)
        median_s, tail_s = takes.median_s, takes.tail_s
        hangs_at = now + max(HANG_FLOOR_S, HANG_FACTOR * tail_s)
        patient = max((ticket.deadline for ticket in tickets if ticket.extra), default=None)
        if patient is not None:
            hangs_at = max(hangs_at, patient)
        if self.flights:  # the batch before it may take as long
            hangs_at += max(0.0, self.flights[0].batch.hangs_at - now)
        batch = Batch(self.name, tickets, began + median_s, began + tail_s, hangs_at, level, now, median_s)
        flight = Flight(batch, times, takes, hidden_s)
        flight.count_from(began)
        if self.flights:
            flight.unexpired = sorted(tickets, key=lambda ticket: -ticket.deadline)
        self.flights.append(flight)
        self.used_at = now
        return batch

    def idle(self, now: float) -> bool:
        """Whether it can start a batch now; one that is late is not followed."""
        return self.open_at <= now and (not self.flights or now <= self.flights[0].end + self.times.overlap_s)

    @property
    def expiry_at(self) -> float:
        """When the next of those that wait behind a late batch has lost its deadline."""
        if len(self.flights) < IN_FLIGHT or not self.flights[1].unexpired:
            return math.inf
        return max(self.flights[0].end, self.flights[1].unexpired[-1].deadline)

    def expire(self, now: float) -> list[tuple[Ticket, float]]:
        """Those that have lost theirs since it was asked last, and when their batch may end; it stays."""
        found = []
        while self.expiry_at <= now:
            waiting = self.flights[1]
            may_end = max(waiting.end, now + waiting.batch.median_s - waiting.hidden_s)
            found.append((waiting.unexpired.pop(), may_end))
        return found

    def recall(self) -> list[Batch]:
        """Takes back the batches behind the one in the engine."""
        recalled = [flight.batch for flight in self.flights[1:]]
        del self.flights[1:]
        return recalled

    def learn(
        self, flight: Flight, seconds: float, inference_s: float | None, outside_s: float, waited_s: float
    ) -> None:
        """Takes in what a batch took whose engine ran (`Scheduler.finished`); nothing of one with more than actions.

        Of work that was ended nobody knows what all of it takes; but that it was answered at all bounds the least.
        """
        tickets, times, takes = flight.batch.tickets, flight.times, flight.takes
        if any(ticket.extra for ticket in tickets):
            return
        cut = takes.was_cut(seconds - waited_s)
        share = takes.least if cut else takes.share
        if self.trial and seconds < share * times.median[1]:
            times.rescale(seconds / share)
        if inference_s is not None:
            times.note_network(seconds - inference_s)
        if not cut:
            times.record(len(tickets), (seconds - waited_s) / share)
        self.times.note_outside(len(tickets), outside_s)

    def release(self, batch: Batch, ended_at: float | None) -> Flight | None:
        """A batch has left it, answered at `ended_at` or failed (None); None where the batch is not this worker's."""
        for index, flight in enumerate(self.flights):
            if flight.batch is batch:
                del self.flights[index]
                break
        else:
            return None
        if ended_at is not None:
            self.ended_at = ended_at
        if index == 0:
            self.silent = False
            if self.flights and ended_at is not None:  # its engine has begun the next one, however early or late
                following = self.flights[0]
                following.count_from(max(following.batch.sent_at, ended_at - following.hidden_s))
        return flight
