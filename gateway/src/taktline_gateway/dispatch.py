"""Batches of one policy on their way: sends what the scheduler decides, delivers answers, hedges, retries, gives up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from taktline_protocol import ErrorCode, TaktlineError, worker_pb2
from taktline_protocol.messages import CheaperLevel

from taktline_gateway.batch_channel import WorkerCallError
from taktline_gateway.deadline_queue import Priority, Ticket
from taktline_gateway.degrade import Levels
from taktline_gateway.logs import log
from taktline_gateway.pending import (
    ClientGone,
    Pending,
    behind_answers,
    failing,
    is_away,
    outside_s,
    read_result,
    results_of,
    waited_s,
)
from taktline_gateway.phases import PhasePlanner
from taktline_gateway.refusals import internal_error, superseded, worker_failed
from taktline_gateway.rtc_delay import estimate_delay
from taktline_gateway.scheduler import Batch, Refused, Scheduler
from taktline_gateway.sent_batch import SentBatch, rows_of
from taktline_gateway.telemetry import Telemetry
from taktline_gateway.tracing.requests import begin_batch
from taktline_gateway.worker_link import WorkerLink

MAX_ATTEMPTS = 2
RETRIED = frozenset({ErrorCode.WORKER_UNAVAILABLE, ErrorCode.OVERLOADED})
"""What a worker says of an observation that it did not look at; another worker may take it."""
SUSPEND_S = 0.25
SUSPEND_MAX_S = 8.0
_logger = logging.getLogger(__name__)


class Dispatch:
    """The loop around one scheduler.

    Attributes:
        seats: worker name of the scheduler -> its link; a worker with replicas has one seat for each.
        levels: link name -> the qualities below full that its worker may be asked for.
        in_flight: observations on workers; one that was hedged counts twice.
    """

    def __init__(
        self,
        policy: str,
        scheduler: Scheduler,
        telemetry: Telemetry,
        phases: PhasePlanner,
        refuse: Callable[[Refused, float], None],
    ) -> None:
        """`refuse` is told of each observation that left the queue unserved."""
        self.seats: dict[str, WorkerLink] = {}
        self.levels: dict[str, Levels] = {}
        self.in_flight = 0
        self._policy = policy
        self._scheduler = scheduler
        self._telemetry = telemetry
        self._phases = phases
        self._refuse = refuse
        self._poll_soon = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[int, asyncio.Task[None]] = {}  # by id of the batch
        self._recalled: set[int] = set()  # so, until their calls have ended: their members are taken care of
        self._endings: list[Callable[[], None]] = []  # of batches that have come back, untold to the scheduler

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` beside the loop; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def stop(self) -> None:
        """No more decisions."""
        if self._timer is not None:
            self._timer.cancel()

    async def close(self) -> None:
        """Waits for what is in flight; its channels are closed, so that it ends at once."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def poll_later(self) -> None:
        """Decides soon: one decision for all arrivals of this turn of the event loop."""
        if not self._poll_soon:
            self._poll_soon = True
            asyncio.get_running_loop().call_soon(self._poll)

    def _poll(self) -> None:
        self._poll_soon = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._end_landed()
        now = time.monotonic()
        plan = self._scheduler.poll(now)
        for refused in plan.refused:
            if not self.elsewhere(refused.ticket):
                self._refuse(refused, now)
        for recalled in plan.recalled:  # before those that they waited for: of a robot in both, they have the newer one
            self._recall(recalled, now)
        for silent in plan.silent:
            self._hedge(silent, now)
        for expired in plan.expired:
            ticket = expired.ticket
            if isinstance(ticket, Pending) and ticket.flights == 1 and ticket not in self._scheduler.queue:
                self._refuse(expired, now)
        for batch in plan.batches:
            self.in_flight += len(batch.tickets)
            for ticket in batch.tickets:
                if isinstance(ticket, Pending):
                    ticket.flights += 1
            link = self.seats[batch.worker]
            call = self._calls[id(batch)] = self.spawn(self._send(link, batch, now))
            call.add_done_callback(partial(self._landed, batch))
            self._telemetry.batch(self._policy, link.target.pool, link.revision, len(batch.tickets))
        if plan.wake_at is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, plan.wake_at - now), self._poll)

    def _landed(self, batch: Batch, _: asyncio.Task[None]) -> None:
        self.in_flight -= len(batch.tickets)
        self._calls.pop(id(batch), None)
        self._recalled.discard(id(batch))

    def _send(self, link: WorkerLink, batch: Batch, sent_at: float) -> Coroutine[Any, Any, None]:
        """Sends a batch, where that need not wait; what it gives does the rest."""
        members = [ticket for ticket in batch.tickets if isinstance(ticket, Pending)]
        level = self._level(link, batch)
        trace = begin_batch([member.trace for member in members], sent_at, link.name)
        sent = SentBatch(link, batch, members, sent_at, level, trace)
        try:
            request = worker_pb2.InferRequest(policy=self._policy, revision=link.revision)
            if level is not None:
                request.solver_steps, request.action_horizon = level.solver_steps, level.action_horizon
            for member in members:
                member.item.budget_ms = 1e3 * (member.deadline - sent_at)
                if member.outside_s is not None:
                    estimate_delay(member.item, link.info, member.outside_s + batch.predicted - member.arrived_at)
            items = [(member.item, member.images) for member in members]
            came = partial(self._came, sent)
            answer = link.infer(request, items, batch.hangs_at - sent_at, trace.metadata, came)
        except Exception as error:
            answer = failing(error)
        return self._run(sent, answer)

    def _came(self, sent: SentBatch, response: worker_pb2.InferResponse) -> None:
        """A response, in the turn that read it: the robots have their answers before anything else is done.

        Only where no other observation waits or is on a worker, and each has its actions: else others wait for what
        follows.
        """
        members = sent.members
        if self._scheduler.depth or self.in_flight != len(members) or rows_of(response) != len(members):
            return
        if id(sent.batch) in self._recalled:
            return
        sent.seconds = time.monotonic() - sent.sent_at
        self._deliver(sent, response)
        for member in members:
            served = member.result
            if member.tell is None or not served.done() or served.cancelled():
                continue
            if served.exception() is None:
                member.tell(served.result())

    async def _run(self, sent: SentBatch, answer: Awaitable[worker_pb2.InferResponse]) -> None:
        link, batch, members, trace = sent.link, sent.batch, sent.members, sent.trace
        try:
            response = await answer
        except WorkerCallError as error:
            trace.end(error.code)
            if id(batch) in self._recalled:
                return
            self._batch_failed(link, batch, members, str(error)[:300])
            return
        except asyncio.CancelledError:
            trace.end("CANCELLED")
            if id(batch) in self._recalled:
                return
            self._batch_failed(link, batch, members, "the channel was closed")
            raise
        except Exception as error:  # a fault of ours must not leave robots without an answer, nor its worker busy
            log(_logger, logging.ERROR, "internal", exc_info=True, policy=self._policy, worker=link.name)
            trace.end("INTERNAL")
            self._batch_failed(link, batch, members, f"the gateway failed on it: {type(error).__name__}")
            return
        trace.end()
        if id(batch) in self._recalled:
            return
        seconds, rows = sent.seconds, rows_of(response)
        # Whoever waits for the worker waits for this; what a member's error leads to asks who is free.
        at_once = self._scheduler.depth > 0 or rows < len(members)
        if seconds is None:
            seconds = time.monotonic() - sent.sent_at
            if at_once:
                self._ended(sent, response, seconds, rows)
            self._deliver(sent, response)
        elif at_once:
            self._ended(sent, response, seconds, rows)
        if at_once:
            self.poll_later()  # so that those count whose frames this turn has read, of many robots half as many again
        else:
            self._endings.append(partial(self._ended, sent, response, seconds, rows))
            behind_answers(self._poll_if_landed)

    def _poll_if_landed(self) -> None:
        """Decides, unless a decision has been made since the batch came back that was looked out for."""
        if self._endings:
            self._poll()

    def _end_landed(self) -> None:
        """Before any decision: a batch that has come back is neither silent nor to be recalled."""
        endings, self._endings = self._endings, []
        for end in endings:
            end()

    def _ended(self, sent: SentBatch, response: worker_pb2.InferResponse, seconds: float, rows: int) -> None:
        """A batch came back after `seconds` with so many rows of actions: its worker is free, and what it taught."""
        link, batch, sent_at = sent.link, sent.batch, sent.sent_at
        if response.results and all(is_away(result) for result in response.results):
            # It lives and cannot serve, such as a mesh that has lost a rank: its quick answers must attract nobody.
            self._scheduler.failed(batch, self._rests_until(link, sent_at, time.monotonic()))
        else:
            link.failures = 0
            told = outside_s(response, seconds), waited_s(response)
            self._scheduler.finished(batch, seconds, response.total_ms / 1e3, *told, measured=rows > 0)
        behind_answers(
            partial(
                self._telemetry.batch_finished,
                self._policy,
                link.target.pool,
                sent.revision(response),
                rows,
                response.bucket,
                seconds - (waited_s(response) or 0.0),
                batch.median_s,
            )
        )

    def _deliver(self, sent: SentBatch, response: worker_pb2.InferResponse) -> None:
        """Gives each member its result; a fault of ours must not leave robots without one."""
        try:
            self._hand_out(sent, response)
        except Exception:
            log(_logger, logging.ERROR, "internal", exc_info=True, policy=self._policy, worker=sent.link.name)
            for member in sent.members:
                self.fail(member, internal_error())

    def _hand_out(self, sent: SentBatch, response: worker_pb2.InferResponse) -> None:
        returned_at = time.monotonic()
        for member, result in zip(sent.members, results_of(sent.members, response.results), strict=True):
            member.flights -= 1
            if member.result.done():
                continue
            try:
                made = read_result(result, sent.link.name)
            except TaktlineError as error:
                if error.code in RETRIED and self._again(member, returned_at):
                    continue
                if error.code in (ErrorCode.WORKER_FAILED, *RETRIED) and self.elsewhere(member):
                    continue
                self._scheduler.cancel(member)
                self.fail(member, error)
                continue
            self._scheduler.cancel(member)  # a hedged copy may still be queued
            if member.hedged is not None and member.hedged is not sent.batch:
                self._telemetry.hedge_won(self._policy)
            next_at = self._next_at(member, sent.batch.worker, returned_at)
            instead = self._policy if member.policy != self._policy else ""
            member.result.set_result(sent.served(made, response, returned_at, next_at, instead))

    def _level(self, link: WorkerLink, batch: Batch) -> CheaperLevel | None:
        return self.levels[link.name].qualities[batch.level - 1] if batch.level else None

    def _next_at(self, member: Pending, seat: str, now: float) -> float | None:
        """When the robot's next observation should arrive here, so that the fleet fills batches evenly."""
        times = self._scheduler.times(seat)
        if times is None or member.priority > Priority.PRODUCTION or member.policy != self._policy:
            return None
        slack_s = member.deadline - member.arrived_at - 2.0 * times.tail[times.max_batch]
        return self._phases.next_at(member.source, now, slack_s, times, len(self.seats))

    def _batch_failed(self, link: WorkerLink, batch: Batch, members: list[Pending], reason: str) -> None:
        now = time.monotonic()
        rests_until = self._rests_until(link, batch.sent_at, now)
        self._scheduler.failed(batch, rests_until)
        log(
            _logger,
            logging.ERROR,
            "batch_failed",
            policy=self._policy,
            worker=link.name,
            reason=reason,
            members=[ticket.robot for ticket in batch.tickets],
            pause_s=round(rests_until - now, 3),
        )
        for member in members:
            member.flights -= 1
            if not member.result.done() and not self.elsewhere(member) and not self._again(member, now):
                self.fail(member, worker_failed(link.name, reason, SUSPEND_S))
        self._poll()

    def _rests_until(self, link: WorkerLink, sent_at: float, now: float) -> float:
        """Until when a worker gets nothing, of which a batch has failed that was sent at `sent_at`.

        Batches that were on it together when it failed have failed once: one rest, no longer for their number.
        """
        if not link.failures or sent_at > link.failed_at:
            link.failures += 1
            link.failed_at = now
        return now + float(min(SUSPEND_MAX_S, SUSPEND_S * 2 ** (link.failures - 1)))

    def _again(self, member: Pending, now: float) -> bool:
        """Queues a member once more where it may still be served in time; false where it has had its chances."""
        return member.attempts + 1 < MAX_ATTEMPTS and not member.gone and self._resubmit(member, now)

    def _resubmit(self, member: Pending, now: float, avoid: str = "") -> bool:
        older = self._scheduler.waits(member.source)
        if not self._scheduler.resubmit(member, now, avoid):
            return False
        self._overtaken(older, member)
        return True

    def _overtaken(self, older: Ticket | None, newer: Ticket) -> None:
        """A robot's older observation that waited has left the queue for its newer one, which came back to it."""
        if older is not None and not self.elsewhere(older):
            self.fail(older, superseded(older, newer))

    def _hedge(self, batch: Batch, now: float) -> None:
        """The worker of a batch has gone silent: its members may go to another one; the first answer counts."""
        hedged = [
            ticket.robot
            for ticket in batch.tickets
            if isinstance(ticket, Pending)
            and not ticket.result.done()
            and not ticket.gone
            and ticket.attempts + 1 < MAX_ATTEMPTS
            and self._resubmit(ticket, now, avoid=batch.worker)
        ]
        log(
            _logger,
            logging.WARNING,
            "worker_silent",
            policy=self._policy,
            worker=batch.worker,
            overdue_ms=round(1e3 * (now - batch.tail), 1),
            members=[ticket.robot for ticket in batch.tickets],
            hedged=hedged,
        )
        if hedged:
            for ticket in batch.tickets:
                if isinstance(ticket, Pending) and ticket in self._scheduler.queue:
                    ticket.hedged = batch
            self._telemetry.hedged(self._policy, len(hedged))
            self.poll_later()

    def _recall(self, batch: Batch, now: float) -> None:
        """A batch that waits behind a silent one: the worker may forget it, and its members queue again."""
        # What waits for it may have been made in this turn, and must have begun to be told that it waits no more.
        self._recalled.add(id(batch))
        asyncio.get_running_loop().call_soon(self._calls.pop(id(batch)).cancel)
        for ticket in batch.tickets:
            if not isinstance(ticket, Pending):
                continue
            ticket.flights -= 1
            if ticket.result.done() or ticket in self._scheduler.queue:
                continue
            if ticket.gone:
                ticket.result.set_exception(ClientGone())
                continue
            older = self._scheduler.waits(ticket.source)
            newer = self._scheduler.requeue(ticket, now)
            if newer is not None:
                self.fail(ticket, superseded(ticket, newer))
            else:
                self._overtaken(older, ticket)
        self.poll_later()

    def elsewhere(self, ticket: Ticket) -> bool:
        """Whether another copy of it is queued or in flight, so that its answer may still come."""
        return ticket in self._scheduler.queue or (isinstance(ticket, Pending) and ticket.flights > 0)

    def fail(self, ticket: Ticket, error: TaktlineError) -> None:
        """Answers one that gets no chunk."""
        if isinstance(ticket, Pending) and not ticket.result.done():
            ticket.result.set_exception(error)
