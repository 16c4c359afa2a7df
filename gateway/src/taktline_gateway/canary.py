"""A candidate revision beside the one that serves: mirrored observations, the split by robot, and a net under both.

The candidate has a lane of its own. An observation that the candidate cannot serve, or fails, goes to the serving
revision while its deadline allows: a bad candidate costs a robot time, never its answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import random
import time
from collections.abc import Callable

import msgspec
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import Candidate, Route
from taktline_protocol.measurements import Outcomes, Trial
from taktline_protocol.messages import Observation, PolicyInfo

from taktline_gateway import shadow
from taktline_gateway.access.rights import OPEN, Principal
from taktline_gateway.lane import Lane
from taktline_gateway.logs import log
from taktline_gateway.pending import ClientGone, Pending, Served
from taktline_gateway.robot_split import RobotSplit
from taktline_gateway.tracing.requests import RequestTrace

MIRRORED_AT_ONCE = 64
"""Mirrored observations in flight; more are not mirrored, so that a slow candidate holds no memory."""
WATCH_S = 0.05
_USABLE = ("idle", "busy")
_REFUSED = frozenset(
    {ErrorCode.DEADLINE_EXPIRED, ErrorCode.DEADLINE_UNREACHABLE, ErrorCode.OVERLOADED, ErrorCode.WORKER_UNAVAILABLE}
)
_FAILED = frozenset({ErrorCode.WORKER_FAILED, ErrorCode.INTERNAL})
_logger = logging.getLogger(__name__)


def candidate_route(route: Route) -> Route:
    """The route of the candidate's own lane."""
    assert route.candidate is not None
    found = route.candidate
    return msgspec.structs.replace(route, revision=found.revision, targets=found.targets, candidate=None)


def count(outcomes: Outcomes, error: BaseException | None, *, late: bool) -> None:
    """Adds one observation's end. The request's own faults, and what a newer observation replaced, do not count."""
    if error is None:
        outcomes.late += late
        outcomes.on_time += not late
    elif isinstance(error, TaktlineError):
        outcomes.refused += error.code in _REFUSED
        outcomes.failed += error.code in _FAILED


@dataclasses.dataclass(slots=True, eq=False)
class _Relayed(Pending):
    """What the endpoint waits for while the candidate, and after its failure the serving revision, works."""

    lane: Lane | None = None
    inner: Pending | None = None
    withdrawn: bool = False

    def traced(self, trace: RequestTrace | None) -> None:
        """It is the inner ticket that goes into batches."""
        self.trace = trace
        if self.inner is not None:
            self.inner.trace = trace


class Canary:
    """One candidate's trial at this gateway. `stable` gives the lane that serves the policy at any moment."""

    def __init__(self, route: Route, lane: Lane, stable: Callable[[], Lane | None]) -> None:
        """`lane` is the candidate's own, made from `candidate_route(route)`."""
        assert route.candidate is not None
        self.lane = lane
        self.candidate: Candidate = route.candidate
        self._stable = stable
        self._began_at = time.monotonic()
        self.trial = Trial(id=self.candidate.id, step=self.candidate.step)
        self._split = RobotSplit(self.candidate.id, self._began_at)
        self._split.set_weight(self.candidate.weight, self.candidate.hold_s, self._began_at)
        self._mirrored: set[asyncio.Task[None]] = set()
        self._waiting: set[_Relayed] = set()  # observations that the candidate has
        self.usable = self.was_usable = False
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def apply(self, route: Route) -> None:
        """Takes over a changed route of the same trial; a new step begins with empty counts."""
        assert route.candidate is not None
        before, self.candidate = self.candidate, route.candidate
        self.lane.apply(candidate_route(route))
        if (before.step, before.weight) != (self.candidate.step, self.candidate.weight):
            self._began_at = time.monotonic()
            self.trial = Trial(id=self.candidate.id, step=self.candidate.step)
            self._split.set_weight(self.candidate.weight, self.candidate.hold_s, self._began_at)

    def measured(self) -> Trial:
        """The counts of this step so far."""
        now = time.monotonic()
        robots, on_candidate = self._split.active(now)
        return msgspec.structs.replace(
            self.trial,
            seconds=now - self._began_at,
            workers=self.lane.info().workers if self.usable else 0,
            robots=robots,
            candidate_robots=on_candidate,
        )

    def pick(self, observation: Observation, robot: str) -> StableTrack | CandidateTrack:
        """Where this observation goes; `robot` is the robot's name among those of all tenants."""
        now = time.monotonic()
        session = observation.session_id
        if self.candidate.weight > 0.0:
            if self._split.is_on_candidate(robot, session, now):
                return CandidateTrack(self)
        else:
            self._split.note(robot, session, now)
        return StableTrack(self)

    async def close(self) -> None:
        """Ends mirroring and watching; the lane is the caller's."""
        ending = [*self._mirrored, self._watching]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    def withdraw(self) -> None:
        """Takes what is queued with the candidate to the serving revision; what a worker has comes back by itself.

        Of a candidate that was promoted nothing is taken: it is the serving revision, and its lane keeps the queue.
        """
        if self._stable() is self.lane:
            return
        for relayed in list(self._waiting):
            if relayed.inner is not None and relayed.lane is self.lane:
                relayed.withdrawn = True
                self.lane.leave(relayed.inner)

    def relayed(self, relayed: _Relayed) -> None:
        """An observation is with the candidate."""
        self._waiting.add(relayed)
        relayed.result.add_done_callback(lambda _: self._waiting.discard(relayed))

    async def _watch(self) -> None:
        # A lane keeps what is queued while its workers are gone or rest after a failure, for one may come back; here
        # another revision is at hand.
        while True:
            states = self.lane.levels().states
            self.usable = any(count for (_, state), count in states.items() if state in _USABLE)
            self.was_usable |= self.usable
            if not self.usable:
                self.withdraw()
            await asyncio.sleep(WATCH_S)

    def stable(self) -> Lane:
        """The lane that serves the policy. Raises TaktlineError `unknown_policy` once the policy is gone."""
        lane = self._stable()
        if lane is None:
            raise TaktlineError(
                ErrorCode.UNKNOWN_POLICY,
                f"policy {self.lane.route.policy!r} is not served here any more",
                "list the policies with GET /v1/policies",
            )
        return lane

    # ----- mirroring

    def wants_mirror(self) -> bool:
        """Whether the next observation is mirrored."""
        share = self.candidate.mirror
        if not share or len(self._mirrored) >= MIRRORED_AT_ONCE or not self.usable:
            return False
        return random.random() * 100.0 < share

    def mirror(
        self, request_id: str, observation: Observation, deadline: float, principal: Principal, serving: Pending
    ) -> None:
        """Sends a copy to the candidate, and compares the answers once both are there."""
        task = asyncio.get_running_loop().create_task(
            self._mirror(request_id, observation, deadline, principal, serving)
        )
        self._mirrored.add(task)
        task.add_done_callback(self._mirrored.discard)

    async def _mirror(
        self, request_id: str, observation: Observation, deadline: float, principal: Principal, serving: Pending
    ) -> None:
        trial, candidate = self.trial, self.candidate
        offered: Served | None = None
        error: BaseException | None = None
        try:
            copy = self.lane.submit(f"{request_id}-shadow", observation, deadline, principal)
            copy.trace = None if serving.trace is None else serving.trace.mirrored()
            offered = await copy.result
        except TaktlineError as refused:
            error = refused
        except ClientGone:
            return
        late = time.monotonic() > deadline
        count(trial.shadow.outcomes, error, late=late)
        if offered is None:
            return
        await asyncio.wait({serving.result})
        if serving.result.cancelled() or serving.result.exception() is not None:
            return  # without the serving revision's answer there is nothing to compare with
        served = serving.result.result()
        if served.degraded != offered.degraded:
            return  # one of them was made cheaper: how far they lie apart says nothing of the revision
        if not self._fit_alike():
            return  # the robot may have fitted its frames to the serving revision: the candidate saw others
        found = shadow.difference(served.actions.to_numpy(), offered.actions.to_numpy(), candidate)
        shadow.note(trial.shadow, found)
        if found is None or found[0] > 1.0:
            log(
                _logger,
                logging.INFO,
                "shadow_disagrees",
                policy=self.lane.route.policy,
                robot=observation.robot_id,
                request_id=request_id,
                revision=offered.revision,
                tolerances=None if found is None else round(found[0], 3),
            )

    def _fit_alike(self) -> bool:
        stable = self._stable()
        return stable is not None and stable.info().image_fit == self.lane.info().image_fit


class StableTrack:
    """The serving revision, for observations that count in a trial and may be mirrored. Looks like a `Lane`."""

    def __init__(self, canary: Canary) -> None:
        self._canary = canary
        self._lane = canary.stable()

    def info(self) -> PolicyInfo:
        """What a client must know."""
        return self._lane.info()

    def submit(
        self, request_id: str, observation: Observation, deadline: float, principal: Principal = OPEN
    ) -> Pending:
        """Queues one observation; see `Lane.submit`."""
        canary = self._canary
        mirrored = canary.wants_mirror()
        if mirrored and observation.seed is None:
            # Both revisions must draw the same noise, or two equal policies would seem to differ.
            observation = msgspec.structs.replace(observation, seed=int.from_bytes(os.urandom(7), "big"))
        try:
            pending = self._lane.submit(request_id, observation, deadline, principal)
        except TaktlineError as error:
            count(canary.trial.stable, error, late=False)
            raise
        _counted(pending, canary.trial.stable, deadline)
        if mirrored:
            canary.mirror(request_id, observation, deadline, principal, pending)
        return pending

    def leave(self, pending: Pending) -> None:
        """The robot is gone."""
        self._lane.leave(pending)


class CandidateTrack:
    """The candidate, with the serving revision as its net. Looks like a `Lane`."""

    def __init__(self, canary: Canary) -> None:
        self._canary = canary

    def info(self) -> PolicyInfo:
        """What a client must know, from the candidate where it is up."""
        found = self._canary.lane.info()
        return found if found.ready else self._canary.stable().info()

    def submit(
        self, request_id: str, observation: Observation, deadline: float, principal: Principal = OPEN
    ) -> Pending:
        """Queues one observation with the candidate, or with the serving revision where the candidate refuses it."""
        canary = self._canary
        if not canary.usable:
            if canary.was_usable:  # before that nobody has promised anything
                canary.trial.candidate.failed += 1
                canary.trial.rescued += 1
            return canary.stable().submit(request_id, observation, deadline, principal)
        try:
            inner = canary.lane.submit(request_id, observation, deadline, principal)
        except TaktlineError as error:
            count(canary.trial.candidate, error, late=False)
            if error.code not in _REFUSED:
                raise
            canary.trial.rescued += 1
            return canary.stable().submit(request_id, observation, deadline, principal)
        relayed = _Relayed(
            robot=inner.robot,
            seq=inner.seq,
            deadline=deadline,
            arrived_at=inner.arrived_at,
            request_id=request_id,
            lane=canary.lane,
            inner=inner,
        )
        canary.relayed(relayed)
        inner.result.add_done_callback(lambda _: self._candidate_done(relayed, observation, principal))
        return relayed

    def leave(self, pending: Pending) -> None:
        """The robot is gone."""
        if isinstance(pending, _Relayed) and pending.lane is not None and pending.inner is not None:
            pending.lane.leave(pending.inner)
            inner = pending.inner.result
            if inner.done() and isinstance(_error_of(inner), ClientGone):
                _hand_on(pending.inner, pending)  # now, as with a lane: whoever takes it out asks whether it has left
        else:
            self._canary.stable().leave(pending)

    def _candidate_done(self, relayed: _Relayed, observation: Observation, principal: Principal) -> None:
        assert relayed.inner is not None
        late = time.monotonic() > relayed.deadline
        error = _error_of(relayed.inner.result)
        count(self._canary.trial.candidate, error, late=late)
        rescuable = isinstance(error, TaktlineError) and error.code in (_REFUSED | _FAILED)
        if relayed.withdrawn and isinstance(error, ClientGone):
            self._canary.trial.candidate.failed += 1
            rescuable = True
        if not rescuable or relayed.result.done():
            _hand_on(relayed.inner, relayed)
            return
        try:
            relayed.lane = self._canary.stable()
            relayed.inner = relayed.lane.submit(relayed.request_id, observation, relayed.deadline, principal)
            relayed.inner.trace = relayed.trace
        except TaktlineError as refused:
            relayed.result.set_exception(refused)
            return
        self._canary.trial.rescued += 1
        inner = relayed.inner
        inner.result.add_done_callback(lambda _: _hand_on(inner, relayed))


def _counted(pending: Pending, outcomes: Outcomes, deadline: float) -> None:
    def done(result: asyncio.Future[Served]) -> None:
        count(outcomes, _error_of(result), late=time.monotonic() > deadline)

    pending.result.add_done_callback(done)


def _error_of(result: asyncio.Future[Served]) -> BaseException | None:
    return ClientGone() if result.cancelled() else result.exception()  # whoever waited for it has gone


def _hand_on(inner: Pending, relayed: _Relayed) -> None:
    error = _error_of(inner.result)
    if relayed.result.done():
        return
    if error is not None:
        relayed.result.set_exception(error)
    else:
        relayed.result.set_result(inner.result.result())
