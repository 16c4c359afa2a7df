"""One policy's lane: its scheduler, its workers, and the I/O between them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from operator import is_
from types import MappingProxyType

import msgspec
from taktline_protocol import TaktlineError
from taktline_protocol.deployment import Route, Target
from taktline_protocol.messages import AdmissionAnswer, AdmissionQuestion, Observation, PolicyInfo, Search
from taktline_protocol.rpc import to_item, to_search
from taktline_protocol.search_work import SearchWork

from taktline_gateway.access.rights import OPEN, Principal
from taktline_gateway.admissions import Admissions
from taktline_gateway.deadline_queue import Priority, Ticket
from taktline_gateway.degrade import levels_of, stands_in
from taktline_gateway.dispatch import Dispatch
from taktline_gateway.pending import ClientGone, Pending
from taktline_gateway.phases import PhasePlanner
from taktline_gateway.priorities import priority_of
from taktline_gateway.refusals import refused_error, superseded, unavailable
from taktline_gateway.rtc_delay import needs_delay, seconds_outside
from taktline_gateway.scheduler import Refusal, Refused, Scheduler
from taktline_gateway.service_times import ServiceTimes
from taktline_gateway.telemetry import Levels, PredictedTime, Telemetry, WorkerLevel
from taktline_gateway.tls import WorkerTls
from taktline_gateway.work import WHOLE, work_of
from taktline_gateway.worker_link import WorkerLink

SWAP_S = 30.0
"""How long workers that a route no longer names may stand in for those that it names and that do not serve yet."""


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
            max_batch=route.max_batch,
            max_wait_s=route.max_wait_ms / 1e3,
            max_queued=max_queued,
            goes_elsewhere=lambda ticket: self._fallback_of(ticket) is not None,
        )
        self._links: dict[Target, WorkerLink] = {}
        self._up: dict[str, WorkerLink] = {}
        self._others = others
        self._phases = PhasePlanner()
        self._admissions = Admissions(self._phases)
        self._dispatch = Dispatch(route.policy, self._scheduler, telemetry, self._phases, self._refused)
        self._last_info: PolicyInfo | None = None
        self._search: SearchWork | None = None
        """What a planner's workers say of their search: the newest one's word."""
        self._told: tuple[list[object], PolicyInfo] | None = None
        """What `info` was last made of, and what it was."""
        self._retiring: set[WorkerLink] = set()
        self._leaving: dict[Target, asyncio.TimerHandle] = {}  # connected, and not in the route
        self.apply(route)

    # ----- what others see

    @property
    def depth(self) -> int:
        """Observations waiting for a batch."""
        return self._scheduler.depth

    @property
    def unanswered(self) -> int:
        """Observations queued or in flight."""
        return self.depth + self._dispatch.in_flight

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
            in_flight=self._dispatch.in_flight,
            usable={link.target.pool: counts[link.target.pool] for link in self._links.values()},
            states=states,
            predicted=tuple(predicted),
            workers=tuple(workers),
            batch_ports=Counter((link.target.pool, link.batch_state) for link in self._links.values() if link.up),
        )

    def _state(self, link: WorkerLink, now: float) -> str:
        """A worker with several replicas is busy where any of them is."""
        states = [self._scheduler.worker_state(seat, now) for seat in link.seats]
        return "busy" if "busy" in states else states[0]

    def info(self) -> PolicyInfo:
        """What a client must know; cameras and sizes come from a worker, the last one seen where none is up."""
        sources: list[object] = [self.route, *[link.info for link in self._up.values()]]
        if self._told is not None and len(sources) == len(self._told[0]) and all(map(is_, sources, self._told[0])):
            return self._told[1]
        wanted = self.route.revision
        links = sorted(self._up.values(), key=lambda link: link.revision != wanted)
        if links and links[0].info is not None:
            self._last_info = links[0].info
        known = self._last_info or PolicyInfo(
            policy=self.route.policy, family=self.route.family, revision=self.route.revision, ready=False
        )
        info: PolicyInfo = msgspec.structs.replace(
            known, ready=bool(links), workers=len(links), control_budget_ms=self.route.control_budget_ms
        )
        self._told = (sources, info)
        return info

    # ----- routing

    def apply(self, route: Route) -> None:
        """Takes over a changed route: new targets are connected, removed ones finish their batch and close.

        Where none of the new targets serves yet, the removed ones go on until one does, at most `SWAP_S`: a table that
        swaps all of them at once costs no request.
        """
        self.route = route
        self._scheduler.max_batch = route.max_batch
        self._scheduler.max_wait_s = route.max_wait_ms / 1e3
        for link in self._up.values():
            self._retime(link)
        for target in dict.fromkeys(route.targets):
            if target not in self._links:
                link = self._links[target] = WorkerLink(
                    route.policy, target, self._worker_up, self._worker_down, self._worker_tls
                )
                link.start()
        for target in self._links:
            if target in route.targets:
                self._keep(target)
            elif target not in self._leaving:
                self._leaving[target] = asyncio.get_running_loop().call_later(SWAP_S, self._let_go, target)
        self._let_go()

    def _keep(self, target: Target) -> None:
        """The route names this worker again, or it has gone: nothing is to be done when its time is over."""
        timer = self._leaving.pop(target, None)
        if timer is not None:
            timer.cancel()

    def _let_go(self, overdue: Target | None = None) -> None:
        """Retires the workers that the route no longer names: the overdue one, all once one that it names serves."""
        wanted = set(self.route.targets)
        replaced = {target.address for target in wanted}  # the same worker under another revision or pool
        serves = not wanted or any(link.up for target, link in self._links.items() if target in wanted)
        for target in [target for target in self._links if target not in wanted]:
            if not (serves or target == overdue or target.address in replaced):
                continue
            self._keep(target)
            link = self._links.pop(target)
            self._worker_down(link)
            self._dispatch.spawn(self._retire(link))

    async def close(self) -> None:
        """Refuses what is queued and closes every channel."""
        for ticket in self._scheduler.waiting():
            self._scheduler.cancel(ticket)
            self._dispatch.fail(ticket, unavailable(self.route.policy, None))
        self._dispatch.stop()
        for target in list(self._leaving):
            self._keep(target)
        links = list(self._links.values())
        self._links.clear()
        for link in links:  # what their channels leave unanswered must not be sent to one another
            self._worker_down(link)
        await asyncio.gather(*(link.close() for link in links))
        await self._dispatch.close()

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
            item=to_item(request_id, observation, 0.0, images=False),
            images=observation.images,
            outside_s=seconds_outside(observation) if needs_delay(observation) else None,
            info=self.info() if needs_delay(observation) else None,
            extra=observation.imagine is not None,
        )
        refused = self._admit(pending, now)
        if pending.priority <= Priority.PRODUCTION:
            self._phases.arrived(pending.source, now, pending.share)
        if refused is not None and not self._stand_in(refused, now):
            raise self._error(refused, now)
        return pending

    def admission(self, question: AdmissionQuestion, tenant: str = "") -> AdmissionAnswer:
        """Whether one more robot can be served in time. Raises TaktlineError `worker_unavailable`."""
        workers = [times for seat in self._scheduler.workers() if (times := self._scheduler.times(seat)) is not None]
        if not workers:
            raise unavailable(self.route.policy, None)
        now = time.monotonic()
        tightest_s = self._scheduler.arrivals.tightest_s(now)
        share = 1.0
        if self._search is not None:
            work = work_of(to_search(question.search or Search()), self._search)
            share = work.needs(min(times.median[1] for times in workers))
        return self._admissions.ask((tenant, question.robot_id), question, now, tightest_s, workers, share)

    def _admit(self, pending: Pending, now: float) -> Refused | None:
        pending.work = WHOLE if self._search is None else work_of(pending.item.search, self._search)
        refused, older = self._scheduler.submit(pending, now)
        if refused is not None:
            return refused
        pending.lane = self
        if older is not None:
            self._telemetry.superseded(self.route.policy)
            if not self._dispatch.elsewhere(older):
                self._dispatch.fail(older, superseded(older, pending))
        self._dispatch.poll_later()
        return None

    def _refused(self, refused: Refused, now: float) -> None:
        if not self._stand_in(refused, now):
            self._dispatch.fail(refused.ticket, self._error(refused, now))

    def _error(self, refused: Refused, now: float) -> TaktlineError:
        return refused_error(refused, self.route.policy, now, self._scheduler.max_queued)

    def _stand_in(self, refused: Refused, now: float) -> bool:
        """Whether a smaller policy has taken an observation that this one's workers cannot serve in time."""
        pending, other = refused.ticket, self._fallback_of(refused.ticket)
        if other is None or refused.reason is Refusal.NO_WORKER or not isinstance(pending, Pending):
            return False
        return other._admit(pending, now) is None

    def _fallback_of(self, ticket: Ticket) -> Lane | None:
        """The smaller policy that may take an observation; of one that this policy has taken over itself, none."""
        other = self._others.get(self.route.degrade.fallback_policy)
        if other is None or other is self or not isinstance(ticket, Pending) or ticket.policy != self.route.policy:
            return None
        return other if stands_in(self.info(), other.info()) else None

    def leave(self, pending: Pending) -> None:
        """The robot is gone: a queued observation leaves; one in flight runs to its end."""
        if isinstance(pending.lane, Lane) and pending.lane is not self:
            pending.lane.leave(pending)
        elif not self._scheduler.cancel(pending):
            pending.gone = True
        elif not pending.result.done():
            pending.result.set_exception(ClientGone())

    # ----- workers coming and going

    def _worker_up(self, link: WorkerLink) -> None:
        if link.info is None:
            return
        self._up[link.name] = link
        self._search = link.info.search
        # Its replicas are alike: what one batch teaches of T_sync holds for all.
        times, now = ServiceTimes(link.info.t_sync, self.route.max_batch), time.monotonic()
        levels = self._dispatch.levels[link.name] = levels_of(link.info, self.route.degrade, self.route.max_batch)
        for seat in link.seats:
            self._dispatch.seats[seat] = link
            self._scheduler.add_worker(seat, times, now, levels.times)
        self._dispatch.poll_later()
        self._let_go()

    def _retime(self, link: WorkerLink) -> None:
        """A connected worker gets batches of what the route allows now, at the qualities that it allows now."""
        if link.info is None:
            return
        levels = levels_of(link.info, self.route.degrade, self.route.max_batch, self._dispatch.levels.get(link.name))
        self._dispatch.levels[link.name] = levels
        for seat in link.seats:
            times = self._scheduler.times(seat)
            if times is not None:
                times.limit(self.route.max_batch)
            self._scheduler.set_cheaper(seat, levels.times)
        self._dispatch.poll_later()

    def _worker_down(self, link: WorkerLink) -> None:
        if self._up.get(link.name) is link:
            del self._up[link.name]
            for seat in [seat for seat, owner in self._dispatch.seats.items() if owner is link]:
                del self._dispatch.seats[seat]
                self._scheduler.remove_worker(seat)
            self._dispatch.poll_later()

    async def _retire(self, link: WorkerLink) -> None:
        self._retiring.add(link)
        try:
            await link.idle.wait()
            await link.close()
        finally:
            self._retiring.discard(link)
