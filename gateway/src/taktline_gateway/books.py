"""What became of each request, told once: to the metrics, the log, the traces, the timeline and the live page."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import msgspec
from taktline_protocol import ErrorCode, Observation, PolicyInfo, TaktlineError, Timings
from taktline_protocol.tracing import Tracing

from taktline_gateway.cycles import ControlCycles
from taktline_gateway.live.recent import Recent
from taktline_gateway.logs import log
from taktline_gateway.series import Exemplar
from taktline_gateway.telemetry import Telemetry, margin_of, miss_cause
from taktline_gateway.tracing.requests import RequestTrace, RequestTraces
from taktline_gateway.tracing.timeline import TimedRequest, Timeline

if TYPE_CHECKING:
    from taktline_gateway.http_io import Exchange
    from taktline_gateway.pending import Pending, Served

CLIENT_GONE = "client_gone"
"""The outcome of a request whose robot closed the connection; a metric label, never on the wire."""
# Errors that leave a deadline unmet; the others are the request's own fault or have a newer observation behind them.
MISSED = frozenset(
    {
        ErrorCode.DEADLINE_EXPIRED,
        ErrorCode.DEADLINE_UNREACHABLE,
        ErrorCode.OVERLOADED,
        ErrorCode.DRAINING,
        ErrorCode.WORKER_UNAVAILABLE,
        ErrorCode.WORKER_FAILED,
        ErrorCode.INTERNAL,
    }
)
_logger = logging.getLogger(__name__)


class Verdict(msgspec.Struct, frozen=True):
    """The five terms of an answer, its margin, and the cause where it is late."""

    timings: Timings
    margin_ms: float
    cause: str | None


class Books:
    """The records of one gateway. Policies that are not served are only counted, under one label."""

    def __init__(self, telemetry: Telemetry, tracing: Tracing | None = None) -> None:
        self.telemetry = telemetry
        self.traces = RequestTraces(tracing)
        self.timelines: dict[str, Timeline] = {}
        self.recent: dict[str, Recent] = {}
        self._cycles = ControlCycles()

    def policy_served(self, policy: str) -> None:
        """The policy is in the routing table."""
        self.telemetry.policy_served(policy)
        self.timelines.setdefault(policy, Timeline())
        self.recent.setdefault(policy, Recent())

    def policy_gone(self, policy: str) -> None:
        """The policy left the routing table."""
        self.telemetry.policy_gone(policy)
        self.timelines.pop(policy, None)
        self.recent.pop(policy, None)

    def queued(self, policy: str, exchange: Exchange, observation: Observation, pending: Pending) -> None:
        """Notes that the observation waits for a batch, and begins its trace where it is sampled."""
        exchange.pending = pending
        if self.traces.tracing is not None:
            pending.traced(
                self.traces.begin(
                    exchange.traceparent or observation.traceparent,
                    exchange.received_at,
                    policy=policy,
                    robot=observation.robot_id,
                    request_id=exchange.request_id,
                    seq=observation.seq,
                    budget_ms=observation.budget_ms,
                )
            )

    def answered(
        self,
        request_id: str,
        info: PolicyInfo,
        observation: Observation,
        served: Served,
        pending: Pending,
        received_at: float,
    ) -> Verdict:
        """What is stated in an answer that is about to be sent; it is counted in the loop's next turn, behind it."""
        now = time.monotonic()
        queue_s = served.sent_at - pending.arrived_at + served.waited_s
        sent_at = observation.captured_at if observation.sent_at is None else observation.sent_at
        timings = Timings(
            observe_ms=1e3 * (sent_at - observation.captured_at),
            # The gateway's own time that is neither waiting nor inference: reading, decoding, the RPC's overhead.
            transfer_ms=1e3 * max(0.0, now - received_at - queue_s - served.inference_s),
            queue_ms=1e3 * queue_s,
            inference_ms=1e3 * served.inference_s,
            actuate_ms=observation.actuate_ms,
        )
        margin_ms = margin_of(observation.budget_ms, timings)
        verdict = Verdict(timings, margin_ms, miss_cause(observation.budget_ms, timings))
        what = (request_id, info, observation, served, pending, received_at, now, verdict)
        asyncio.get_running_loop().call_soon(self._count, *what)
        return verdict

    def _count(
        self,
        request_id: str,
        info: PolicyInfo,
        observation: Observation,
        served: Served,
        pending: Pending,
        received_at: float,
        now: float,
        verdict: Verdict,
    ) -> None:
        """Tells everybody of an answer that was made at `now`."""
        timings, margin_ms, cause = verdict.timings, verdict.margin_ms, verdict.cause
        policy = info.policy
        trace = pending.trace
        # Of the answers in time any is as good as another; of the late ones a person wants to see which.
        exemplar = _exemplar(trace, request_id if cause is not None else "")
        self.telemetry.answered(policy, served.pool, served.revision, timings, margin_ms, cause, exemplar)
        if served.degraded is not None:
            self.telemetry.degraded(policy, served.degraded)
        # A cheaper answer may be shorter; what a planner gives is less than the robot has time for.
        chunk_s = (served.actions.shape[0] if served.plan is None else info.horizon) * info.dt_s
        cycle = self._cycles.answered(policy, observation, margin_ms, timings.inference_ms, chunk_s)
        if cycle is not None:
            self.telemetry.control_cycle(policy, cycle.environment_ms, cycle.control_ms)
        recent = self.recent.get(policy)
        if recent is not None:
            recent.answered(margin_ms, cause, cycle)
            self.timelines[policy].note(
                TimedRequest(
                    request_id=request_id,
                    robot=observation.robot_id,
                    seq=observation.seq,
                    outcome="ok",
                    received_at=received_at,
                    ended_at=now,
                    deadline_at=_deadline(received_at, observation),
                    observe_ms=timings.observe_ms,
                    queued_at=pending.arrived_at,
                    sent_at=served.sent_at,
                    returned_at=served.returned_at,
                    cause=cause,
                    margin_ms=round(margin_ms, 3),
                    worker=served.worker,
                    pool=served.pool,
                    revision=served.revision,
                    batch_size=served.batch_size,
                    inference_ms=timings.inference_ms,
                    phases_ms=served.phases_ms,
                    waited_ms=round(1e3 * served.waited_s, 3),
                    trace_id=_trace_id(trace),
                    priority=observation.priority,
                    actions=served.actions.shape[0],
                )
            )
        if trace is not None:
            trace.answered(
                pending.arrived_at,
                served.sent_at,
                served.returned_at,
                now,
                code="ok",
                margin_ms=margin_ms,
                cause=cause or "",
                pool=served.pool,
                revision=served.revision,
                worker=served.worker,
                batch_size=served.batch_size,
            )
        level = logging.DEBUG if cause is None else logging.INFO
        if _logger.isEnabledFor(level):
            log(
                _logger,
                level,
                "answered" if cause is None else "deadline_missed",
                policy=policy,
                pool=served.pool,
                revision=served.revision,
                robot=observation.robot_id,
                request_id=request_id,
                seq=observation.seq,
                code="ok",
                cause=cause,
                margin_ms=round(margin_ms, 3),
                observe_ms=round(timings.observe_ms, 3),
                transfer_ms=round(timings.transfer_ms, 3),
                queue_ms=round(timings.queue_ms, 3),
                inference_ms=round(timings.inference_ms, 3),
                actuate_ms=round(timings.actuate_ms, 3),
                # The host's monotonic clock, so that lines of several processes fall on one line of time.
                received_at_s=received_at,
                answered_at_s=now,
                worker=served.worker,
                batch_size=served.batch_size,
                trace_id=_trace_id(trace) or None,
            )

    def refused(self, policy: str, exchange: Exchange, observation: Observation | None, error: TaktlineError) -> None:
        """Counts and logs one typed error."""
        missed = error.code in MISSED
        self._without_chunk(policy, exchange, observation, error.code.value, error.message, missed=missed)

    def gone(self, policy: str, exchange: Exchange, observation: Observation | None) -> None:
        """Counts a request whose robot closed the connection before its answer; that is nobody's missed deadline."""
        self._without_chunk(policy, exchange, observation, CLIENT_GONE, "", missed=False)

    def close(self) -> None:
        """Exports the traces that are left."""
        self.traces.close()

    def _without_chunk(
        self,
        policy: str,
        exchange: Exchange,
        observation: Observation | None,
        code: str,
        reason: str,
        *,
        missed: bool,
    ) -> None:
        pending = exchange.pending
        trace = None if pending is None else pending.trace
        queued_at = None if pending is None else pending.arrived_at
        if pending is None and self.traces.tracing is not None:
            parent = exchange.traceparent or (observation.traceparent if observation is not None else "")
            about = {"policy": policy[:128], "request_id": exchange.request_id}
            trace = self.traces.begin(parent, exchange.received_at, **about)
        self.telemetry.refused(policy, code, missed=missed, exemplar=_exemplar(trace, exchange.request_id))
        if trace is not None:
            trace.ended(code, reason, queued_at)
        recent = self.recent.get(policy)
        if recent is not None:
            recent.refused(code, missed=missed)
        if recent is not None and observation is not None:
            self._cycles.lost(policy, observation.robot_id)
            self.timelines[policy].note(
                TimedRequest(
                    request_id=exchange.request_id,
                    robot=observation.robot_id,
                    seq=observation.seq,
                    outcome=code,
                    received_at=exchange.received_at,
                    ended_at=time.monotonic(),
                    deadline_at=_deadline(exchange.received_at, observation),
                    queued_at=queued_at,
                    cause="refused" if missed else None,
                    trace_id=_trace_id(trace),
                    priority=observation.priority,
                )
            )
        log(
            _logger,
            logging.INFO,
            CLIENT_GONE if code == CLIENT_GONE else "request_refused",
            policy=policy[:128],
            code=code,
            cause="refused" if missed else None,
            reason=reason or None,
            request_id=exchange.request_id,
            robot=observation.robot_id if observation is not None else None,
            seq=observation.seq if observation is not None else None,
            trace_id=_trace_id(trace) or None,
        )


def _deadline(received_at: float, observation: Observation) -> float:
    return received_at + (observation.budget_ms - observation.actuate_ms) / 1e3


def _trace_id(trace: RequestTrace | None) -> str:
    return "" if trace is None else f"{trace.context.trace_id:032x}"


def _exemplar(trace: RequestTrace | None, request_id: str) -> Exemplar | None:
    if trace is not None:
        return {"trace_id": _trace_id(trace)}
    return {"request_id": request_id} if request_id else None
