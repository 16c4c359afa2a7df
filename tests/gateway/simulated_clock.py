"""A simulated clock around the scheduler, for tests: workers that take exactly their predicted time."""

from __future__ import annotations

from taktline_gateway.deadline_queue import Priority, Ticket
from taktline_gateway.scheduler import Scheduler
from taktline_gateway.service_times import ServiceTimes
from taktline_protocol.messages import BucketTime

TIMES_MS = {1: 10.0, 2: 12.0, 4: 16.0, 8: 24.0}


def service_times(table=TIMES_MS, max_batch=8, tail=1.0):
    rows = [BucketTime(batch=batch, median_ms=ms, p99_ms=ms * tail) for batch, ms in table.items()]
    return ServiceTimes(rows, max_batch)


def scheduler(*, workers=1, max_wait_s=0.0, max_batch=8, table=TIMES_MS, tail=1.0, max_queued=10_000):
    made = Scheduler(max_batch=max_batch, max_wait_s=max_wait_s, max_queued=max_queued)
    for index in range(workers):
        made.add_worker(f"w{index}", service_times(table, max_batch, tail))
    return made


def ticket(robot, deadline, *, at=0.0, seq=1, priority=Priority.PRODUCTION, **fields):
    return Ticket(robot=str(robot), seq=seq, deadline=deadline, arrived_at=at, priority=priority, **fields)


def running(made, name):
    """The batch that a worker has."""
    return made.fleet.get(name).batch


class Simulation:
    """Drives a scheduler event by event, with workers that take exactly their median time."""

    def __init__(self, made):
        self.scheduler = made
        self.now = 0.0
        self.wake_at = None
        self.running = []  # (end, batch)
        self.launched = {}
        self.done = {}  # ticket -> completion
        self.refused = {}
        self.superseded = []
        self.batches = []

    def submit(self, one):
        refused, older = self.scheduler.submit(one, self.now)
        if refused is not None:
            self.refused[one] = refused.reason
        if older is not None:
            self.superseded.append(older)
        return self.poll()

    def poll(self):
        plan = self.scheduler.poll(self.now)
        for refused in plan.refused:
            self.refused[refused.ticket] = refused.reason
        for batch in plan.batches:
            self.batches.append(batch)
            self.running.append((batch.predicted, batch))
            self.launched[batch.worker] = self.now
        self.wake_at = plan.wake_at
        return plan

    def advance(self, until):
        while True:
            events = [end for end, _ in self.running]
            if self.wake_at is not None:
                events.append(max(self.wake_at, self.now))
            upcoming = min(events, default=until)
            if upcoming > until:
                self.now = until
                return
            self.now = upcoming
            for end, batch in [item for item in self.running if item[0] <= self.now]:
                self.running.remove((end, batch))
                self.done.update(dict.fromkeys(batch.tickets, end))
                self.scheduler.finished(batch, end - self.launched[batch.worker])
            self.poll()
            if not self.running and self.wake_at is None:
                self.now = until
                return

    def run(self, arrivals):
        for one in sorted(arrivals, key=lambda item: item.arrived_at):
            self.advance(one.arrived_at)
            self.submit(one)
        self.advance(1e9)
