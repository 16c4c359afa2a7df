"""A planner's request path, wherever its world model runs: observations to rows, budgets, plans to robot units."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import torch
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.search_work import SearchWork

from taktline_worker.adapter import Description, PlannedChunk
from taktline_worker.models.vjepa2_ac.config import ACTION_WIDTH, POSE_WIDTH
from taktline_worker.models.vjepa2_ac.processor import PendingPlannerRow, PlannerProcessor, PlannerRow
from taktline_worker.observation import RobotInput
from taktline_worker.planning.round_times import RoundTimes
from taktline_worker.planning.search import Plan

FAMILY = "vjepa2-ac"


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What `run` hands to `finish` for one row; tensors are on the CPU."""

    plan: Plan | None
    error: TaktlineError | None = None


class PlannerAdapter(ABC):
    """Rows of a batch are searched side by side, each as if alone; where they are searched is the subclass's part.

    Args:
        device: as reported to the gateway.
        round_times: learned from the plans made here; a subclass replaces it when its number of ranks changes.
        clock: monotonic seconds, the clock of `RobotInput.expires_at`.

    Attributes:
        ordinary: whether the newest plans took the time that such plans take here; set by the subclass.
    """

    def __init__(
        self,
        processor: PlannerProcessor,
        device: str,
        precision: str,
        control_period_s: float,
        round_times: RoundTimes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ordinary = True
        self.processor = processor
        self.round_times = round_times
        self._clock = clock
        self.description = Description(
            family=FAMILY,
            precision=precision,
            device=device,
            cameras=processor.cameras,
            optional_cameras=(),
            state_dim=POSE_WIDTH,
            action_dim=ACTION_WIDTH,
            horizon=processor.settings.horizon,
            control_period_s=control_period_s,
        )

    def wait_turn(self, rows: Sequence[PlannerRow], deadlines: Sequence[float | None]) -> bool:
        """Waits until a search may begin; whether it had to.

        Raises:
            TaktlineError: it may not begin in time for any of the rows.
        """
        del rows, deadlines
        return False

    @abstractmethod
    def plans(self, rows: Sequence[PlannerRow], deadlines: Sequence[float | None]) -> Sequence[Plan | TaktlineError]:
        """Plans of all rows, tensors anywhere; a search ends before the round that would end after its deadline.

        Raises:
            TaktlineError: where none of them can be made.
        """

    def begin(self, observation: RobotInput, pool: Executor) -> PendingPlannerRow:
        """Checks an observation and starts decoding its images. Raises TaktlineError where it does not fit."""
        return self.processor.begin(observation, pool)

    def run(self, rows: Sequence[PlannerRow], bucket: int) -> list[_Outcome]:
        """Plans of all rows, or the refusal of those whose budget is too short for one round."""
        del bucket  # units have a fixed shape already; a batch of fewer robots is just fewer of them
        began = self._clock()
        deadlines = [_deadline(row, began) for row in rows]
        try:
            # What a plan waits for is not what searching takes.
            began = self._clock() if self.wait_turn(rows, deadlines) else began
        except TaktlineError as error:
            return [_Outcome(None, error)] * len(rows)
        round_s = sum(self.round_times.round_s(row.settings) or 0.0 for row in rows)
        outcomes: dict[int, _Outcome] = {}
        for index, deadline in enumerate(deadlines):
            if deadline is None or began + round_s <= deadline:
                continue
            if self.round_times.refuse([row.settings for row in rows], deadline - began):
                outcomes[index] = _Outcome(None, _too_short(deadline - began, round_s, len(rows)))
        kept = [index for index in range(len(rows)) if index not in outcomes]
        if kept:
            try:
                found = self.plans([rows[index] for index in kept], [deadlines[index] for index in kept])
            except TaktlineError as error:
                return [outcomes.get(index, _Outcome(None, error)) for index in range(len(rows))]
            plans = {index: _to_cpu(one) for index, one in zip(kept, found, strict=True) if isinstance(one, Plan)}
            elapsed_s = self._clock() - began
            if self.ordinary:
                work = [(rows[index].settings, plan.rounds) for index, plan in plans.items()]
                self.round_times.learn(work, elapsed_s)
            outcomes |= {index: _Outcome(plan) for index, plan in plans.items()}
            outcomes |= {
                index: _Outcome(None, one) for index, one in zip(kept, found, strict=True) if not isinstance(one, Plan)
            }
        return [outcomes[index] for index in range(len(rows))]

    def finish(self, rows: Sequence[PlannerRow], outputs: Sequence[_Outcome]) -> list[PlannedChunk | TaktlineError]:
        """Each plan in robot units, or its row's error; a plan that is not finite is an error."""
        assert len(rows) == len(outputs)
        return [outcome.error or _chunk(outcome.plan) for outcome in outputs]

    def largest_row(self) -> PlannerRow:
        """The deployment's own search on neutral images; requests may ask for more, up to the limits."""
        size = self.processor.image_size
        return PlannerRow(
            pixels=torch.zeros(2, 3, size, size),
            pose=torch.zeros(POSE_WIDTH),
            settings=self.processor.settings,
            seed=0,
        )

    def one_round_row(self) -> PlannerRow:
        """The same with one round."""
        return replace(self.largest_row(), settings=replace(self.processor.settings, rounds=1))

    def search_work(self, whole_ms: float, one_round_ms: float) -> SearchWork:
        """The deployment's search, its limits, and which part of it a round is: what the rounds after the first take.

        The rest, encoding above all, is the same for any number of rounds.
        """
        settings, limits = self.processor.settings, self.processor.limits
        # Of one round, or measured out of order by a pause, the whole is all that is known.
        later_s = (whole_ms - one_round_ms) / (settings.rounds - 1) if settings.rounds > 1 else 0.0
        share = later_s / whole_ms if later_s > 0.0 else 1.0 / settings.rounds
        return SearchWork(
            candidates=settings.candidates,
            rounds=settings.rounds,
            horizon=settings.horizon,
            anytime=settings.anytime,
            unit=self.round_times.unit,
            round_share=min(share, 1.0 / settings.rounds),
            max_candidates=limits.candidates,
            max_rounds=limits.rounds,
            max_horizon=limits.horizon,
        )


def ends_of(rows: Sequence[PlannerRow], deadlines: Sequence[float | None]) -> list[float | None]:
    """By row, the instant after which an answer is of no use; None = never."""
    return [
        min((one for one in (row.expires_at, deadline) if one is not None), default=None)
        for row, deadline in zip(rows, deadlines, strict=True)
    ]


def _deadline(row: PlannerRow, began: float) -> float | None:
    ends = [] if row.budget_s is None else [began + row.budget_s]
    if row.settings.anytime and row.expires_at is not None:
        ends.append(row.expires_at)
    return min(ends, default=None)


def _to_cpu(plan: Plan) -> Plan:
    return Plan(plan.actions.cpu(), plan.poses.cpu(), plan.energies.cpu(), plan.rounds, plan.stopped)


def _chunk(plan: Plan | None) -> PlannedChunk | TaktlineError:
    assert plan is not None
    if not bool(torch.isfinite(plan.actions).all() and torch.isfinite(plan.energies).all()):
        return TaktlineError(
            ErrorCode.WORKER_FAILED,
            "the search's energies are not finite",
            "check the observation's state; if others fail too, check the checkpoint",
        )
    return PlannedChunk(
        actions=plan.actions.float().numpy(),
        predicted_states=plan.poses.float().numpy(),
        energies=plan.energies.float().numpy(),
        stopped=plan.stopped,
    )


def _too_short(left_s: float, round_s: float, plans: int) -> TaktlineError:
    company = f" of {plans} plans side by side" if plans > 1 else ""
    return TaktlineError(
        ErrorCode.DEADLINE_UNREACHABLE,
        f"{left_s * 1000.0:.1f} ms are left for the search; one round{company} takes {round_s * 1000.0:.1f} ms here",
        "send a larger budget, ask for fewer candidates, or add ranks",
    )
