"""Real-time chunking as GR00T does it: the noise begins at the last chunk's tail, whose rows are denoised less."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from taktline_protocol.checks import rtc_error
from torch import Tensor

from taktline_worker.models.groot.embodiment import Embodiment
from taktline_worker.observation import RtcInput
from taktline_worker.rtc import RtcPlan, RtcSettings, plan_rtc, read_tail

SETTINGS = RtcSettings("guided", schedule="exp")


@dataclass(frozen=True, slots=True)
class RtcRow:
    """One observation's tail.

    Attributes:
        start: fp32 (H, action width), where the solver begins instead of at the noise; only rows and dimensions with a
            strength below 1 count.
        strength: fp32 (H, action width), the share of each velocity that is followed.
    """

    start: Tensor
    strength: Tensor
    plan: RtcPlan


def strengths(delay: int, end: int, horizon: int, rate: float) -> NDArray[np.float64]:
    """Share of the velocity that each action follows, (H,): 0 before the delay, 1 from the prefix end on.

    Between the two, with t_i = (i - d + 1) / (e - d + 1): (1 - exp(-rate t)) / (1 - exp(-rate)).
    """
    index = np.arange(horizon, dtype=np.float64)
    start = min(delay, end)
    t = (index - start + 1.0) / (end - start + 1.0)
    ramp = np.expm1(-rate * t) / np.expm1(-rate) if rate > 0 else t
    return np.where(index < start, 0.0, np.where(index < end, ramp, 1.0))


def read_row(
    embodiment: Embodiment, sent: RtcInput, state: NDArray[np.float64], horizon: int, width: int, rate: float
) -> RtcRow:
    """The row of what a robot sent.

    The robot's tail knows nothing of the network's padding dimensions, so these are denoised from noise as ever; the
    official code holds them to its own last chunk.

    Args:
        state: (S,) raw: relative parts of the tail are expressed from it.
        horizon: actions of the network; width: its action numbers.
        rate: of the ramp.

    Raises:
        TaktlineError: RTC_INVALID.
    """
    tail = read_tail(sent.tail, embodiment.rows, embodiment.action_dim)
    plan = plan_rtc(SETTINGS, embodiment.rows, len(tail), sent.delay, sent.execution_horizon, sent.prefix_end)
    parts, first = [], 0
    for part in embodiment.actions:
        parts.append(part.encoded(tail[:, first : first + part.width], state))
        first += part.width
    with np.errstate(over="ignore"):  # the check below has a better word for it
        values = np.concatenate(parts, axis=1).astype(np.float32)
    if not np.isfinite(values).all():
        raise rtc_error(
            "the tail is out of all proportion to the checkpoint's statistics",
            "send the actions as they were received, in the robot's units",
        )
    start, strength = torch.zeros(horizon, width), torch.ones(horizon, width)
    start[: len(tail), : embodiment.action_dim] = torch.from_numpy(values)
    ramp = torch.from_numpy(strengths(plan.delay, plan.end, horizon, rate)).float()
    strength[:, : embodiment.action_dim] = ramp[:, None]
    return RtcRow(start, strength, plan)
