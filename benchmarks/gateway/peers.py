"""Scheduling policies of other servers, written from their documentation, and ours behind the same interface."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from taktline_gateway.deadline_queue import Ticket
from taktline_gateway.scheduler import Batch, Plan, Scheduler
from taktline_gateway.service_times import ServiceTimes

from benchmarks.gateway.times import Engine
from benchmarks.gateway.traces import Job

PATIENCE = 0.6
"""Triton's queue timeout as a share of the usual largest budget."""


class Policy(Protocol):
    """One worker's queue. `next_batch` is asked when the worker is free; it may say when to ask again.

    `refuse` is asked after arrivals and when it says so while the worker runs: whoever has timers of their own refuses
    then whom no batch can make any more.
    """

    name: str

    def arrive(self, job: Job, now: float) -> None:
        """A request comes in."""

    def next_batch(self, now: float) -> tuple[Sequence[Job], float | None]:
        """(the batch to start now or nothing, when to ask again if nothing)."""

    def refuse(self, now: float) -> float | None:
        """Refuses whom it has to while the worker runs; when to ask again."""

    def finished(self, size: int, seconds: float) -> None:
        """The batch is done."""


class Fifo:
    """First come, first served: waits a window after the first request, as a plain batching server does."""

    def __init__(self, engine: Engine, window_s: float = 0.020) -> None:
        self.name = f"FIFO + {1e3 * window_s:g} ms"
        self._most = engine.most
        self._window_s = window_s
        self._queue: deque[Job] = deque()

    def arrive(self, job: Job, now: float) -> None:
        """Queues it at the end, whatever its deadline."""
        self._queue.append(job)

    def next_batch(self, now: float) -> tuple[Sequence[Job], float | None]:
        """Everything queued, up to the largest batch, once the oldest has waited its window."""
        if not self._queue:
            return (), None
        ready = self._queue[0].arrival + self._window_s
        if len(self._queue) < self._most and now < ready:
            return (), ready
        return [self._queue.popleft() for _ in range(min(self._most, len(self._queue)))], None

    def refuse(self, now: float) -> float | None:
        """Refuses nobody in between."""
        return None

    def finished(self, size: int, seconds: float) -> None:
        """Learns nothing."""


class TritonLike(Fifo):
    """Dynamic batching with preferred sizes, a queue delay, and a queue timeout that rejects when a batch is formed."""

    def __init__(self, engine: Engine, delay_s: float = 0.005, timeout_s: float | None = None) -> None:
        super().__init__(engine, delay_s)
        self.name = "Triton-like"
        self._timeout_s = PATIENCE * engine.pace.high_ms / 1e3 if timeout_s is None else timeout_s
        self._preferred = [bucket for bucket in engine.buckets if bucket <= engine.most][-4:]

    def next_batch(self, now: float) -> tuple[Sequence[Job], float | None]:
        """The largest preferred size that is there, else what is there after the delay."""
        while self._queue and now - self._queue[0].arrival > self._timeout_s:
            self._queue.popleft()
        if not self._queue:
            return (), None
        ready = self._queue[0].arrival + self._window_s
        preferred = max((size for size in self._preferred if size <= len(self._queue)), default=0)
        if not preferred and now < ready:
            return (), ready
        return [self._queue.popleft() for _ in range(preferred or len(self._queue))], None


class RayLike(Fifo):
    """`@serve.batch`: waits from the moment the batch begins to form, which is when the last one was handed over."""

    def __init__(self, engine: Engine, wait_s: float = 0.010) -> None:
        super().__init__(engine, wait_s)
        self.name = "Ray-Serve-like"
        self._formed_at: float | None = None

    def next_batch(self, now: float) -> tuple[Sequence[Job], float | None]:
        """Up to the largest batch, after the wait since the first member was taken from the queue."""
        if not self._queue:
            self._formed_at = None
            return (), None
        if self._formed_at is None:
            self._formed_at = now
        if len(self._queue) < self._most and now < self._formed_at + self._window_s:
            return (), self._formed_at + self._window_s
        self._formed_at = None
        return [self._queue.popleft() for _ in range(min(self._most, len(self._queue)))], None


class ClockworkLike:
    """Earliest deadline first with known times: drops what cannot be met, runs the largest batch its head allows."""

    name = "Clockwork-like"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue: list[Job] = []

    def arrive(self, job: Job, now: float) -> None:
        """Keeps deadline order."""
        self._queue.append(job)
        self._queue.sort(key=lambda one: one.deadline)

    def next_batch(self, now: float) -> tuple[Sequence[Job], float | None]:
        """Drops the hopeless, then takes the largest bucket that the most urgent request allows."""
        while self._queue and now + self._engine.median_s(1) > self._queue[0].deadline:
            self._queue.pop(0)
        if not self._queue:
            return (), None
        size = 1
        for bucket in self._engine.buckets:
            if bucket <= len(self._queue) and now + self._engine.median_s(bucket) <= self._queue[0].deadline:
                size = bucket
        batch, self._queue = self._queue[:size], self._queue[size:]
        return batch, None

    def refuse(self, now: float) -> float | None:
        """Drops when it forms a batch, which finds the same ones hopeless."""
        return None

    def finished(self, size: int, seconds: float) -> None:
        """Its times are fixed."""


class Ours:
    """The gateway's scheduler itself."""

    name = "Taktline"

    def __init__(self, engine: Engine, max_wait_s: float = 0.005) -> None:
        most = engine.buckets[-1]
        self.times = ServiceTimes(engine.table(), most)
        self.scheduler = Scheduler(max_batch=most, max_wait_s=max_wait_s)
        self.scheduler.add_worker("worker", self.times)
        self._jobs: dict[Ticket, Job] = {}
        self._running: Batch | None = None
        self.refused = 0

    def arrive(self, job: Job, now: float) -> None:
        """Admits or refuses."""
        ticket = Ticket(robot=str(job.robot), seq=job.seq, deadline=job.deadline, arrived_at=now)
        refused, older = self.scheduler.submit(ticket, now)
        if refused is None:
            self._jobs[ticket] = job
        else:
            self.refused += 1
        if older is not None:
            del self._jobs[older]

    def next_batch(self, now: float) -> tuple[Sequence[Job], float | None]:
        """One poll of the scheduler."""
        plan = self._polled(now)
        if not plan.batches:
            return (), plan.wake_at
        self._running = plan.batches[0]
        return [self._jobs.pop(ticket) for ticket in self._running.tickets], None

    def refuse(self, now: float) -> float | None:
        """One poll of the scheduler while its worker is busy: it refuses by timers."""
        return self._polled(now).wake_at

    def _polled(self, now: float) -> Plan:
        plan = self.scheduler.poll(now)
        for refused in plan.refused:
            del self._jobs[refused.ticket]
            self.refused += 1
        return plan

    def finished(self, size: int, seconds: float) -> None:
        """Updates the measured times."""
        if self._running is not None:
            self.scheduler.finished(self._running, seconds)


POLICIES = (Ours, Fifo, TritonLike, RayLike, ClockworkLike)
