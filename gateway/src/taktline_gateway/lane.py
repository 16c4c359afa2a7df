"""One policy's lane: its scheduler, its workers, and the I/O between them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from types import MappingProxyType
from typing import Any

import grpc
import msgspec
from taktline_protocol import ErrorCode, TaktlineError, worker_pb2
from taktline_protocol.deployment import Route, Target
from taktline_protocol.messages import Observation, PolicyInfo
from taktline_protocol.rpc import to_item

from taktline_gateway.access.rights import OPEN, Principal
from taktline_gateway.deadline_queue import Ticket
from taktline_gateway.degrade import Levels as QualityLevels
from taktline_gateway.degrade import degraded, levels_of, stands_in
from taktline_gateway.logs import log
from taktline_gateway.pending import ClientGone, Pending, Served, read_result
from taktline_gateway.priorities import priority_of
from taktline_gateway.refusals import SHED, advised, refused_error, superseded, unavailable, worker_failed
from taktline_gateway.scheduler import Batch, Refusal, Refused, Scheduler
from taktline_gateway.service_times import ServiceTimes
from taktline_gateway.telemetry import Levels, PredictedTime, Telemetry, WorkerLevel
from taktline_gateway.tls import WorkerTls
from taktline_gateway.tracing.requests import begin_batch, end_batch
from taktline_gateway.worker_link import WorkerLink

__all__ = ["ClientGone", "Lane", "Pending", "Served"]

MAX_ATTEMPTS = 2
RETRIED = frozenset({ErrorCode.WORKER_UNAVAILABLE, ErrorCode.OVERLOADED})
"""What a worker says of an observation that it did not look at; another worker may take it."""
SUSPEND_S = 0.25
SUSPEND_MAX_S = 8.0
_logger = logging.getLogger(__name__)


class Lane:
    """Admits observations of one policy and gets each a chunk or a typed error."""

    def __init__(
        self,
        route: Route,
        telemetry: Telemetry,
        *,
        max_queued: int,
        worker_tls: WorkerTls | None = None,
        others: Mapping[str, Lane] = MappingProxyType({}),
    ) -> None:
        """`others` are the lanes of this gateway's policies by name, for observations that this one cannot serve."""
        self.route = route
        self._worker_tls = worker_tls
        self._telemetry = telemetry
        self._scheduler = Scheduler(
            max_batch=route.max_batch, max_wait_s=route.max_wait_ms / 1e3, max_queued=max_queued
        )
        self._links: dict[Target, WorkerLink] = {}
        self._up: dict[str, WorkerLink] = {}
        self._seats: dict[str, WorkerLink] = {}
        self._levels: dict[str, QualityLevels] = {}
        self._others = others
        self._last_info: PolicyInfo | None = None
        self._poll_soon = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._retiring: set[WorkerLink] = set()
        self.apply(route)

    # ----- what others see

    @property
    def depth(self) -> int:
        """Observations waiting for a batch."""
        return len(self._scheduler.queue)

    @property
    def unanswered(self) -> int:
        """Observations queued or in flight."""
        return self.depth + self._in_flight

    def levels(self) -> Levels:
        """Queue, workers and predicted times at this instant; a pool that has no usable worker counts 0."""
        now = time.monotonic()
        counts = Counter(link.target.pool for link in self._links.values() if link.up)
        workers = [
            WorkerLevel(link.name, link.target.pool, link.revision, self._state(link, now) if link.up else "down")
            for link in self._links.values()
        ]
        workers += [WorkerLevel(link.name, link.target.pool, link.revision, "draining") for link in self._retiring]
        states = Counter((worker.pool, worker.state) for worker in workers)
        predicted = []
        for link in self._up.values():
            times = self._scheduler.times(link.name)
            for size in times.buckets if times is not None else ():
                if times is not None and size <= times.max_batch:
                    median_ms, tail_ms = 1e3 * times.median_s(size), 1e3 * times.tail_s(size)
                    predicted.append(PredictedTime(link.target.pool, link.revision, size, median_ms, tail_ms))
        return Levels(
            policy=self.route.policy,
            depth=self.depth,
            in_flight=self._in_flight,
            usable={link.target.pool: counts[link.target.pool] for link in self._links.values()},
            states=states,
            predicted=tuple(predicted),
            workers=tuple(workers),
        )

    def _state(self, link: WorkerLink, now: float) -> str:
        """A worker with several replicas is busy where any of them is."""
        states = [self._scheduler.worker_state(seat, now) for seat in link.seats]
        return "busy" if "busy" in states else states[0]

    def info(self) -> PolicyInfo:
        """What a client must know; cameras and sizes come from a worker, the last one seen where none is up."""
        wanted = self.route.revision
        links = sorted(self._up.values(), key=lambda link: link.revision != wanted)
        if links and links[0].info is not None:
            self._last_info = links[0].info
        known = self._last_info or PolicyInfo(
            policy=self.route.policy, family=self.route.family, revision=self.route.revision, ready=False
        )
        return msgspec.structs.replace(
            known, ready=bool(links), workers=len(links), control_budget_ms=self.route.control_budget_ms
        )

    # ----- routing

    def apply(self, route: Route) -> None:
        """Takes over a changed route: new targets are connected, removed ones finish their batch and close."""
        self.route = route
        self._scheduler.max_batch = route.max_batch
        self._scheduler.max_wait_s = route.max_wait_ms / 1e3
        wanted = dict.fromkeys(route.targets)
        for target in [target for target in self._links if target not in wanted]:
            link = self._links.pop(target)
            self._worker_down(link)
            self._spawn(self._retire(link))
        for target in wanted:
            if target not in self._links:
                link = self._links[target] = WorkerLink(
                    route.policy, target, self._worker_up, self._worker_down, self._worker_tls
                )
                link.start()

    async def close(self) -> None:
        """Refuses what is queued and closes every channel."""
        for ticket in list(self._scheduler.queue):
            self._scheduler.cancel(ticket)
            self._fail(ticket, unavailable(self.route.policy, None))
        if self._timer is not None:
            self._timer.cancel()
        links = list(self._links.values())
        self._links.clear()
        self._up.clear()
        await asyncio.gather(*(link.close() for link in links))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ----- requests

    def submit(
        self, request_id: str, observation: Observation, deadline: float, principal: Principal = OPEN
    ) -> Pending:
        """Queues one observation; await `result` of what it returns.

        Raises:
            TaktlineError: `deadline_unreachable`, `overloaded` or `worker_unavailable`, at once.
        """
        now = time.monotonic()
        pending = Pending(
            robot=observation.robot_id,
            seq=observation.seq,
            deadline=deadline,
            arrived_at=now,
            tenant=principal.tenant,
            tenant_weight=principal.weight,
            robot_weight=self.route.robot_weights.get(observation.robot_id, 1.0),
            priority=priority_of(observation, principal.tenant, self.route),
            policy=self.route.policy,
            request_id=request_id,
            item=to_item(request_id, observation, 0.0),
        )
        refused = self._admit(pending, now)
        if refused is not None and not self._stand_in(refused, now):
            raise self._advised(pending, self._error(refused, now), now)
        return pending

    def _admit(self, pending: Pending, now: float) -> Refused | None:
        refused, older = self._scheduler.submit(pending, now)
        if refused is not None:
            return refused
        pending.lane = self
        if older is not None:
            self._telemetry.superseded(self.route.policy)
            if not self._elsewhere(older):
                self._fail(older, superseded(older, pending))
        self._poll_later()
        return None

    def _stand_in(self, refused: Refused, now: float) -> bool:
        """Whether a smaller policy has taken an observation that this one's workers cannot serve in time."""
        other = self._others.get(self.route.degrade.fallback_policy)
        pending = refused.ticket
        if other is None or other is self or refused.reason is Refusal.NO_WORKER or not isinstance(pending, Pending):
            return False
        if pending.policy != self.route.policy or not stands_in(self.info(), other.info()):
            return False  # it stands in already: what it cannot serve is refused
        return other._admit(pending, now) is None

    def leave(self, pending: Pending) -> None:
        """The robot is gone: a queued observation leaves; one in flight runs to its end."""
        if isinstance(pending.lane, Lane) and pending.lane is not self:
            pending.lane.leave(pending)
        elif self._scheduler.cancel(pending) and not pending.result.done():
            pending.result.set_exception(ClientGone())

    # ----- the loop around the scheduler

    def _poll_later(self) -> None:
        # One decision for all arrivals of this turn of the event loop.
        if not self._poll_soon:
            self._poll_soon = True
            asyncio.get_running_loop().call_soon(self._poll)

    def _poll(self) -> None:
        self._poll_soon = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        plan = self._scheduler.poll(now)
        for refused in plan.refused:
            if not self._elsewhere(refused.ticket) and not self._stand_in(refused, now):
                self._fail(refused.ticket, self._error(refused, now))
        for silent in plan.silent:
            self._hedge(silent, now)
        for batch in plan.batches:
            self._in_flight += len(batch.tickets)
            for ticket in batch.tickets:
                if isinstance(ticket, Pending):
                    ticket.flights += 1
            link = self._seats[batch.worker]
            self._telemetry.batch(self.route.policy, link.target.pool, link.revision, len(batch.tickets))
            self._spawn(self._run(link, batch, now))
        if plan.wake_at is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, plan.wake_at - now), self._poll)

    async def _run(self, link: WorkerLink, batch: Batch, sent_at: float) -> None:
        size = len(batch.tickets)
        members = [ticket for ticket in batch.tickets if isinstance(ticket, Pending)]
        steps = self._levels[link.name].steps[batch.level - 1] if batch.level else 0
        request = worker_pb2.InferRequest(policy=self.route.policy, revision=link.revision, solver_steps=steps)
        for member in members:
            member.item.budget_ms = 1e3 * (member.deadline - sent_at)
            request.items.append(member.item)
        traces = [member.trace for member in members]
        try:
            response = await link.infer(request, batch.hangs_at - sent_at, begin_batch(traces, sent_at, link.name))
        except grpc.aio.AioRpcError as error:
            end_batch(traces, error.code().name)
            self._batch_failed(link, batch, members, f"{error.code().name}: {error.details() or 'no details'}"[:300])
            return
        except asyncio.CancelledError:
            self._batch_failed(link, batch, members, "the channel was closed")
            raise
        finally:
            self._in_flight -= size
        end_batch(traces)
        link.failures = 0
        seconds = time.monotonic() - sent_at
        self._scheduler.finished(batch.worker, size, seconds, response.total_ms / 1e3)
        rows = sum(result.WhichOneof("outcome") == "actions" for result in response.results)
        revision = response.revision or link.revision
        self._telemetry.batch_finished(
            self.route.policy, link.target.pool, revision, rows, response.bucket, seconds, batch.predicted - sent_at
        )
        self._deliver(link, members, response, sent_at, steps)
        self._poll()

    def _deliver(
        self, link: WorkerLink, members: list[Pending], response: worker_pb2.InferResponse, sent_at: float, steps: int
    ) -> None:
        results = {result.request_id: result for result in response.results}
        returned_at = time.monotonic()
        for member in members:
            member.flights -= 1
            if member.result.done():
                continue
            try:
                actions, plan, rtc = read_result(results.get(member.request_id), link.name)
            except TaktlineError as error:
                if error.code in RETRIED and self._again(member, returned_at):
                    continue
                if error.code is ErrorCode.WORKER_FAILED and self._elsewhere(member):
                    continue
                self._scheduler.cancel(member)
                self._fail(member, error)
                continue
            self._scheduler.cancel(member)  # a hedged copy may still be queued
            member.result.set_result(
                Served(
                    actions=actions,
                    revision=response.revision or link.revision,
                    worker=link.name,
                    pool=link.target.pool,
                    batch_size=len(members),
                    sent_at=sent_at,
                    returned_at=returned_at,
                    inference_s=response.total_ms / 1e3,
                    phases_ms=(response.preprocess_ms, response.engine_ms, response.postprocess_ms),
                    plan=plan,
                    rtc=rtc,
                    degraded=degraded(steps, self.route.policy if member.policy != self.route.policy else ""),
                )
            )

    def _batch_failed(self, link: WorkerLink, batch: Batch, members: list[Pending], reason: str) -> None:
        link.failures += 1
        now = time.monotonic()
        pause = min(SUSPEND_MAX_S, SUSPEND_S * 2 ** (link.failures - 1))
        self._scheduler.failed(batch.worker, len(batch.tickets), now + pause)
        log(
            _logger,
            logging.ERROR,
            "batch_failed",
            policy=self.route.policy,
            worker=link.name,
            reason=reason,
            members=[ticket.robot for ticket in batch.tickets],
            pause_s=pause,
        )
        for member in members:
            member.flights -= 1
            if not member.result.done() and not self._elsewhere(member) and not self._again(member, now):
                self._fail(member, worker_failed(link.name, reason, SUSPEND_S))
        self._poll()

    def _again(self, member: Pending, now: float) -> bool:
        """Queues a member once more where it may still be served in time; false where it has had its chances."""
        return member.attempts + 1 < MAX_ATTEMPTS and self._scheduler.resubmit(member, now)

    def _hedge(self, batch: Batch, now: float) -> None:
        """The worker of a batch has gone silent: its members may go to another one; the first answer counts."""
        hedged = [
            ticket.robot
            for ticket in batch.tickets
            if isinstance(ticket, Pending)
            and not ticket.result.done()
            and ticket.attempts + 1 < MAX_ATTEMPTS
            and self._scheduler.resubmit(ticket, now, avoid=batch.worker)
        ]
        log(
            _logger,
            logging.WARNING,
            "worker_silent",
            policy=self.route.policy,
            worker=batch.worker,
            overdue_ms=round(1e3 * (now - batch.tail), 1),
            members=[ticket.robot for ticket in batch.tickets],
            hedged=hedged,
        )
        if hedged:
            self._poll_later()

    def _elsewhere(self, ticket: Ticket) -> bool:
        """Whether another copy of it is queued or in flight, so that its answer may still come."""
        return ticket in self._scheduler.queue or (isinstance(ticket, Pending) and ticket.flights > 0)

    # ----- workers coming and going

    def _worker_up(self, link: WorkerLink) -> None:
        if link.info is None:
            return
        self._up[link.name] = link
        # Its replicas are alike: what one batch teaches of T_sync holds for all.
        times, now = ServiceTimes(link.info.t_sync, self.route.max_batch), time.monotonic()
        levels = self._levels[link.name] = levels_of(link.info, self.route.degrade, self.route.max_batch)
        for seat in link.seats:
            self._seats[seat] = link
            self._scheduler.add_worker(seat, times, now, levels.times)
        self._poll_later()

    def _worker_down(self, link: WorkerLink) -> None:
        if self._up.get(link.name) is link:
            del self._up[link.name]
            for seat in [seat for seat, owner in self._seats.items() if owner is link]:
                del self._seats[seat]
                self._scheduler.remove_worker(seat)
            self._poll_later()

    async def _retire(self, link: WorkerLink) -> None:
        self._retiring.add(link)
        try:
            await link.idle.wait()
            await link.close()
        finally:
            self._retiring.discard(link)

    # ----- errors

    def _fail(self, ticket: Ticket, error: TaktlineError) -> None:
        if isinstance(ticket, Pending) and not ticket.result.done():
            ticket.result.set_exception(self._advised(ticket, error, time.monotonic()))

    def _advised(self, ticket: Ticket, error: TaktlineError, now: float) -> TaktlineError:
        dt_s = self._last_info.dt_s if self._last_info is not None else 0.0
        return advised(error, ticket.deadline, now, dt_s) if error.code in SHED else error

    def _error(self, refused: Refused, now: float) -> TaktlineError:
        return refused_error(refused, self.route.policy, now, self._scheduler.max_queued)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
