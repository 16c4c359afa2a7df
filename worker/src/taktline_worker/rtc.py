"""Real-time chunking (arXiv 2506.07339): the formulas that every flow-matching family shares, and their settings.

The convention of time is the paper's: t = 0 is noise, t = 1 the action chunk. Of the H actions of a chunk the first d
are executed while the chunk is made; the tail of the last chunk has influence before action e, the prefix end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from taktline_protocol import TaktlineError
from taktline_protocol.checks import check_delay, rtc_error

from taktline_worker.observation import RtcInput

Schedule = Literal["linear", "exp", "ones", "zeros"]
SCHEDULES: tuple[Schedule, ...] = ("linear", "exp", "ones", "zeros")


@dataclass(frozen=True, slots=True)
class RtcSettings:
    """What a loaded policy does with a tail.

    Attributes:
        mode: `guided` pulls the chunk towards the tail at each solver step; `trained` fixes its first actions to it.
        max_guidance_weight: beta, the bound of `guidance_weight`.
        exact: whether guidance runs a backward pass (`RtcOptions.gradient`).
        max_delay: trained only: the largest delay of the training.
    """

    mode: Literal["guided", "trained"]
    schedule: Schedule = "linear"
    max_guidance_weight: float = 10.0
    exact: bool = False
    max_delay: int = 0


@dataclass(frozen=True, slots=True)
class RtcPlan:
    """One observation's delay and prefix end after checking and clipping.

    Attributes:
        delay: d.
        end: e, at most the tail's length.
    """

    delay: int
    end: int


def plan_rtc(
    settings: RtcSettings,
    horizon: int,
    tail_length: int,
    delay: int | None,
    execution_horizon: int | None,
    prefix_end: int | None,
) -> RtcPlan:
    """Checks what the robot says of its delay, and clips it to the tail it sent.

    In the guided mode a delay beyond the tail is clipped: there is nothing to be held to. In the trained mode it is
    refused, as the network was never shown a prefix that is partly unknown.

    Raises:
        TaktlineError: RTC_INVALID.
    """
    if delay is None:
        raise rtc_error(
            "the delay is not stated",
            "send delay: the actions that will be executed before the new chunk is there, ceil(latency / dt)",
        )
    check_delay(delay, execution_horizon, horizon, settings.max_delay if settings.mode == "trained" else None)
    if settings.mode == "trained":
        if delay > tail_length:
            raise rtc_error(
                f"the delay is {delay} actions, the tail holds {tail_length}",
                "ask for the next chunk while at least as many actions are left as it takes to come",
            )
        return RtcPlan(delay, delay)
    stated = prefix_end
    if stated is None and execution_horizon is not None:
        stated = horizon - execution_horizon
    end = min(tail_length if stated is None else stated, tail_length, horizon)
    return RtcPlan(min(delay, end), end)


def prefix_weights(delay: int, end: int, horizon: int, schedule: Schedule) -> NDArray[np.float64]:
    """Influence of the tail on each action, float64 (H,): 1 before the delay, 0 from the prefix end on.

    Between the two, with l = (e - i) / (e - d + 1): linear l; exp l * (exp(l) - 1) / (exp(1) - 1); ones 1; zeros 0.

    Args:
        delay: d; more than `end` counts as `end`.
        end: e.
        horizon: H.
        schedule: how the weight falls.
    """
    start = min(delay, end)
    index = np.arange(horizon, dtype=np.float64)
    falling = (end - index) / (end - start + 1)
    between = {
        "linear": falling,
        "exp": falling * np.expm1(falling) / (math.e - 1.0),
        "ones": np.ones(horizon),
        "zeros": np.zeros(horizon),
    }[schedule]
    return np.where(index < start, 1.0, np.where(index < end, between, 0.0))


def guidance_weight(t: float, bound: float) -> float:
    """min((1 - t) / t * (t^2 + (1 - t)^2) / (1 - t)^2, bound); at t = 0, where that has no value, `bound`."""
    rest = 1.0 - t
    if t <= 0.0 or rest <= 0.0:
        return bound
    return min(rest / t * (t * t + rest * rest) / (rest * rest), bound)


def read_tail(tail: NDArray[np.generic], horizon: int, width: int) -> NDArray[np.float64]:
    """The tail as float64 (n, D), checked.

    Raises:
        TaktlineError: RTC_INVALID for another shape or dtype, or where a number is not finite.
    """
    if tail.ndim != 2 or tail.shape[1] != width or not 1 <= tail.shape[0] <= horizon or tail.dtype.kind != "f":
        raise rtc_error(
            f"the tail is {tail.dtype} of shape {list(tail.shape)}; it must be 1 to {horizon} float rows of {width}",
            "send unexecuted rows of a chunk of this policy",
        )
    values = tail.astype(np.float64)
    if not np.isfinite(values).all():
        raise _not_finite(values)
    return values


def cut_to(sent: RtcInput, horizon: int, settings: RtcSettings, whole: int, width: int) -> RtcInput:
    """What a robot that reckons with longer chunks sends, for a chunk of `horizon` actions.

    It is refused as it would be for a whole chunk. Its tail ends where the shorter chunk does; of the actions that it
    executes of each chunk it gets as many as there are after the delay.

    Args:
        settings: of the whole policy, of chunks of `whole` actions of `width` numbers.

    Raises:
        TaktlineError: RTC_INVALID, also where all of the shorter chunk would pass while it is made.
    """
    tail = read_tail(sent.tail, whole, width)
    plan_rtc(settings, whole, len(tail), sent.delay, sent.execution_horizon, sent.prefix_end)
    delay, end = sent.delay or 0, sent.prefix_end
    if delay >= horizon:
        raise rtc_error(
            f"the delay is {delay} actions, and the policy answers with chunks of {horizon} instead of {whole} now",
            "shorten the round trip, or raise spec.degrade.minActionHorizon above the delay",
        )
    if sent.execution_horizon is not None:
        end = max(horizon - sent.execution_horizon, delay)
    return replace(sent, tail=sent.tail[:horizon], execution_horizon=None, prefix_end=end)


def _not_finite(values: NDArray[np.float64]) -> TaktlineError:
    row = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
    return rtc_error(f"tail[{row}] holds a NaN or infinity", "send the actions as they were received")
