"""One policy's lane: its scheduler, its workers, and the I/O between them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import grpc
import msgspec
import numpy as np
from taktline_protocol import ErrorCode, TaktlineError, worker_pb2
from taktline_protocol.deployment import Route, Target
from taktline_protocol.messages import Array, Observation, PlanReport, PolicyInfo, RtcReport
from taktline_protocol.rpc import from_error, from_plan, from_rtc, from_tensor, to_item

from taktline_gateway.access.rights import OPEN, Principal
from taktline_gateway.deadline_queue import Ticket
from taktline_gateway.logs import log
from taktline_gateway.priorities import priority_of
from taktline_gateway.scheduler import Batch, Refusal, Refused, Scheduler
from taktline_gateway.service_times import ServiceTimes
from taktline_gateway.telemetry import Levels, PredictedTime, Telemetry
from taktline_gateway.worker_link import WorkerLink

HANG_FACTOR = 5.0
"""A batch that takes longer than this many times its predicted tail hangs."""
HANG_FLOOR_S = 1.0
MAX_ATTEMPTS = 2
SUSPEND_S = 0.25
SUSPEND_MAX_S = 8.0
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """What a worker made of one observation, with the instants (monotonic, s) and durations around it."""

    actions: Array
    revision: str
    worker: str
    pool: str
    batch_size: int
    sent_at: float
    inference_s: float
    plan: PlanReport | None = None
    rtc: RtcReport | None = None


class ClientGone(Exception):
    """The robot closed its connection while its observation was queued."""


@dataclasses.dataclass(slots=True, eq=False)
class Pending(Ticket):
    """A ticket with its observation and the future that its request waits for."""

    request_id: str = ""
    item: worker_pb2.InferItem = dataclasses.field(default_factory=worker_pb2.InferItem)
    result: asyncio.Future[Served] = dataclasses.field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Lane:
    """Admits observations of one policy and gets each a chunk or a typed error."""

    def __init__(self, route: Route, telemetry: Telemetry, *, max_queued: int) -> None:
        self.route = route
        self._telemetry = telemetry
        self._scheduler = Scheduler(
            max_batch=route.max_batch, max_wait_s=route.max_wait_ms / 1e3, max_queued=max_queued
        )
        self._links: dict[Target, WorkerLink] = {}
        self._up: dict[str, WorkerLink] = {}
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
        states = Counter(
            (link.target.pool, self._scheduler.worker_state(link.name, now) if link.up else "down")
            for link in self._links.values()
        )
        states.update((link.target.pool, "draining") for link in self._retiring)
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
        )

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
                link = self._links[target] = WorkerLink(route.policy, target, self._worker_up, self._worker_down)
                link.start()

    async def close(self) -> None:
        """Refuses what is queued and closes every channel."""
        for ticket in list(self._scheduler.queue):
            self._scheduler.cancel(ticket)
            self._fail(ticket, _unavailable(self.route.policy, None))
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
            request_id=request_id,
            item=to_item(request_id, observation, 0.0),
        )
        refused, older = self._scheduler.submit(pending, now)
        if refused is not None:
            raise self._error(refused, now)
        if older is not None:
            self._telemetry.superseded(self.route.policy)
            self._fail(
                older,
                TaktlineError(
                    ErrorCode.SUPERSEDED,
                    f"observation {older.seq} of robot {older.robot!r} was still queued when {observation.seq} came",
                    "use the chunk of the newer observation",
                ),
            )
        self._poll_later()
        return pending

    def leave(self, pending: Pending) -> None:
        """The robot is gone: a queued observation leaves; one in flight runs to its end."""
        if self._scheduler.cancel(pending) and not pending.result.done():
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
            self._fail(refused.ticket, self._error(refused, now))
        for batch in plan.batches:
            self._in_flight += len(batch.tickets)
            link = self._up[batch.worker]
            self._telemetry.batch(self.route.policy, link.target.pool, link.revision, len(batch.tickets))
            self._spawn(self._run(link, batch, now))
        if plan.wake_at is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, plan.wake_at - now), self._poll)

    async def _run(self, link: WorkerLink, batch: Batch, sent_at: float) -> None:
        size = len(batch.tickets)
        members = [ticket for ticket in batch.tickets if isinstance(ticket, Pending)]
        request = worker_pb2.InferRequest(policy=self.route.policy, revision=link.revision)
        for member in members:
            member.item.budget_ms = 1e3 * (member.deadline - sent_at)
            request.items.append(member.item)
        timeout_s = max(HANG_FLOOR_S, HANG_FACTOR * (batch.tail - sent_at))
        try:
            response = await link.infer(request, timeout_s)
        except grpc.aio.AioRpcError as error:
            self._batch_failed(link, batch, f"{error.code().name}: {error.details() or 'no details'}"[:300])
            return
        except asyncio.CancelledError:
            self._batch_failed(link, batch, "the channel was closed")
            raise
        finally:
            self._in_flight -= size
        link.failures = 0
        seconds = time.monotonic() - sent_at
        self._scheduler.finished(link.name, size, seconds)
        rows = sum(result.WhichOneof("outcome") == "actions" for result in response.results)
        revision = response.revision or link.revision
        self._telemetry.batch_finished(
            self.route.policy, link.target.pool, revision, rows, response.bucket, seconds, batch.predicted - sent_at
        )
        self._deliver(link, members, response, sent_at)
        self._poll()

    def _deliver(
        self, link: WorkerLink, members: list[Pending], response: worker_pb2.InferResponse, sent_at: float
    ) -> None:
        results = {result.request_id: result for result in response.results}
        for member in members:
            if member.result.done():
                continue
            result = results.get(member.request_id)
            try:
                if result is None:
                    raise _worker_failed(link, "it sent no result for this observation")
                if result.WhichOneof("outcome") == "error":
                    raise from_error(result.error)
                actions = from_tensor("actions", result.actions, ErrorCode.WORKER_FAILED)
                if actions.dtype != "float32" or len(actions.shape) != 2 or not np.isfinite(actions.to_numpy()).all():
                    # A robot must never be handed numbers that are not actions.
                    raise _worker_failed(link, "its actions are not finite float32 rows")
                plan = from_plan(result.plan) if result.HasField("plan") else None
                rtc = from_rtc(result.rtc) if result.HasField("rtc") else None
            except TaktlineError as error:
                member.result.set_exception(error)
                continue
            member.result.set_result(
                Served(
                    actions=actions,
                    revision=response.revision or link.revision,
                    worker=link.name,
                    pool=link.target.pool,
                    batch_size=len(members),
                    sent_at=sent_at,
                    inference_s=response.total_ms / 1e3,
                    plan=plan,
                    rtc=rtc,
                )
            )

    def _batch_failed(self, link: WorkerLink, batch: Batch, reason: str) -> None:
        link.failures += 1
        now = time.monotonic()
        pause = min(SUSPEND_MAX_S, SUSPEND_S * 2 ** (link.failures - 1))
        self._scheduler.failed(link.name, len(batch.tickets), now + pause)
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
        for ticket in batch.tickets:
            if isinstance(ticket, Pending) and ticket.result.done():
                continue
            if ticket.attempts + 1 >= MAX_ATTEMPTS or not self._scheduler.resubmit(ticket, now):
                self._fail(ticket, _worker_failed(link, reason))
        self._poll()

    # ----- workers coming and going

    def _worker_up(self, link: WorkerLink) -> None:
        if link.info is None:
            return
        self._up[link.name] = link
        self._scheduler.add_worker(link.name, ServiceTimes(link.info.t_sync, self.route.max_batch), time.monotonic())
        self._poll_later()

    def _worker_down(self, link: WorkerLink) -> None:
        if self._up.get(link.name) is link:
            del self._up[link.name]
            self._scheduler.remove_worker(link.name)
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
            ticket.result.set_exception(error)

    def _error(self, refused: Refused, now: float) -> TaktlineError:
        policy = self.route.policy
        retry_ms = round(1e3 * refused.retry_s, 1)
        if refused.reason is Refusal.NO_WORKER or refused.completion is None:
            return _unavailable(policy, retry_ms)
        if refused.reason is Refusal.QUEUE_FULL:
            return TaktlineError(
                ErrorCode.OVERLOADED,
                f"the queue of policy {policy!r} is full ({self._scheduler.max_queued})",
                "retry after the hint, or add workers to the pool",
                retry_after_ms=retry_ms,
            )
        return TaktlineError(
            ErrorCode.DEADLINE_UNREACHABLE,
            f"the answer is predicted {1e3 * (refused.completion - now):.1f} ms from now,"
            f" {1e3 * (refused.completion - refused.ticket.deadline):.1f} ms after the deadline",
            "keep executing the buffer or hold; send a fresh observation after the hint",
            retry_after_ms=retry_ms,
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _unavailable(policy: str, retry_ms: float | None) -> TaktlineError:
    return TaktlineError(
        ErrorCode.WORKER_UNAVAILABLE,
        f"no worker of policy {policy!r} is ready",
        "wait for GET /v1/policies/{policy} to say ready, or look at the worker's log",
        retry_after_ms=retry_ms,
    )


def _worker_failed(link: WorkerLink, reason: str) -> TaktlineError:
    return TaktlineError(
        ErrorCode.WORKER_FAILED,
        f"worker {link.name} failed this batch: {reason}",
        "send a fresh observation; the gateway avoids that worker for a moment",
        retry_after_ms=1e3 * SUSPEND_S,
    )
