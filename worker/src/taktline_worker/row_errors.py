"""What one row of a batch is answered that gets no chunk; its neighbours are none the wiser."""

from __future__ import annotations

import logging

from taktline_protocol import ErrorCode, TaktlineError

logger = logging.getLogger(__name__)


def own_error(error: Exception) -> TaktlineError:
    """What one observation is answered whose preprocessing failed; its neighbours are none the wiser."""
    if isinstance(error, TaktlineError):
        return error
    logger.error("preprocessing failed", exc_info=error)
    return TaktlineError(
        ErrorCode.INTERNAL,
        f"preprocessing this observation failed: {type(error).__name__}",
        "the worker's log has the details; this is a fault of the worker, not of its neighbours in the batch",
    )


def no_rtc(family: str) -> TaktlineError:
    """A tail was sent to a policy that takes none."""
    return TaktlineError(
        ErrorCode.RTC_INVALID,
        f"this worker serves {family} without real-time chunking",
        "leave rtc out of the observation, or set spec.engine.rtc where the family has it",
    )


def no_video(family: str) -> TaktlineError:
    """A video was asked of a policy that imagines none."""
    return TaktlineError(
        ErrorCode.IMAGINE_INVALID,
        f"this worker serves {family} without imagined videos",
        "leave imagine out of the observation, or set spec.engine.worldAction.imagine where the family has it",
    )


def expired(late_s: float) -> TaktlineError:
    """Its deadline was over before its turn came."""
    return TaktlineError(
        ErrorCode.DEADLINE_EXPIRED,
        f"the hand-off deadline passed {late_s * 1000.0:.1f} ms before the engine was free",
        "send a larger budget, or add workers",
    )
