"""Real-time chunking of π0 and π0.5: settings from the checkpoint, a robot's tail as tensors, and the guided velocity.

π's time runs the other way than the paper's: tau = 1 is noise, tau = 0 the action; the velocity points to the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from taktline_kernels.guidance import Guidance
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import RtcOptions
from torch import Tensor

from taktline_worker.models.pi import aloha
from taktline_worker.models.pi.config import PiConventions
from taktline_worker.observation import RtcInput
from taktline_worker.rtc import RtcPlan, RtcSettings, guidance_weight, plan_rtc, prefix_weights, read_tail


@dataclass(frozen=True, slots=True)
class RtcRow:
    """The tail of one observation, ready for the network.

    Attributes:
        target: fp32 (H, action width): the tail in model units; zero beyond it, and in dimensions no robot has.
        weights: fp32 (H,), influence on each action; unused in the trained mode.
        plan: delay and prefix end as applied.
    """

    target: Tensor
    weights: Tensor
    plan: RtcPlan


@dataclass(frozen=True, slots=True)
class RtcBatch:
    """The tails of a batch, one entry a row; rows without a tail are zero, and `rows` leaves them as they are.

    Attributes:
        settings: the policy's.
        target: fp32 (B, H, action width).
        weights: fp32 (B, H, 1).
        rows: bool (B, 1, 1), rows with a tail.
        frozen: bool (B, H), actions fixed to the target; all false in the guided mode.
        index: int64 (rows with a tail,), their places.
    """

    settings: RtcSettings
    target: Tensor
    weights: Tensor
    rows: Tensor
    frozen: Tensor
    index: Tensor

    @property
    def everyone(self) -> bool:
        """Whether all rows have a tail."""
        return self.index.shape[0] == self.rows.shape[0]

    def to(self, device: torch.device) -> RtcBatch:
        """The same on `device`."""
        return replace(
            self,
            target=self.target.to(device),
            weights=self.weights.to(device),
            rows=self.rows.to(device),
            frozen=self.frozen.to(device),
            index=self.index.to(device),
        )


def settings_of(conventions: PiConventions, options: RtcOptions) -> RtcSettings | None:
    """What the policy does with a tail; None where the deployment refuses them.

    Raises:
        TaktlineError: CONFIG_INVALID where the trained mode is asked of a checkpoint that was not trained for it.
    """
    if options.mode == "off":
        return None
    max_delay = min(conventions.rtc_max_delay, conventions.horizon)
    if options.mode == "trained" and not max_delay:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            "engine.rtc.mode is trained, and the checkpoint was not trained with a delay",
            "set spec.engine.rtc.mode to guided, or use a π0.5 checkpoint with rtc_training_max_delay above 0",
        )
    if max_delay and options.mode != "guided":
        return RtcSettings("trained", max_delay=max_delay)
    bound = options.max_guidance_weight or conventions.rtc_max_guidance_weight or 10.0
    return RtcSettings(
        "guided",
        schedule=options.schedule or conventions.rtc_schedule or "linear",
        max_guidance_weight=bound,
        exact=options.gradient == "vjp",
    )


def model_tail(
    conventions: PiConventions, tail: NDArray[np.float64], state: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Actions in robot units (n, D) -> the network's own output (n, D) that stands for them: the inverse of what
    `PiProcessor.finish` does, so relative actions are taken against the state of this observation.

    Args:
        state: (S,), in the policy's joint space.
    """
    actions = aloha.to_policy_actions(tail) if conventions.adapt_to_pi else tail
    if conventions.relative_mask:
        mask = np.array(conventions.relative_mask)
        actions = actions.copy()
        actions[:, : len(mask)] -= np.where(mask, state[: len(mask)], 0.0)
    return conventions.action_normaliser.undo(actions)


def read_row(
    conventions: PiConventions, settings: RtcSettings, width: int, sent: RtcInput, state: NDArray[np.float64]
) -> RtcRow:
    """The row of what a robot sent.

    Args:
        width: the network's action width.
        state: (S,), in the policy's joint space.

    Raises:
        TaktlineError: RTC_INVALID.
    """
    horizon = conventions.horizon
    tail = read_tail(sent.tail, horizon, conventions.action_dim)
    plan = plan_rtc(settings, horizon, len(tail), sent.delay, sent.execution_horizon, sent.prefix_end)
    with np.errstate(over="ignore"):
        values = model_tail(conventions, tail, state).astype(np.float32)
    if not np.isfinite(values).all():
        raise TaktlineError(
            ErrorCode.RTC_INVALID,
            "the tail is out of all proportion to the checkpoint's statistics",
            "send the actions as they were received, in the robot's units",
        )
    target = torch.zeros(horizon, width)
    target[: len(tail), : conventions.action_dim] = torch.from_numpy(values)
    weights = prefix_weights(plan.delay, plan.end, horizon, settings.schedule)
    return RtcRow(target, torch.from_numpy(weights).float(), plan)


def collate_rtc(rows: Sequence[RtcRow | None], settings: RtcSettings, horizon: int, width: int) -> RtcBatch | None:
    """The tails of a batch; None where no row has one."""
    index = [place for place, row in enumerate(rows) if row is not None]
    if not index:
        return None
    target = torch.zeros(len(rows), horizon, width)
    weights = torch.zeros(len(rows), horizon, 1)
    frozen = torch.zeros(len(rows), horizon, dtype=torch.bool)
    present = torch.zeros(len(rows), 1, 1, dtype=torch.bool)
    for place, row in enumerate(rows):
        if row is None:
            continue
        target[place], weights[place, :, 0], present[place] = row.target, row.weights, True
        if settings.mode == "trained":
            frozen[place, : row.plan.delay] = True
    return RtcBatch(settings, target, weights, present, frozen, torch.tensor(index))


def fix_prefix(batch: RtcBatch, x: Tensor) -> Tensor:
    """x (B, H, action width) with every frozen action set to its target."""
    return torch.where(batch.frozen[..., None], batch.target, x)


def guide(batch: RtcBatch, x: Tensor, v: Tensor, tau: float) -> Tensor:
    """v - g * (A - x1) W with x1 = x - tau v, for rows with a tail; the other rows' v bit by bit.

    This takes dx1/dx for the identity, as LeRobot's implementation does: it evaluates v before x is marked as an input.

    Args:
        x: fp32 (B, H, action width).
        v: likewise, the velocity at x.
        tau: time of the step.
    """
    correction = (batch.target - (x - tau * v)) * batch.weights
    return torch.where(batch.rows, v - guidance_weight(1.0 - tau, batch.settings.max_guidance_weight) * correction, v)


def guidance_steps(target: Tensor, influence: Tensor, times: Sequence[float], bound: float) -> list[Guidance]:
    """The correction of every solver step as the fused solver reads it: `guide` for any rows, of influence 0 or more.

    Args:
        target: fp32 (B, H, action width); influence: fp32 (B, H), zero for rows without a tail. Both are read when the
            solver runs.
        times: tau of each step.
        bound: of the weight.
    """
    flat, each = target.flatten(0, 1), influence.flatten()
    return [Guidance(flat, each, tau, guidance_weight(1.0 - tau, bound)) for tau in times]


def guide_exactly(batch: RtcBatch, x: Tensor, v: Tensor, tau: float) -> Tensor:
    """v - g * (dx1/dx)^T ((A - x1) W) for a batch whose rows all have a tail: the paper's form, one backward pass.

    Args:
        x: fp32 (B, H, action width), a leaf that requires its gradient.
        v: the velocity at x, with its graph.
        tau: time of the step.
    """
    denoised = x - tau * v
    error = (batch.target - denoised.detach()) * batch.weights
    (correction,) = torch.autograd.grad(denoised, x, error)
    return v.detach() - guidance_weight(1.0 - tau, batch.settings.max_guidance_weight) * correction


def rows_with_tails(batch: RtcBatch) -> RtcBatch:
    """The entries of the rows that have a tail."""
    count = batch.index.shape[0]
    return replace(
        batch,
        target=batch.target[batch.index],
        weights=batch.weights[batch.index],
        rows=batch.rows[batch.index],
        frozen=batch.frozen[batch.index],
        index=torch.arange(count, device=batch.index.device),
    )
