"""Errors of a stream that the robot's own end finds."""

from __future__ import annotations

import time

from taktline_protocol import ErrorCode, TaktlineError


def closed() -> TaktlineError:
    """Asked after `close`."""
    return TaktlineError(ErrorCode.CANCELLED, "this robot was closed", "make a new Robot")


def closed_meanwhile() -> TaktlineError:
    """`close` came before the answer, or before there was a connection."""
    return TaktlineError(ErrorCode.CANCELLED, "the robot was closed while it asked", "nothing: it was told so")


def asked_to_pause(pause_s: float) -> TaktlineError:
    """The gateway asked for a pause, which has still to last `pause_s`."""
    return TaktlineError(
        ErrorCode.OVERLOADED,
        "the gateway asked this robot to pause, as the policy's workers cannot keep up",
        "keep executing the buffer or hold; send a fresh observation after the hint",
        retry_after_ms=round(1e3 * pause_s, 1),
    )


def budget_spent() -> TaktlineError:
    """Sent before, and now too late to be sent again."""
    return TaktlineError(
        ErrorCode.DEADLINE_EXPIRED,
        "the budget was spent while the connection was away",
        "hold, and send a fresh observation",
    )


def superseded(newest: int) -> TaktlineError:
    """Of several that a lost connection carried, the newest one is sent again."""
    return TaktlineError(
        ErrorCode.SUPERSEDED,
        f"the connection was lost, and observation {newest} was sent again instead",
        "use the chunk of the newer observation",
    )


def overtaken(newest: int) -> TaktlineError:
    """A newer observation went out while this one still waited to."""
    return TaktlineError(
        ErrorCode.SUPERSEDED,
        f"observation {newest} went out before this one could",
        "use the chunk of the newer observation",
    )


_SHED = (ErrorCode.GATEWAY_UNREACHABLE, ErrorCode.OVERLOADED, ErrorCode.DEADLINE_EXPIRED)


def say_what_is_safe(error: TaktlineError, budget_ms: float, asked_at: float, timeout_s: float) -> None:
    """Adds to an error of the robot's own end what a gateway says with its refusals, by what is left of the budget.

    Also that it was the robot's own `timeout_s` that ended the wait, where the budget had time left.
    """
    if error.safe_action is None and error.code in _SHED:
        left_ms = round(budget_ms - 1e3 * (time.monotonic() - asked_at), 1)
        if error.code is ErrorCode.GATEWAY_UNREACHABLE and 0.0 < left_ms <= budget_ms - 1e3 * timeout_s:
            error.next_step += (
                f"; this robot's answer_timeout_s is {timeout_s:g} s: give it more where the policy takes longer"
            )
        error.safe_action, error.buffer_ms = ("continue", left_ms) if left_ms > 0 else ("hold", 0.0)
