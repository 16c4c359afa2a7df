"""What a robot is told when it gets no chunk: why, when to try again, and what is safe to do until then."""

from __future__ import annotations

from taktline_protocol import ErrorCode, TaktlineError

from taktline_gateway.deadline_queue import Ticket
from taktline_gateway.scheduler import Refusal, Refused

SHED = frozenset(
    {
        ErrorCode.DEADLINE_UNREACHABLE,
        ErrorCode.OVERLOADED,
        ErrorCode.WORKER_UNAVAILABLE,
        ErrorCode.WORKER_FAILED,
        ErrorCode.SUPERSEDED,
        ErrorCode.DEADLINE_EXPIRED,
        ErrorCode.DRAINING,
        ErrorCode.INTERNAL,
    }
)
"""Errors that are not the request's own fault, so that the robot must be told what is safe to do."""


def internal_error() -> TaktlineError:
    """What a client is told where the gateway itself is at fault; the log has the rest under the request id."""
    return TaktlineError(
        ErrorCode.INTERNAL, "the gateway failed on this request", "report the request id with the gateway's log"
    )


def advise(error: TaktlineError, deadline: float, now: float, dt_s: float) -> None:
    """Tells a robot that was shed what it can safely do: go on with its buffer while that lasts, else hold.

    The hand-off deadline is when the buffer runs dry, so what is left until then is what the robot can still execute;
    less than one control period is nothing.

    Args:
        deadline: monotonic instant at which the buffer is dry, s.
        dt_s: control period of the policy; 0 where it is not known.
    """
    if error.code not in SHED:
        return
    left_s = max(0.0, deadline - now)
    error.safe_action = "continue" if left_s > dt_s else "hold"
    error.buffer_ms = round(1e3 * left_s, 1)


def refused_error(refused: Refused, policy: str, now: float, max_queued: int) -> TaktlineError:
    """The typed error of a ticket that the scheduler refuses."""
    retry_ms = round(1e3 * refused.retry_s, 1)
    if refused.reason is Refusal.NO_WORKER or refused.completion is None:
        return unavailable(policy, retry_ms)
    if refused.reason is Refusal.QUEUE_FULL:
        return TaktlineError(
            ErrorCode.OVERLOADED,
            f"the queue of policy {policy!r} is full ({max_queued})",
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


def unavailable(policy: str, retry_ms: float | None) -> TaktlineError:
    """No worker of the policy can be used."""
    return TaktlineError(
        ErrorCode.WORKER_UNAVAILABLE,
        f"no worker of policy {policy!r} is ready",
        "wait for GET /v1/policies/{policy} to say ready, or look at the worker's log",
        retry_after_ms=retry_ms,
    )


def worker_failed(worker: str, reason: str, retry_s: float) -> TaktlineError:
    """A worker failed or hung, and there was no time or no other worker."""
    return TaktlineError(
        ErrorCode.WORKER_FAILED,
        f"worker {worker} failed this batch: {reason}",
        "send a fresh observation; the gateway avoids that worker for a moment",
        retry_after_ms=1e3 * retry_s,
    )


def superseded(older: Ticket, newer: Ticket) -> TaktlineError:
    """A newer observation of the robot took its place in the queue."""
    return TaktlineError(
        ErrorCode.SUPERSEDED,
        f"observation {older.seq} of robot {older.robot!r} was still queued when {newer.seq} came",
        "use the chunk of the newer observation",
    )
